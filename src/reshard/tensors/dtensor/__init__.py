"""DTensors: their layouts, their local tensors, and moves to other placements.

placements      meshes and placements as meshes and layouts, and back
wrapping        the layout and local tensor of a DTensor; DTensors made from local tensors
inexpressible   what words of a layout cannot express: local work around a move, moves of boxes
redistribution  moves to other placements, with gradients; repeated moves with one look-up
"""
