"""How one kernel launch is divided among the blocks of a table of copies.

A move packs, unpacks and copies thousands of blocks whose sizes differ by many orders of magnitude:
18,000 slices of experts beside one of a gigabyte. Here the list of blocks becomes a launch table,
in four steps, each over all blocks at once:

1. strides in bytes, dims of width 1 dropped, adjacent dims merged where both sides allow it:

       [8, 4, 1, 16] floats, strides (256, 16, 16, 1) -> (64, 16, 16, 1)   becomes
       [8, 256] bytes, strides (1024, 1) -> (256, 1)

2. rows in units of 16, 8, 4, 2 or 1 bytes, the widest that every address of the block permits;
   rows that start or end off the grid of 16 give their edges to separate blocks
3. at most 4 dims and 2**30 units per block, so that a kernel needs no 64-bit division
4. tiles of equally many units, each of which one program of the kernel copies

Only numpy: nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, distinct
from reshard.live.program.copies import CopyBlocks

__all__ = ["FIELDS", "Cast", "LaunchTable", "Strided", "compile_table", "merged_blocks"]

NUM_DIMS = 4
MAX_UNITS = 1 << 30
WIDEST = 16
FEW_LANES, MANY_LANES = 256, 512
MAX_TILES = 1 << 20
EDGE_BYTES = 256
"""Rows shorter than this are not split into edges and a middle: one more block costs more."""

FIELDS = 24
"""Columns of a launch row: source, its offset, destination, its offset, first tile, units, unit,
the 3 inner widths, the multipliers and shifts that divide by them, the strides of both sides."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Bytes per element on both sides of a table that changes the dtype."""

    source_itemsize: int
    destination_itemsize: int

    @property
    def num_together(self) -> int:
        """Elements that one thread converts at once where rows are aligned and long."""
        return min(8, WIDEST // min(self.source_itemsize, self.destination_itemsize))


@dataclass(frozen=True, slots=True)
class Strided:
    """Blocks whose strides count bytes; dims that matter are the last ones."""

    source: Ints
    destination: Ints
    source_offset: Ints
    destination_offset: Ints
    widths: Ints
    source_strides: Ints
    destination_strides: Ints
    unit: Ints
    """Bytes (of a cast: elements) that one index stands for."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> Strided:
        """Some of the blocks, or all of them several times."""
        return Strided(*(getattr(self, name)[rows] for name in Strided.__slots__))

    def moved(self, source: Ints, destination: Ints) -> Strided:
        """The same blocks further on by so many bytes."""
        return replace(
            self,
            source_offset=self.source_offset + source,
            destination_offset=self.destination_offset + destination,
        )


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """What a kernel needs to know of all blocks, but for the addresses of the tensors."""

    rows: Ints
    """One row of ``FIELDS`` numbers per block."""
    tiles: np.ndarray[Any, np.dtype[np.int32]]
    """The block of each tile."""
    lanes: int
    """Units of one tile."""
    num_dims: int
    units: tuple[int, ...]
    """The sizes of units that occur, in bytes (of a cast: in elements)."""
    wide: bool
    """Whether offsets inside a block need 64 bits."""


def merged_blocks(blocks: CopyBlocks, phase: Ints, cast: Cast | None = None) -> Strided:
    """The blocks with as few dims and as wide units as their addresses permit.

    The phases are the base addresses modulo 16.
    """
    strided = _merge_dims(_by_destination(_in_bytes(blocks, cast)))
    if cast is not None:
        return _merge_dims(_grouped_elements(strided, phase, cast))
    middle, edges = _without_edges(strided, phase)
    parts = [_in_units(part, phase) for part in (middle, *edges)]
    return _joined([_merge_dims(part) for part in parts if len(part)] or [parts[0]])


def compile_table(blocks: Strided, cast: Cast | None = None) -> LaunchTable:
    """Tiles of equal work over all blocks."""
    blocks = _bounded(_at_most_dims(blocks))
    units = blocks.widths.prod(axis=1)
    lanes = _lanes(units, blocks.unit, WIDEST if cast is None else cast.num_together)
    tiles = -(-units // lanes)
    first = np.cumsum(tiles) - tiles
    divisors = blocks.widths[:, 1:]
    multipliers, shifts = _division_by(divisors)
    rows = np.column_stack(
        [
            *(blocks.source, blocks.source_offset),
            *(blocks.destination, blocks.destination_offset),
            *(first, units, blocks.unit, divisors, multipliers, shifts),
            *(blocks.source_strides, blocks.destination_strides),
        ]
    )
    return LaunchTable(
        rows=np.ascontiguousarray(rows, dtype=np.int64),
        tiles=np.repeat(np.arange(len(blocks), dtype=np.int32), tiles),
        lanes=lanes,
        num_dims=_num_dims(blocks.widths),
        units=tuple(distinct(blocks.unit).tolist()),
        wide=_reach(blocks) >= 1 << 31,
    )


def _in_bytes(blocks: CopyBlocks, cast: Cast | None) -> Strided:
    """Blocks that hold anything; an element that is not cast is one more dim, of its bytes."""
    full = np.flatnonzero(blocks.widths.all(axis=1))
    item = blocks.itemsize[full, None]
    widths = blocks.widths[full]
    source_item = item if cast is None else np.int64(cast.source_itemsize)
    destination_item = item if cast is None else np.int64(cast.destination_itemsize)
    source = blocks.source_strides[full] * source_item
    destination = blocks.destination_strides[full] * destination_item
    if cast is None:
        widths = np.hstack([widths, item])
        source, destination = (np.hstack([s, np.ones_like(item)]) for s in (source, destination))
    return Strided(
        source=blocks.source[full],
        destination=blocks.destination[full],
        source_offset=blocks.source_offset[full],
        destination_offset=blocks.destination_offset[full],
        widths=widths,
        source_strides=np.where(widths > 1, source, 0),
        destination_strides=np.where(widths > 1, destination, 0),
        unit=np.ones(len(full), dtype=np.int64),
    )


def _by_destination(blocks: Strided) -> Strided:
    """Dims in the memory order of the destination, so that writes are contiguous."""
    order = np.argsort(-blocks.destination_strides, axis=1, kind="stable")
    return replace(
        blocks,
        widths=np.take_along_axis(blocks.widths, order, 1),
        source_strides=np.take_along_axis(blocks.source_strides, order, 1),
        destination_strides=np.take_along_axis(blocks.destination_strides, order, 1),
    )


def _merge_dims(blocks: Strided) -> Strided:
    """Drop dims of width 1, merge a dim into the next inner one where both sides run on."""
    widths = np.ones_like(blocks.widths)
    strides = np.zeros_like(blocks.source_strides), np.zeros_like(blocks.destination_strides)
    num_dims = widths.shape[1]
    at = np.full(len(blocks), num_dims)
    for dim in reversed(range(num_dims)):
        width = blocks.widths[:, dim]
        steps = blocks.source_strides[:, dim], blocks.destination_strides[:, dim]
        rows = np.flatnonzero((width > 1) & (at < num_dims))
        place = rows, at[rows]
        runs_on = np.ones(len(rows), dtype=bool)
        for side, step in zip(strides, steps, strict=True):
            runs_on &= step[rows] == widths[place] * side[place]
        merged = rows[runs_on]
        widths[merged, at[merged]] *= width[merged]
        fresh = width > 1
        fresh[merged] = False
        at[fresh] -= 1
        new = np.flatnonzero(fresh)
        widths[new, at[new]] = width[new]
        for side, step in zip(strides, steps, strict=True):
            side[new, at[new]] = step[new]
    keep = slice(min(int(at.min(initial=num_dims)), num_dims - 1), None)
    return replace(
        blocks,
        widths=widths[:, keep],
        source_strides=strides[0][:, keep],
        destination_strides=strides[1][:, keep],
    )


def _addresses(blocks: Strided, phase: Ints) -> tuple[Ints, Ints]:
    """Where each block starts on both sides, modulo 16 at least."""
    source = blocks.source_offset + phase[blocks.source]
    return source, blocks.destination_offset + phase[blocks.destination]


def _without_edges(blocks: Strided, phase: Ints) -> tuple[Strided, list[Strided]]:
    """Split off what is off the grid of 16 bytes at both ends of long rows."""
    source, destination = _addresses(blocks, phase)
    outer = blocks.source_strides[:, :-1] | blocks.destination_strides[:, :-1]
    grid = np.bitwise_or.reduce(outer, axis=1, initial=0) | (source - destination)
    length = blocks.widths[:, -1]
    head = -source % WIDEST
    tail = (length - head) % WIDEST
    cut = _runs(blocks) & (grid % WIDEST == 0) & (length >= EDGE_BYTES) & (head + tail > 0)
    head, tail = np.where(cut, head, 0), np.where(cut, tail, 0)
    edges = [
        _row_part(blocks, np.zeros_like(head), head),
        _row_part(blocks, length - tail, tail),
    ]
    return _row_part(blocks, head, length - head - tail), edges


def _row_part(blocks: Strided, start: Ints, length: Ints) -> Strided:
    """Bytes ``start`` to ``start + length`` of each row; blocks with none are left out."""
    rows = np.flatnonzero(length)
    part = blocks.take(rows).moved(start[rows], start[rows])
    widths = part.widths.copy()
    widths[:, -1] = length[rows]
    return replace(part, widths=widths)


def _runs(blocks: Strided, source_item: int = 1, destination_item: int = 1) -> Any:
    """Whether the rows of each block are contiguous on both sides."""
    source = blocks.source_strides[:, -1] == source_item
    return source & (blocks.destination_strides[:, -1] == destination_item)


def _in_units(blocks: Strided, phase: Ints) -> Strided:
    """Rows counted in the widest unit that fits every address and every length."""
    source, destination = _addresses(blocks, phase)
    bits = source | destination | blocks.widths[:, -1] | WIDEST
    outer = blocks.source_strides[:, :-1] | blocks.destination_strides[:, :-1]
    bits |= np.bitwise_or.reduce(outer, axis=1, initial=0)
    unit = np.where(_runs(blocks), bits & -bits, 1)
    return _rows_of(blocks, unit, unit, unit)


def _grouped_elements(blocks: Strided, phase: Ints, cast: Cast) -> Strided:
    """Rows counted in groups of elements where both sides are aligned to whole groups."""
    num = cast.num_together
    runs = _runs(blocks, cast.source_itemsize, cast.destination_itemsize)
    fits = runs & (blocks.widths[:, -1] % num == 0)
    items = cast.source_itemsize, cast.destination_itemsize
    starts = _addresses(blocks, phase)
    strides = blocks.source_strides[:, :-1], blocks.destination_strides[:, :-1]
    for item, start, outer in zip(items, starts, strides, strict=True):
        bits = start | np.bitwise_or.reduce(outer, axis=1, initial=0)
        fits &= bits % min(WIDEST, num * item) == 0
    unit = np.where(fits, num, 1)
    return _rows_of(blocks, unit, unit * cast.source_itemsize, unit * cast.destination_itemsize)


def _rows_of(blocks: Strided, unit: Ints, source: Ints, destination: Ints) -> Strided:
    """Divide rows by a unit that takes up so many bytes on either side."""
    widths, steps = blocks.widths.copy(), []
    widths[:, -1] //= unit
    for strides, size in (
        (blocks.source_strides, source),
        (blocks.destination_strides, destination),
    ):
        step = strides.copy()
        step[:, -1] = np.where(unit > 1, size, step[:, -1])
        steps.append(step)
    return replace(
        blocks, widths=widths, source_strides=steps[0], destination_strides=steps[1], unit=unit
    )


def _joined(parts: list[Strided]) -> Strided:
    """Several lists of blocks as one."""
    num_dims = max(part.widths.shape[1] for part in parts)
    parts = [_padded(part, num_dims) for part in parts]
    names = Strided.__slots__
    return Strided(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _padded(blocks: Strided, num_dims: int) -> Strided:
    """Blocks with at least so many dims, the new ones outermost and of width 1."""
    lacking = num_dims - blocks.widths.shape[1]
    if lacking <= 0:
        return blocks
    zeros = np.zeros((len(blocks), lacking), dtype=np.int64)
    return replace(
        blocks,
        widths=np.hstack([zeros + 1, blocks.widths]),
        source_strides=np.hstack([zeros, blocks.source_strides]),
        destination_strides=np.hstack([zeros, blocks.destination_strides]),
    )


def _at_most_dims(blocks: Strided) -> Strided:
    """One block per index of the outermost dims, until the rest have few enough dims."""
    while blocks.widths.shape[1] > NUM_DIMS:
        times = blocks.widths[:, 0]
        rows = np.repeat(np.arange(len(blocks)), times)
        index = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
        blocks = blocks.take(rows)
        steps = blocks.source_strides[:, 0], blocks.destination_strides[:, 0]
        blocks = blocks.moved(index * steps[0], index * steps[1])
        blocks = replace(
            blocks,
            widths=blocks.widths[:, 1:],
            source_strides=blocks.source_strides[:, 1:],
            destination_strides=blocks.destination_strides[:, 1:],
        )
    return _padded(blocks, NUM_DIMS)


def _bounded(blocks: Strided) -> Strided:
    """Halve blocks of too many units along their outermost dim."""
    while (large := blocks.widths.prod(axis=1) > MAX_UNITS).any():
        whole, small = blocks.take(large), blocks.take(~large)
        rows, dim = np.arange(len(whole)), np.argmax(whole.widths > 1, axis=1)
        half = whole.widths[rows, dim] // 2
        first, second = whole.widths.copy(), whole.widths.copy()
        first[rows, dim] = half
        second[rows, dim] -= half
        steps = whole.source_strides[rows, dim], whole.destination_strides[rows, dim]
        rest = replace(whole.moved(half * steps[0], half * steps[1]), widths=second)
        blocks = _joined([small, replace(whole, widths=first), rest])
    return blocks


def _lanes(units: Ints, unit: Ints, widest: int) -> int:
    """One warp per tile copies fastest where units are wide.

    Narrow units need more of them under way at once, and so does a table that would grow too large.
    """
    narrow = int(units[unit * 4 < widest].sum()) * 2 > int(units.sum())
    num_tiles = int((-(-units // FEW_LANES)).sum())
    return MANY_LANES if narrow or num_tiles > MAX_TILES else FEW_LANES


def _division_by(divisors: Ints) -> tuple[Ints, Ints]:
    """Numbers m, s with ``n // d == ((n * m >> 32) + n) >> s`` for all n below 2**31.

    Granlund and Montgomery's: a multiplication instead of a division, which GPUs lack.
    """
    shifts = np.ceil(np.log2(divisors)).astype(np.int64)
    power = np.left_shift(np.uint64(1), shifts.astype(np.uint64))
    d = divisors.astype(np.uint64)
    multipliers = ((power - d) << np.uint64(32)) // d + np.uint64(1)
    return multipliers.astype(np.int64), shifts


def _num_dims(widths: Ints) -> int:
    """Dims that any block needs."""
    used = (widths > 1).any(axis=0)
    return NUM_DIMS - int(np.argmax(used)) if used.any() else 1


def _reach(blocks: Strided) -> int:
    """The largest distance in bytes from the first to the last unit of any block."""
    steps = np.maximum(blocks.source_strides, blocks.destination_strides)
    return int(((blocks.widths - 1) * steps).sum(axis=1).max(initial=0)) + WIDEST
