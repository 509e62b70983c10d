"""Checkpoint formats: every reader produces a Catalog, every writer plans an Output.

reader         opens a checkpoint, recognises its format and reads it into a catalog
checks         checks of values from files, problems found, meaning of file names
ranks          files with the local tensors of one rank each
safetensors/   whole tensors, boxes, or tensors of one rank
torch/         files of torch.save
distcp         folders of torch.distributed.checkpoint, read
distcp_writer  the same, planned: archives, and the pickle of the metadata
"""
