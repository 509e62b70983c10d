"""Operations of torch on sharded tensors.

Above autograd, ``functions`` receives torch's functions; below autograd, ``dispatch`` receives its
operations and works on contents.

dispatch      chooses one of the ways below for an operation, or runs it with whole tensors
dtensor       arguments of operations; operations done by DTensor; conversion from and to DTensors
elementwise   operations on single elements, shard by shard; on lists of tensors; losses
functions     torch's functions, attention, and functions that users register
lookup        embedding and linear with plain inputs, which may differ between ranks
"""
