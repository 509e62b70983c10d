"""The catalog of a checkpoint: which box of which tensor is stored in which bytes.

Every format is read into this one value, and everything else (inspection, conversion, verification)
works on it. Nothing here opens a file.

>>> files = (StoredFile("a.safetensors", 40), StoredFile("b.safetensors", 40))
>>> w = StoredTensor("w", (4, 2), "float32", (
...     StoredPiece(Box((0, 0), (2, 2)), file=0, offset=24, strides=(2, 1)),
...     StoredPiece(Box((2, 0), (4, 2)), file=1, offset=24, strides=(2, 1)),
... ))
>>> catalog = Catalog("ckpt", "safetensors", files, {"w": w})
>>> catalog.num_bytes, w.missing(), w.pieces[1].num_bytes(w.dtype)
(32, (), 16)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from reshard.checkpoint.storage.local import StoredFile
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, CoverageError
from reshard.layout.box import Box, row_major
from reshard.layout.coverage import missing_boxes, repeated_boxes
from reshard.text import quoted


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, and the bytes of a file that hold it."""

    box: Box
    file: int
    """The number of the file in the catalog."""
    offset: int
    """The byte of the file at which the first element of the box begins."""
    strides: tuple[int, ...]
    """The stride of each dim, in elements."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the box is one run of bytes, in row-major order."""
        shape = self.box.shape
        dims = zip(shape, self.strides, row_major(shape), strict=True)
        return all(length == 1 or have == want for length, have, want in dims)

    def num_bytes(self, dtype: str) -> int:
        """Bytes of the elements of the box."""
        return self.box.size * itemsize(dtype)

    def span(self, dtype: str) -> tuple[int, int]:
        """The range of bytes of the file that the piece spans, gaps included."""
        pairs = zip(self.box.shape, self.strides, strict=True)
        last = sum((length - 1) * stride for length, stride in pairs) if self.box.size else -1
        return self.offset, self.offset + (last + 1) * itemsize(dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its pieces. Pieces that overlap are replicas of each other."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]
    zeros: tuple[Box, ...] = ()
    """Boxes that are not stored and are zero, in a tensor that a renaming has padded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def boxes(self) -> frozenset[Box]:
        """The boxes of the pieces that are not empty."""
        return frozenset(piece.box for piece in self.pieces if piece.box.size)

    def fingerprint(self) -> bytes:
        """Bytes that are equal for tensors with equal pieces."""
        rows = [(p.file, p.offset, p.box.start, p.box.stop, p.strides) for p in self.pieces]
        return repr(rows).encode()

    def missing(self) -> tuple[Box, ...]:
        """The parts of the tensor that no piece holds, as disjoint boxes."""
        return self._covered(missing_boxes)

    def repeated(self) -> tuple[Box, ...]:
        """The parts of the tensor that several pieces hold, as disjoint boxes; at most 1,000."""
        return self._covered(repeated_boxes)

    def _covered(self, search: Callable[[Box, Iterable[Box]], tuple[Box, ...]]) -> tuple[Box, ...]:
        boxes = (*(piece.box for piece in self.pieces), *self.zeros)
        try:
            return search(Box.whole(self.shape), boxes)
        except CoverageError as error:
            raise CheckpointError(f"tensor {quoted(self.name)}: {error}") from None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An entry that is not a tensor (a step counter, a config): bytes that are not interpreted."""

    name: str
    file: int
    offset: int
    size: int


class Crc(NamedTuple):
    """The CRC-32 of a range of a file, as the writer of the file recorded it."""

    file: int
    offset: int
    size: int
    value: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The contents of a checkpoint."""

    root: str
    """The path or address it was read from."""
    format: str
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata of the files, such as ``format: pt``."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are plain values: numbers, strings, bytes, and lists, tuples and dicts of them.

    Those that JSON can hold are in ``metadata``, too.
    """
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that other programs keep in the metadata of a .distcp: ``mcore_data``."""
    left_out: tuple[str, ...] = ()
    """Names of entries that are neither tensors nor plain values; they are not read."""
    others: tuple[StoredFile, ...] = ()
    """Files that belong to the checkpoint and hold no tensor: config.json, a tokenizer."""
    mesh: str | None = None
    """The mesh of the checkpoint, if its files record it."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """The layout of each tensor on that mesh, if its files record it."""
    nesting: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """The path of keys to each entry of a nested state dict, if its files record it."""
    crcs: tuple[Crc, ...] = ()
    """The CRC-32 records of the files, if they have any."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each, such as values that were left out."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())
