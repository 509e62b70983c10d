"""Files that fsspec reaches (s3, gcs, http, memory and others), read by byte ranges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from reshard.checkpoint.catalog import StoredFile
from reshard.checkpoint.storage.files import (
    MAX_FILES,
    OURS,
    TENSOR_FILES,
    Range,
    Storage,
    check_path,
)
from reshard.errors import CheckpointError, DamageError

__all__ = ["RemoteStorage"]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

MAX_REQUESTS = 32
"""Small reads that a server is asked for at the same time."""
VERSIONS = (
    "ETag", "etag", "md5Hash", "generation", "VersionId", "version_id",
    "mtime", "LastModified", "last_modified", "updated", "modified", "created",
)  # fmt: skip
"""What servers call that by which one sees that a file was written again."""


class RemoteStorage(Storage):
    """A folder, or one file, at an address."""

    is_local = False

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._files, self._base = self._connect(root)
        self._only: str | None = None
        self.is_file = False
        info = self._ask(self.root, "info", self._base)
        # Over http a folder is a page, and so a file: only a name that is one counts as one.
        if info.get("type") == "file" and self._base.endswith(TENSOR_FILES):
            self._base, _, self._only = self._base.rpartition("/")
            self.is_file = True

    def list(self) -> tuple[StoredFile, ...]:
        if self._only is not None:
            return (StoredFile(self._only, self.size(self._only)),)
        found = self._ask(self.root, "find", self._base, detail=True)
        if len(found) > MAX_FILES:
            raise CheckpointError(
                f"{self.root} holds {len(found)} files, at most {MAX_FILES} are read: "
                "name the folder of one checkpoint"
            )
        files = []
        for name, info in found.items():
            path = str(name).removeprefix(self._base).lstrip("/")
            *folders, last = path.split("/")
            if path and not last.startswith(OURS) and not any(f.startswith(".") for f in folders):
                files.append(StoredFile(path, self._remember(path, info)))
        return tuple(sorted(files, key=lambda file: file.path))

    def size(self, path: str) -> int:
        with self._lock:
            known = self._sizes.get(path)
        if known is not None:
            return known
        return self._remember(path, self._ask(self.where(path), "info", self._full(path)))

    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        self._files.invalidate_cache()
        listed = {} if self.is_file else self._ask(self.root, "find", self._base, detail=True)
        known = {str(name).removeprefix(self._base).lstrip("/"): listed[name] for name in listed}
        told = [_version(known.get(path, {})) for path in paths]
        silent = [path for path, version in zip(paths, told, strict=True) if version is None]

        def ask(path: str) -> str | None:
            return _version(self._ask(self.where(path), "info", self._full(path)))

        asked = dict(zip(silent, self._at_once(ask, silent), strict=True))
        return [asked.get(path) or version for path, version in zip(paths, told, strict=True)]

    def read(self, path: str, offset: int, length: int) -> bytes:
        self._check_range(path, offset, length)
        if not length:
            return b""
        where = self.where(path)
        found: bytes = self._ask(
            where, "cat_file", self._full(path), start=offset, end=offset + length
        )
        if len(found) > length:
            raise CheckpointError(
                f"{where}: {length} bytes from {offset} were asked for and {len(found)} came: "
                "the server does not serve byte ranges; copy the checkpoint here first"
            )
        if len(found) < length:
            raise DamageError(
                f"{where}: bytes {offset} to {offset + length} are wanted and only {len(found)} "
                "came: it is cut short"
            )
        return found

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        return self._at_once(lambda wanted: self.read(*wanted), ranges)

    def _at_once(self, ask: Callable[[Asked], Answer], things: Sequence[Asked]) -> Sequence[Answer]:
        """Ask many small things at the same time."""
        from concurrent.futures import ThreadPoolExecutor

        if len(things) < 2:
            return [ask(thing) for thing in things]
        with ThreadPoolExecutor(min(len(things), MAX_REQUESTS)) as pool:
            return [*pool.map(ask, things)]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        flat = buffer.cast("B")
        flat[:] = self.read(path, offset, len(flat))

    def _full(self, path: str) -> str:
        return f"{self._base}/{check_path(path)}"

    def _remember(self, path: str, info: Any) -> int:
        size = info.get("size")
        if size is None:  # some servers list names only
            size = self._ask(self.where(path), "size", self._full(path))
        if not isinstance(size, int):
            raise CheckpointError(f"{self.where(path)}: the server does not tell its size")
        with self._lock:
            self._sizes[path] = size
        return size

    def _connect(self, root: str) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs

            files, base = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{root} cannot be reached: {_one_line(error)}") from None
        return files, str(base).rstrip("/")

    def _ask(self, where: str, method: str, *arguments: object, **options: object) -> Any:
        """Call fsspec, whose implementations raise whatever their client library raises."""
        try:
            return getattr(self._files, method)(*arguments, **options)
        except FileNotFoundError:
            raise DamageError(f"{where} does not exist: check the address") from None
        except Exception as error:
            kind = type(error).__name__
            raise CheckpointError(f"{where}: {method} failed: {kind}: {_one_line(error)}") from None


def _version(info: Mapping[str, Any]) -> str | None:
    """What a server says of a file that changes when the file does."""
    told = {key: str(info[key]) for key in VERSIONS if info.get(key) is not None}
    return f"{info.get('size')} {told}" if told else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
