"""The files of an output in the making: made at their full size, then written in any order."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from reshard.checkpoint.catalog import StoredFile
from reshard.checkpoint.storage import direct
from reshard.checkpoint.storage.durable import named, sync_folder
from reshard.errors import TargetError, UnfinishedError
from reshard.text import format_bytes

__all__ = ["TargetFiles"]

MAX_OPEN = 128
WORTH_STARTING = 1 << 20
"""Bytes from which on the system is told to begin putting them on disk."""
AT_ONCE = 1 << 20
"""The most that is written by one call. The page cache takes memory in blocks as large as a write;
in a virtual machine blocks of 2 MiB may first have to be got from the host, which we measured to
take six times as long as the writing itself."""
_START = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


@dataclass(slots=True)
class _Open:
    """A file that is open."""

    descriptor: int
    direct: int | None
    """A second descriptor, for direct writes, where these can be."""
    users: int = 0

    def close(self) -> None:
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)


class TargetFiles:
    """Files below a folder, each written by ranges; safe to use from several threads."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        self.folder = folder
        self.files = tuple(files)
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def allocate(self) -> None:
        """Make all files at their full size, so that a full disk is noticed before any work."""
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
        with self._used(file) as entry:
            try:
                _write(entry, offset, data)
            except OSError as error:
                raise UnfinishedError(
                    f"{self.folder / self.files[file].path}: bytes {offset} to "
                    f"{offset + len(data)} cannot be written: {error.strerror}; "
                    "when that is mended, --resume goes on"
                ) from None

    def sync(self) -> None:
        """Put what was written to all files on disk."""
        for file in range(len(self.files)):
            self.sync_file(file)

    def sync_file(self, file: int) -> None:
        """Put what was written to one file on disk."""
        with self.using(file) as descriptor, named(self.folder / self.files[file].path):
            os.fsync(descriptor)

    def sync_folders(self) -> None:
        """Put the names of all files on disk."""
        folders = {self.folder}
        for file in self.files:
            path = (self.folder / file.path).parent
            folders |= {path, *(p for p in path.parents if self.folder in p.parents)}
        for folder in folders:
            sync_folder(folder)

    @contextmanager
    def using(self, file: int) -> Iterator[int]:
        """A descriptor that nobody closes meanwhile."""
        with self._used(file) as entry:
            yield entry.descriptor

    @contextmanager
    def _used(self, file: int) -> Iterator[_Open]:
        with self._lock:
            entry = self._open.get(file) or self._opened(file)
            self._open.move_to_end(file)
            entry.users += 1
        try:
            yield entry
        finally:
            with self._lock:
                entry.users -= 1

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for entry in self._open.values():
                entry.close()
            self._open.clear()

    def _opened(self, file: int) -> _Open:
        """Open a file, and close one that nobody uses if there are many; call with the lock."""
        if len(self._open) >= MAX_OPEN:
            idle = next((at for at, entry in self._open.items() if not entry.users), None)
            if idle is not None:
                self._open.pop(idle).close()
        path = self.folder / self.files[file].path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        entry = self._open[file] = _Open(descriptor, direct.open_direct(path))
        return entry


def _write(entry: _Open, offset: int, data: memoryview) -> None:
    """Write the whole blocks directly, if they are worth it, and the rest through the cache."""
    low, high = direct.whole_blocks(offset, len(data))
    if entry.direct is None or high - low < direct.WORTH_IT:
        _write_cached(entry.descriptor, offset, data)
        return
    _write_cached(entry.descriptor, offset, data[:low])
    # What the system does not take this way, it takes in the other.
    rest = low + direct.write(entry.direct, offset + low, data[low:high])
    _write_cached(entry.descriptor, offset + rest, data[rest:])


def _write_cached(descriptor: int, offset: int, data: memoryview) -> None:
    start, left = offset, data
    while left:
        count = os.pwrite(descriptor, left[:AT_ONCE], offset)
        left, offset = left[count:], offset + count
    if len(data) >= WORTH_STARTING:
        start_writeback(descriptor, start, len(data))


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the disk begin at once, so that little is left to wait for at the end."""
    call = _sync_file_range()
    if call is not None:
        call(descriptor, offset, length, _START)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """A call of Linux that Python does not offer."""
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
        # Some file systems cannot set room aside; they fail later, when they are full.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)
