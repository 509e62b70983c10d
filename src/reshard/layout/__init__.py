"""Who holds which part of a tensor; no torch.

mesh, box  named axes over ranks; N-d regions, and their addresses in local tensors
words      what a layout says, as values, and how each word divides a dim
notation   text of a layout -> its words
layout     `Layout`: mesh and words, or explicit boxes
grid       regular layouts as tables, one per dim
coverage   do boxes overlap, and what is missing of a region
boxlist    any layout as a list of boxes with their owners
spec       `TensorSpec`: shape, dtype and layout of one tensor; equality of layouts; flat buckets
columns    distinct values of integer columns
"""
