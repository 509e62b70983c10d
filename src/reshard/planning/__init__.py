"""Plans: which rank sends which box to which other rank, in which round, at what cost.

names      `take`, `join` and `stack`: renamed, joined, stacked and cropped tensors
classes    which source tensors feed which destination tensors; equal ones are planned once
sharing    which of several ranks does how much
cells/     the common boxes of source and destination regions
flows      cells become transfers from rank to rank
hosts      the same with a topology: between hosts and inside them
rounds     what moves when, so that staging stays under the memory cap
rank       one rank's part of a plan
cost/      bytes, messages and seconds of a plan
plans      `plan` and `Plan`, also as JSON
proof      checks that every wanted element is written exactly once, for all ranks together
row_proof  the same for single ranks, row by row
adjoint    the moves of gradients
"""
