"""A catalog says what a checkpoint holds: which box of which tensor lies in which bytes?

Every format is read into this one value, and everything else (inspecting, converting, verifying)
asks only it. Nothing here opens a file.

>>> files = (StoredFile("a.safetensors", 40), StoredFile("b.safetensors", 40))
>>> w = StoredTensor("w", (4, 2), "float32", (
...     StoredPiece(Box((0, 0), (2, 2)), file=0, offset=24, strides=(2, 1)),
...     StoredPiece(Box((2, 0), (4, 2)), file=1, offset=24, strides=(2, 1)),
... ))
>>> catalog = Catalog("ckpt", "safetensors", files, {"w": w})
>>> catalog.num_bytes, w.holes(), w.pieces[1].num_bytes(w.dtype)
(32, (), 16)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from reshard.checkpoint.coverage import holes_of
from reshard.checkpoint.storage.base import StoredFile
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major

__all__ = ["Catalog", "Crc", "StoredObject", "StoredPiece", "StoredTensor"]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, and the bytes of a file that hold it."""

    box: Box
    file: int
    """Which of the catalog's files."""
    offset: int
    """The byte at which the first element of the box begins."""
    strides: tuple[int, ...]
    """Elements from one index to the next, for each dim of the box."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the box is one run of bytes, in row-major order."""
        shape = self.box.shape
        ideal = row_major(shape)
        if self.strides == ideal:
            return True
        dims = zip(shape, self.strides, ideal, strict=True)
        return all(length == 1 or have == want for length, have, want in dims)

    def num_bytes(self, dtype: str) -> int:
        """Bytes of the elements of the box."""
        return self.box.size * itemsize(dtype)

    def span(self, dtype: str) -> tuple[int, int]:
        """The first byte of the piece in its file, and the one past its last."""
        pairs = zip(self.box.shape, self.strides, strict=True)
        last = sum((length - 1) * stride for length, stride in pairs) if self.box.size else -1
        return self.offset, self.offset + (last + 1) * itemsize(dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: what it is, and its pieces. Pieces that overlap are replicas of each other."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]
    zeros: tuple[Box, ...] = ()
    """Boxes that are stored nowhere and are zero, where a tensor is padded by its new name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return prod(self.shape) * itemsize(self.dtype)

    def holes(self) -> tuple[Box, ...]:
        """What no piece holds, as disjoint boxes."""
        return holes_of(self.shape, (*(piece.box for piece in self.pieces), *self.zeros))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An entry that is no tensor (a step counter, a config): bytes nobody interprets."""

    name: str
    file: int
    offset: int
    size: int


class Crc(NamedTuple):
    """The CRC-32 of a range of a file, which whoever wrote the file has left there."""

    file: int
    offset: int
    size: int
    value: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that a checkpoint holds."""

    root: str
    """The path or address it was read from."""
    format: str
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the files say beside the tensors, such as ``format: pt``."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are plain values: numbers, texts, bytes, and lists, tuples and dicts of them.

    Where JSON can hold one, ``metadata`` has it as a text, too.
    """
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that other programs keep in the metadata of a .distcp: ``mcore_data``."""
    left_out: tuple[str, ...] = ()
    """Names of entries that are neither tensors nor plain values, and are not read."""
    others: tuple[StoredFile, ...] = ()
    """Files that belong to the checkpoint and hold no tensor: config.json, a tokenizer."""
    mesh: str | None = None
    """The mesh the checkpoint was cut over, where its files say so."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """The layout of each tensor on that mesh, where its files say so."""
    nesting: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """The keys that lead to each entry of a nested state dict, where its files say so."""
    crcs: tuple[Crc, ...] = ()
    """What the files say of their own bytes, where they do."""
    notes: tuple[str, ...] = ()
    """What a reader should know and no error says: values that were left out, one line each."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())
