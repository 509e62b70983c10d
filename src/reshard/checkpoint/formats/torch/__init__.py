"""Files of torch.save and torch.distributed.checkpoint, read and written without torch.

unpickler        reads pickles without running them; plain values
archive          the zip archive of torch.save, read
archive_writer   the same, and its pickle, written
tensors          tensors in the pickle of an archive
state_dict       files that hold a nested state dict; recognises DeepSpeed's ZeRO files
distcp_metadata  the metadata of a distributed checkpoint, read
distcp_writer    plans a distributed checkpoint
"""
