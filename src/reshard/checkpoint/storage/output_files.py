"""The files of an output: allocated at their full size, then written by ranges in any order."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from reshard.checkpoint.storage import direct
from reshard.checkpoint.storage.base import StoredFile
from reshard.checkpoint.storage.durable import named, sync_folder
from reshard.checkpoint.storage.open_files import OpenFile, OpenFiles
from reshard.errors import TargetError, UnfinishedError
from reshard.text import format_bytes

__all__ = ["OutputFiles"]

MIN_WRITEBACK = 1 << 20
"""Writes of at least this size start writeback at once."""
MAX_WRITE = 1 << 20
"""Bytes per system call. The page cache takes memory in blocks as large as a write; in a virtual
machine, blocks of 2 MiB may first have to be got from the host, which was measured to take six
times as long as the write itself."""
_SYNC_FILE_RANGE_WRITE = 2


class OutputFiles:
    """Files below a folder, each written by ranges; safe to use from several threads."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        self.folder = folder
        self.files = tuple(files)
        self._open: OpenFiles[int] = OpenFiles(self._open_file)

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
            needed = sum(file.size for file in self.files)
            raise TargetError(
                f"no room for {format_bytes(needed)} at {self.folder.parent.parent} "
                f"({error.strerror}): free some space, or choose another target"
            ) from None

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file."""
        with self._open.using(file) as entry:
            try:
                _write(entry, offset, data)
            except OSError as error:
                raise UnfinishedError(
                    f"{self.folder / self.files[file].path}: bytes {offset} to "
                    f"{offset + len(data)} cannot be written: {error.strerror}; "
                    "when that is mended, --resume goes on"
                ) from None

    def sync(self) -> None:
        """Flush all files to disk."""
        for file in range(len(self.files)):
            self.sync_file(file)

    def sync_file(self, file: int) -> None:
        """Flush one file to disk."""
        with self.using(file) as descriptor, named(self.folder / self.files[file].path):
            os.fsync(descriptor)

    def sync_folders(self) -> None:
        """Flush the directory entries of all files to disk."""
        folders = {self.folder}
        for file in self.files:
            path = (self.folder / file.path).parent
            folders |= {path, *(p for p in path.parents if self.folder in p.parents)}
        for folder in folders:
            sync_folder(folder)

    @contextmanager
    def using(self, file: int) -> Iterator[int]:
        """A descriptor that stays open inside the ``with`` block."""
        with self._open.using(file) as entry:
            yield entry.descriptor

    def close(self) -> None:
        """Close all files."""
        self._open.close()

    def _open_file(self, file: int) -> OpenFile:
        path = self.folder / self.files[file].path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return OpenFile(descriptor, self.files[file].size, direct.open_direct(path))


def _write(entry: OpenFile, offset: int, data: memoryview) -> None:
    """Write whole blocks directly, if there are enough of them, and the rest through the cache."""
    low, high = direct.whole_blocks(offset, len(data))
    if entry.direct is None or high - low < direct.MIN_BYTES:
        _write_cached(entry.descriptor, offset, data)
        return
    _write_cached(entry.descriptor, offset, data[:low])
    rest = low + direct.write(entry.direct, offset + low, data[low:high])
    _write_cached(entry.descriptor, offset + rest, data[rest:])


def _write_cached(descriptor: int, offset: int, data: memoryview) -> None:
    start, left = offset, data
    while left:
        count = os.pwrite(descriptor, left[:MAX_WRITE], offset)
        left, offset = left[count:], offset + count
    start_writeback = _sync_file_range()
    if len(data) >= MIN_WRITEBACK and start_writeback is not None:
        start_writeback(descriptor, start, len(data), _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call that starts writeback without waiting; Python does not offer it."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


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
