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
        return _list_grids(grids, np.array(lost, dtype=np.int64))
    columns = {
        rank: piece_columns(layout, rank, shape) for rank in layout.ranks if rank not in lost
    }
    cuts = (*layout.dims(shape), layout.words.flat)
    alike = not isinstance(layout, BoxLayout) and not any(map(is_mixed, cuts))
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
        places = np.array([piece.offset for piece in pieces], dtype=np.int64)
        return starts, stops, steps.reshape(starts.shape), places
    local = [*map(length_of, intervals)]
    low, high = np.array(ranges, dtype=np.int64).T
    shapes = np.broadcast_to(np.array(local, dtype=np.int64), (len(low), len(local)))
    _, starts, widths = flat_boxes(shapes, low, high)
    stops, sizes, strides = starts + widths, widths.prod(axis=1), row_major(local)
    places = np.cumsum(sizes) - sizes
    for dim, (mine, stride) in enumerate(zip(intervals, strides, strict=True)):
        starts, stops, places = _on_intervals(starts, stops, places, dim, mine, stride)
    order = np.argsort(places)
    steps = np.broadcast_to(np.array(strides, dtype=np.int64), stops.shape)
    return starts[order], stops[order], steps, places[order]


def flat_boxes(shapes: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges of flattened boxes of these shapes as boxes: the range of each, its start and width.

    Dim by dim: what covers whole indices is a box; a ragged head and a ragged tail are ranges of
    one index, which the next dim divides further. Boxes are in the order of their elements.
    """
    row, low, at = np.arange(len(start)), np.zeros_like(shapes), np.zeros_like(start)
    done: list[tuple[Ints, Ints, Ints, Ints]] = []
    for dim in range(shapes.shape[1]):
        inner = np.prod(shapes[:, dim + 1 :], axis=1, dtype=np.int64)[row]
        first, last = start // inner, (stop - 1) // inner
        body_from, body_to = -(-start // inner), stop // inner
        body = np.flatnonzero(body_from < body_to)
        box, width = low[body], shapes[row[body]]
        box[:, dim] = body_from[body]
        width[:, :dim] = 1
        width[:, dim] = (body_to - body_from)[body]
        done.append((row[body], (at + body_from * inner)[body], box, width))
        ragged = start % inner != 0
        head = np.flatnonzero(ragged)
        tail = np.flatnonzero((stop % inner != 0) & ((first < last) | ~ragged))
        rest, index = np.concatenate([head, tail]), np.concatenate([first[head], last[tail]])
        inner, skipped = inner[rest], index * inner[rest]
        start, stop = np.maximum(start[rest] - skipped, 0), np.minimum(stop[rest] - skipped, inner)
        row, low, at = row[rest], low[rest], at[rest] + skipped
        low[:, dim] = index
    row, at, low, width = (np.concatenate(columns) for columns in zip(*done, strict=True))
    order = np.lexsort((at, row))
    return row[order], low[order], width[order]


def _on_intervals(
    starts: Ints, stops: Ints, places: Ints, dim: int, intervals: Sequence[Interval], stride: int
) -> tuple[Ints, Ints, Ints]:
    """Boxes of the local tensor, split where a dim's intervals of the whole tensor begin."""
    low, high = np.array(intervals, dtype=np.int64).reshape(-1, 2).T
    edge = offsets(high - low)
    first = np.searchsorted(edge, starts[:, dim], side="right") - 1
    box, at = spread(first, np.searchsorted(edge, stops[:, dim], side="left") - first)
    starts, stops = starts[box], stops[box]
    begin, end = np.maximum(starts[:, dim], edge[at]), np.minimum(stops[:, dim], edge[at + 1])
    places = places[box] + (begin - starts[:, dim]) * stride
    starts[:, dim], stops[:, dim] = (low - edge[:-1])[at] + begin, (low - edge[:-1])[at] + end
    return starts, stops, places


def _grouped(columns: Mapping[int, Columns], num_dims: int, alike: bool) -> Listed:
    """Equal boxes once, with all their holders; where all are ``alike``, one start is one box."""
    none = np.zeros((0, num_dims), dtype=np.int64)
    starts = np.concatenate([none, *(one[0] for one in columns.values())])
    stops = np.concatenate([none, *(one[1] for one in columns.values())])
    counts = [len(one[0]) for one in columns.values()]
    ranks = np.repeat(np.array([*columns], dtype=np.int64), counts)
    corners = starts if alike else np.concatenate([starts, stops], axis=1)
    order = np.lexsort([ranks, *corners.T[::-1]])
    starts, stops, ranks, corners = starts[order], stops[order], ranks[order], corners[order]
    new = np.ones(len(starts), dtype=bool)
    new[1:] = (corners[1:] != corners[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    return Listed(starts[first], stops[first], np.append(first, len(starts)), ranks)


def _list_grids(grids: Sequence[Grid], lost: Ints) -> Listed:
    """The boxes of grids in order, without those that no rank holds."""
    columns = []
    for grid in grids:
        starts, stops, regions = grid.boxes()
        ranks = grid.holders(regions)
        kept = ~contained(ranks, lost)
        columns.append((starts, stops, kept.sum(axis=1), ranks[kept]))
    starts, stops, counts, ranks = map(np.concatenate, zip(*columns, strict=True))
    order = np.lexsort(starts.T[::-1]) if starts.shape[1] else np.arange(len(starts))
    order = order[counts[order] > 0]
    _, at = spread(offsets(counts)[order], counts[order])
    return Listed(starts[order], stops[order], offsets(counts[order]), ranks[at])


def _disjoint(listed: Listed) -> Listed:
    """Cut boxes that partly overlap until none do; a box of two origins has the holders of both."""
    corners = listed.starts, listed.stops
    left, right = overlapping_pairs(*corners, *corners)
    crossing = {*left[left != right].tolist()}
    if not crossing:
        return listed
    boxes: list[tuple[Box, set[int]]] = []
    apart: list[tuple[Box, set[int]]] = []
    for number, (start, stop) in enumerate(zip(*corners, strict=True)):
        box, ranks = Box(tuple(start), tuple(stop)), {*listed.of(number).tolist()}
        if number in crossing:
            apart = _insert(apart, box, ranks)
        else:
            boxes.append((box, ranks))
    boxes = sorted([*boxes, *apart], key=lambda entry: entry[0])
    return Listed(
        *box_columns([box for box, _ in boxes], listed.starts.shape[1]),
        offsets(np.array([len(ranks) for _, ranks in boxes], dtype=np.int64)),
        np.array([rank for _, ranks in boxes for rank in sorted(ranks)], dtype=np.int64),
    )


def _insert(
    apart: list[tuple[Box, set[int]]], box: Box, ranks: set[int]
) -> list[tuple[Box, set[int]]]:
    """Add a box to disjoint boxes, splitting both where they overlap."""
    result, rest = list[tuple[Box, set[int]]](), [box]
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
    """Who holds the data inside a box: disjoint boxes in order, each with all its holders.

    Of a regular layout only the boxes that meet this one are listed.
    """
    layout.dims(shape)
    box = Box.whole(shape) & box
    grids = grids_of(layout, shape)
    if grids is None:
        listed = listed_of(layout, shape)
    else:
        listed = _list_grids([_near(grid, box) for grid in grids], np.zeros(0, np.int64))
    here = box_columns([box] if box.size else [], len(shape))
    parts = [
        Owners(
            box & Box(tuple(listed.starts[row]), tuple(listed.stops[row])),
            tuple(listed.of(row).tolist()),
        )
        for row in overlapping_pairs(*here, listed.starts, listed.stops)[1]
    ]
    return tuple(sorted(parts, key=lambda part: part.box))


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
