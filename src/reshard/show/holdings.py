"""Who holds what of a tensor: as cells of a picture, and as rows of a table.

A picture is of at most two sharded dims. Its cells end where any box of the layout ends. Where that
would be more cells than can be drawn, neighbours are merged: such a cell has several parts, on
different ranks. In the table, ranks that hold the same share a row.

>>> from reshard.layout.mesh import Mesh
>>> picture = picture_of(Layout(Mesh(dp=2, tp=2), "dp tp"), (8, 6), most=(4, 4))
>>> picture.rows, picture.columns
((0, 4, 8), (0, 3, 6))
>>> [[str(cell) for cell in row] for row in picture.cells]
[['0', '1'], ['2', '3']]
>>> merged = picture_of(Layout(Mesh(dp=64), "dp"), (1024,), most=(1, 4))
>>> [str(cell) for cell in merged.cells[0]]
['0..15', '16..31', '32..47', '48..63']
>>> for row in holdings(Layout(Mesh(dp=2, tp=2), "tp -"), (8, 6)).rows:
...     print(row.ranks, row.coords, row.local_shape, row.text)
(0, 2) {'tp': 0} (4, 6) [0:4, 0:6]
(1, 3) {'tp': 1} (4, 6) [4:8, 0:6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from typing import TypeVar

import numpy as np

from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints
from reshard.layout.grid import Grid, grids_of
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import format_ranks

T = TypeVar("T")

MAX_BOXES = 200_000
"""More boxes than this are not worth listing for a drawing."""
MAX_RUNS = 3
"""Runs of a dim, or boxes, that a text lists."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A region of the drawing and the ranks that hold it."""

    ranks: tuple[int, ...]
    """All that hold any part of it, in rising order."""
    num_parts: int = 1
    """1 where every rank holds all of it; more where neighbours were merged."""
    whole: bool = True
    """False where no rank holds some of it."""

    def text(self, most: int) -> str:
        """The ranks in at most so many characters, if that is possible.

        >>> Cell((0, 4, 8, 12)).text(8), Cell((0, 4, 8, 12)).text(5), Cell(()).text(9)
        ('0,4,8,12', '0+3', 'none')
        """
        if not self.ranks:
            return "none" if most >= 6 else "?"
        first, last, more = self.ranks[0], self.ranks[-1], len(self.ranks) - 1
        if self.num_parts > 1 and more:
            return f"{first}..{last}" if len(f"{first}..{last}") <= most else f"{first}.."
        full = format_ranks(self.ranks)
        return full if len(full) <= most else f"{first}+{more}"

    def __str__(self) -> str:
        return self.text(1000)


@dataclass(frozen=True, slots=True)
class Picture:
    """Cells in rows and columns, and where these begin and end in the tensor."""

    shape: tuple[int, ...]
    """The sizes of the dims that are drawn, one or two."""
    rows: tuple[int, ...]
    """The edges of the rows; (0, 1) for a 1-d tensor."""
    columns: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    dims: tuple[int, ...]
    """Which dims of the tensor are drawn; no other is sharded."""
    ndim: int


def picture_of(
    layout: Layout,
    shape: Sequence[int],
    most: tuple[int, int],
    dims: tuple[int, ...] | None = None,
) -> Picture | None:
    """Draw a layout with at most so many rows and columns.

    Of a tensor with more than two dims, ``dims`` says which are drawn: all that are sharded. None
    where there is nothing to draw: more dims than two, no elements, or far too many boxes.
    """
    whole = tuple(shape)
    layout.dims(whole)
    dims = tuple(range(len(whole))) if dims is None else dims
    if len(dims) not in (1, 2) or not prod(whole) or num_boxes(layout, whole) > MAX_BOXES:
        return None
    listed, shape = listed_of(layout, whole), tuple(whole[dim] for dim in dims)
    starts, stops = (side[:, list(dims)] for side in (listed.starts, listed.stops))
    if len(dims) == 1:
        flat = np.zeros_like(starts)
        starts, stops = np.hstack([flat, starts]), np.hstack([flat + 1, stops])
    listed = replace(listed, starts=starts, stops=stops)
    lengths = shape if len(shape) == 2 else (1, *shape)
    rows, columns = map(_edges, starts.T, stops.T, lengths, most)
    cells = [[_cell(listed, row, each) for each in pairwise(columns)] for row in pairwise(rows)]
    kept, lows = _joined(cells, rows)
    turned, lefts = _joined([*zip(*kept, strict=True)], columns)
    return Picture(shape, lows, lefts, tuple(zip(*turned, strict=True)), dims, len(whole))


def two_dims(shape: tuple[int, ...], layouts: Sequence[Layout]) -> tuple[int, ...] | None:
    """Which two of three or more dims to draw: those that are sharded, else the last ones.

    None where there are fewer dims, where more are sharded, or where that is too much to look at.

    >>> from reshard.layout.mesh import Mesh
    >>> two_dims((8, 6, 4), [Layout(Mesh(ep=2, tp=2), "ep - tp")])
    (0, 2)
    """
    sharded: set[int] = set()
    for layout in layouts:
        if len(shape) < 3 or not prod(shape) or num_boxes(layout, shape) > MAX_BOXES:
            return None
        listed = listed_of(layout, shape)
        parts = (listed.starts > 0) | (listed.stops < np.array(shape, dtype=np.int64))
        sharded |= set(np.flatnonzero(parts.any(axis=0)).tolist())
    rest = [dim for dim in reversed(range(len(shape))) if dim not in sharded]
    return tuple(sorted([*sharded, *rest[: 2 - len(sharded)]])) if len(sharded) <= 2 else None


