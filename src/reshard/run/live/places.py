"""Where in a rank's local tensor do boxes sit? Asked for thousands of boxes at once.

A box never crosses a border of what a rank holds, so its first element and the strides of the local
tensor say where all of it is. The first element is found dim by dim: how many held elements of the
dim come before it?
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from reshard.box import row_major
from reshard.columns import Ints
from reshard.dims import Interval, length_of
from reshard.layout import BoxLayout, Layout

__all__ = ["Places", "places_of"]


@lru_cache(maxsize=4096)
def places_of(layout: Layout, shape: tuple[int, ...], rank: int) -> Places:
    """The places of one rank; kept, because every round and every tensor of a stack asks."""
    return (
        _BoxPlaces(layout, rank)
        if isinstance(layout, BoxLayout)
        else _DimPlaces(layout, shape, rank)
    )


class Places:
    """Finds boxes of the global tensor in one rank's local tensor."""

    def find(self, low: Ints) -> tuple[Ints, Ints]:
        """The offset of each box and the strides of each dim, in elements of the local tensor."""
        raise NotImplementedError


class _DimPlaces(Places):
    """A local tensor whose dims are lists of intervals, perhaps flattened and cut once more."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], rank: int) -> None:
        intervals, ranges = layout.intervals(rank, shape)
        self.dims = [_Line(one) for one in intervals]
        self.strides = np.array(row_major(tuple(map(length_of, intervals))), dtype=np.int64)
        self.flat = None if ranges is None else _Line(ranges)

    def find(self, low: Ints) -> tuple[Ints, Ints]:
        offset = np.zeros(len(low), dtype=np.int64)
        for dim, line in enumerate(self.dims):
            offset += line.position(low[:, dim]) * self.strides[dim]
        if self.flat is not None:
            offset = self.flat.position(offset)
        return offset, np.broadcast_to(self.strides, low.shape)


class _Line:
    """Rising intervals, and how many elements come before each."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        self.starts = table[:, 0]
        widths = table[:, 1] - table[:, 0]
        self.before = np.cumsum(widths) - widths

    def position(self, index: Ints) -> Ints:
        """Where elements sit among those that are held."""
        at = np.searchsorted(self.starts, index, side="right") - 1
        found: Ints = self.before[at] + index - self.starts[at]
        return found


class _BoxPlaces(Places):
    """Explicit boxes, one after the other."""

    CHUNK = 1 << 22
    """Comparisons made at once, so that many boxes on both sides stay small."""

    def __init__(self, layout: BoxLayout, rank: int) -> None:
        pieces = layout.pieces(rank, layout.shape)
        table = (len(pieces), len(layout.shape))
        self.starts = np.array([p.box.start for p in pieces], np.int64).reshape(table)
        self.stops = np.array([p.box.stop for p in pieces], np.int64).reshape(table)
        self.strides = np.array([p.strides for p in pieces], np.int64).reshape(table)
        self.offsets = np.array([p.offset for p in pieces], np.int64)

    def find(self, low: Ints) -> tuple[Ints, Ints]:
        step = max(1, self.CHUNK // max(1, self.starts.size))
        parts = [self._piece(low[at : at + step]) for at in range(0, len(low), step)]
        piece = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        strides = self.strides[piece]
        return self.offsets[piece] + ((low - self.starts[piece]) * strides).sum(axis=1), strides

    def _piece(self, low: Ints) -> Ints:
        if len(self.starts) == 1:
            return np.zeros(len(low), dtype=np.int64)
        inside = (self.starts <= low[:, None]).all(axis=2) & (self.stops > low[:, None]).all(axis=2)
        found: Ints = inside.argmax(axis=1)
        return found
