"""Integrity of checkpoints: detects bytes that changed since they were written.

checksums  the checksums of files that reshard writes, and their sidecar
crcs       the CRC-32 that torch.save writes for every storage
digest     the digest of a tensor, independent of its sharding
"""
