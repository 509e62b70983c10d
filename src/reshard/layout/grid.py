"""The regions of a regular layout as integer columns: who holds which part of each dim?

A regular layout cuts each dim by itself. Its dims are small tables of intervals, a region is one
part per dim, and the ranks that hold a region follow by arithmetic from the strides of the mesh:

    place in the mesh = place of the region + one of the offsets of its replicas

What no table can say (explicit boxes, flattened tensors, lost ranks) is listed in ``boxlist``.
Neither knows where an element sits in a local tensor: that is a question to the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from reshard.errors import LayoutError
from reshard.layout.box import row_major
from reshard.layout.columns import Ints, distinct, sized_cache
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.words import Cut, Cuts, Packed, axes_of, is_mixed, placed_segments, tiling

MAX_BOXES = 1 << 26  # boxes that are listed at once; beyond, memory would not suffice


@dataclass(frozen=True, eq=False, slots=True)
class DimTable:
    """The intervals of one dim in rising order, and the part that holds each."""

    starts: Ints
    stops: Ints
    parts: Ints
    places: Ints  # what each part adds to the place of a region in the mesh
    axes: tuple[str, ...]  # the axes that cut the dim

    @property
    def num_parts(self) -> int:
        """How many parts the dim is cut into; some may be empty."""
        return len(self.places)


@dataclass(frozen=True, eq=False)
class Grid:
    """Regions that are products of one part per dim, each held by equally many ranks."""

    mesh: Mesh
    dims: tuple[DimTable, ...]
    replicas: Ints  # offsets of the ranks that hold a region, or an addend of it, from its place

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.num_parts for dim in self.dims)

    @cached_property
    def num_regions(self) -> int:
        return prod(self.shape)

    @cached_property
    def ranks(self) -> Ints:
        """The rank at each place of the mesh."""
        return _array(self.mesh.ranks)

    def parts_of(self, regions: Ints) -> tuple[Ints, ...]:
        return np.unravel_index(regions, self.shape) if self.dims else ()

    def holders(self, regions: Ints) -> Ints:
        """The ranks that hold each region, or an addend of it, one row of rising ranks each."""
        places = np.zeros(len(regions), dtype=np.int64)
        for dim, parts in zip(self.dims, self.parts_of(regions), strict=True):
            places += dim.places[parts]
        return np.sort(self.ranks[places[:, None] + self.replicas], axis=1)

    @cached_property
    def region_at(self) -> Ints:
        """The region of each place of the mesh, or -1 where nothing is held."""
        at = np.full(self.mesh.num_ranks, -1, dtype=np.int64)
        places = _sums(dim.places for dim in self.dims)
        at[places[:, None] + self.replicas] = np.arange(self.num_regions)[:, None]
        return at

    def region_of(self, rank: int) -> int | None:
        place = self.mesh.index(rank)
        region = -1 if place is None else int(self.region_at[place])
        return None if region < 0 else region

    def boxes(self) -> tuple[Ints, Ints, Ints]:
        """All boxes: their starts, their stops, and the region each is of."""
        counts = [len(dim.starts) for dim in self.dims]
        count = prod(counts)
        if count > MAX_BOXES:
            raise LayoutError(f"{count} boxes at once, at most {MAX_BOXES} work: use larger blocks")
        index = np.indices(counts).reshape(len(counts), count)
        pairs = list(zip(self.dims, index, strict=True))
        parts = [dim.parts[i] for dim, i in pairs]
        regions = np.ravel_multi_index(parts, self.shape) if parts else np.zeros(1, np.int64)
        return (
            stacked([dim.starts[i] for dim, i in pairs], count),
            stacked([dim.stops[i] for dim, i in pairs], count),
            regions.astype(np.int64),
        )


def stacked(arrays: Sequence[Ints], count: int) -> Ints:
    """One column per dim and ``count`` rows, also where there is no dim."""
    return np.stack(arrays, axis=1) if arrays else np.zeros((count, 0), dtype=np.int64)


def _grids_bytes(grids: tuple[Grid, ...], layout: Layout, _: object) -> int:
    """About how much memory grids take, with the tables of ranks that they make later."""
    arrays = [a for g in grids for d in g.dims for a in (d.starts, d.stops, d.parts, d.places)]
    return layout.num_bytes + 32 * len(layout.ranks) * len(grids) + sum(a.nbytes for a in arrays)


@sized_cache(64 << 20, _grids_bytes)
def grids_of(layout: Layout, shape: tuple[int, ...]) -> tuple[Grid, ...] | None:
    """The grids that make up a regular layout, or None for a layout that must be listed.

    There is one grid, unless segments of a packed dim are cut by different axes.
    """
    if isinstance(layout, BoxLayout) or layout.words.flat or layout.words.without:
        return None
    per_dim = []
    for cuts, size in zip(layout.dims(shape), shape, strict=True):
        try:
            groups = _groups(cuts, size)
            if groups is None:
                return None
            per_dim.append([_table(layout, group) for group in groups])
        except LayoutError as error:
            raise LayoutError(f'layout "{layout}" on mesh {layout.mesh}: {error}') from None
    grids, on, mesh = [], dict(layout.words.on), layout.mesh
    for dims in product(*per_dim):
        used = {axis for dim in dims for axis in dim.axes}
        replicas = _sums(
            _array(on.get(axis, range(size))) * mesh.stride(axis)
            for axis, size in mesh.axes.items()
            if axis not in used
        )
        grids.append(Grid(mesh, dims, replicas))
    return tuple(grids)


_Group = list[tuple[int, int, Cuts]]
"""Segments of a dim that name the same axes: where each starts, its length and its cuts."""


def _groups(cuts: Cuts, size: int) -> list[_Group] | None:
    if not is_mixed(cuts):
        return [[(0, size, cuts)]]
    packed = cuts[0]
    if len(cuts) > 1 or not isinstance(packed, Packed):
        return None
    if any(is_mixed(segment.cuts) for segment in packed.segments):
        return None
    groups: dict[frozenset[str], _Group] = {}
    for segment in placed_segments(packed, size):
        groups.setdefault(frozenset(axes_of(segment[2])), []).append(segment)
    return list(groups.values())


def _table(layout: Layout, group: _Group) -> DimTable:
    axes, mesh = axes_of(group[0][2]), layout.mesh
    places = _sums(np.arange(mesh.axes[axis]) * mesh.stride(axis) for axis in axes)
    return DimTable(*_intervals(layout, group, axes), places, axes)


def _intervals(layout: Layout, group: _Group, axes: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    """Where the intervals of segments start and stop, and the part that holds each."""
    columns = []
    for at, size, cuts in group:
        starts, parts = _partition(layout, cuts, size, axes)
        columns.append((at + starts, at + starts + _widths(starts, size), parts))
    starts, stops, parts = map(np.concatenate, zip(*columns, strict=True))
    return starts, stops, parts


def _partition(layout: Layout, cuts: Cuts, length: int, axes: Sequence[str]) -> tuple[Ints, Ints]:
    """Divide a length by all cuts: where each interval starts, and the part that holds it.

    Parts count row-major over the coordinates of ``axes``.
    """
    starts = np.zeros(1 if length else 0, dtype=np.int64)
    parts = np.zeros_like(starts)
    for cut in cuts:
        starts, parts = _refine(layout, cut, length, starts, parts)
    order = axes_of(cuts)
    if order != tuple(axes):
        sizes = [layout.mesh.axes[axis] for axis in order]
        coords = dict(zip(order, np.unravel_index(parts, sizes), strict=True))
        wanted = [layout.mesh.axes[axis] for axis in axes]
        parts = np.ravel_multi_index([coords[axis] for axis in axes], wanted).astype(np.int64)
    return starts, parts


def _refine(layout: Layout, cut: Cut, length: int, starts: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Cut every part once more, each on its own local positions.

    The local positions of all parts are laid end to end on one line. On it the intervals and the
    new blocks are two ways to divide the same length; their common refinement is the answer.
    """
    widths = _widths(starts, length)
    lengths = np.bincount(parts, weights=widths).astype(np.int64)
    blocks, owners = _blocks(layout, cut, lengths)
    order = np.argsort(parts, kind="stable")
    line = np.cumsum(widths[order]) - widths[order]
    edges = distinct(np.concatenate([line, blocks]))
    at = np.searchsorted(line, edges, side="right") - 1
    refined = starts[order][at] + edges - line[at]
    owner = owners[np.searchsorted(blocks, edges, side="right") - 1]
    rising = np.argsort(refined)
    return refined[rising], owner[rising]


