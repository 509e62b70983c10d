"""Operations of torch on sharded tensors.

Above autograd, ``functions`` receives torch's functions; below autograd, ``dispatch`` receives its
operations and works on contents.

dispatch    chooses a way for an operation; operations shard by shard, on lists, and losses
dtensor     arguments of operations; operations done by DTensor; conversion from and to DTensors
functions   torch's functions, attention, comparison, and functions that users register
lookup      embedding and linear with plain inputs, which may differ between ranks
whole       operations with whole tensors on every rank
"""
