"""Files below one root, read by byte ranges: the interface of a storage, and local files.

Local files are read with ``pread`` and not mapped, because mapped pages count as memory of the
process.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Self

from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

OURS = ".reshard"
"""Prefix of our own files, which are never part of a checkpoint."""
REQUEST = f"{OURS}-request.json"
"""Names the conversion that wrote a folder without checksums."""
COMMITTED = "_RESHARD_COMMITTED"
"""Written last where folders cannot be renamed."""
TENSOR_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
"""Suffixes of files that hold tensors."""
MAX_FILES = 1 << 20

Range = tuple[str, int, int]
"""A path, the first byte, and the number of bytes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint: its path below the root, with ``/`` between parts, and its size."""

    path: str
    size: int


def plain_path(address: str | Path) -> str:
    """The path of a local address; any other address unchanged.

    >>> plain_path("file:///ckpt"), plain_path("s3://bucket/ckpt")
    ('/ckpt', 's3://bucket/ckpt')
    """
    if not isinstance(address, str | Path):
        raise CheckpointError(f"{address!r} is no path of a checkpoint: give a string or a Path")
    if not str(address):
        raise CheckpointError('the path of a checkpoint is empty: name a folder, "." for this one')
    return str(address).removeprefix("file://").removeprefix("local://")


def check_path(path: str) -> str:
    """Refuse a path that is absolute or leaves the root; return any other."""
    parts = path.split("/")
    if "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise UnsupportedError(
            f"the path {quoted(path)} leaves its checkpoint or is none: "
            "only plain paths below the checkpoint's folder are read"
        )
    return path


class Storage(ABC):
    """Files below one root, read by byte ranges; safe to use from several threads."""

    root: str
    """The path or address that was opened."""
    is_local: bool
    only: str | None
    """The name of the file, where the root is a single one."""

    @property
    def is_file(self) -> bool:
        """Whether the root is a single file."""
        return self.only is not None

    def list(self) -> tuple[StoredFile, ...]:
        """All regular files below the root, sorted, without hidden folders and our own files."""
        if self.only is not None:
            return (StoredFile(self.only, self.size(self.only)),)
        return tuple(sorted(self._listed(), key=attrgetter("path")))

    @abstractmethod
    def _listed(self) -> Iterable[StoredFile]:
        """The files below a folder, in any order."""

    @abstractmethod
    def size(self, path: str) -> int:
        """The size of a file in bytes."""

    @abstractmethod
    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        """A text per file that changes when the file is rewritten; None where the store has none.

        Reads the current state, not what was known before.
        """

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file; DamageError if the file ends before."""

    @abstractmethod
    def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file; DamageError, before anything is allocated, if it does not have them."""

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges; those of a remote storage are requested concurrently."""
        return [self.read(*place) for place in ranges]

    def where(self, path: str) -> str:
        """The full path or address of a file, for errors."""
        return self.root if self.is_file else f"{self.root}/{path}"

    def close(self) -> None:  # noqa: B027
        """Close all open files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_range(self, path: str, offset: int, length: int, size: int) -> None:
        if not (0 <= offset <= size and 0 <= length <= size - offset):
            raise DamageError(
                f"{self.where(path)}: bytes {offset} to {offset + length} are needed and the file "
                f"has {size}: it is truncated, or the reference into it is wrong"
            )


STEP = 4 << 20
"""Bytes per read of a long range, of which only a sum is needed."""


def blocks(storage: Storage, path: str, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a range, a few MiB at a time, each time in the same memory."""
    buffer = memoryview(bytearray(min(stop - start, STEP)))
    for at in range(start, stop, STEP):
        part = buffer[: min(STEP, stop - at)]
        storage.read_into(path, at, part)
        yield part


MAX_OPEN = 128
"""Files that stay open while no thread uses them."""


@dataclass(slots=True)
class OpenFile:
    """An open file, and the number of threads that use it."""

    descriptor: int
    size: int
    direct: int | None = None
    """A second descriptor for direct writes, where the file system supports them."""
    users: int = 0

    def close(self) -> None:
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)


