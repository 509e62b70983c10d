"""Any layout as a list of disjoint boxes, each with the ranks that hold it.

Regular layouts have tables (see ``grid``) and are listed only when the other side of a move
must be. Explicit boxes may overlap across ranks; they are cut until each box has one set of
holders:

    rank 0   [0:6)                 [0:4) on 0
    rank 1      [4:9)      ->      [4:6) on 0, 1
                                   [6:9) on 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from reshard.layout.box import Box, Interval, Piece, length_of, row_major
from reshard.layout.columns import Ints, contained, offsets, sized_cache, spread
from reshard.layout.coverage import box_columns, overlapping_pairs
from reshard.layout.grid import DimTable, Grid, grids_of
from reshard.layout.layout import BoxLayout, Layout, Owners
from reshard.layout.words import is_mixed

MANY = 64  # ranges of a flattened tensor from which on numpy is faster


@dataclass(frozen=True, eq=False, slots=True)
class Listed:
    """Disjoint boxes as columns, and the holders of each one after the other."""

    starts: Ints
    stops: Ints
    first: Ints  # where the holders of each box begin in ``holders``; one more entry ends the last
    holders: Ints  # the ranks of the first box in rising order, then those of the second, and so on

    def of(self, box: int) -> Ints:
        return self.holders[self.first[box] : self.first[box + 1]]


@sized_cache(
    64 << 20,
    lambda listed, layout, _: (
        layout.num_bytes + 16 * listed.starts.size + 8 * (len(listed.first) + len(listed.holders))
    ),
)
def listed_of(layout: Layout, shape: tuple[int, ...]) -> Listed:
    """All boxes of a layout; every addend of a pending reduction counts as a holder."""
    lost = layout.words.without
    if lost:
        layout = Layout(layout.mesh, replace(layout.words, without=()))
    grids = grids_of(layout, shape)
    if grids is not None:
        return _merge([_list_grid(grid, lost) for grid in grids])
    columns = {
        rank: piece_columns(layout, rank, shape) for rank in layout.ranks if rank not in lost
    }
    alike = not isinstance(layout, BoxLayout) and not any(map(is_mixed, layout.dims(shape)))
    alike = alike and not is_mixed(layout.words.flat)
    listed = _grouped(columns, len(shape), alike)
    return listed if alike else _disjoint(listed)


Columns = tuple[Ints, Ints, Ints, Ints]


def piece_columns(layout: Layout, rank: int, shape: tuple[int, ...]) -> Columns:
    """The pieces of a rank as columns: starts, stops, strides, and offsets.

    Ranges of a flattened tensor are turned into boxes all at once, because there may be millions.
    """
    intervals, ranges = layout.intervals(rank, shape)
    if ranges is None or layout.holds(rank) is None or len(ranges) < MANY:
        pieces = layout.pieces(rank, shape)
        starts, stops = box_columns([piece.box for piece in pieces], len(shape))
        steps = np.array([piece.strides for piece in pieces], dtype=np.int64)
        offsets = np.array([piece.offset for piece in pieces], dtype=np.int64)
        return starts, stops, steps.reshape(starts.shape), offsets
    local = tuple(map(length_of, intervals))
    low, high = np.array(ranges, dtype=np.int64).T
    of, starts, stops = _flat_boxes(local, low, high)
    strides = row_major(local)
    for dim, (mine, step) in enumerate(zip(intervals, strides, strict=True)):
        starts, stops, of = _on_intervals(starts, stops, of, dim, mine, step)
    before = np.cumsum(high - low) - (high - low)
    # The last column of `starts` is where a box begins in the flattened tensor.
    offsets = starts[:, -1] - low[of] + before[of]
    order = np.argsort(offsets)
    steps = np.broadcast_to(np.array(strides, dtype=np.int64), stops.shape)
    return starts[order, :-1], stops[order], steps, offsets[order]


def _flat_boxes(shape: tuple[int, ...], low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """The boxes of many ranges of a flattened tensor, as `flat_range` cuts each: the range of each
    box, its starts and a last column of zeros, its stops."""
    if not shape:
        none = np.zeros((len(low), 0), dtype=np.int64)
        return np.arange(len(low)), np.zeros((len(low), 1), np.int64), none
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner
    head, tail, inside = low - (first - 1) * inner, high - last * inner, first > last
    ragged = [
        (inside, last, low - last * inner, tail),
        (~inside & (head < inner), first - 1, head, np.full_like(low, inner)),
        (~inside & (tail > 0), last, np.zeros_like(low), tail),
    ]
    row = np.concatenate([np.flatnonzero(some) for some, *_ in ragged])
    index, begin, end = (
        np.concatenate([part[column][part[0]] for part in ragged]) for column in (1, 2, 3)
    )
    of, starts, stops = _flat_boxes(shape[1:], begin, end)
    middle = np.flatnonzero(first < last)
    starts = np.concatenate([index[of, None], starts], axis=1)
    stops = np.concatenate([index[of, None] + 1, stops], axis=1)
    more = np.zeros((len(middle), starts.shape[1]), dtype=np.int64)
    more[:, 0] = first[middle]
    ends = np.tile(np.array(shape, dtype=np.int64), (len(middle), 1))
    ends[:, 0] = last[middle]
    return (
        np.concatenate([row[of], middle]),
        np.concatenate([starts, more]),
        np.concatenate([stops, ends]),
    )


def _on_intervals(
    starts: Ints, stops: Ints, of: Ints, dim: int, intervals: Sequence[Interval], step: int
) -> tuple[Ints, Ints, Ints]:
    """Boxes of the local tensor, cut where a dim's intervals of the whole tensor begin."""
    low, high = np.array(intervals, dtype=np.int64).reshape(-1, 2).T
    edge = offsets(high - low)
    first = np.searchsorted(edge, starts[:, dim], side="right") - 1
    box, at = spread(first, np.searchsorted(edge, stops[:, dim], side="left") - first)
    starts, stops = starts[box], stops[box]
    begin, end = np.maximum(starts[:, dim], edge[at]), np.minimum(stops[:, dim], edge[at + 1])
    starts[:, -1] += begin * step
    starts[:, dim], stops[:, dim] = (low - edge[:-1])[at] + begin, (low - edge[:-1])[at] + end
    return starts, stops, of[box]


