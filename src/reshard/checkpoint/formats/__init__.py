"""Checkpoint formats: every reader produces a Catalog, every writer plans an Output.

reader              opens a checkpoint, recognises its format and reads it into a catalog
checks              checks of values from files, problems found, meaning of file names
ranks               files with the local tensors of one rank each
safetensors_header  the header of a file: tensors, metadata
safetensors_reader  whole tensors, boxes, or tensors of one rank, read
safetensors_writer  the same, planned
torch_unpickler     reads pickles without running them
torch_archive       the zip archive of torch.save, read and written
torch_tensors       tensors and plain values in the pickle of an archive
torch_state_dict    files that hold a nested state dict; recognises DeepSpeed's ZeRO files
distcp              folders of torch.distributed.checkpoint, read
distcp_writer       the same, planned: archives, and the pickle of the metadata
"""
