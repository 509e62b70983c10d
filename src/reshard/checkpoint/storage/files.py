"""Where the bytes of a checkpoint live: a local folder, or anything fsspec reaches.

Local files are read with ``pread`` (mapped pages would count as memory of the process) and remote
ones by ranges. Every path is relative to the root and may not leave it.

>>> import tempfile, pathlib
>>> folder = tempfile.mkdtemp()
>>> _ = pathlib.Path(folder, "a.bin").write_bytes(b"0123456789")
>>> with open_storage(folder) as store:
...     store.list(), bytes(store.read("a.bin", 2, 3))
((StoredFile(path='a.bin', size=10),), b'234')
"""

from __future__ import annotations

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Self

from reshard.checkpoint.catalog import StoredFile
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.text import quoted

__all__ = [
    "COMMITTED", "MAX_FILES", "OURS", "REQUEST", "TENSOR_FILES", "LocalStorage", "Range",
    "Storage", "check_path", "open_storage", "plain_path",
]  # fmt: skip

OURS = ".reshard"
"""Names that begin so are our own (locks, journals, checksums) and never part of a checkpoint."""

REQUEST = f"{OURS}-request.json"
"""The file that says which conversion a folder without checksums is the result of."""
COMMITTED = "_RESHARD_COMMITTED"
"""The file that is written last where folders cannot be renamed."""
TENSOR_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
"""How a single file that holds tensors may be called."""
MAX_FILES = 1 << 20
MAX_OPEN = 128
"""Descriptors that are kept open while nobody uses them."""
MAX_DEPTH = 32
SHORT = 1 << 20
"""Bytes that are read in one go; more are read piece by piece."""

Range = tuple[str, int, int]
"""A path, the first byte, and how many."""


def open_storage(root: str | Path) -> Storage:
    """A folder, a single file, or the address of either, to be read by ranges.

    What has no ``://`` is local. Nothing is opened yet, but what is absent is an error at once.
    """
    text = plain_path(root)
    if "://" not in text:
        return LocalStorage(text)
    from reshard.checkpoint.storage.remote import RemoteStorage

    return RemoteStorage(text)


def plain_path(address: str | Path) -> str:
    """The path of a local address, and any other address as it is.

    >>> plain_path("file:///ckpt"), plain_path("s3://bucket/ckpt")
    ('/ckpt', 's3://bucket/ckpt')
    """
    text = str(address)
    for local in ("file://", "local://"):
        text = text.removeprefix(local)
    return text


def check_path(path: str) -> str:
    """Refuse a path that is absolute or climbs: a file may name only files beside it.

    >>> check_path("mp_rank_00/model.pt")
    'mp_rank_00/model.pt'
    """
    parts = path.split("/")
    bad = not path or "\0" in path or "\\" in path or any(p in ("", ".", "..") for p in parts)
    if bad:
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
    """Whether the root is a single file, which is then all there is."""

    @abstractmethod
    def list(self) -> tuple[StoredFile, ...]:
        """All regular files below the root, sorted; hidden folders and our own files left out."""

    @abstractmethod
    def size(self, path: str) -> int:
        """How many bytes a file has."""

    @abstractmethod
    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        """What changes when a file is written again, asked anew; None where nothing tells."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file, all of it or DamageError."""

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file, or DamageError before anything is allocated."""
        self._check_range(path, offset, length)
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def where(self, path: str) -> str:
        """What errors call a file: its full path or address."""
        return self.root if self.is_file else f"{self.root}/{path}"

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges, (path, offset, length) each; remote ones all at once."""
        return [self.read(*wanted) for wanted in ranges]

    def close(self) -> None:
        """Give back what was opened."""
        return

    def descriptor(self, path: str) -> int:
        """A file descriptor of a local file, open until this storage is closed."""
        raise CheckpointError(f"{self.where(path)} is not a local file and has no descriptor")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_range(self, path: str, offset: int, length: int) -> None:
        size = self.size(path)
        if not (0 <= offset <= size and 0 <= length <= size - offset):
            raise DamageError(
                f"{self.where(path)}: bytes {offset} to {offset + length} are wanted and the file "
                f"has {size}: it is cut short, or what points into it is wrong"
            )


