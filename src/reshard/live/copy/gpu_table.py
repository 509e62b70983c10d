"""How one kernel launch is divided among the blocks of a table of copies.

A move packs, unpacks and copies thousands of blocks whose sizes differ by many orders of magnitude:
18,000 slices of experts beside one of a gigabyte. Here the list of blocks becomes a launch table,
in five steps, each over all blocks at once:

1. strides in bytes, dims of width 1 dropped, adjacent dims merged where both sides allow it:

       [8, 4, 1, 16] floats, strides (256, 16, 16, 1) -> (64, 16, 16, 1)   becomes
       [8, 256] bytes, strides (1024, 1) -> (256, 1)

2. rows in units of 16, 8, 4, 2 or 1 bytes, the widest that every address of the block permits;
   rows that start or end off the grid of 16 give their edges to separate blocks
3. at most 4 dims and 2**30 units per block, so that a kernel needs no 64-bit division
4. long rows whose two sides are not on the same grid of 16 bytes: units are the 16 bytes of the
   destination's grid, which the kernel puts together from the words of the source
5. tiles of equally many units, each of which one program of the kernel copies; of such long rows
   no tile has parts of two, so that the kernel computes the shift once

Only numpy: nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, distinct, spread
from reshard.live.program.blocks import CopyBlocks

NUM_DIMS = 4
MAX_UNITS = 1 << 30
WIDEST = 16
FEWEST_LANES, FEW_LANES, MANY_LANES = 128, 256, 512
MAX_TILES = 1 << 20
EDGE_BYTES = 256
"""Rows shorter than this are not split into edges and a middle: one more block costs more."""

SHIFTED, ROWS = 1 << 40, 1 << 41
"""Added to the bytes of a row, in place of a unit: units are then 16 bytes of the destination's
grid, put together from shifted words. With `ROWS` every tile is in one row."""
SHIFTED_BYTES = 256  # shorter rows are not divided like that; the kernel needs at least 32
SHIFTED_UNITS = 8  # only rows whose units would be narrower than this

FIELDS = 24
"""Columns of a launch row: source, its offset, destination, its offset, first tile, units, unit,
the 3 inner widths, the multipliers and shifts that divide by them, the strides of both sides."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Bytes per element on both sides of a table that changes the dtype."""

    source_itemsize: int
    destination_itemsize: int

    @property
    def itemsizes(self) -> Ints:
        """One row per side."""
        return np.array([[self.source_itemsize], [self.destination_itemsize]])

    @property
    def num_together(self) -> int:
        """Elements that one thread converts at once where rows are aligned and long."""
        return min(8, WIDEST // min(self.source_itemsize, self.destination_itemsize))


@dataclass(frozen=True, slots=True)
class Strided:
    """Blocks whose strides are in bytes. Columns of both sides have the source's first."""

    base: Ints  # numbers in the table of base addresses: 2 sides, blocks
    offset: Ints  # 2 sides, blocks
    widths: Ints  # blocks, dims
    strides: Ints  # 2 sides, blocks, dims
    unit: Ints
    """Bytes (of a cast: elements) that one index stands for; or those of a row with `SHIFTED` or
    `ROWS`."""

    def __len__(self) -> int:
        return len(self.unit)

    def take(self, rows: Any) -> Strided:
        """Some of the blocks, or all of them several times."""
        sides = (self.base[:, rows], self.offset[:, rows])
        return Strided(*sides, self.widths[rows], self.strides[:, rows], self.unit[rows])

    def moved(self, num_bytes: Ints) -> Strided:
        """The same blocks further on by so many bytes."""
        return replace(self, offset=self.offset + num_bytes)

    def addresses(self, phase: Ints) -> Ints:
        """Where each block starts on both sides, modulo 16 at least."""
        offsets: Ints = self.offset + phase[self.base]
        return offsets


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """What a kernel needs to know of all blocks, but for the addresses of the tensors."""

    rows: Ints  # one row of ``FIELDS`` numbers per block
    tiles: np.ndarray[Any, np.dtype[np.int32]]  # the block of each tile
    lanes: int  # units of one tile
    num_warps: int  # warps that copy one tile
    num_dims: int
    units: tuple[int, ...]
    """The sizes of units that occur, in bytes (of a cast: in elements), `SHIFTED` or `ROWS`."""
    wide: bool  # whether offsets inside a block need 64 bits


def merged_blocks(blocks: CopyBlocks, phase: Ints, cast: Cast | None = None) -> Strided:
    """The blocks with as few dims and as wide units as their addresses permit.

    The phases are the base addresses modulo 16.
    """
    strided = _merge_dims(_in_bytes(blocks, cast))
    if cast is None:
        strided = _without_edges(strided, phase)
    return _merge_dims(_in_units(strided, phase, cast))


def compile_table(blocks: Strided, cast: Cast | None = None) -> LaunchTable:
    """Tiles of equal work over all blocks."""
    blocks = _bounded(_at_most_dims(blocks if cast is not None else _shifted(blocks)))
    widest = WIDEST if cast is None else cast.num_together
    lanes, num_warps = _lanes(blocks.widths.prod(axis=1), blocks.unit, widest)
    blocks = _whole_tiles(blocks, lanes)
    units, unit = blocks.widths.prod(axis=1), blocks.unit
    tiles = -(-units // lanes)
    first = np.cumsum(tiles) - tiles
    divisors = blocks.widths[:, 1:]
    multipliers, shifts = _division_by(divisors)
    dims = np.flatnonzero((blocks.widths > 1).any(axis=0))
    # The largest distance in bytes from the first to the last unit of any block.
    reach = int(((blocks.widths - 1) * blocks.strides.max(axis=0)).sum(axis=1).max(initial=0))
    rows = np.column_stack(
        [
            *(blocks.base[0], blocks.offset[0], blocks.base[1], blocks.offset[1]),
            *(first, units, unit, divisors, multipliers, shifts, *blocks.strides),
        ]
    )
    return LaunchTable(
        rows=np.ascontiguousarray(rows, dtype=np.int64),
        tiles=np.repeat(np.arange(len(blocks), dtype=np.int32), tiles),
        lanes=lanes,
        num_warps=num_warps,
        num_dims=NUM_DIMS - int(dims[0]) if len(dims) else 1,
        # Without the bytes of rows.
        units=tuple(distinct(np.where(unit >= ROWS, ROWS, np.minimum(unit, SHIFTED))).tolist()),
        wide=reach + WIDEST >= 1 << 31,
    )


def _in_bytes(blocks: CopyBlocks, cast: Cast | None) -> Strided:
    """Blocks that are not empty; an element that is not cast is one more dim, of its bytes.

    Dims are in the memory order of the destination, so that writes are contiguous.
    """
    full = np.flatnonzero(blocks.widths.all(axis=1))
    widths, item = blocks.widths[full], blocks.itemsize[full, None]
    strides = np.stack([blocks.source_strides[full], blocks.destination_strides[full]])
    if cast is None:
        strides = np.concatenate([strides * item, np.ones((2, *item.shape), np.int64)], axis=2)
        widths = np.hstack([widths, item])
    else:
        strides = strides * cast.itemsizes[:, :, None]
    strides = np.where(widths > 1, strides, 0)
    order = np.argsort(-strides[1], axis=1, kind="stable")
    return Strided(
        base=np.stack([blocks.source, blocks.destination])[:, full],
        offset=np.stack([blocks.source_offset, blocks.destination_offset])[:, full],
        widths=np.take_along_axis(widths, order, 1),
        strides=np.take_along_axis(strides, order[None], 2),
        unit=np.ones(len(full), dtype=np.int64),
    )


def _merge_dims(blocks: Strided) -> Strided:
    """Drop dims of width 1, merge a dim into the next inner one where both sides are contiguous."""
    widths, strides = np.ones_like(blocks.widths), np.zeros_like(blocks.strides)
    num_dims = widths.shape[1]
    at = np.full(len(blocks), num_dims)
    for dim in reversed(range(num_dims)):
        width, step = blocks.widths[:, dim], blocks.strides[:, :, dim]
        rows = np.flatnonzero((width > 1) & (at < num_dims))
        inner = widths[rows, at[rows]] * strides[:, rows, at[rows]]
        merged = rows[(step[:, rows] == inner).all(axis=0)]
        widths[merged, at[merged]] *= width[merged]
        fresh = width > 1
        fresh[merged] = False
        at[fresh] -= 1
        new = np.flatnonzero(fresh)
        widths[new, at[new]] = width[new]
        strides[:, new, at[new]] = step[:, new]
    keep = slice(min(int(at.min(initial=num_dims)), num_dims - 1), None)
    return replace(blocks, widths=widths[:, keep], strides=strides[:, :, keep])


def _outer_bits(blocks: Strided) -> Ints:
    """All strides of the outer dims, or-ed, on both sides."""
    bits: Ints = np.bitwise_or.reduce(blocks.strides[:, :, :-1], axis=2, initial=0)
    return bits


def _without_edges(blocks: Strided, phase: Ints) -> Strided:
    """Make blocks of what is off the grid of 16 bytes at both ends of long rows."""
    source, destination = blocks.addresses(phase)
    outer = _outer_bits(blocks)
    grid = outer[0] | outer[1] | (source - destination)
    length = blocks.widths[:, -1]
    head = -source % WIDEST
    tail = (length - head) % WIDEST
    split = _contiguous(blocks) & (grid % WIDEST == 0) & (length >= EDGE_BYTES) & (head + tail > 0)
    head, tail = np.where(split, head, 0), np.where(split, tail, 0)
    parts = (head, length - head - tail), (np.zeros_like(head), head), (length - tail, tail)
    return _joined([_row_part(blocks, *part) for part in parts])


def _row_part(blocks: Strided, start: Ints, length: Ints) -> Strided:
    """Bytes ``start`` to ``start + length`` of each row; blocks with none are left out."""
    rows = np.flatnonzero(length)
    part = blocks.take(rows).moved(start[rows])
    widths = part.widths.copy()
    widths[:, -1] = length[rows]
    return replace(part, widths=widths)


def _contiguous(blocks: Strided, items: Any = 1) -> Any:
    """Whether the rows of each block are contiguous on both sides, in elements of these sizes."""
    return (blocks.strides[:, :, -1] == items).all(axis=0)


def _in_units(blocks: Strided, phase: Ints, cast: Cast | None) -> Strided:
    """Rows counted in the widest unit that fits every address and every length.

    Of a cast it is a group of elements, where both sides are aligned to whole groups.
    """
    bits, length = blocks.addresses(phase) | _outer_bits(blocks), blocks.widths[:, -1]
    items: Any = 1 if cast is None else cast.itemsizes
    if cast is None:
        all_bits = bits[0] | bits[1] | length | WIDEST
        unit = np.where(_contiguous(blocks), all_bits & -all_bits, 1)
    else:
        num = cast.num_together
        fits = (bits % np.minimum(WIDEST, num * items) == 0).all(axis=0)
        unit = np.where(fits & _contiguous(blocks, items) & (length % num == 0), num, 1)
    widths, strides = blocks.widths.copy(), blocks.strides.copy()
    widths[:, -1] //= unit
    strides[:, :, -1] = np.where(unit > 1, unit * items, strides[:, :, -1])
    return replace(blocks, widths=widths, strides=strides, unit=unit)


def _shifted(blocks: Strided) -> Strided:
    """Divide long rows in narrow units into units of the destination's grid."""
    length = blocks.widths[:, -1] * blocks.unit
    rows = _contiguous(blocks, blocks.unit) & (blocks.unit < SHIFTED_UNITS)
    rows &= (length >= SHIFTED_BYTES) & (length < MAX_UNITS)
    long, length = blocks.take(rows), length[rows]
    widths, strides = long.widths.copy(), long.strides.copy()
    # As many as a row can have bytes of, wherever on the grid it begins.
    widths[:, -1], strides[:, :, -1] = (length + 2 * (WIDEST - 1)) // WIDEST, WIDEST
    long = replace(long, widths=widths, strides=strides, unit=SHIFTED + length)
    return _joined([blocks.take(~rows), long])


def _whole_tiles(blocks: Strided, lanes: int) -> Strided:
    """Divide rows of shifted units into tiles of their own, where these are at least half full."""
    length = blocks.unit - SHIFTED
    count = length // WIDEST
    rows = (length >= 0) & (count >= lanes // 2)
    widths = blocks.widths.copy()
    widths[rows, -1] = -(-count[rows] // lanes) * lanes
    rows &= widths.prod(axis=1) <= 2 * MAX_UNITS
    widths[~rows] = blocks.widths[~rows]
    return replace(blocks, widths=widths, unit=np.where(rows, ROWS + length, blocks.unit))


def _joined(parts: list[Strided]) -> Strided:
    """Several lists of blocks of as many dims as one."""
    return Strided(
        np.concatenate([part.base for part in parts], axis=1),
        np.concatenate([part.offset for part in parts], axis=1),
        np.concatenate([part.widths for part in parts]),
        np.concatenate([part.strides for part in parts], axis=1),
        np.concatenate([part.unit for part in parts]),
    )


def _at_most_dims(blocks: Strided) -> Strided:
    """One block per index of the outermost dims, until `NUM_DIMS` are left; or more, of width 1."""
    while blocks.widths.shape[1] > NUM_DIMS:
        rows, index = spread(np.zeros_like(blocks.unit), blocks.widths[:, 0])
        blocks = blocks.take(rows)
        blocks = blocks.moved(index * blocks.strides[:, :, 0])
        blocks = replace(blocks, widths=blocks.widths[:, 1:], strides=blocks.strides[:, :, 1:])
    new = ((0, 0), (NUM_DIMS - blocks.widths.shape[1], 0))
    widths = np.pad(blocks.widths, new, constant_values=1)
    return replace(blocks, widths=widths, strides=np.pad(blocks.strides, ((0, 0), *new)))


def _bounded(blocks: Strided) -> Strided:
    """Halve blocks of too many units along their outermost dim."""
    while (large := blocks.widths.prod(axis=1) > MAX_UNITS).any():
        whole, small = blocks.take(large), blocks.take(~large)
        rows, dim = np.arange(len(whole)), np.argmax(whole.widths > 1, axis=1)
        half = whole.widths[rows, dim] // 2
        first, second = whole.widths.copy(), whole.widths.copy()
        first[rows, dim] = half
        second[rows, dim] -= half
        rest = replace(whole.moved(half * whole.strides[:, rows, dim]), widths=second)
        blocks = _joined([small, replace(whole, widths=first), rest])
    return blocks


def _lanes(units: Ints, unit: Ints, widest: int) -> tuple[int, int]:
    """Units of a tile, and the warps that copy it; what is fastest for most units of a table.

    One warp for a few wide units. Narrow units need more of them under way at once, and so does a
    table that would grow too large. Tiles that are in one row are small, so that few of their lanes
    are idle. Units that are each shifted by themselves need many registers: few for each thread.
    """

    def are_most(chosen: Any) -> bool:
        return int(units[chosen].sum()) * 2 > int(units.sum())

    lanes = FEW_LANES, 1
    if are_most(unit >= SHIFTED + FEWEST_LANES // 2 * WIDEST):
        lanes = FEWEST_LANES, 1
    elif are_most(unit >= SHIFTED):
        lanes = FEW_LANES, 4
    too_many = int((-(-units // lanes[0])).sum()) > MAX_TILES
    return (MANY_LANES, 2) if too_many or are_most(unit * 4 < widest) else lanes


def _division_by(divisors: Ints) -> tuple[Ints, Ints]:
    """Numbers m, s with ``n // d == ((n * m >> 32) + n) >> s`` for all n below 2**31.

    Granlund and Montgomery's: a multiplication instead of a division, which GPUs lack.
    """
    shifts = np.ceil(np.log2(divisors)).astype(np.int64)
    power = np.left_shift(np.uint64(1), shifts.astype(np.uint64))
    d = divisors.astype(np.uint64)
    multipliers = ((power - d) << np.uint64(32)) // d + np.uint64(1)
    return multipliers.astype(np.int64), shifts
