"""Who holds which part of a tensor; no torch.

mesh, box    named axes over ranks; N-d regions
notation/    text of a layout <-> its words
layout       `Layout`: mesh and words, or explicit boxes
tiling       how a word divides one dim
pieces       the boxes of a rank, and their addresses in its local tensor
grid         regular layouts as tables, one per dim
coverage     do boxes overlap, and what is missing of a region
boxlist      any layout as a list of boxes with their owners
spec         `TensorSpec`: shape, dtype and layout of one tensor; equality of layouts for a shape
bucket       flattened, padded buckets of tensors (FSDP1, ZeRO)
columns      distinct values of integer columns
"""
