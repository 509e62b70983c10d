"""Files of torch.save and torch.distributed.checkpoint, read and written without torch.

unpickler        reads pickles without running them
pickler          writes pickles that name classes without importing them
archive          the zip archive of torch.save, read
archive_writer   the same, written
tensors          tensors in the pickle of an archive
plain_values     values that are no tensors
state_dict       files that hold a nested state dict
zero             recognises DeepSpeed's ZeRO files, which are refused
distcp_metadata  the metadata of a distributed checkpoint, read
distcp_writer    plans a distributed checkpoint
"""
