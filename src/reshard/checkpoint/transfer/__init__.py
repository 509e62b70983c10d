"""Copies the bytes of tensors: which pieces make up a tensor; read, cast and write windows.

transfers  the stored pieces of each output tensor, its windows, and chunks of windows
packing    many small tensors read, digested and written together
windows    one window read, cast, compared with replicas, written; worker threads and their memory
source     a checkpoint opened for reading, with its checksums; a reader of one tensor
copying    copies chunks in worker threads, or in the kernel
"""
