"""Plans: which rank sends which box to which other rank, in which round, at what cost.

classes    tensors of equal shapes, dtypes and layouts are planned once
names/     renamed, joined, stacked and cropped tensors
cells/     the common boxes of source and destination regions
sharing    which of several ranks does how much
flows      cells become transfers from rank to rank
hosts      the same with a topology: between hosts and inside them
rounds     what moves when, so that staging stays under the memory cap
rank       one rank's part of a plan
cost/      bytes, messages and seconds of a plan
plans      `plan` and `Plan`
proof      checks that every wanted element is written exactly once, for all ranks together
row_proof  the same for single ranks, row by row
serial     plans as JSON
adjoint    the moves of gradients
"""
