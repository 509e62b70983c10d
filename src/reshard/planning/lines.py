"""Responsibility along a line: a region's elements in order, cut into one slot per member.

The source region's holders share what they must send; the destination region's replicas share what
they must receive from outside. Both cut the same elements, each in their own way, and a transfer is
where a slot of the one meets a slot of the other:

    source region, 2 holders      |  rank 0           |  rank 1           |
    destination region, 3 ranks   |  rank 8    |  rank 9     |  rank 10   |
    transfers                     |  0 -> 8    | 0->9 | 1->9 |  1 -> 10   |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import distinct
from reshard.layout.grid import Ints
from reshard.planning.balance import Line

__all__ = ["LineSet", "Runs", "Slots"]


@dataclass(frozen=True, eq=False, slots=True)
class Slots:
    """Lines laid end to end, and the slots that divide them."""

    base: Ints
    """Where each line begins; one more entry ends the last."""
    starts: Ints
    """Where each slot begins."""
    ranks: Ints
    """Whose slot it is."""
    first: Ints
    """The first slot of each line; one more entry ends the last."""


@dataclass(frozen=True, eq=False, slots=True)
class LineSet:
    """Amounts of elements, each with the ranks that share it."""

    amounts: Ints
    first: Ints
    """Where the members of each line begin in ``members``; one more entry ends the last."""
    members: Ints

    @classmethod
    def regular(cls, amounts: Ints, members: Ints) -> LineSet:
        """Lines with equally many members, one row each."""
        first = np.arange(len(amounts) + 1, dtype=np.int64) * members.shape[1]
        return cls(amounts, first, members.reshape(-1))

    def of(self, line: int) -> Ints:
        """The members of a line."""
        return self.members[self.first[line] : self.first[line + 1]]

    def has(self, rank: int) -> NDArray[np.bool_]:
        """For each line, whether a rank is a member."""
        found = np.concatenate([[0], np.cumsum(self.members == rank)])[self.first]
        return np.diff(found) > 0

    def by_size(self) -> list[tuple[Ints, Ints]]:
        """The lines that are worth sharing, grouped by the number of members, with those."""
        counts = np.diff(self.first)
        groups = []
        for num in distinct(counts[(self.amounts > 0) & (counts > 0)]):
            lines = np.flatnonzero((counts == num) & (self.amounts > 0))
            groups.append((lines, self.members[self.first[lines][:, None] + np.arange(num)]))
        return groups

    def to_share(self, world: Ints, itemsize: int, grain: int) -> list[Line]:
        """What ``balance`` needs: amounts in bytes, members as places in ``world``."""
        return [
            Line(self.amounts[lines] * itemsize, np.searchsorted(world, members), grain, itemsize)
            for lines, members in self.by_size()
        ]

    def slots(self, shares: Sequence[Ints], itemsize: int) -> Slots:
        """Cut each line by the shares of its members."""
        ends = np.zeros(len(self.members), dtype=np.int64)
        for (lines, members), share in zip(self.by_size(), shares, strict=True):
            cuts = np.cumsum(share, axis=1) // itemsize
            cuts[:, -1] = self.amounts[lines]
            ends[self.first[lines][:, None] + np.arange(members.shape[1])] = cuts
        base = np.concatenate([[0], np.cumsum(self.amounts)])
        starts = np.concatenate([[0], ends[:-1]])
        has = self.first[:-1][np.diff(self.first) > 0]
        starts[has] = 0
        lines = np.repeat(np.arange(len(self.amounts)), np.diff(self.first))
        return Slots(base, starts + base[lines], self.members, self.first)


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Runs of cells: elements ``start`` to ``stop`` of the stacked cell, row-major."""

    cell: Ints
    start: Ints
    stop: Ints

    @classmethod
    def whole(cls, sizes: Ints) -> Runs:
        """One run per cell."""
        return cls(np.arange(len(sizes)), np.zeros_like(sizes), sizes)

    def take(self, rows: Ints) -> Runs:
        """Some of the runs."""
        return Runs(self.cell[rows], self.start[rows], self.stop[rows])

    def split(self, slots: Slots, line: Ints, at: Ints, unit: Ints) -> tuple[Runs, Ints, Ints]:
        """Cut runs where slots begin; give the new runs, the old run and the slot of each.

        ``line`` and ``at`` say on which line each cell lies and where. Cuts are rounded to a whole
        ``unit`` of the cell, so that they fall between rows rather than inside one.
        """
        lines, units = line[self.cell], unit[self.cell]
        offset = at[self.cell] + slots.base[lines]
        low = np.searchsorted(slots.starts, offset + self.start - units, side="right") - 1
        high = np.searchsorted(slots.starts, offset + self.stop + units, side="left")
        low = np.maximum(low, slots.first[lines])
        counts = np.minimum(high, slots.first[lines + 1]) - low
        old = np.repeat(np.arange(len(lines)), counts)
        slot = np.arange(len(old)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        edges = np.append(slots.starts, slots.base[-1])
        last = slot + 1 == slots.first[lines[old] + 1]
        start = _round(edges[slot] - offset[old], units[old])
        stop = _round(edges[slot + 1] - offset[old], units[old])
        start = np.where(slot == slots.first[lines[old]], 0, start)
        start = np.maximum(start, self.start[old])
        stop = np.where(last, self.stop[old], np.minimum(stop, self.stop[old]))
        kept = np.flatnonzero(start < stop)
        old, slot = old[kept], slot[kept]
        return Runs(self.cell[old], start[kept], stop[kept]), old, slot


def _round(offset: Ints, unit: Ints) -> Ints:
    return (offset + unit // 2) // unit * unit
