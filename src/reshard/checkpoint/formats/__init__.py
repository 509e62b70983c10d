"""Checkpoint formats: every reader produces a Catalog, every writer plans an Output.

reader        opens a checkpoint, recognises its format and reads it into a catalog
output        the plan of an output: its files, and the place of every box
checks        checks of values from files, problems found, meaning of file names
ranks         files with the local tensors of one rank each
distcp        folders of torch.distributed.checkpoint
safetensors_header, safetensors_reader, safetensors_writer  whole tensors, boxes, or one rank's
torch         torch.save and torch.distributed.checkpoint, without torch
"""
