"""DTensors: their layouts, their local tensors, and moves to other placements.

placements      meshes and placements as meshes and layouts, and back
wrapping        the layout and local tensor of a DTensor; DTensors made from local tensors
reductions      pending reductions that a layout cannot express, as local work around a move
boxes           placements that no words of a layout express, as lists of boxes
redistribution  moves to other placements, with gradients; repeated moves with one look-up
"""
