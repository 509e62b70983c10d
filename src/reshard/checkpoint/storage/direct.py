"""Direct writes: from our memory to the disk, without a copy in the page cache.

They save a third of the CPU time of a conversion of 3 GB and about 15 % of its time
(``benchmarks/reports/convert.md``). A direct write takes whole blocks only, in the file and in
memory, so the middle of a range is written directly and its two short ends through the cache:

>>> whole_blocks(5000, 20000)
(3192, 19576)
>>> whole_blocks(8192, 4096), whole_blocks(8000, 100)
((0, 4096), (0, 0))

Data that is not aligned in memory is copied to an aligned buffer first.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BLOCK", "MAX_COPY", "MIN_BYTES", "aligned", "open_direct", "whole_blocks", "write"]

BLOCK = 4096
"""The alignment that disks and file systems require, or a multiple of it."""
MIN_BYTES = 1 << 20
"""Shorter ranges are written through the cache."""
MAX_COPY = 2 << 20
"""Bytes that are copied at a time where memory and file are aligned differently."""
FILE_SYSTEMS = frozenset({"ext4", "xfs"})
"""File systems that write directly without further conditions. Others may accept it and be slow;
network file systems gain nothing."""

Array = np.ndarray[Any, Any]
_local = threading.local()


def aligned(num_bytes: int) -> Array:
    """New memory whose first byte is at a multiple of a block."""
    spare = np.empty(num_bytes + BLOCK, dtype=np.uint8)
    start = -spare.ctypes.data % BLOCK
    return spare[start : start + num_bytes]


def whole_blocks(offset: int, length: int) -> tuple[int, int]:
    """The part of a range that is whole blocks of its file, relative to the start of the range."""
    low, high = -offset % BLOCK, (offset + length) // BLOCK * BLOCK - offset
    return (low, high) if low < high else (0, 0)


def open_direct(path: Path) -> int | None:
    """A descriptor for direct writes; None where the file system is not known to support them."""
    if _file_systems().get(path.stat().st_dev) not in FILE_SYSTEMS or not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def write(descriptor: int, offset: int, data: memoryview) -> int:
    """Write whole blocks; returns the bytes written, which may be fewer or 0."""
    try:
        return _write(descriptor, offset, np.frombuffer(data, dtype=np.uint8))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return 0
        raise


def _write(descriptor: int, offset: int, data: Array) -> int:
    if data.ctypes.data % BLOCK == 0:
        return os.pwrite(descriptor, data.data, offset)
    done = 0
    for at in range(0, len(data), MAX_COPY):
        part = data[at : at + MAX_COPY]
        copy = _thread_buffer(len(part))
        copy[...] = part
        count = os.pwrite(descriptor, copy.data, offset + at)
        done += count
        if count < len(part):
            break
    return done


def _thread_buffer(num_bytes: int) -> Array:
    """Aligned memory of this thread, kept for the next copy; at most ``MAX_COPY`` bytes."""
    buffer: Array | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = _local.buffer = aligned(num_bytes)
    return buffer[:num_bytes]


@cache
def _file_systems() -> dict[int, str]:
    """The file system of each mounted device."""
    found: dict[int, str] = {}
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, kind = line.partition(" - ")
        major, _, minor = fields.split()[2].partition(":")
        found[os.makedev(int(major), int(minor))] = kind.split()[0]
    return found
