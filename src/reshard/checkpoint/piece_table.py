"""Stored pieces as a table of arrays, which plans and copies thousands of pieces fast.

A catalog has one object per piece. A table has one row per piece and one column per dim, with all
amounts in bytes.

>>> from reshard.layout.box import Box
>>> from reshard.checkpoint.catalog import StoredPiece
>>> pieces = [StoredPiece(Box((0, 0), (2, 4)), 0, 100, (4, 1)),
...           StoredPiece(Box((2, 0), (4, 4)), 1, 100, (4, 1))]
>>> rows = PieceTable.of(pieces, num_dims=2, itemsize=2)
>>> part = rows.within(Box((1, 2), (3, 4)))
>>> part.offsets.tolist(), part.is_run.tolist(), part.num_bytes.tolist()
([112, 104], [True, True], [4, 4])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.catalog import Catalog, StoredPiece
from reshard.layout.box import Box
from reshard.layout.columns import Ints

_COLUMNS = ("files", "offsets", "starts", "stops", "strides")


@dataclass(frozen=True, eq=False)
class PieceTable:
    """Boxes; for each its file, the offset of its first element, and its strides in bytes."""

    itemsize: int
    starts: Ints
    stops: Ints
    files: Ints
    offsets: Ints
    strides: Ints

    @classmethod
    def of(cls, pieces: Sequence[StoredPiece], num_dims: int, itemsize: int) -> PieceTable:
        rows = [(*p.box.start, *p.box.stop, *p.strides, p.file, p.offset) for p in pieces]
        table = np.array(rows, dtype=np.int64).reshape(len(pieces), 3 * num_dims + 2)
        starts, stops = table[:, :num_dims], table[:, num_dims : 2 * num_dims]
        strides = table[:, 2 * num_dims : -2] * itemsize
        return cls(itemsize, starts, stops, table[:, -2], table[:, -1], strides)

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> bytes:
        return b"".join(getattr(self, name).tobytes() for name in _COLUMNS)

    def __getitem__(self, rows: Ints | slice) -> PieceTable:
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    @cached_property
    def shapes(self) -> Ints:
        return self.stops - self.starts

    @cached_property
    def num_bytes(self) -> Ints:
        sizes: Ints = self.shapes.prod(axis=1) * self.itemsize
        return sizes

    @cached_property
    def spans(self) -> Ints:
        """Bytes from the first to the end of the last element of each box, gaps included."""
        spans: Ints = ((self.shapes - 1) * self.strides).sum(axis=1) + self.itemsize
        return spans

    @cached_property
    def is_run(self) -> NDArray[np.bool_]:
        """Whether each box is one run of bytes in row-major order."""
        after = np.ones_like(self.shapes)
        after[:, :-1] = np.cumprod(self.shapes[:, :0:-1], axis=1)[:, ::-1]
        steps = np.where(self.shapes == 1, after * self.itemsize, self.strides)
        is_run: NDArray[np.bool_] = (steps == after * self.itemsize).all(axis=1)
        return is_run

    def box(self, row: int) -> Box:
        return Box(tuple(self.starts[row].tolist()), tuple(self.stops[row].tolist()))

    def boxes(self) -> Iterator[Box]:
        return map(self.box, range(len(self)))

    def pieces(self) -> Iterator[StoredPiece]:
        strides = (self.strides // self.itemsize).tolist()
        rows = zip(self.boxes(), self.files.tolist(), self.offsets.tolist(), strides, strict=True)
        return (StoredPiece(box, file, offset, tuple(steps)) for box, file, offset, steps in rows)

    def within(self, box: Box) -> PieceTable:
        """The intersections with a box."""
        low, high = np.array(box.start, dtype=np.int64), np.array(box.stop, dtype=np.int64)
        starts, stops = np.maximum(self.starts, low), np.minimum(self.stops, high)
        rows = np.flatnonzero((starts < stops).all(axis=1))
        return self.clipped(rows, starts[rows], stops[rows])

    def clipped(self, rows: Ints, starts: Ints, stops: Ints) -> PieceTable:
        """Parts of some rows, given by their starts and stops."""
        strides = self.strides[rows]
        offsets = self.offsets[rows] + ((starts - self.starts[rows]) * strides).sum(axis=1)
        return PieceTable(self.itemsize, starts, stops, self.files[rows], offsets, strides)

    def distinct(self) -> tuple[Ints, Ints]:
        """The rows whose box no earlier row has, and the other rows."""
        first: dict[tuple[int, ...], int] = {}
        for row, box in enumerate(np.concatenate([self.starts, self.stops], axis=1).tolist()):
            first.setdefault(tuple(box), row)
        chosen = np.array([*first.values()], dtype=np.int64)
        return chosen, np.delete(np.arange(len(self)), chosen)

    def runs(self) -> PieceTable:
        """The same elements in boxes that are one run of bytes each."""
        parts = [self[np.flatnonzero(self.is_run)]]
        for row in np.flatnonzero(~self.is_run).tolist():
            # Outer dims are enumerated, inner dims are one run.
            shape, strides = self.shapes[row].tolist(), self.strides[row].tolist()
            outer, run = len(shape), self.itemsize
            while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
                outer -= 1
                run *= shape[outer]
            at = np.indices(shape[:outer]).reshape(outer, -1).T
            rows = np.full(len(at), row)
            starts, stops = self.starts[rows], self.stops[rows]
            starts[:, :outer] += at
            stops[:, :outer] = starts[:, :outer] + 1
            parts.append(self.clipped(rows, starts, stops))
        return joined(parts)


def joined(parts: Sequence[PieceTable]) -> PieceTable:
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS
    }
    return replace(parts[0], **columns)


class Extent(NamedTuple):
    """A range of bytes of a file, and the rows of a table that are in it."""

    file: int
    start: int
    stop: int
    rows: Ints

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def extents(table: PieceTable, gap: int, limit: int) -> Iterator[Extent]:
    """Group boxes into ranges of at most ``limit`` bytes, across gaps of at most ``gap`` bytes.

    A box longer than the limit is a range of its own.
    """
    if not len(table):
        return
    order = np.lexsort((table.offsets, table.files))
    files, begins = table.files[order], table.offsets[order]
    ends = begins + table.spans[order]
    apart = int(ends.max()) + gap + 1
    furthest = np.maximum.accumulate(ends + files * apart)
    new = np.append(True, begins[1:] + files[1:] * apart > furthest[:-1] + gap)
    limits = np.append(np.flatnonzero(new), len(order))
    for first, last in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True):
        rows = slice(first, last)
        yield from _split(int(files[first]), order[rows], begins[rows], ends[rows], limit)


def _split(file: int, rows: Ints, begins: Ints, ends: Ints, limit: int) -> Iterator[Extent]:
    """Split neighbouring boxes of one file into ranges no longer than the limit."""
    stop, first = int(ends.max()), 0
    if stop - begins[0] > limit:
        stop = int(ends[0])
        for at in range(1, len(rows)):
            longer = max(stop, int(ends[at]))
            if longer - begins[first] > limit:
                yield Extent(file, int(begins[first]), stop, rows[first:at])
                first, longer = at, int(ends[at])
            stop = longer
    yield Extent(file, int(begins[first]), stop, rows[first:])


def tensors_at(catalog: Catalog, ranges: Iterable[tuple[int, int, int]]) -> Iterator[list[str]]:
    """The names of the tensors with bytes in each of these ranges: file, start, stop."""
    names = [*catalog.tensors]
    rows = [
        (number, piece.file, *piece.span(tensor.dtype))
        for number, tensor in enumerate(catalog.tensors.values())
        for piece in tensor.pieces
    ]
    numbers, files, starts, stops = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    for file, start, stop in ranges:
        hit = (files == file) & (starts < stop) & (stops > start)
        yield [names[number] for number in dict.fromkeys(numbers[hit].tolist())]