def num_boxes(layout: Layout, shape: tuple[int, ...]) -> int:
    """How many boxes listing a layout would give, at least; cheap even where that is a lot.

    >>> from reshard.layout.mesh import Mesh
    >>> num_boxes(Layout(Mesh(x=2, y=2), "x:1 y:1"), (8192, 4096))
    33554432
    """
    if isinstance(layout, BoxLayout):
        return sum(map(len, layout.boxes.values()))
    regular = replace(layout.words, flat=(), without=())
    grids = grids_of(Layout(layout.mesh, regular), shape)
    if grids is None:
        return len(layout.ranks)
    return sum(prod(len(dim.starts) for dim in grid.dims) for grid in grids)


def _edges(starts: Ints, stops: Ints, length: int, most: int) -> Ints:
    """Where rows or columns begin and end: at the ends of boxes, or at every k-th of them."""
    edges = np.unique(np.concatenate([starts, stops, np.array([0, length], dtype=np.int64)]))
    step = -(-(len(edges) - 1) // most)
    return edges if step == 1 else np.unique(np.append(edges[::step], length))


def _cell(listed: Listed, rows: tuple[int, int], columns: tuple[int, int]) -> Cell:
    low, high = np.array([rows, columns]).T
    sides = np.minimum(listed.stops, high) - np.maximum(listed.starts, low)
    boxes = np.flatnonzero((sides > 0).all(axis=1))
    whole = int(sides[boxes].prod(axis=1).sum()) == int((high - low).prod())
    holders = {listed.of(box).tobytes() for box in boxes.tolist()}
    ranks = np.unique(np.frombuffer(b"".join(holders), dtype=np.int64))
    return Cell(tuple(ranks.tolist()), 1 if len(holders) == 1 else len(boxes), whole)


def _joined(
    lines: Sequence[Sequence[Cell]], edges: Ints
) -> tuple[list[Sequence[Cell]], tuple[int, ...]]:
    """Rows or columns without those that look like the one before, and where the rest begin."""
    first = [i for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]
    return [lines[i] for i in first], (*edges[first].tolist(), int(edges[-1]))


@dataclass(frozen=True, slots=True)
class Holding:
    """Ranks that hold the same, and what that is."""

    ranks: tuple[int, ...]
    coords: dict[str, int]
    """The coordinates that all of them have in common."""
    local_shape: tuple[int, ...]
    text: str
    """The boxes, shortened where there are many."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """The first rows of a layout's table, and figures of all of them."""

    rows: Sequence[Holding]
    num_different: int
    """How many different things ranks hold."""
    num_ranks: int
    idle: tuple[int, ...] = ()
    """Ranks of the mesh that hold nothing."""


def holdings(layout: Layout, shape: Sequence[int], most: int = 16) -> Holdings:
    """Group the ranks of a layout by what they hold; describe the first groups."""
    shape = tuple(shape)
    layout.dims(shape)
    lost, whole = set(layout.words.without), layout
    if lost:  # there may be tables for a layout with the ranks that it lost
        whole = Layout(layout.mesh, replace(layout.words, without=()))
    grids = grids_of(whole, shape)
    ranks_of: dict[object, list[int]] = {}
    if grids is None:
        for rank in layout.ranks:
            ranks_of.setdefault(tuple(p.box for p in layout.pieces(rank, shape)), []).append(rank)
    else:
        regions = np.stack([grid.region_at for grid in grids], axis=1).tolist()
        for rank, at in zip(grids[0].ranks.tolist(), regions, strict=True):
            if rank not in lost and max(at) >= 0:
                ranks_of.setdefault(tuple(at), []).append(rank)
    groups = [tuple(sorted(ranks)) for key, ranks in ranks_of.items() if key]
    local = {ranks: layout.local_shape(ranks[0], shape) for ranks in groups}
    groups = [ranks for ranks in groups if prod(local[ranks])]
    rows = []
    for ranks in groups[:most]:
        first, *others = [(layout.holds(rank) or {}).items() for rank in ranks]
        coords = {axis: at for axis, at in first if all((axis, at) in one for one in others)}
        if grids is None:
            pieces = layout.pieces(ranks[0], shape)
            text = _first_few(pieces, lambda piece: str(piece.box), "boxes", " ")
        else:
            boxes = [box for grid in grids if (box := _region_text(grid, ranks[0]))]
            text = _first_few(boxes, str, "boxes", " ")
        rows.append(Holding(ranks, coords, local[ranks], text))
    holders = {*chain(*groups)}
    idle = tuple(rank for rank in layout.ranks if rank not in holders)
    return Holdings(rows, len(groups), len(holders), idle)


def _region_text(grid: Grid, rank: int) -> str:
    """What a rank holds of a grid as the runs of each dim; empty where that is nothing."""
    region = grid.region_of(rank)
    if region is None:
        return ""
    texts = []
    for dim, part in zip(grid.dims, grid.parts_of(np.array(region)), strict=True):
        mine = np.flatnonzero(dim.parts == part)
        runs = list(zip(dim.starts[mine].tolist(), dim.stops[mine].tolist(), strict=True))
        texts.append(_first_few(runs, "{0[0]}:{0[1]}".format, "runs", "+"))
    return f"[{', '.join(texts)}]" if all(texts) else ""


def _first_few(items: Sequence[T], text_of: Callable[[T], str], what: str, between: str) -> str:
    """The first few of many.

    >>> _first_few(range(0, 256, 4), str, "runs", "+")
    '0+4+...64 runs'
    """
    if len(items) <= MAX_RUNS:
        return between.join(map(text_of, items))
    first = map(text_of, items[: MAX_RUNS - 1])
    return between.join([*first, f"...{len(items):,} {what}"])