def _widths(starts: Ints, length: int) -> Ints:
    return np.concatenate([starts[1:], [length]])[: len(starts)] - starts


def _blocks(layout: Layout, cut: Cut, lengths: Ints) -> tuple[Ints, Ints]:
    """The blocks of every part on the line, and the new part that holds each."""
    axes = axes_of((cut,))
    num = prod(layout.mesh.axes[axis] for axis in axes)
    base = np.cumsum(lengths) - lengths
    starts, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for length in distinct(lengths[lengths > 0]).tolist():
        if isinstance(cut, Packed):
            block, _, owner = _intervals(layout, placed_segments(cut, length), axes)
        else:
            block, owner = map(_array, tiling(cut, length, num))
        alike = np.flatnonzero(lengths == length)
        starts.append((base[alike][:, None] + block).ravel())
        owners.append((alike[:, None] * num + owner).ravel())
    start, owner = np.concatenate(starts), np.concatenate(owners)
    order = np.argsort(start)
    return start[order], owner[order]


def _sums(columns: Iterable[Ints]) -> Ints:
    """All sums of one number of each column; the last column varies fastest."""
    sums = np.zeros(1, dtype=np.int64)
    for column in columns:
        sums = (sums[:, None] + column).ravel()
    return sums


def _array(values: Sequence[int]) -> Ints:
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=np.int64)
    return np.array(values, dtype=np.int64)


@sized_cache(16 << 20, lambda addends, layout: 128 * len(addends) + layout.num_bytes)
def addend_of(layout: Layout) -> dict[int, int]:
    """Which addend of a pending reduction each rank holds; empty where nothing is pending.

    Addends count row-major over the reduced axes as the layout lists them: in the order of the
    mesh, on an ordinary mesh, they count in rank order.
    """
    if layout.reduce is None:
        return {}
    axes = layout.reduce[1]
    strides = row_major([layout.mesh.axes[axis] for axis in axes])
    places = map(layout.mesh.coords, layout.ranks)
    addends = (sum(at[axis] * by for axis, by in zip(axes, strides, strict=True)) for at in places)
    return dict(zip(layout.ranks, addends, strict=True))


def num_addends(layout: Layout) -> int:
    """How many addends are pending; 1 where none is."""
    return prod(layout.mesh.axes[axis] for axis in layout.reduce[1]) if layout.reduce else 1
