"""Files of torch.save, read and written without torch.

unpickler   reads pickles without running them; plain values
archive     the zip archive of torch.save, read and written
tensors     tensors and plain values in the pickle of an archive
state_dict  files that hold a nested state dict; recognises DeepSpeed's ZeRO files
"""