class OpenFiles(ABC):
    """Files by path, opened when first used; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenFile] = OrderedDict()

    @abstractmethod
    def _open_file(self, path: str) -> OpenFile:
        """Open a file that is not open."""

    @contextmanager
    def using(self, path: str) -> Iterator[OpenFile]:
        """A file that stays open inside the ``with`` block."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                idle = [old for old, file in self._open.items() if not file.users]
                for old in idle[: max(len(self._open) + 1 - MAX_OPEN, 0)]:
                    self._open.pop(old).close()
                file = self._open[path] = self._open_file(path)
            self._open.move_to_end(path)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def close(self) -> None:
        """Close all open files."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()


MAX_DEPTH = 32


class LocalStorage(OpenFiles, Storage):
    """A local folder, or one local file.

    The identity of a file is recorded when it is first listed or opened. A file that has another
    identity later is refused: its bytes would be mixed with those that were read before.
    """

    is_local = True

    def __init__(self, root: str, depth: int = MAX_DEPTH) -> None:
        """Open a folder, of which files are listed down to this depth, or a file."""
        super().__init__()
        self.root, self._depth = root.rstrip("/") or root, depth
        self._identities: dict[str, tuple[int, ...]] = {}
        path = Path(root)
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
            raise CheckpointError(f"{path} does not exist: check the path") from None
        except OSError as error:
            raise CheckpointError(
                f"{quoted(path)} cannot be opened: {error.strerror}: check the path"
            ) from None
        self.only = path.name if stat.S_ISREG(mode) else None
        if self.only is None and not stat.S_ISDIR(mode):
            raise CheckpointError(f"{root} is neither a folder nor a file")
        self._folder = path.parent if self.only else path
        self._real = os.path.realpath(self._folder)

    def _listed(self) -> Iterator[StoredFile]:
        for path, status in _walk(self._folder, self.root, self._depth):
            self._identities.setdefault(path, _identity(status))
            yield StoredFile(path, status.st_size)

    def size(self, path: str) -> int:
        with self.using(path) as file:
            return file.size

    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        """Size and both times of each file.

        Inodes are compared too, but only within this process: on some network file systems they
        differ between machines.
        """
        versions = []
        for path in paths:
            where = self._folder / check_path(path)
            try:
                status = where.stat()
            except OSError as error:
                raise _unreadable(self.where(path), error) from None
            self._check_same(path, status)
            versions.append(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        return versions

    def read(self, path: str, offset: int, length: int) -> bytes:
        with self.using(path) as file:
            self._check_range(path, offset, length, file.size)
            data = b""
            with suppress(OSError):  # `_fill` raises the error
                data = os.pread(file.descriptor, length, offset)
            if len(data) < length:
                buffer = bytearray(length)
                self._fill(file, path, offset, memoryview(buffer))
                data = bytes(buffer)
            return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with self.using(path) as file:
            flat = buffer.cast("B")
            self._check_range(path, offset, len(flat), file.size)
            self._fill(file, path, offset, flat)

    def _fill(self, file: OpenFile, path: str, at: int, left: memoryview) -> None:
        """Fill a buffer from an open file, in as many system calls as it takes."""
        while left:
            try:
                count = os.preadv(file.descriptor, [left], at)
            except OSError as error:
                raise CheckpointError(
                    f"{self.where(path)}: bytes {at} to {at + len(left)} cannot be read: "
                    f"{error.strerror}"
                ) from None
            if count == 0:
                raise DamageError(
                    f"{self.where(path)}: ends at byte {at} and {len(left)} more are needed: it "
                    f"had {file.size} bytes when it was opened; is it being written?"
                )
            left, at = left[count:], at + count

    def _open_file(self, path: str) -> OpenFile:
        where = self._folder / check_path(path)
        # A link may lead to a file below the root or, in a hub cache, to one of its blobs. A single
        # file that is opened may be a link to anywhere: the caller named it.
        real = os.path.realpath(where)
        cache, snapshots, _ = self._real.rpartition("/snapshots/")
        inside = (self._real, f"{cache}/blobs") if snapshots else (self._real,)
        is_inside = any(os.path.commonpath([real, folder]) == folder for folder in inside)
        if not is_inside and path != self.only:
            raise UnsupportedError(
                f"{where} leads to {real}, outside of its checkpoint, and is not read: copy the "
                "file into the folder"
            )
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

    def _check_same(self, path: str, status: os.stat_result) -> None:
        """Refuse a file that is not the one that was first listed or opened."""
        identity = _identity(status)
        if self._identities.setdefault(path, identity) != identity:
            raise DamageError(
                f"{self.where(path)} was replaced or written while it was read: read it again when "
                "no process writes to it"
            )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, and the times of the last write and the last change of a file."""
    file = status.st_dev, status.st_ino, status.st_size
    return *file, status.st_mtime_ns, status.st_ctime_ns


def _unreadable(path: str, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return DamageError(f"{path} is missing: the checkpoint is not complete")
    return CheckpointError(f"{path} cannot be opened: {_reason(error)}")


def _reason(error: OSError) -> str:
    """Why the system refuses a file or folder, and what to try."""
    is_denied = isinstance(error, PermissionError)
    return f"{error.strerror}{': check its permissions' if is_denied else ''}"


def _walk(folder: Path, root: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of a folder and its subfolders; links to folders are not followed."""
    pending, count = [(folder, "", depth)], 0
    while pending:
        here, prefix, left = pending.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as error:
            raise CheckpointError(f"{here} cannot be listed: {_reason(error)}") from None
        for entry in entries:
            count += 1
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and left:
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/", left - 1))
            elif not entry.name.startswith(OURS) and (status := _file_status(entry)):
                yield prefix + entry.name, status
        if count > MAX_FILES:
            raise CheckpointError(
                f"{root} holds more than {MAX_FILES} files: name the folder of one checkpoint"
            )


def _file_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a regular file, or of one that a link leads to; None for anything else."""
    try:
        status = entry.stat()
    except OSError as error:
        # Deleted since the folder was listed, or a link that leads nowhere.
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise CheckpointError(f"{entry.path} cannot be read: {_reason(error)}") from None
    return status if stat.S_ISREG(status.st_mode) else None
