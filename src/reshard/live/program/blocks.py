"""Blocks, the boxes of single tensors that a plan moves, and the one description of their copies.

A row of a plan is a range of a stacked cell: elements ``start`` to ``stop`` of several tensors that
each have a cell of the same shape. Only a box of one tensor has an address, so every row becomes
blocks:

    two tensors, cell 2 x 3, elements 4 to 12     -> tensor 0: row 1, columns 1 to 3
    0 1 2 | 3[4 5]    [6 7 8 | 9 10 11]              tensor 1: all of it

A block never crosses a border of what a rank holds, so its first element and the strides of the
local tensor give the address of every element. All rows are handled at once, as columns.

A call has a table of base addresses: its source tensors, its destination tensors, and last a
staging buffer. `CopyBlocks` lists blocks to copy between places, each given as a number in that
table and an offset. It does not depend on addresses, so it is compiled once per plan. The host
copies it with memmove and numpy, a GPU with one kernel launch, and the kernel reads and writes
other processes along the same strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.layout.box import Interval, length_of, row_major
from reshard.layout.boxlist import flat_boxes
from reshard.layout.columns import Ints, spread
from reshard.layout.layout import BoxLayout, Layout

COMPARED = 1 << 22
"""Comparisons with explicit boxes made at once: bounds memory when both sides have many."""


def blocks_of(cell_width: Ints, num_tensors: int, start: Ints, stop: Ints) -> tuple[Ints, ...]:
    """Divide ranges of stacked cells into blocks; ``cell_width`` has one row per range.

    Returns which range each block is of, which tensor of the stack, where it starts in its cell,
    and its width, in the order of the ranges.

    >>> blocks = blocks_of(np.array([[2, 3]]), 2, np.array([4]), np.array([12]))
    >>> [column.tolist() for column in blocks]
    [[0, 0], [0, 1], [[1, 1], [0, 0]], [[1, 2], [2, 3]]]
    """
    stacked = np.insert(cell_width, 0, num_tensors, axis=1)
    row, low, width = flat_boxes(stacked, start, stop)
    old, tensor = spread(low[:, 0], width[:, 0])
    return row[old], tensor, low[old, 1:], width[old, 1:]


FindOffsets = Callable[[Ints], tuple[Ints, Ints]]
"""Finds boxes of the global tensor, given by their first indices, in one rank's local tensor.

