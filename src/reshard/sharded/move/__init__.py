"""Contents moved to other layouts, and the same operations with gradients.

autograd     moves and conversions between sharded and other tensors that autograd follows
engine       contents moved along a plan, whole tensors on chosen ranks, comparison on all ranks
resharding   tensors moved to the layout of another spec
"""
