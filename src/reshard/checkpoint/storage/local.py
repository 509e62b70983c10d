"""Local folders and files, read with ``pread``; and the choice between local and remote.

Files are not mapped into memory, because mapped pages count as memory of the process.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> _ = Path(folder, "a.bin").write_bytes(b"0123456789")
>>> with open_storage(folder) as store:
...     store.list(), bytes(store.read("a.bin", 2, 3))
((StoredFile(path='a.bin', size=10),), b'234')
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from reshard.checkpoint.storage.base import (
    MAX_FILES,
    OURS,
    Range,
    Storage,
    StoredFile,
    check_path,
    plain_path,
)
from reshard.checkpoint.storage.open_files import OpenFile, OpenFiles
from reshard.checkpoint.storage.remote import RemoteStorage
from reshard.errors import CheckpointError, DamageError, UnsupportedError

__all__ = ["LocalStorage", "open_storage"]

MAX_DEPTH = 32
SHORT = 1 << 20
"""Reads up to this size are one system call into a new bytes object."""

Identity = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of the last write and the last change of a file."""


def open_storage(root: str | Path) -> Storage:
    """A folder, a single file, or the address of either, to be read by byte ranges.

    What has no ``://`` is local. Raises if the root does not exist; no file is opened yet.
    """
    text = plain_path(root)
    return RemoteStorage(text) if "://" in text else LocalStorage(text)


class LocalStorage(Storage):
    """A local folder, or one local file.

    The identity of a file is recorded when it is first listed or opened. A file that has another
    identity later is refused: its bytes would be mixed with those that were read before.
    """

    is_local = True

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/") or root
        self._open: OpenFiles[str] = OpenFiles(self._open_file)
        self._identities: dict[str, Identity] = {}
        path = Path(root)
        if not path.exists():
            raise CheckpointError(f"{root} does not exist: check the path")
        self._only = path.name if path.is_file() else None
        if self._only is None and not path.is_dir():
            raise CheckpointError(f"{root} is neither a folder nor a file")
        self.is_file = self._only is not None
        self._folder = path.parent if self._only else path
        self._real = os.path.realpath(self._folder)

    def list(self) -> tuple[StoredFile, ...]:
        if self._only is not None:
            return (StoredFile(self._only, self.size(self._only)),)
        found = sorted(_walk(self._folder, self.root), key=itemgetter(0))
        for path, status in found:
            self._identities.setdefault(path, _identity(status))
        return tuple(StoredFile(path, status.st_size) for path, status in found)

    def size(self, path: str) -> int:
        with self.using(path) as file:
            return file.size

    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        """Size and both times of each file.

        Inodes are compared too, but only within this process: on some network file systems they
        differ between machines.
        """
        statuses = [self._status(path) for path in paths]
        for path, status in zip(paths, statuses, strict=True):
            self._check_same(path, status)
        return [f"{one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}" for one in statuses]

    def read(self, path: str, offset: int, length: int) -> bytes:
        return self.read_many([(path, offset, length)])[0]

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges; consecutive ranges of one file look it up once."""
        found: list[bytes] = []
        for path, some in groupby(ranges, key=itemgetter(0)):
            with self.using(path) as file:
                found += [self._read_short(file, *wanted) for wanted in some]
        return found

    def _read_short(self, file: OpenFile, path: str, offset: int, length: int) -> bytes:
        if offset >= 0 <= length <= file.size - offset and length <= SHORT:
            with suppress(OSError):  # the general path below raises the error
                data = os.pread(file.descriptor, length, offset)
                if len(data) == length:
                    return data
        return super().read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with self.using(path) as file:
            left, at = buffer.cast("B"), offset
            if offset < 0 or offset + len(left) > file.size:
                self._check_range(path, offset, len(left))
            while left:
                count = self._pread(path, file.descriptor, left, at)
                if count == 0:
                    raise DamageError(
                        f"{self.where(path)}: ends at byte {at} and {len(left)} more are wanted: "
                        f"it had {file.size} bytes when it was opened; is it being written?"
                    )
                left, at = left[count:], at + count

    def using(self, path: str) -> AbstractContextManager[OpenFile]:
        """A file that stays open inside the ``with`` block."""
        return self._open.using(path)

    def close(self) -> None:
        self._open.close()

    def _pread(self, path: str, descriptor: int, buffer: memoryview, at: int) -> int:
        try:
            return os.preadv(descriptor, [buffer], at)
        except OSError as error:
            raise CheckpointError(
                f"{self.where(path)}: bytes {at} to {at + len(buffer)} cannot be read: "
                f"{error.strerror}"
            ) from None

    def _open_file(self, path: str) -> OpenFile:
        where = self._folder / check_path(path)
        self._check_inside(where)
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(self.where(path), error) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamageError(f"{self.where(path)} is not a regular file")
            self._check_same(path, status)
        except DamageError:
            os.close(descriptor)
            raise
        return OpenFile(descriptor, status.st_size)

    def _status(self, path: str) -> os.stat_result:
        try:
            return (self._folder / check_path(path)).stat()
        except OSError as error:
            raise _unreadable(self.where(path), error) from None

    def _check_same(self, path: str, status: os.stat_result) -> None:
        """Refuse a file that is not the one that was first listed or opened."""
        identity = _identity(status)
        if self._identities.setdefault(path, identity) != identity:
            raise DamageError(
                f"{self.where(path)} was replaced or written while it was read: read it again when "
                "no process writes to it"
            )

    def _check_inside(self, where: Path) -> None:
        """A link may lead to a file below the root or, in a hub cache, to one of its blobs."""
        real = os.path.realpath(where)
        inside = [self._real]
        cache, snapshots, _ = self._real.rpartition("/snapshots/")
        if snapshots:
            inside.append(f"{cache}/blobs")
        if not any(os.path.commonpath([real, folder]) == folder for folder in inside):
            raise UnsupportedError(
                f"{where} leads to {real}, outside of its checkpoint, and is not read: copy the "
                "file into the folder"
            )


def _identity(status: os.stat_result) -> Identity:
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def _unreadable(path: str, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return DamageError(f"{path} is missing: the checkpoint is not complete")
    return CheckpointError(f"{path} cannot be opened: {error.strerror}")


def _walk(folder: Path, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of a folder and its subfolders; links to folders are not followed."""
    pending, count = [(folder, "", 0)], 0
    while pending:
        here, prefix, depth = pending.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as error:
            raise CheckpointError(f"{here} cannot be listed: {error.strerror}") from None
        for entry in entries:
            count += 1
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and depth < MAX_DEPTH:
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
            elif not entry.name.startswith(OURS) and entry.is_file():
                yield prefix + entry.name, entry.stat()
        if count > MAX_FILES:
            raise CheckpointError(
                f"{root} holds more than {MAX_FILES} files: name the folder of one checkpoint"
            )
