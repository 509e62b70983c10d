"""Loads and saves the tensors of a running job, on all ranks together.

loading       ``load`` and its report
saving        ``save`` and its report
entries       the entries of a state dict, and this rank's part of each
matching      the tensors of a checkpoint that are loaded into them
direct_reads  reads what only one rank needs into its tensors
shared_reads  reads what several ranks need, in shares, and sends it to them
write_shares  which rank writes which box, and writes it
"""
