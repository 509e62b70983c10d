"""Tensors of torch (plain, DTensor, FSDP2, ShardedTensor): their layouts, and moves between them.

moving        `rs.move`
state_dicts   `rs.describe`; plans that are run on state dicts
exchanging    `rs.exchange`: one spec per tensor from the specs that each rank gives
local         `rs.layout_of`; the spec of any tensor, and this rank's part of it
dtensor/      DTensors: placements, local tensors, redistribution
tensor_move   the move of one tensor between two layouts, with gradients
autograd      the backward of a move, and `rs.backward`
agreement     all ranks agree, or all raise the same error
kinds         kinds of tensors, recognized without importing their modules
"""
