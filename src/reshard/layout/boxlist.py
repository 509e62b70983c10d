"""Any layout as a list of disjoint boxes, each with the ranks that hold it.

Regular layouts have tables (see ``regions``) and are listed only when the other side of a move
must be. Explicit boxes may overlap across ranks; they are cut until each box has one set of
holders:

    rank 0   [0:6)                 [0:4) on 0
    rank 1      [4:9)      ->      [4:6) on 0, 1
                                   [6:9) on 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.layout.box import Box
from reshard.layout.columns import contained, sized_cache
from reshard.layout.coverage import box_columns, overlapping_pairs
from reshard.layout.grid import DimTable, Grid, Ints, grids_of
from reshard.layout.layout import BoxLayout, Layout, Owners, Piece

__all__ = ["Listed", "LocalPieces", "listed_of", "owners"]


@dataclass(frozen=True, eq=False, slots=True)
class Listed:
    """Disjoint boxes as columns, and the holders of each one after the other."""

    starts: Ints
    stops: Ints
    first: Ints
    """Where the holders of each box begin in ``holders``; one more entry ends the last."""
    holders: Ints
    """The ranks of the first box in rising order, then those of the second, and so on."""

    def of(self, box: int) -> Ints:
        """The ranks that hold a box."""
        return self.holders[self.first[box] : self.first[box + 1]]


def _listed_bytes(listed: Listed, layout: Layout, _: object) -> int:
    arrays = (listed.starts, listed.stops, listed.first, listed.holders)
    return layout.num_bytes + sum(array.nbytes for array in arrays)


@sized_cache(64 << 20, _listed_bytes)
def listed_of(layout: Layout, shape: tuple[int, ...]) -> Listed:
    """All boxes of a layout; every addend of a pending reduction counts as a holder."""
    lost = layout.words.without
    if lost:
        layout = Layout(layout.mesh, replace(layout.words, without=()))
    grids = grids_of(layout, shape)
    if grids is not None:
        return _merge([_list_grid(grid, lost) for grid in grids])
    held: dict[Box, set[int]] = {}
    for rank in layout.ranks:
        for piece in layout.pieces(rank, shape) if rank not in lost else ():
            held.setdefault(piece.box, set()).add(rank)
    return _from_mapping(_disjoint(held), len(shape))


def _list_grid(grid: Grid, lost: Iterable[int]) -> Listed:
    starts, stops, regions = grid.boxes()
    ranks = np.concatenate(
        [grid.holders(regions, addend) for addend in range(len(grid.addends))], axis=1
    )
    ranks.sort(axis=1)
    kept = ~contained(ranks, np.array([*lost], dtype=np.int64))
    first = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
    return Listed(starts, stops, first, ranks[kept])


def _merge(lists: list[Listed]) -> Listed:
    """One list of several, in the order of the boxes, without boxes that no rank holds."""
    starts = np.concatenate([listed.starts for listed in lists])
    counts = np.concatenate([np.diff(listed.first) for listed in lists])
    order = np.lexsort(starts.T[::-1]) if starts.shape[1] else np.arange(len(starts))
    order = order[counts[order] > 0]
    first = (np.cumsum(counts) - counts)[order]
    kept = counts[order]
    at = np.arange(kept.sum()) + np.repeat(first - (np.cumsum(kept) - kept), kept)
    return Listed(
        starts[order],
        np.concatenate([listed.stops for listed in lists])[order],
        np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        np.concatenate([listed.holders for listed in lists])[at],
    )


def _from_mapping(held: Mapping[Box, set[int]], num_dims: int) -> Listed:
    boxes = sorted(held)
    counts = [len(held[box]) for box in boxes]
    return Listed(
        *box_columns(boxes, num_dims),
        np.cumsum([0, *counts]).astype(np.int64),
        np.array([rank for box in boxes for rank in sorted(held[box])], dtype=np.int64),
    )


def _disjoint(held: Mapping[Box, set[int]]) -> dict[Box, set[int]]:
    """Cut boxes that partly overlap until none do; a box of two origins has the holders of both."""
    boxes = sorted(held)
    table = _from_mapping(held, len(boxes[0].start) if boxes else 0)
    left, right = overlapping_pairs(table.starts, table.stops, table.starts, table.stops)
    crossing = {int(i) for i in left[left != right]}
    done = {box: held[box] for i, box in enumerate(boxes) if i not in crossing}
    pending = [(boxes[i], held[boxes[i]]) for i in sorted(crossing)]
    apart: list[tuple[Box, set[int]]] = []
    for box, ranks in pending:
        apart = _insert(apart, box, ranks)
    return done | dict(apart)


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
    grids = None if isinstance(layout, BoxLayout) else grids_of(layout, shape)
    if grids is None:
        found = list(_owners_listed(listed_of(layout, shape), box))
    else:
        found = [owner for grid in grids for owner in _owners_in_grid(grid, box)]
    return tuple(sorted(found, key=lambda owner: owner.box))


def _owners_listed(listed: Listed, box: Box) -> Iterable[Owners]:
    lows = np.array([box.start], dtype=np.int64).reshape(1, -1)
    highs = np.array([box.stop], dtype=np.int64).reshape(1, -1)
    for i in overlapping_pairs(lows, highs, listed.starts, listed.stops)[1] if box.size else ():
        whole = Box(tuple(listed.starts[i]), tuple(listed.stops[i]))
        yield Owners(whole & box, tuple(map(int, listed.of(int(i)))))


def _owners_in_grid(grid: Grid, box: Box) -> Iterable[Owners]:
    if not box.size:
        return
    limits = zip(grid.dims, box.start, box.stop, strict=True)
    near = replace(grid, dims=tuple(_near(dim, low, high) for dim, low, high in limits))
    starts, stops, regions = near.boxes()
    for start, stop, region in zip(starts, stops, regions, strict=True):
        ranks = [grid.holders(region[None], a) for a in range(len(grid.addends))]
        holders = tuple(sorted(map(int, np.concatenate(ranks, axis=1).ravel())))
        yield Owners(Box(tuple(start), tuple(stop)) & box, holders)


def _near(dim: DimTable, low: int, high: int) -> DimTable:
    """Only the intervals that meet a range of the dim."""
    kept = slice(
        int(np.searchsorted(dim.stops, low, side="right")),
        int(np.searchsorted(dim.starts, high, side="left")),
    )
    return replace(dim, starts=dim.starts[kept], stops=dim.stops[kept], parts=dim.parts[kept])


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
