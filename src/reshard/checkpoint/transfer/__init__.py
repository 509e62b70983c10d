"""Moves the bytes of tensors: which pieces make up a tensor; read, cast, copy in windows."""
