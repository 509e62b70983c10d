"""What each rank holds, as rows of a table; ranks that hold the same share a row.

>>> from reshard.layout.mesh import Mesh
>>> for row in holdings(Layout(Mesh(dp=2, tp=2), "tp -"), (8, 6)).rows:
...     print(row.ranks, row.coords, row.local_shape, row.text)
(0, 2) {'tp': 0} (4, 6) [0:4, 0:6]
(1, 3) {'tp': 1} (4, 6) [4:8, 0:6]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from reshard.layout.grid import Grid, Ints, grids_of
from reshard.layout.layout import BoxLayout, Layout

__all__ = ["Holding", "Holdings", "holdings"]

MAX_RUNS = 3
"""Runs of a dim, or boxes, that a text lists."""


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

    rows: tuple[Holding, ...]
    num_different: int
    """How many different things ranks hold."""
    num_ranks: int
    """Ranks that hold anything."""
    idle: tuple[int, ...] = ()
    """Ranks of the mesh that hold nothing."""


def holdings(layout: Layout, shape: Sequence[int], most: int = 16) -> Holdings:
    """Group the ranks of a layout by what they hold; describe the first groups."""
    shape = tuple(shape)
    layout.dims(shape)
    regular = _regular(layout)
    grids = grids_of(regular, shape)
    if grids is None:
        groups = _listed_groups(layout, shape)
    else:
        groups = _grid_groups(layout, grids)
    kept = [group for group in groups if prod(layout.local_shape(group[0], shape))]
    rows = tuple(_holding(layout, shape, grids, group) for group in kept[:most])
    holders = {rank for group in kept for rank in group}
    idle = tuple(rank for rank in layout.ranks if rank not in holders)
    return Holdings(rows, len(kept), len(holders), idle)


def _regular(layout: Layout) -> Layout:
    """The layout with the ranks it lost, for which there may be tables."""
    if isinstance(layout, BoxLayout) or not layout.words.without:
        return layout
    return Layout(layout.mesh, replace(layout.words, without=()))


def _grid_groups(layout: Layout, grids: Iterable[Grid]) -> list[tuple[int, ...]]:
    grids = tuple(grids)
    regions = np.stack([grid.region_at for grid in grids], axis=1)
    ranks = grids[0].ranks
    lost = np.array(layout.words.without, dtype=np.int64)
    held = np.flatnonzero((regions >= 0).any(axis=1) & ~np.isin(ranks, lost))
    _, first, inverse = np.unique(regions[held], axis=0, return_index=True, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    groups = np.split(ranks[held][order], np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    return [tuple(sorted(map(int, groups[i]))) for i in np.argsort(first)] if len(held) else []


def _listed_groups(layout: Layout, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    groups: dict[object, list[int]] = {}
    for rank in layout.ranks:
        key = tuple(piece.box for piece in layout.pieces(rank, shape))
        if key:
            groups.setdefault(key, []).append(rank)
    return [tuple(sorted(group)) for group in groups.values()]


def _holding(
    layout: Layout, shape: tuple[int, ...], grids: Sequence[Grid] | None, ranks: tuple[int, ...]
) -> Holding:
    if grids is None:
        boxes = [piece.box for piece in layout.pieces(ranks[0], shape)]
        text = _some([str(box) for box in boxes], "boxes")
    else:
        found = ((grid, grid.region_of(ranks[0])) for grid in grids)
        texts = [_region_text(grid, region) for grid, region in found if region is not None]
        text = _some([one for one in texts if one], "boxes")
    return Holding(ranks, _common(layout, ranks), layout.local_shape(ranks[0], shape), text)


def _region_text(grid: Grid, region: int) -> str:
    """A region as the runs it has in each dim; empty where it has no elements."""
    parts = grid.parts_of(np.array([region]))
    runs = [_runs(d.starts, d.stops, d.parts == p) for d, p in zip(grid.dims, parts, strict=True)]
    return f"[{', '.join(runs)}]" if all(runs) else ""


def _runs(starts: Ints, stops: Ints, mine: Ints) -> str:
    pairs = zip(starts[mine][: MAX_RUNS + 1], stops[mine], strict=False)
    return _some([f"{low}:{high}" for low, high in pairs], "runs", int(np.count_nonzero(mine)), "+")


def _some(texts: Sequence[str], what: str, count: int | None = None, between: str = " ") -> str:
    """The first few of many.

    >>> _some(["0:2", "4:6", "8:10", "12:14"], "runs", 64, "+")
    '0:2+4:6+...64 runs'
    """
    count = len(texts) if count is None else count
    if count <= MAX_RUNS:
        return between.join(texts)
    return between.join([*texts[: MAX_RUNS - 1], f"...{count:,} {what}"])


def _common(layout: Layout, ranks: tuple[int, ...]) -> dict[str, int]:
    if isinstance(layout, BoxLayout):
        return {}
    first = layout.mesh.coords(ranks[0])
    sample = [layout.mesh.coords(rank) for rank in ranks]
    return {axis: at for axis, at in first.items() if all(at == c[axis] for c in sample)}
