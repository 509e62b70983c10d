"""The files of an output: allocated at their full size, written by ranges in any order, durable.

Large writes go from our memory to the disk, without a copy in the page cache: these *direct* writes
save a third of the CPU time of a conversion of 3 GB and about 15 % of its time
(``benchmarks/reports/convert.md``). They take whole blocks only, in the file and in memory, so the
middle of a range is written directly and its two short ends through the cache. Data that is not
aligned in memory is copied to an aligned buffer first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from reshard.checkpoint.storage.local import OpenFile, OpenFiles, StoredFile
from reshard.errors import TargetError, UnfinishedError
from reshard.text import format_bytes

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


@cache
def _c_function(name: str) -> Any:
    """A system call that Python does not offer; None where the C library does not have it."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; False where the system cannot."""
    rename, paths = _c_function("renameat2"), (os.fsencode(one), os.fsencode(other))
    if rename is None:
        return False
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file atomically: readers see the old content or the new one."""
    new = path.with_name(path.name + ".new")
    with named(new):
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    sync_folder(path.parent)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path to an OSError that does not name one, such as those of ``write``."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with named(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


BLOCK = 4096
"""The alignment that disks and file systems require, or a multiple of it."""
MIN_DIRECT = 1 << 20
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
    """The part of a range that is whole blocks of its file, relative to the start of the range.

    >>> whole_blocks(5000, 20000), whole_blocks(8000, 100)
    ((3192, 19576), (0, 0))
    """
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


def write_direct(descriptor: int, offset: int, data: memoryview) -> int:
    """Write whole blocks; returns the bytes written, which may be fewer or 0."""
    blocks, done = np.frombuffer(data, dtype=np.uint8), 0
    try:
        if blocks.ctypes.data % BLOCK == 0:
            return os.pwrite(descriptor, blocks.data, offset)
        for at in range(0, len(blocks), MAX_COPY):
            part = blocks[at : at + MAX_COPY]
            buffer: Array | None = getattr(_local, "buffer", None)  # kept for the next copy
            if buffer is None or len(buffer) < len(part):
                buffer = _local.buffer = aligned(len(part))
            buffer[: len(part)] = part
            done += os.pwrite(descriptor, buffer[: len(part)].data, offset + at)
            if done < at + len(part):
                break
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return done


@cache
def _file_systems() -> dict[int, str]:
    """The file system of each mounted device."""
    kinds: dict[int, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            major, _, minor = fields.split()[2].partition(":")
            kinds[os.makedev(int(major), int(minor))] = kind.split()[0]
    return kinds


MIN_WRITEBACK = 1 << 20
"""Writes of at least this size start writeback at once, which saves about 17 % of the time until a
file of 400 MB that is written through the cache is on disk."""
MAX_WRITE = 1 << 20
"""Bytes per system call. The page cache takes memory in blocks as large as a write; in a virtual
machine, blocks of 2 MiB may first have to be got from the host, which was measured to take six
times as long as the write itself."""


class OutputFiles(OpenFiles):
    """Files below a folder, each written by ranges; safe to use from several threads."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        super().__init__()
        self.folder = folder
        self.files = tuple(files)

    def allocate(self) -> None:
        """Create all files at their full size, so that a full disk is noticed before any work."""
        try:
            for file in self.files:
                path = self.folder / file.path
                with named(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _allocate(path, file.size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise TargetError(f"{error.filename} cannot be written: {error.strerror}") from None
            needed = format_bytes(sum(file.size for file in self.files))
            raise TargetError(
                f"no room for {needed} at {self.folder.parent.parent} ({error.strerror}): free "
                "some space, or choose another target"
            ) from None

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file."""
        path = self.files[file].path
        with self.using(path) as entry:
            try:
                # Whole blocks directly, if there are enough, and the rest through the cache.
                low, high = whole_blocks(offset, len(data))
                done = 0
                if entry.direct is not None and high - low >= MIN_DIRECT:
                    _write_cached(entry.descriptor, offset, data[:low])
                    done = low + write_direct(entry.direct, offset + low, data[low:high])
                _write_cached(entry.descriptor, offset + done, data[done:])
            except OSError as error:
                raise UnfinishedError(
                    f"{self.folder / path}: bytes {offset} to {offset + len(data)} cannot be "
                    f"written: {error.strerror}; fix the cause, then continue with --resume"
                ) from None

    def sync(self) -> None:
        """Flush all files to disk."""
        for file in range(len(self.files)):
            self.sync_file(file)

    def sync_file(self, file: int) -> None:
        """Flush one file to disk."""
        path = self.files[file].path
        with self.using(path) as entry, named(self.folder / path):
            os.fsync(entry.descriptor)

    def sync_folders(self) -> None:
        """Flush the directory entries of all files to disk."""
        folders = {self.folder}
        for file in self.files:
            path = (self.folder / file.path).parent
            folders |= {path, *(p for p in path.parents if self.folder in p.parents)}
        for folder in folders:
            sync_folder(folder)

    def _open_file(self, path: str) -> OpenFile:
        where = self.folder / path
        descriptor = os.open(where, os.O_RDWR | os.O_CLOEXEC)
        return OpenFile(descriptor, 0, open_direct(where))


def _write_cached(descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + MAX_WRITE], offset + done)
    start_writeback = _c_function("sync_file_range")  # without waiting for it
    if done >= MIN_WRITEBACK and start_writeback is not None:
        start, size = ctypes.c_int64(offset), ctypes.c_int64(done)
        start_writeback(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Some file systems cannot reserve space; writes fail later if the disk is full.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)
