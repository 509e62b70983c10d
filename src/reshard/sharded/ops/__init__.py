"""Operations of torch on sharded tensors.

Above autograd, ``functions`` receives torch's functions; below autograd, ``dispatch`` receives its
operations and works on contents.

arguments     the arguments of an operation: contents in place of sharded tensors
attention     scaled dot product attention, head by head if ranks hold whole heads
dispatch      chooses one of the ways below for an operation
dtensor       operations done by DTensor; conversion from and to DTensors
elementwise   operations on single elements, shard by shard; losses
functions     torch's functions, and functions that users register
lists         operations on lists of tensors, as optimizers use them
lookup        embedding and linear with plain inputs, which may differ between ranks
whole         operations that need whole tensors on every rank
"""
