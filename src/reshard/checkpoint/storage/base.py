"""The interface of a storage: files below one root, read by byte ranges; reserved file names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

__all__ = [
    "COMMITTED", "MAX_FILES", "OURS", "REQUEST", "TENSOR_FILES", "Range", "Storage", "StoredFile",
    "check_path", "plain_path",
]  # fmt: skip

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
    return str(address).removeprefix("file://").removeprefix("local://")


def check_path(path: str) -> str:
    """Refuse a path that is absolute or leaves the root.

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

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file; DamageError, before anything is allocated, if it does not have them."""
        self._check_range(path, offset, length)
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_many(self, ranges: Sequence[Range]) -> Sequence[bytes]:
        """Many small ranges; those of a remote storage are requested concurrently."""
        return [self.read(*wanted) for wanted in ranges]

    def where(self, path: str) -> str:
        """The full path or address of a file, for errors."""
        return self.root if self.is_file else f"{self.root}/{path}"

    def close(self) -> None:
        """Close all open files."""
        return

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