def _grouped(columns: Mapping[int, Columns], num_dims: int, alike: bool) -> Listed:
    """Equal boxes once, with all their holders; where all are ``alike``, one start is one box."""
    none = np.zeros((0, num_dims), dtype=np.int64)
    starts = np.concatenate([none, *(one[0] for one in columns.values())])
    stops = np.concatenate([none, *(one[1] for one in columns.values())])
    ranks = np.repeat(
        np.array([*columns], dtype=np.int64), [len(one[0]) for one in columns.values()]
    )
    corners = starts if alike else np.concatenate([starts, stops], axis=1)
    order = np.lexsort([ranks, *corners.T[::-1]])
    starts, stops, ranks, corners = starts[order], stops[order], ranks[order], corners[order]
    new = np.ones(len(starts), dtype=bool)
    new[1:] = (corners[1:] != corners[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    return Listed(starts[first], stops[first], np.append(first, len(starts)), ranks)


def _list_grid(grid: Grid, lost: Sequence[int]) -> Listed:
    starts, stops, regions = grid.boxes()
    ranks = grid.holders(regions)
    kept = ~contained(ranks, np.array(lost, dtype=np.int64))
    return Listed(starts, stops, offsets(kept.sum(axis=1)), ranks[kept])


def _merge(lists: list[Listed]) -> Listed:
    """One list of several, in the order of the boxes, without boxes that no rank holds."""
    starts = np.concatenate([listed.starts for listed in lists])
    counts = np.concatenate([np.diff(listed.first) for listed in lists])
    order = np.lexsort(starts.T[::-1]) if starts.shape[1] else np.arange(len(starts))
    order = order[counts[order] > 0]
    _, at = spread(offsets(counts)[order], counts[order])
    return Listed(
        starts[order],
        np.concatenate([listed.stops for listed in lists])[order],
        offsets(counts[order]),
        np.concatenate([listed.holders for listed in lists])[at],
    )


def _disjoint(listed: Listed) -> Listed:
    """Cut boxes that partly overlap until none do; a box of two origins has the holders of both."""
    corners = listed.starts, listed.stops
    left, right = overlapping_pairs(*corners, *corners)
    crossing = {*left[left != right].tolist()}
    if not crossing:
        return listed
    done: list[tuple[Box, set[int]]] = []
    apart: list[tuple[Box, set[int]]] = []
    for number, (start, stop) in enumerate(zip(*corners, strict=True)):
        box, ranks = Box(tuple(start), tuple(stop)), {*listed.of(number).tolist()}
        if number in crossing:
            apart = _insert(apart, box, ranks)
        else:
            done.append((box, ranks))
    held = sorted([*done, *apart], key=lambda one: one[0])
    return Listed(
        *box_columns([box for box, _ in held], listed.starts.shape[1]),
        offsets(np.array([len(ranks) for _, ranks in held], dtype=np.int64)),
        np.array([rank for _, ranks in held for rank in sorted(ranks)], dtype=np.int64),
    )


def _insert(
    apart: list[tuple[Box, set[int]]], box: Box, ranks: set[int]
) -> list[tuple[Box, set[int]]]:
    """Add a box to disjoint boxes, splitting both where they overlap."""
    result: list[tuple[Box, set[int]]] = []
    rest = [box]
    for other, others in apart:
        common = box & other
        if not common.size:
            result.append((other, others))
            continue
        result += [(part, others) for part in other - common]
        result.append((common, others | ranks))
        rest = [part for left in rest for part in left - common]
    return result + [(part, ranks) for part in rest]


def owners(layout: Layout, box: Box, shape: tuple[int, ...]) -> tuple[Owners, ...]:
    """Who holds the data inside a box, by arithmetic where the layout is regular."""
    layout.dims(shape)
    box = Box.whole(shape) & box
    grids = grids_of(layout, shape)
    if grids is None:
        listed = listed_of(layout, shape)
    else:
        listed = _merge([_list_grid(_near(grid, box), ()) for grid in grids])
    found: list[Owners] = []
    here = box_columns([box] if box.size else [], len(shape))
    for i in overlapping_pairs(*here, listed.starts, listed.stops)[1].tolist():
        whole = Box(tuple(listed.starts[i]), tuple(listed.stops[i]))
        found.append(Owners(whole & box, tuple(map(int, listed.of(i)))))
    return tuple(sorted(found, key=lambda owner: owner.box))


def _near(grid: Grid, box: Box) -> Grid:
    """A grid of the intervals that meet a box."""
    dims = []
    for dim, low, high in zip(grid.dims, box.start, box.stop, strict=True):
        first = np.searchsorted(dim.stops, low, side="right")
        kept = slice(first, max(first, np.searchsorted(dim.starts, high, side="left")))
        parts = dim.starts[kept], dim.stops[kept], dim.parts[kept]
        dims.append(DimTable(*parts, dim.places, dim.axes))
    return replace(grid, dims=tuple(dims))


class LocalPieces:
    """The pieces of one tensor on one rank, ready to be searched.

    >>> pieces = [Piece(Box((2, 0), (4, 8)), 0, (8, 1)), Piece(Box((6, 0), (8, 8)), 16, (8, 1))]
    >>> LocalPieces(pieces, 2).find(Box((7, 3), (8, 5)))
    (27, (8, 1))
    """

    def __init__(self, pieces: Sequence[Piece], num_dims: int) -> None:
        self.pieces = pieces
        self.starts, self.stops = box_columns([piece.box for piece in pieces], num_dims)

    def find(self, box: Box) -> tuple[int, tuple[int, ...]] | None:
        """The offset and the strides of a box, in elements; None if no piece contains it."""
        if len(self.pieces) == 1:
            piece = self.pieces[0] if box in self.pieces[0].box else None
        else:
            inside = (self.starts <= box.start).all(axis=1) & (self.stops >= box.stop).all(axis=1)
            piece = self.pieces[int(inside.argmax())] if inside.any() else None
        if piece is None:
            return None
        steps = zip(box.start, piece.box.start, piece.strides, strict=True)
        return piece.offset + sum((at - low) * by for at, low, by in steps), piece.strides
