"""Verifies a checkpoint in full, and compares two of them tensor by tensor.

soundness    ``verify``, the problems of one checkpoint, or of two that should be equal
differences  ``diff``, how two checkpoints differ: where, and by how much
examination  the digest of every tensor of a checkpoint, and all of its problems
"""
