"""Files below one root, read by byte ranges: the interface of a storage, and local files.

Local files are read with ``pread`` and not mapped, because mapped pages count as memory of the
process.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> _ = Path(folder, "a.bin").write_bytes(b"0123456789")
>>> with LocalStorage(folder) as store:
...     store.list(), bytes(store.read("a.bin", 2, 3))
((StoredFile(path='a.bin', size=10),), b'234')
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Generic, Self, TypeVar

from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

OURS = ".reshard"
"""Prefix of our own files (locks, journals), which are never part of a checkpoint."""
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
    """Refuse a path that is absolute or leaves the root.

    >>> check_path("mp_rank_00/model.pt")
    'mp_rank_00/model.pt'
    """
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
    is_file: bool
    """Whether the root is a single file."""

    @abstractmethod
    def list(self) -> tuple[StoredFile, ...]:
        """All regular files below the root, sorted, without hidden folders and our own files."""

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
    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges; those of a remote storage are requested concurrently."""

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file; DamageError, before anything is allocated, if it does not have them."""
        return self.read_many([(path, offset, length)])[0]

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

Key = TypeVar("Key", bound=Hashable)


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


class OpenFiles(Generic[Key]):
    """Open files by key, opened when first used; safe to use from several threads."""

    def __init__(self, open_file: Callable[[Key], OpenFile]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._files: OrderedDict[Key, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def using(self, key: Key) -> Iterator[OpenFile]:
        """A file that stays open inside the ``with`` block."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                idle = [key for key, file in self._files.items() if not file.users]
                for old in idle[: max(len(self._files) + 1 - MAX_OPEN, 0)]:
                    self._files.pop(old).close()
                file = self._files[key] = self._open_file(key)
            self._files.move_to_end(key)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


MAX_DEPTH = 32
SHORT = 1 << 20
"""Reads up to this size are one system call into a new bytes object."""

Identity = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of the last write and the last change of a file."""


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
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
            raise CheckpointError(f"{path} does not exist: check the path") from None
        except OSError as error:
            raise CheckpointError(
                f"{quoted(path)} cannot be opened: {error.strerror}: check the path"
            ) from None
        self._only = path.name if stat.S_ISREG(mode) else None
        if self._only is None and not stat.S_ISDIR(mode):
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
        found = []
        for path in paths:
            try:
                status = (self._folder / check_path(path)).stat()
            except OSError as error:
                raise _unreadable(self.where(path), error) from None
            self._check_same(path, status)
            found.append(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        return found

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges; consecutive ranges of one file look it up once."""
        found: list[bytes] = []
        for path, some in groupby(ranges, key=itemgetter(0)):
            with self.using(path) as file:
                found += [self._read_short(file, *wanted) for wanted in some]
        return found

    def _read_short(self, file: OpenFile, path: str, offset: int, length: int) -> bytes:
        self._check_range(path, offset, length, file.size)
        if length <= SHORT:
            with suppress(OSError):  # the general path below raises the error
                data = os.pread(file.descriptor, length, offset)
                if len(data) == length:
                    return data
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with self.using(path) as file:
            left, at = buffer.cast("B"), offset
            self._check_range(path, offset, len(left), file.size)
            while left:
                where = self.where(path)
                try:
                    count = os.preadv(file.descriptor, [left], at)
                except OSError as error:
                    raise CheckpointError(
                        f"{where}: bytes {at} to {at + len(left)} cannot be read: {error.strerror}"
                    ) from None
                if count == 0:
                    raise DamageError(
                        f"{where}: ends at byte {at} and {len(left)} more are needed: it had "
                        f"{file.size} bytes when it was opened; is it being written?"
                    )
                left, at = left[count:], at + count

    def using(self, path: str) -> AbstractContextManager[OpenFile]:
        """A file that stays open inside the ``with`` block."""
        return self._open.using(path)

    def close(self) -> None:
        self._open.close()

    def _open_file(self, path: str) -> OpenFile:
        where = self._folder / check_path(path)
        # A link may lead to a file below the root or, in a hub cache, to one of its blobs.
        real = os.path.realpath(where)
        cache, snapshots, _ = self._real.rpartition("/snapshots/")
        inside = (self._real, f"{cache}/blobs") if snapshots else (self._real,)
        if not any(os.path.commonpath([real, folder]) == folder for folder in inside):
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


def _identity(status: os.stat_result) -> Identity:
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


def file_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a regular file, or of one that a link leads to; None for anything else."""
    try:
        status = entry.stat()
    except OSError as error:
        # Deleted since the folder was listed, or a link that leads nowhere.
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise CheckpointError(f"{entry.path} cannot be read: {_reason(error)}") from None
    return status if stat.S_ISREG(status.st_mode) else None


def _walk(folder: Path, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of a folder and its subfolders; links to folders are not followed."""
    pending, count = [(folder, "", 0)], 0
    while pending:
        here, prefix, depth = pending.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as error:
            raise CheckpointError(f"{here} cannot be listed: {_reason(error)}") from None
        for entry in entries:
            count += 1
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and depth < MAX_DEPTH:
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
            elif not entry.name.startswith(OURS) and (status := file_status(entry)):
                yield prefix + entry.name, status
        if count > MAX_FILES:
            raise CheckpointError(
                f"{root} holds more than {MAX_FILES} files: name the folder of one checkpoint"
            )
