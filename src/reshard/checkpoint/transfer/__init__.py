"""Copies the bytes of tensors: which pieces make up a tensor; read, cast and write windows.

- ``transfers``: the stored pieces of each output tensor, its windows, and chunks of windows
- ``packing``: many small tensors read, digested and written together
- ``windows``: one window read, cast, compared with replicas, written
- ``source``: a checkpoint opened for reading, with its checksums; a reader of one tensor
- ``copying``: copies chunks in worker threads
- ``zero_copy``: copies runs from file to file in the kernel
- ``workers``: worker threads within a memory budget
- ``arguments``: meshes and rules as callers pass them
"""
