"""Cells of two regular layouts: a rank's cells follow from its own regions by arithmetic.

The cells are products of what happens in each dim, and each dim is a short table:

    source       0 0 0 0 0 0|1 1 1 1 1 1       two parts
    destination  0 0 0 0|1 1 1 1|2 2 2 2       three parts
    common       0 0 0 0|0 0|1 1|1 1 1 1       four runs: (0,0) (0,1) (1,1) (1,2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from reshard.errors import PlanError
from reshard.layout.columns import Ints, contained, numbered, offsets, spread
from reshard.layout.grid import DimTable, Grid, grids_of, stacked
from reshard.planning.cells.transfers import Cells, fed_lengths, run_columns
from reshard.planning.classes import Stack
from reshard.planning.names import Segments
from reshard.planning.sharing import LineSet

MAX_CELLS = 1 << 26  # cells that are worked out at once; more would not fit into memory


@dataclass(frozen=True, eq=False, slots=True)
class _Side:
    """The runs of a dim seen from one side: which part each is of, and what comes before it."""

    part: Ints
    runs: LineSet  # the runs of each part, as a line of them
    total: Ints  # elements of each part that meet anything
    before: Ints  # elements of the same part in earlier runs

    @classmethod
    def of(cls, part: Ints, width: Ints, num_parts: int) -> _Side:
        order = np.argsort(part, kind="stable")
        runs = LineSet(np.searchsorted(part[order], np.arange(num_parts + 1)), order)
        ends, before = offsets(width[order]), np.empty_like(width)
        edges = ends[runs.first]
        before[order] = ends[:-1] - edges[part[order]]
        return cls(part, runs, np.diff(edges), before)


@dataclass(frozen=True, eq=False, slots=True)
class DimMeet:
    """The runs of one dim, each inside one interval of each side, in rising order."""

    have_low: Ints
    want_low: Ints
    width: Ints
    have: _Side
    want: _Side
    needed: int  # elements of the destination that the source should provide

    def common(self, have_part: Ints, want_part: Ints) -> Ints:
        """How many elements pairs of parts have in common."""
        num = len(self.want.total)
        keys, inverse = numbered(self.have.part * num + self.want.part)
        widths = np.append(np.bincount(inverse, weights=self.width).astype(np.int64), 0)
        wanted = have_part * num + want_part
        at = np.searchsorted(keys, wanted)
        return np.where(np.append(keys, -1)[at] == wanted, widths[at], 0)


def meet_dim(have: DimTable, want: DimTable, segments: Segments | None) -> DimMeet:
    """Intersect the intervals of both sides of a dim, the source moved by segments if given."""
    starts, stops, parts = have.starts, have.stops, have.parts
    shift, needed = np.zeros(len(starts), dtype=np.int64), want.stops - want.starts
    if segments is not None:
        runs = run_columns(sorted(segments, key=lambda run: run[1]))
        low, high = runs[:, 0], runs[:, 0] + runs[:, 2]
        run, at = _meeting(low, high, starts, stops)
        shift = (runs[:, 1] - runs[:, 0])[run]
        starts = np.maximum(starts[at], low[run]) + shift
        stops = np.minimum(stops[at], high[run]) + shift
        parts, needed = parts[at], fed_lengths(want.starts, want.stops, segments)
    mine, other = _meeting(starts, stops, want.starts, want.stops)
    low = np.maximum(starts[mine], want.starts[other])
    width = np.minimum(stops[mine], want.stops[other]) - low
    return DimMeet(
        low - shift[mine],
        low,
        width,
        _Side.of(parts[mine], width, have.num_parts),
        _Side.of(want.parts[other], width, want.num_parts),
        int(needed.sum()),
    )


def _meeting(starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints) -> tuple[Ints, Ints]:
    """All pairs of an interval and another, of rising disjoint ones, that it meets."""
    first = np.searchsorted(other_stops, starts, side="right")
    counts = np.maximum(np.searchsorted(other_starts, stops, side="left") - first, 0)
    return spread(first, counts)


def _with_dims(grid: Grid, at: Sequence[int]) -> Grid:
    """The same grid with whole dims of size 1 inserted at these places."""
    dims = list(grid.dims)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    for place in at:
        dims.insert(place, DimTable(zero, one, zero, zero, ()))
    return replace(grid, dims=tuple(dims)) if at else grid


@dataclass(frozen=True, eq=False)
class GridPair:
    """Two regular layouts of one tensor, met dim by dim."""

    have: Grid
    want: Grid
    dims: tuple[DimMeet, ...]

    @property
    def is_regular(self) -> bool:
        """Whether no rank holds a region and shares a wanted one with ranks that lack it."""
        alone = len(self.have.replicas) == 1 and len(self.want.replicas) == 1
        return alone or not contained(self.have.ranks, self.want.ranks).any()

    def common_elements(self) -> tuple[Ints, Ints]:
        """The ranks of both meshes, and how many elements each both holds and wants."""
        mine = np.flatnonzero(contained(self.have.ranks, self.want.ranks))
        ranks = self.have.ranks[mine]
        if not len(ranks):
            return ranks, ranks
        order = np.argsort(self.want.ranks)
        theirs = order[np.searchsorted(self.want.ranks, ranks, sorter=order)]
        have, want = self.have.region_at[mine], self.want.region_at[theirs]
        both = np.flatnonzero((have >= 0) & (want >= 0))
        elements = np.ones(len(both), dtype=np.int64)
        parts = (self.have.parts_of(have[both]), self.want.parts_of(want[both]))
        for dim, one, other in zip(self.dims, *parts, strict=True):
            elements *= dim.common(one, other)
        return ranks[both], elements

    def cells(self, have_region: int | None, want_region: int | None) -> Cells:
        """The cells of a region of either side, or all; in rising order of their place."""
        runs = [np.arange(len(dim.width)) for dim in self.dims]
        haves, wants = [dim.have for dim in self.dims], [dim.want for dim in self.dims]
        for grid, region, sides in (self.have, have_region, haves), (self.want, want_region, wants):
            if region is not None:
                parts = map(int, grid.parts_of(np.array(region)))
                some = [side.runs.of(part) for side, part in zip(sides, parts, strict=True)]
                runs = [
                    one if len(every) == len(side.part) else every[contained(every, one)]
                    for side, every, one in zip(sides, runs, some, strict=True)
                ]
        return self._product(runs)

    @property
    def num_cells(self) -> int:
        return prod(len(dim.width) for dim in self.dims)

    def blocks(self, most: int) -> Iterator[Cells]:
        """All cells, about so many at a time."""
        runs = [np.arange(len(dim.width)) for dim in self.dims]
        longest = max(range(len(runs)), key=lambda dim: len(runs[dim]), default=0)
        times = max(-(-self.num_cells // most), 1)
        for some in np.array_split(runs[longest], min(times, len(runs[longest]))):
            yield self._product([*runs[:longest], some, *runs[longest + 1 :]])

    def _product(self, runs: Sequence[Ints]) -> Cells:
        counts = [len(run) for run in runs]
        count = prod(counts)
        if count > MAX_CELLS:
            raise PlanError(f"{count} cells at once, at most {MAX_CELLS} work: use larger blocks")
        index = np.indices(counts).reshape(len(counts), count)
        chosen = [(dim, run[i]) for dim, run, i in zip(self.dims, runs, index, strict=True)]
        width = stacked([dim.width[run] for dim, run in chosen], count)
        return Cells(
            stacked([dim.have_low[run] for dim, run in chosen], count),
            stacked([dim.want_low[run] for dim, run in chosen], count),
            width,
            width.prod(axis=1),
            *_line([(dim.have, run) for dim, run in chosen], width),
            *_line([(dim.want, run) for dim, run in chosen], width),
        )


def _outer(per_dim: Sequence[Ints]) -> Ints:
    product = np.ones((), dtype=np.int64)
    for values in per_dim:
        product = product[..., None] * values
    return product.reshape(-1)


def _line(sides: Sequence[tuple[_Side, Ints]], width: Ints) -> tuple[Ints, Ints]:
    """The region of each cell, and how many elements of it come before, cells in row-major order
    of runs."""
    region, at = np.zeros((2, len(width)), dtype=np.int64)
    inner = np.ones(len(width), dtype=np.int64)
    stride = 1
    for dim in reversed(range(len(sides))):
        side, runs = sides[dim]
        part = side.part[runs]
        region = region + part * stride
        stride *= len(side.total)
        at = side.before[runs] * inner + width[:, dim] * at
        inner = inner * side.total[part]
    return region, at


def regular_geometry(stack: Stack) -> RegularGeometry | None:
    """The regular geometry of a stack, or None if its cells must be listed."""
    have = grids_of(stack.have.layout, stack.have.shape)
    want = grids_of(stack.want.layout, stack.want.shape)
    if stack.have.layout.reduce or stack.want.layout.reduce or have is None or want is None:
        return None
    feed, pairs = stack.feed, list[GridPair]()
    targets = [_with_dims(grid, feed.want_insert) for grid in want]
    for one, other in product([_with_dims(grid, feed.have_insert) for grid in have], targets):
        moves = feed.moves or [None] * len(one.dims)
        dims = [meet_dim(*dims) for dims in zip(one.dims, other.dims, moves, strict=True)]
        pairs.append(GridPair(one, other, tuple(dims)))
    if not all(pair.is_regular for pair in pairs):
        return None
    receivers = LineSet.chain([_lines(pair.want) for pair in pairs])
    return RegularGeometry(
        pairs,
        LineSet.chain([_lines(pair.have) for pair in pairs]),
        np.concatenate([_outer([dim.have.total for dim in pair.dims]) for pair in pairs]),
        receivers,
        np.concatenate([_outer([dim.want.total for dim in pair.dims]) for pair in pairs]),
        receivers,
    )


@dataclass(frozen=True, eq=False)
class RegularGeometry:
    """Pairs of grids; the lines of a pair are the regions of its two grids.

    A rank that wants a line holds all of it or nothing, and nothing is added up.
    """

    pairs: list[GridPair]
    senders: LineSet
    send_amounts: Ints
    receivers: LineSet
    receive_amounts: Ints
    wanting: LineSet  # all replicas of a region lack it, so those that want it share it
    num_addends = 1
    listed = False
    kinds = None
    addends = ()

    @property
    def is_covered(self) -> bool:
        """Whether the source has all that the destination wants."""
        needed = {id(pair.want): prod(dim.needed for dim in pair.dims) for pair in self.pairs}
        return int(self.receive_amounts.sum()) == sum(needed.values())

    def cells_per_rank(self) -> tuple[int, int]:
        """The most cells of any source region and of any destination region."""
        sent = wanted = 0
        for pair in self.pairs:
            sent += prod(int(dim.have.runs.counts.max(initial=0)) for dim in pair.dims)
            wanted += prod(int(dim.want.runs.counts.max(initial=0)) for dim in pair.dims)
        return sent, wanted

    def all(self) -> Cells:
        return self.cells_of()

    def cells_of(self, sender: int | None = None, receiver: int | None = None) -> Cells:
        """The cells of the regions that a rank holds, of those that a rank wants, or of both."""
        parts = [Cells.none(len(self.pairs[0].dims))]
        for number, pair in enumerate(self.pairs):
            have = None if sender is None else pair.have.region_of(sender)
            want = None if receiver is None else pair.want.region_of(receiver)
            if (have is None) == (sender is None) and (want is None) == (receiver is None):
                parts.append(self._numbered(pair.cells(have, want), number))
        return parts[-1] if len(parts) <= 2 else Cells.chain(parts)

    def blocks(self, most: int) -> Iterator[Cells]:
        """All cells, about so many at a time."""
        if self.num_cells() <= most:
            yield self.all()
            return
        for number, pair in enumerate(self.pairs):
            for cells in pair.blocks(most):
                yield self._numbered(cells, number)

    def copied_by(self, rank: int) -> Cells:
        return self.cells_of(rank, rank)

    def copied_elements(self) -> tuple[Ints, Ints]:
        """Ranks of both sides, and how much of one tensor each both holds and wants."""
        ranks, elements = zip(*(pair.common_elements() for pair in self.pairs), strict=True)
        return np.concatenate(ranks), np.concatenate(elements)

    def num_cells(self) -> int:
        return sum(pair.num_cells for pair in self.pairs)

    @property
    def wanted(self) -> int:
        """Elements of one tensor that ranks want, once per such rank."""
        return int(self.receive_amounts @ self.receivers.counts)

    def _numbered(self, cells: Cells, pair: int) -> Cells:
        """The cells of a pair; the regions of all pairs are numbered one after the other."""
        if pair == 0:
            return cells
        send = cells.send_line + sum(one.have.num_regions for one in self.pairs[:pair])
        receive = cells.receive_line + sum(one.want.num_regions for one in self.pairs[:pair])
        return replace(cells, send_line=send, receive_line=receive)


def _lines(grid: Grid) -> LineSet:
    """One line per region; members in rising order, whatever the order of the mesh."""
    members = grid.holders(np.arange(grid.num_regions))
    return LineSet(np.arange(len(members) + 1) * members.shape[1], members.reshape(-1))
