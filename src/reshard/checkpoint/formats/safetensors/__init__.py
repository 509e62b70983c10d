"""Safetensors files: whole tensors, boxes of tensors, or the tensors of one rank.

header  the header of a file, parsed and built, and what reshard adds to its metadata
reader  headers, the index, and files that hold whole tensors or boxes of tensors
writer  plans the files of an output
"""
