"""Stage 2 of a conversion, the source: read its catalog and check all bytes outside of tensors.

Headers, indexes, plain values and other files have checksums, as tensors have. Digests verify the
tensors while they are copied; the other bytes are few, and are compared before anything is copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checksums,
    ChunkSum,
    checksum,
    damage,
    sum_of,
)
from reshard.checkpoint.storage.base import Storage
from reshard.errors import DamageError
from reshard.text import quoted

__all__ = ["Stamp", "check_outside_tensors"]

AT_ONCE = 256
"""The most chunks that are read at the same time."""
MOST_BYTES = 8 << 20
"""The most bytes of these chunks."""

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a source's files at one time."""

    text: str
    """A hash of the source's path and of the names, sizes and versions of its files."""
    is_sure: bool
    """Whether every file has a version, so that every change of it shows."""

    @classmethod
    def of(cls, catalog: Catalog, storage: Storage) -> Stamp:
        """The present state of a source."""
        root = str(Path(catalog.root).resolve()) if storage.is_local else catalog.root
        hasher = hashlib.blake2b(root.encode(), digest_size=16)
        files = (*catalog.files, *catalog.others)
        versions = storage.versions([file.path for file in files])
        for file, version in zip(files, versions, strict=True):
            hasher.update(json.dumps([file.path, file.size, version]).encode())
        return cls(hasher.hexdigest(), None not in versions)


def check_outside_tensors(storage: Storage, catalog: Catalog, sums: Checksums) -> None:
    """Raise DamageError if a file or tensor is missing, or a byte outside of tensors changed."""
    present = {file.path: file.size for file in storage.list()}
    if SIDECAR not in present:  # a single file was opened, not its folder
        return
    for name in sums.digests:
        if name not in catalog.tensors:
            raise DamageError(
                f"{storage.root}: tensor {quoted(name)} was written and is in no file"
            )
    for path, file in sums.files.items():
        _check_size(storage, path, file.size, present.get(path))
    for some in _batches(_chunks(catalog, sums)):
        for (path, chunk), found in zip(some, _sums_of(storage, some), strict=True):
            if found != chunk.sum:
                raise DamageError(damage(f"{storage.root}/{path}", chunk, found))


def _check_size(storage: Storage, path: str, size: int, found: int | None) -> None:
    if found is None:
        raise DamageError(
            f"{storage.root}/{path} is missing: it was written with {size} bytes; "
            f"if it is not wanted, delete {SIDECAR}"
        )
    if found != size:
        raise DamageError(
            f"{storage.root}/{path} has {found} bytes and was written with {size}: "
            "restore it from a copy"
        )


def _chunks(catalog: Catalog, sums: Checksums) -> Iterator[tuple[str, ChunkSum]]:
    """The chunks without a byte of a tensor."""
    spans = _spans(catalog)
    for path, file in sums.files.items():
        starts, furthest = spans.get(path, (np.empty(0), np.empty(0)))
        for index in range(len(file.ends)):
            chunk = file.chunk(index)
            last = int(np.searchsorted(starts, chunk.stop)) - 1
            if last < 0 or furthest[last] <= chunk.start:
                yield path, chunk


def _spans(catalog: Catalog) -> dict[str, tuple[Ints, Ints]]:
    """For each file the starts of pieces in order, and the furthest end of each and all before."""
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            found.setdefault(piece.file, []).append(piece.span(tensor.dtype))
    spans = {}
    for file, pairs in found.items():
        table = np.array(sorted(pairs), dtype=np.int64)
        spans[catalog.files[file].path] = table[:, 0], np.maximum.accumulate(table[:, 1])
    return spans


def _batches(chunks: Iterable[tuple[str, ChunkSum]]) -> Iterator[list[tuple[str, ChunkSum]]]:
    """Chunks in groups of a few MiB; a chunk that is longer is alone."""
    some, size = list[tuple[str, ChunkSum]](), 0
    for path, chunk in chunks:
        length = chunk.stop - chunk.start
        if some and (len(some) == AT_ONCE or size + length > MOST_BYTES):
            yield some
            some, size = [], 0
        some.append((path, chunk))
        size += length
    if some:
        yield some


def _sums_of(storage: Storage, chunks: list[tuple[str, ChunkSum]]) -> list[bytes]:
    """The present checksums of chunks."""
    path, first = chunks[0]
    if first.stop - first.start > MOST_BYTES:
        return [sum_of(storage, path, first.start, first.stop)]
    ranges = [(path, chunk.start, chunk.stop - chunk.start) for path, chunk in chunks]
    return [checksum(data) for data in storage.read_many(ranges)]
