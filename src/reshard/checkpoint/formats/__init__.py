"""Checkpoint formats: every reader produces a Catalog, every writer plans an Output.

reader        recognises the format and reads it into a catalog
writer        plans the files of an output in any format
output        the plan of an output: its files, and the place of every box
findings      problems found while reading, collected
checks        checks of numbers that come from files
file_names    meaning of file names
completeness  files and tensors that should be there
safetensors   whole tensors, boxes, or tensors of one rank
torch         torch.save and torch.distributed.checkpoint, without torch
ranks         files with the local tensors of one rank each
"""
