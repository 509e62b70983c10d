"""The plan of an output: its files, and the place of every box in them.

It is complete before the first byte is read: shapes and layouts give the sizes, sizes the headers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from reshard.checkpoint.catalog import StoredObject, StoredTensor
from reshard.checkpoint.storage.local import TENSOR_FILES, StoredFile
from reshard.dtypes import itemsize
from reshard.errors import CoverageError, LayoutError
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import sized_cache
from reshard.layout.layout import Layout
from reshard.text import quoted


def count_tensor_files(files: Iterable[StoredFile]) -> int:
    """The number of files that hold tensors, not only an index or metadata."""
    return sum(file.path.endswith((*TENSOR_FILES, ".distcp")) for file in files)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor to be written: its shape, dtype and layout; without a layout it is written whole."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None
    owned: Sequence[OwnedBox] | None = None
    """The rank that writes each box; without it the replicas take turns."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


class Literal(NamedTuple):
    """Bytes of a file that the plan has already: headers, indexes, directories."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ObjectCopy:
    """An object of the source, and the place of its bytes in the output."""

    source: StoredObject
    file: int
    offset: int


@dataclass(frozen=True, eq=False, slots=True)
class OutputTensor(StoredTensor):
    """A tensor of the output, and the places of its pieces."""

    around: tuple[tuple[bytes, bytes], ...] = ()
    """The bytes before and after each piece in its file, if the format has such."""

    def literals(self) -> Iterator[Literal]:
        for piece, (head, tail) in zip(self.pieces, self.around, strict=False):
            yield Literal(piece.file, piece.offset - len(head), head)
            yield Literal(piece.file, piece.offset + piece.num_bytes(self.dtype), tail)


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """The files of a checkpoint to be written."""

    files: tuple[StoredFile, ...]
    tensors: Mapping[str, OutputTensor]
    literals: tuple[Literal, ...]
    """Literals that are not around the pieces of a tensor."""
    objects: tuple[ObjectCopy, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of objects, values and files of the source that are not in the output."""

    def all_literals(self, without: Container[str] = ()) -> Iterator[Literal]:
        """All literals, with those around the pieces of all tensors but some."""
        yield from self.literals
        for name, tensor in self.tensors.items():
            if name not in without:
                yield from tensor.literals()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


class OwnedBox(NamedTuple):
    """A box of a tensor, and the rank that writes it."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    rank: int


def owned_boxes(name: str, wanted: Wanted, number: int) -> Sequence[OwnedBox]:
    """Each distinct box of a tensor with one owner; replicas take turns from tensor to tensor."""
    layout = wanted.layout
    if wanted.owned is not None:
        return wanted.owned
    if layout is None:
        return [OwnedBox((0,) * len(wanted.shape), wanted.shape, 0)]
    if layout.reduce is not None:
        raise LayoutError(
            f'tensor {quoted(name)}: layout "{layout}" leaves a sum pending: a checkpoint holds '
            "values; take the suffix away"
        )
    num_elements, period = _counted(layout, wanted.shape)
    if num_elements != prod(wanted.shape):
        raise CoverageError(
            f'tensor {quoted(name)}: layout "{layout}" keeps {num_elements} of the '
            f"{prod(wanted.shape)} elements of {wanted.shape}: the others would be lost"
        )
    if not num_elements:
        return [OwnedBox((0,) * len(wanted.shape), wanted.shape, layout.ranks[0])]
    return _turn(layout, wanted.shape, number % period)


@sized_cache(16 << 20, lambda counted, layout, shape: layout.num_bytes)
def _counted(layout: Layout, shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of elements in all boxes of a layout, and the period of the turns."""
    listed = listed_of(layout, shape)
    elements = int((listed.stops - listed.starts).prod(axis=1).sum())
    return elements, lcm(*np.diff(listed.first).tolist())


@sized_cache(64 << 20, lambda boxes, layout, shape, turn: layout.num_bytes + 320 * len(boxes))
def _turn(layout: Layout, shape: tuple[int, ...], turn: int) -> tuple[OwnedBox, ...]:
    listed = listed_of(layout, shape)
    counts = np.diff(listed.first)
    ranks = listed.holders[listed.first[:-1] + (np.arange(len(counts)) + turn) % counts]
    boxes = zip(listed.starts.tolist(), listed.stops.tolist(), ranks.tolist(), strict=True)
    return tuple(OwnedBox(tuple(start), tuple(stop), rank) for start, stop, rank in boxes)
