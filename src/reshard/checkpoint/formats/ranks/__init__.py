"""Files that hold the local tensors of one rank each, joined to global tensors.

by_rules  files whose layouts come from rules, or that reshard wrote
distcp    distributed checkpoints with one metadata, or one for each rank
joining   the global tensors behind the local ones
"""