Identity = tuple[int, int, int, int, int]
"""Device, inode, size, times of the last write and of the last change of a file."""


def _identity(status: os.stat_result) -> Identity:
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


@dataclass(slots=True)
class _Open:
    """An open file: its descriptor, its size, and how many are using it."""

    descriptor: int
    size: int
    users: int = 0


class LocalStorage(Storage):
    """A folder, or one file, of this machine.

    The identity of a file is kept from the first time that it is listed or opened. A file that is
    later another one, whatever its size and time stamp, is refused: its bytes would be mixed with
    those that were read before.
    """

    is_local = True

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/") or root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
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
        """Size and both times. Inodes are compared too, but only within this process: on some
        network file systems each machine sees others."""
        found = [self._status(path) for path in paths]
        for path, status in zip(paths, found, strict=True):
            self._check_same(path, status)
        return [f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}" for status in found]

    def read(self, path: str, offset: int, length: int) -> bytes:
        return self.read_many([(path, offset, length)])[0]

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Ranges of one file that follow each other in the list take its lock once."""
        found: list[bytes] = []
        for path, some in groupby(ranges, key=itemgetter(0)):
            with self.using(path) as file:
                found += [self._read_short(file, *wanted) for wanted in some]
        return found

    def _read_short(self, file: _Open, path: str, offset: int, length: int) -> bytes:
        if offset >= 0 <= length <= file.size - offset and length <= SHORT:
            with suppress(OSError):  # then the long way says what is wrong
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
                        f"it had {file.size} bytes when it was opened; is somebody writing to it?"
                    )
                left, at = left[count:], at + count

    def descriptor(self, path: str) -> int:
        with self._lock:
            file = self._opened(path)
            file.users += 1  # never given back, so that it is not closed under its user
            return file.descriptor

    @contextmanager
    def using(self, path: str) -> Iterator[_Open]:
        """The open file, which nobody closes meanwhile; for many files rather than descriptor."""
        with self._lock:
            file = self._opened(path)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                os.close(file.descriptor)
            self._open.clear()

    def _pread(self, path: str, descriptor: int, buffer: memoryview, at: int) -> int:
        try:
            return os.preadv(descriptor, [buffer], at)
        except OSError as error:
            raise CheckpointError(
                f"{self.where(path)}: bytes {at} to {at + len(buffer)} cannot be read: "
                f"{error.strerror}"
            ) from None

    def _opened(self, path: str) -> _Open:
        """The open file, now the last to be closed; call with the lock held."""
        file = self._open.get(path)
        if file is None:
            self._make_room()
            file = self._open[path] = self._open_anew(path)
        self._open.move_to_end(path)
        return file

    def _make_room(self) -> None:
        idle = [path for path, file in self._open.items() if not file.users]
        for path in idle[: max(len(self._open) + 1 - MAX_OPEN, 0)]:
            os.close(self._open.pop(path).descriptor)

    def _open_anew(self, path: str) -> _Open:
        where = self._folder / check_path(path)
        self._check_inside(where)
        try:
            # Without O_NONBLOCK opening a pipe would wait for somebody to write to it.
            descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(self.where(path), error) from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise DamageError(f"{self.where(path)} is not a regular file")
        try:
            self._check_same(path, status)
        except DamageError:
            os.close(descriptor)
            raise
        return _Open(descriptor, status.st_size)

    def _status(self, path: str) -> os.stat_result:
        try:
            return (self._folder / check_path(path)).stat()
        except OSError as error:
            raise _unreadable(self.where(path), error) from None

    def _check_same(self, path: str, status: os.stat_result) -> None:
        """Refuse a file that is not the one that was listed or opened first."""
        found = _identity(status)
        if self._identities.setdefault(path, found) != found:
            raise DamageError(
                f"{self.where(path)} was replaced or written while it was read: read it again when "
                "no process writes to it"
            )

    def _check_inside(self, where: Path) -> None:
        """A link may lead to a file of the root, or, in a hub's cache, to one of its blobs."""
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


def _unreadable(path: str, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return DamageError(f"{path} is missing: the checkpoint is not complete")
    return CheckpointError(f"{path} cannot be opened: {error.strerror}")


def _walk(folder: Path, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of a folder and of the folders in it; links to folders are not followed."""
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
