"""Tensors as torch has them (DTensor, ShardedTensor, plain) and layouts: from one to the other."""
