"""Contents moved to other layouts, and the same operations with gradients.

autograd     moves and conversions between sharded and other tensors that autograd follows
engine       contents moved along a plan of the live engine, or inside one process
gathering    whole tensors on chosen ranks; comparison of two sharded tensors
resharding   tensors moved to the layout of another spec
"""
