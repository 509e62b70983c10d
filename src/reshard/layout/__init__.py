"""Who holds which part of a tensor; no torch.

mesh, box  named axes over ranks; N-d regions
words      what a layout says, as values
notation   text of a layout -> its words
tiling     how a word divides one dim; the boxes of a rank and their addresses in its local tensor
layout     `Layout`: mesh and words, or explicit boxes
grid       regular layouts as tables, one per dim
coverage   do boxes overlap, and what is missing of a region
boxlist    any layout as a list of boxes with their owners
spec       `TensorSpec`: shape, dtype and layout of one tensor; equality of layouts; flat buckets
columns    distinct values of integer columns
"""
