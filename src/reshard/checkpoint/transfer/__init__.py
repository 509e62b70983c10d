"""Copies the bytes of tensors: which pieces make up a tensor; read, cast and write windows.

transfers    the stored pieces of each output tensor, its windows, and chunks of windows
packing      many small tensors read, digested and written together
windows      a checkpoint opened for reading; windows read and compared; workers and their memory
copying      copies chunks of windows, and records what was done
examination  one tensor read in boxes; all read in full, for their digests; bytes outside of them
"""
