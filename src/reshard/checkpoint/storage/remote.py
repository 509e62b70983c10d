"""Files behind an fsspec address (s3, gcs, http, memory): read by byte ranges, and uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reshard.checkpoint.storage.local import (
    COMMITTED,
    MAX_FILES,
    OURS,
    TENSOR_FILES,
    Range,
    Storage,
    StoredFile,
    check_path,
)
from reshard.errors import CheckpointError, DamageError, TargetError, UnfinishedError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_REQUESTS = 32
"""Small requests to a server that are in flight at the same time."""
VERSIONS = (
    "ETag", "etag", "md5Hash", "generation", "VersionId", "version_id",
    "mtime", "LastModified", "last_modified", "updated", "modified", "created",
)  # fmt: skip
"""Keys under which servers report the version of a file."""


class RemoteStorage(Storage):
    """A folder, or one file, at an address."""

    is_local = False

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._sizes: dict[str, int] = {}
        self._files, self._base = _connect(root)
        self.only = None
        info = self._call(self.root, "info", self._base)
        # Over http a folder is a page and counts as a file: only the suffix of its name decides.
        if info.get("type") == "file" and self._base.endswith(TENSOR_FILES):
            self._base, _, self.only = self._base.rpartition("/")

    def _listed(self) -> Iterator[StoredFile]:
        infos = self._infos()
        if len(infos) > MAX_FILES:
            raise CheckpointError(
                f"{self.root} holds {len(infos)} files, at most {MAX_FILES} are read: "
                "name the folder of one checkpoint"
            )
        for path, info in infos.items():
            *folders, last = path.split("/")
            if path and not last.startswith(OURS) and not any(f.startswith(".") for f in folders):
                yield StoredFile(path, self._record_size(path, info))

    def size(self, path: str) -> int:
        if path not in self._sizes:
            self._record_size(path, self._info(path))
        return self._sizes[path]

    def versions(self, paths: Sequence[str]) -> Sequence[str | None]:
        self._files.invalidate_cache()
        infos = {} if self.is_file else self._infos()
        versions = {path: _version(info) for path, info in infos.items()}
        unknown = [path for path in paths if versions.get(path) is None]
        infos = dict(zip(unknown, self._concurrently(self._info, unknown), strict=True))
        versions |= {path: _version(info) for path, info in infos.items()}
        return [versions[path] for path in paths]

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        return self._concurrently(lambda place: self.read(*place), ranges)

    def read(self, path: str, offset: int, length: int) -> bytes:
        self._check_range(path, offset, length, self.size(path))
        if not length:
            return b""
        where, end = self.where(path), offset + length
        data: bytes = self._call(where, "cat_file", self._full(path), start=offset, end=end)
        if len(data) > length:
            raise CheckpointError(
                f"{where}: {length} bytes from {offset} were requested and {len(data)} were "
                "received: the server does not serve byte ranges; copy the checkpoint here first"
            )
        if len(data) < length:
            raise DamageError(
                f"{where}: bytes {offset} to {end} are needed and only {len(data)} came: it is "
                "truncated"
            )
        return data

    def _concurrently(
        self, request: Callable[[Item], Result], items: Sequence[Item]
    ) -> Sequence[Result]:
        from concurrent.futures import ThreadPoolExecutor

        if len(items) < 2:
            return [*map(request, items)]
        with ThreadPoolExecutor(min(len(items), MAX_REQUESTS)) as pool:
            return [*pool.map(request, items)]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        flat = buffer.cast("B")
        flat[:] = self.read(path, offset, len(flat))

    def _infos(self) -> dict[str, Any]:
        """What the server reports of every file below the folder."""
        infos = self._call(self.root, "find", self._base, detail=True)
        return {_below(self._base, name): info for name, info in infos.items()}

    def _info(self, path: str) -> Any:
        return self._call(self.where(path), "info", self._full(path))

    def _full(self, path: str) -> str:
        return f"{self._base}/{check_path(path)}"

    def _record_size(self, path: str, info: Any) -> int:
        size = info.get("size")
        if size is None:  # some servers list names only
            size = self._call(self.where(path), "size", self._full(path))
        if not isinstance(size, int):
            raise CheckpointError(f"{self.where(path)}: the server does not tell its size")
        self._sizes[path] = size
        return size

    def _call(self, where: str, method: str, *arguments: object, **options: object) -> Any:
        """Call fsspec, whose implementations raise whatever their client library raises."""
        try:
            return getattr(self._files, method)(*arguments, **options)
        except FileNotFoundError:
            raise DamageError(f"{where} does not exist: check the address") from None
        except Exception as error:
            raise CheckpointError(f"{where}: {method} failed: {_reason(error)}") from None


class RemoteTarget:
    """An address to write a checkpoint to: uploaded file by file, then committed.

    An object store cannot rename a folder. The file ``_RESHARD_COMMITTED``, which is written last
    and lists every file with its size, tells readers that the checkpoint is complete.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._files, self._base = _connect(self.address)
        self._marker = f"{self._base}/{COMMITTED}"

    def check_absent(self, overwrite: bool) -> None:
        """Refuse an address at which something is: it cannot be replaced."""
        if not self._call("exists", self._base) or not self._call("find", self._base):
            return
        if self._call("exists", self._marker) or not overwrite:
            raise TargetError(
                f"{self.address} exists, and an object store cannot exchange it in one step: "
                "remove it first, or choose another address"
            )

    def is_result(self, request: Mapping[str, Any]) -> bool:
        """Whether the address holds the result of this very conversion."""
        if not self._call("exists", self._marker):
            return False
        try:
            committed = json.loads(self._call("cat_file", self._marker))
        except (ValueError, RecursionError):
            return False
        return isinstance(committed, dict) and committed.get("request") == request

    def upload(self, folder: Path, paths: Sequence[str], request: Mapping[str, Any]) -> None:
        """Upload these files of a folder, compare their sizes, and commit."""
        sizes = {path: (folder / path).stat().st_size for path in paths}
        there = self._call("find", self._base) if self._call("exists", self._base) else []
        names = {_below(self._base, name) for name in there}
        if foreign := sorted(names - {*paths, COMMITTED}):  # would be read together with ours
            raise UnfinishedError(
                f"{self.address}/{foreign[0]} exists and is not part of this checkpoint: remove it "
                "and give --resume"
            )
        for path, size in sizes.items():
            self._call("put_file", str(folder / path), f"{self._base}/{path}")
            received = self._call("size", f"{self._base}/{path}")
            if received != size:
                raise UnfinishedError(
                    f"{self.address}/{path} has {received} bytes and {size} were sent; "
                    "--resume sends it again"
                )
        text = json.dumps({"reshard": 1, "files": sizes, "request": request}).encode()
        self._call("pipe_file", self._marker, text)

    def _call(self, method: str, *arguments: object) -> Any:
        """Call fsspec, whose implementations raise whatever their client library raises."""
        try:
            return getattr(self._files, method)(*arguments)
        except Exception as error:
            reason = _reason(error)
            if method in ("exists", "find"):  # called before anything is done
                raise TargetError(f"{self.address} cannot be written: {reason}") from None
            raise UnfinishedError(
                f"{self.address}: {method} failed: {reason}; --resume tries again"
            ) from None


def _below(base: str, name: object) -> str:
    return str(name).removeprefix(base).lstrip("/")


def _connect(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path of the address in it."""
    try:
        from fsspec.core import url_to_fs

        files, base = url_to_fs(address)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{address} cannot be reached: {reason}") from None
    return files, str(base).rstrip("/")


def _version(info: Mapping[str, Any]) -> str | None:
    """The size and all version keys that a server reports for a file."""
    reported = {key: str(info[key]) for key in VERSIONS if info.get(key) is not None}
    return f"{info.get('size')} {reported}" if reported else None


def _reason(error: Exception) -> str:
    """The type and the text of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
