"""Saved tensors that are equal on all ranks of a group, kept as shares until backward needs them.

frame      one call of a module: which tensors does it save?
known      which of them are equal on all ranks?
keeping    how is each kept: whole, as a share, or on the host?
region     the memory that is kept
ledger     what gives way to a budget
order      what will be needed next?
restoring  makes shares whole again, in few exchanges and ahead of time
"""
