"""Destinations that fsspec reaches: built locally, uploaded file by file, then committed.

An object store cannot rename a folder. The file ``_RESHARD_COMMITTED``, which is written last and
lists every file with its size, tells readers that the checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.base import COMMITTED, StoredFile
from reshard.errors import CheckpointError, TargetError, UnfinishedError

__all__ = ["Remote"]


class Remote:
    """An address to write a checkpoint to."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            files, base = url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{address} cannot be reached: {reason}") from None
        self._files: Any = files
        self._base = str(base).rstrip("/")

    def place(self) -> Workplace:
        """A folder of this machine in which the output is built, the same for each attempt."""
        name = hashlib.blake2b(self.address.encode(), digest_size=8).hexdigest()
        return Workplace.beside(Path(tempfile.gettempdir()) / f"reshard-{name}")

    def check_absent(self, source: str, overwrite: bool) -> None:
        """Refuse the source's address, or one at which something is: it cannot be replaced."""
        mine, other = f"{self.address}/", f"{source.rstrip('/')}/"
        if mine.startswith(other) or other.startswith(mine):
            raise TargetError(
                f"the destination {self.address} and the source {source} are the same or contain "
                "each other: choose a destination outside of the source"
            )
        if not self._ask("exists", self._base) or not self._ask("find", self._base):
            return
        advice = "remove it first, or choose another address"
        if self._ask("exists", f"{self._base}/{COMMITTED}") or not overwrite:
            raise TargetError(
                f"{self.address} exists, and an object store cannot exchange it in one step: "
                f"{advice}"
            )

    def is_result(self, request: Mapping[str, Any]) -> bool:
        """Whether the address holds the result of this very conversion."""
        marker = f"{self._base}/{COMMITTED}"
        if not self._ask("exists", marker):
            return False
        try:
            found = json.loads(self._ask("cat_file", marker))
        except ValueError:
            return False
        return isinstance(found, dict) and found.get("request") == request

    def upload(
        self, place: Workplace, files: Sequence[StoredFile], request: Mapping[str, Any]
    ) -> None:
        """Upload all files, compare their sizes, and commit."""
        paths = [file.path for file in files]
        paths += [SIDECAR] if (place.data / SIDECAR).exists() else []
        sizes = {path: (place.data / path).stat().st_size for path in paths}
        self._check_strangers(paths)
        for path, size in sizes.items():
            self._ask("put_file", str(place.data / path), f"{self._base}/{path}")
            found = self._ask("size", f"{self._base}/{path}")
            if found != size:
                raise UnfinishedError(
                    f"{self.address}/{path} has {found} bytes and {size} were sent; "
                    "--resume sends it again"
                )
        text = json.dumps({"reshard": 1, "files": sizes, "request": request}).encode()
        self._ask("pipe_file", f"{self._base}/{COMMITTED}", text)
        place.finish()

    def _check_strangers(self, paths: Sequence[str]) -> None:
        """Refuse files at the address that would be read together with ours."""
        found = self._ask("find", self._base) if self._ask("exists", self._base) else []
        names = {str(name).removeprefix(self._base).lstrip("/") for name in found}
        if strange := sorted(names - {*paths, COMMITTED}):
            raise UnfinishedError(
                f"{self.address}/{strange[0]} is there and not of this checkpoint: remove it and "
                "give --resume"
            )

    def _ask(self, method: str, *arguments: object) -> Any:
        """Call fsspec, whose implementations raise whatever their client library raises."""
        try:
            return getattr(self._files, method)(*arguments)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if method in ("exists", "find"):  # asked before anything is done
                raise TargetError(f"{self.address} cannot be written: {reason}") from None
            raise UnfinishedError(
                f"{self.address}: {method} failed: {reason}; --resume tries again"
            ) from None
