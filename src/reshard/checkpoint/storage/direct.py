"""Writes that go from our memory to the disk, without a copy in the system's page cache.

A checkpoint is larger than what anyone reads again soon. Written the usual way each byte is copied
once more, into pages that first have to be found and later be written back; that took twice the CPU
time of all else that a conversion does. A direct write takes whole blocks only, in the file and in
memory, so a range of bytes has a middle that is written directly and two short ends that are not:

>>> whole_blocks(5000, 20000)
(3192, 19576)
>>> whole_blocks(8192, 4096), whole_blocks(8000, 100)
((0, 4096), (0, 0))

Where memory does not begin in its block where the file does, it is copied to where it does.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BLOCK", "MOST_COPIED", "WORTH_IT", "aligned", "open_direct", "whole_blocks", "write"]

BLOCK = 4096
"""What disks and file systems can do with at the least, or a multiple of it."""
WORTH_IT = 1 << 20
"""Bytes from which on it pays to wait for the disk."""
MOST_COPIED = 2 << 20
"""Bytes that are copied at a time where memory and file do not begin alike."""
FILE_SYSTEMS = frozenset({"ext4", "xfs"})
"""Those that write directly without further conditions. Others may promise it and be slow, or, as
those of networks, be as fast without."""

Array = np.ndarray[Any, Any]
_own = threading.local()


def aligned(num_bytes: int) -> Array:
    """Bytes in memory whose first one begins a block."""
    spare = np.empty(num_bytes + BLOCK, dtype=np.uint8)
    start = -spare.ctypes.data % BLOCK
    return spare[start : start + num_bytes]


def whole_blocks(offset: int, length: int) -> tuple[int, int]:
    """The part of a range that is whole blocks of its file, counted from the start of the range."""
    low, high = -offset % BLOCK, (offset + length) // BLOCK * BLOCK - offset
    return (low, high) if low < high else (0, 0)


def open_direct(path: Path) -> int | None:
    """A descriptor for direct writes to a file, or None where its file system is not for that."""
    kind = _file_systems().get(path.stat().st_dev)
    if kind not in FILE_SYSTEMS or not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def write(descriptor: int, offset: int, data: memoryview) -> int:
    """Write whole blocks; gives how many bytes of them the system took, 0 if it takes none."""
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
    for at in range(0, len(data), MOST_COPIED):
        part = data[at : at + MOST_COPIED]
        copy = _own_memory(len(part))
        copy[...] = part
        count = os.pwrite(descriptor, copy.data, offset + at)
        done += count
        if count < len(part):
            break
    return done


def _own_memory(num_bytes: int) -> Array:
    """Memory of this thread for copies; it stays for the next one."""
    found: Array | None = getattr(_own, "memory", None)
    if found is None or len(found) < num_bytes:
        found = _own.memory = aligned(num_bytes)
    return found[:num_bytes]


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
