"""Safetensors files: whole tensors, boxes of tensors, or the tensors of one rank.

header        the header of a file, parsed and built
own_metadata  what reshard adds to the metadata of its files
reader        headers, the index, and files that hold whole tensors
sharded       files that hold boxes of tensors
writer        plans the files of an output
"""