Returns the offset of each box and its strides, in elements.
"""


def local_offsets(layout: Layout, shape: tuple[int, ...], rank: int) -> FindOffsets:
    """Offsets in the local tensor of one rank.

    Its dims are lists of intervals, perhaps flattened and sharded once more. The first element of a
    box is found dim by dim: how many held elements of the dim precede it?
    """
    if isinstance(layout, BoxLayout):
        return _box_offsets(layout, rank)
    intervals, ranges = layout.intervals(rank, shape)
    dims, flat = [_positions(one) for one in intervals], _positions(ranges or ())
    strides = np.array(row_major(tuple(map(length_of, intervals))), dtype=np.int64)

    def find(low: Ints) -> tuple[Ints, Ints]:
        offset = np.zeros(len(low), dtype=np.int64)
        for dim, position in enumerate(dims):
            offset += position(low[:, dim]) * strides[dim]
        return offset if ranges is None else flat(offset), np.broadcast_to(strides, low.shape)

    return find


def _positions(intervals: Sequence[Interval]) -> Callable[[Ints], Ints]:
    """Finds the positions of elements among those that rising intervals hold."""
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    starts, widths = table[:, 0], table[:, 1] - table[:, 0]
    before = np.cumsum(widths) - widths

    def position(index: Ints) -> Ints:
        at = np.searchsorted(starts, index, side="right") - 1
        places: Ints = before[at] + index - starts[at]
        return places

    return position


def _box_offsets(layout: BoxLayout, rank: int) -> FindOffsets:
    """Offsets in explicit boxes, which are stored one after the other."""
    pieces = layout.pieces(rank, layout.shape)
    columns = [(one.box.start, one.box.stop, one.strides) for one in pieces]
    table = np.array(columns, np.int64).reshape(len(pieces), 3, len(layout.shape))
    starts, stops, strides = table.transpose(1, 0, 2)
    offsets = np.array([one.offset for one in pieces], np.int64)

    def find(low: Ints) -> tuple[Ints, Ints]:
        step, piece = max(1, COMPARED // max(1, starts.size)), np.zeros(len(low), np.int64)
        for at in range(0, len(low), step):
            first = low[at : at + step, None]
            piece[at : at + step] = ((starts <= first) & (first < stops)).all(axis=2).argmax(axis=1)
        by = strides[piece]
        return offsets[piece] + ((low - starts[piece]) * by).sum(axis=1), by

    return find


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where blocks are: one row per block."""

    base: Ints  # numbers in the table of base addresses
    offset: Ints  # bytes from there
    strides: Ints  # elements from one index to the next, one column per dim
    dtype: str

    @classmethod
    def in_message(cls, width: Ints, at: Ints, base: int, dtype: str) -> Place:
        """Blocks that are packed one after the other; ``at`` is where each begins, in bytes."""
        strides = np.ones_like(width)
        for dim in reversed(range(width.shape[1] - 1)):
            strides[:, dim] = strides[:, dim + 1] * width[:, dim + 1]
        return cls(np.full(len(width), base), at, strides, dtype)


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Blocks to copy, one per row: element ``i`` of a block is on both sides at

        base address + offset + itemsize * (i[0] * stride[0] + i[1] * stride[1] + ...)

    Blocks of fewer dims than the others are filled up with dims of width 1.
    """

    source: Ints  # numbers in the table of base addresses
    destination: Ints
    source_offset: Ints  # bytes from the base address
    destination_offset: Ints
    widths: Ints  # elements along each dim, outermost first: one row of D numbers per block
    source_strides: Ints  # elements from one index to the next, per dim
    destination_strides: Ints
    itemsize: Ints  # bytes of one element; of the source, where elements are cast
    cast: tuple[str, str] | None = field(default=None, kw_only=True)
    """Source and destination dtype of all blocks; None if bytes are copied unchanged."""

    def __post_init__(self) -> None:
        count, shape = len(self.source), self.widths.shape
        if len(shape) != 2 or shape[0] != count:
            raise PlanError(f"widths has shape {shape}: give one row for each of {count} blocks")
        for name in CopyBlocks.__slots__[:-1]:
            actual = getattr(self, name).shape
            expected = shape if name.endswith(("widths", "strides")) else (count,)
            if actual != expected:
                raise PlanError(f"{name} has shape {actual} and must have {expected}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> CopyBlocks:
        columns = (getattr(self, name)[rows] for name in CopyBlocks.__slots__[:-1])
        return CopyBlocks(*columns, cast=self.cast)


class CopyList:
    """Copies of many transfers, joined to one table per change of dtype."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str] | None, list[list[Ints]]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, width: Ints, source: Place, destination: Place) -> None:
        """Copy blocks of this width from one place to another."""
        cast = (source.dtype, destination.dtype) if source.dtype != destination.dtype else None
        both = (source, destination)
        columns = [*(one.base for one in both), *(one.offset for one in both), width]
        columns += [*(one.strides for one in both), np.full(len(width), itemsize(source.dtype))]
        self._rows.setdefault(cast, []).append(columns)

    def tables(self) -> list[CopyBlocks]:
        tables = []
        for cast, rows in self._rows.items():
            num_dims = max(1, *(columns[4].shape[1] for columns in rows))
            columns = [list(parts) for parts in zip(*rows, strict=True)]
            for column, value in ((4, 1), (5, 0), (6, 0)):  # widths and strides of new dims
                columns[column] = [_padded(part, num_dims, value) for part in columns[column]]
            tables.append(CopyBlocks(*map(np.concatenate, columns), cast=cast))
        return tables


def _padded(rows: Ints, num_dims: int, value: int) -> Ints:
    """Rows with so many dims, new ones first."""
    lacking = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (lacking, 0)), constant_values=value) if lacking else rows
