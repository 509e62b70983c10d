"""Which pieces of two pictures share elements, and between which ranks these elements travel.

A link is a rectangle of the source picture, a rectangle of the destination picture, and the
entries of the traffic matrix that carry what both cover. A page lights up links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints
from reshard.planning.cells.transfers import insert_columns
from reshard.show.page.drawings import Drawing
from reshard.show.traffic import Matrix

if TYPE_CHECKING:
    from reshard.planning.classes import Stack
    from reshard.planning.flows import Flow
    from reshard.planning.names import Feed
    from reshard.planning.plans import Plan

__all__ = ["Link", "links_of"]

MAX_ROWS = 50_000
"""Rows of a plan that are looked at for one stack. With more, all groups of ranks that hold a piece
and exchange anything with a group that wants it count as its senders."""
MAX_COMPARED = 4_000_000
"""Pairs of cells and rectangles that are compared."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Link:
    """Two rectangles that share elements."""

    have: int
    want: int
    entries: tuple[int, ...]
    """Entries of the traffic matrix, as row * columns + column."""


def links_of(plan: Plan, stack: Stack, source: Drawing, to: Drawing, matrix: Matrix) -> list[Link]:
    """The links of one drawn stack, in the order of its source rectangles."""
    have, want = source.rects, to.rects
    sides = _Boxes.of(source, stack.have.shape), _Boxes.of(to, stack.want.shape)
    pairs = np.argwhere(_shared(stack.feed, *sides))
    flows = [flow for flow in plan.flows if flow.stack is stack]
    if not matrix.num_bytes.size:
        entries: list[list[int]] = [[] for _ in pairs]
    elif _are_few(flows, len(have) + len(want)):
        entries = _exact(plan, flows, sides, pairs, matrix)
    else:
        entries = [_possible(plan, have[h].ranks, want[w].ranks, matrix) for h, w in pairs.tolist()]
    return [Link(h, w, tuple(one)) for (h, w), one in zip(pairs.tolist(), entries, strict=True)]


@dataclass(frozen=True, eq=False, slots=True)
class _Boxes:
    """Boxes as columns, with as many dims as their tensor has."""

    low: Ints
    high: Ints

    @classmethod
    def of(cls, drawing: Drawing, shape: tuple[int, ...]) -> _Boxes:
        low = np.zeros((len(drawing.rects), len(shape)), dtype=np.int64)
        high = np.tile(np.array(shape, dtype=np.int64), (len(drawing.rects), 1))
        for at, dim in enumerate(drawing.dims, start=2 - len(drawing.dims)):
            low[:, dim] = [rect.low[at] for rect in drawing.rects]
            high[:, dim] = [rect.high[at] for rect in drawing.rects]
        return cls(low, high)

    def touching(self, low: Ints, high: Ints) -> Mask:
        """Which of other boxes (rows) overlap with which of these (columns)."""
        sides = np.minimum(high[:, None], self.high) - np.maximum(low[:, None], self.low)
        return np.asarray((sides > 0).all(axis=2))


def _shared(feed: Feed, have: _Boxes, want: _Boxes) -> Mask:
    """Which source boxes (rows) have elements in common with which destination boxes (columns)."""
    if not feed.moves:
        return want.touching(have.low, have.high)
    (low, high), (to_low, to_high) = (
        (insert_columns(boxes.low, insert, 0), insert_columns(boxes.high, insert, 1))
        for boxes, insert in ((have, feed.have_insert), (want, feed.want_insert))
    )
    found = np.ones((len(low), len(to_low)), dtype=bool)
    for dim, runs in enumerate(feed.moves):
        here = np.zeros_like(found)
        for source, destination, length in runs:
            start = np.maximum(low[:, dim], source) + destination - source
            stop = np.minimum(high[:, dim], source + length) + destination - source
            first = np.maximum(start[:, None], to_low[:, dim])
            here |= np.minimum(stop[:, None], to_high[:, dim]) > first
        found &= here
    return found


def _are_few(flows: Sequence[Flow], num_rects: int) -> bool:
    """Whether all rows of some flows can be compared with so many rectangles."""
    num_cells = sum(flow.geometry.num_cells() for flow in flows)
    if num_cells * num_rects > MAX_COMPARED:  # before they are listed
        return False
    rows = sum(
        int(flow.geometry.wanting.counts[flow.parts().line].sum()) * flow.geometry.num_addends
        for flow in flows
    )
    return rows <= MAX_ROWS


def _exact(
    plan: Plan, flows: Sequence[Flow], sides: tuple[_Boxes, _Boxes], pairs: Ints, matrix: Matrix
) -> list[list[int]]:
    """The entries of each link, from the rows of the plan that carry what it covers."""
    found: list[set[int]] = [set() for _ in pairs]
    size = matrix.num_bytes.size
    for flow in flows:
        for rows in flow.everything():
            moved = rows.take(np.flatnonzero(rows.source != rows.destination))
            row = matrix.row_of[np.searchsorted(plan.world, moved.source)]
            column = matrix.column_of[np.searchsorted(plan.world, moved.destination)]
            entry = row * matrix.num_bytes.shape[1] + column
            keys = np.unique(moved.runs.cell * size + entry)
            cell, entry = np.divmod(keys, size)
            here, there = (
                _touched(boxes, low[cell], moved.cells.width[cell], insert)
                for boxes, low, insert in (
                    (sides[0], moved.cells.have_low, flow.stack.feed.have_insert),
                    (sides[1], moved.cells.want_low, flow.stack.feed.want_insert),
                )
            )
            for number, (h, w) in enumerate(pairs.tolist()):
                found[number].update(entry[here[:, h] & there[:, w]].tolist())
    return [sorted(one) for one in found]


def _touched(boxes: _Boxes, low: Ints, width: Ints, insert: Sequence[int]) -> Mask:
    """Which cells touch which boxes, in the dims of the tensor that has these boxes."""
    low = np.delete(low, insert, axis=1)
    return boxes.touching(low, low + np.delete(width, insert, axis=1))


def _possible(
    plan: Plan, holders: Sequence[int], takers: Sequence[int], matrix: Matrix
) -> list[int]:
    """The entries with traffic between groups that hold a piece and groups that want it."""
    rows, columns = (
        np.unique(group[np.searchsorted(plan.world, np.array(ranks, dtype=np.int64))])
        for group, ranks in ((matrix.row_of, holders), (matrix.column_of, takers))
    )
    entries: Ints = (rows[:, None] * matrix.num_bytes.shape[1] + columns).reshape(-1)
    busy: list[int] = entries[matrix.num_bytes.reshape(-1)[entries] > 0].tolist()
    return busy
