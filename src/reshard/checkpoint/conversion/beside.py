"""The bytes of a checkpoint that no tensor is made of: are they as they were written?

Headers, indices, plain values and the files beside them have checksums as tensors have. Who copies
tensors compares their digests; these are few bytes, and are compared before anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checksums,
    Chunk,
    checksum,
    damage,
    sum_of,
)
from reshard.checkpoint.storage.base import Storage
from reshard.errors import DamageError
from reshard.text import quoted

__all__ = ["check_beside"]

AT_ONCE = 256
"""Chunks that are asked for at the same time."""
MOST_BYTES = 8 << 20
"""Bytes of them."""

Ints = np.ndarray[Any, Any]


def check_beside(storage: Storage, catalog: Catalog, sums: Checksums) -> None:
    """Raise DamageError if a file or a tensor is gone, or a byte outside of tensors has changed."""
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


def _chunks(catalog: Catalog, sums: Checksums) -> Iterator[tuple[str, Chunk]]:
    """The chunks in which no tensor has a byte."""
    spans = _spans(catalog)
    for path, file in sums.files.items():
        starts, furthest = spans.get(path, (np.empty(0), np.empty(0)))
        for index in range(len(file.ends)):
            chunk = file.chunk(index)
            last = int(np.searchsorted(starts, chunk.stop)) - 1
            if last < 0 or furthest[last] <= chunk.start:
                yield path, chunk


def _spans(catalog: Catalog) -> dict[str, tuple[Ints, Ints]]:
    """For each file where pieces of tensors begin, and how far those up to there reach."""
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            found.setdefault(piece.file, []).append(piece.span(tensor.dtype))
    spans = {}
    for file, pairs in found.items():
        table = np.array(sorted(pairs), dtype=np.int64)
        spans[catalog.files[file].path] = table[:, 0], np.maximum.accumulate(table[:, 1])
    return spans


def _batches(chunks: Iterable[tuple[str, Chunk]]) -> Iterator[list[tuple[str, Chunk]]]:
    """A few MiB of chunks at a time; one that is longer than we write is alone."""
    some, size = list[tuple[str, Chunk]](), 0
    for path, chunk in chunks:
        length = chunk.stop - chunk.start
        if some and (len(some) == AT_ONCE or size + length > MOST_BYTES):
            yield some
            some, size = [], 0
        some.append((path, chunk))
        size += length
    if some:
        yield some


def _sums_of(storage: Storage, chunks: list[tuple[str, Chunk]]) -> list[bytes]:
    """The checksums that chunks have now."""
    path, first = chunks[0]
    if first.stop - first.start > MOST_BYTES:
        return [sum_of(storage, path, first.start, first.stop)]
    ranges = [(path, chunk.start, chunk.stop - chunk.start) for path, chunk in chunks]
    return [checksum(data) for data in storage.read_many(ranges)]
