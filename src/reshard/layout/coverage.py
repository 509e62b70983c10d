"""Do boxes overlap, and which part of a region do they leave uncovered?

Overlaps. Boxes are first separated by straight cuts, dim after dim, as long as that separates any
further; grids and everything else that straight cuts can make end as single boxes without comparing
any two. The remaining boxes are compared in pairs that meet in the dim where the fewest do.

    +---+-----+        +---+-----+
    |   |     |        |   |     |
    +---+-+---+   ->   +---+-----+   ->   five single boxes
    |     |   |        +-----+---+
    +-----+---+        |     |   |
                       +-----+---+

Gaps. A regular grid, or disjoint boxes of the right total size, have none. Otherwise the region is
halved at an edge of a box, and each half is the same question, until boxes span a half or none is
in it.

    dim 0   0     2     5     6      halved at 5:  [5:6] has no box, a gap
            +--A--+--C--+     |                    [0:5] is halved at 2, and both halves by dim 1:
            +--B--+                                A and B span [0:2]; the gap beside C is left

>>> boxes = [Box((0, 0), (2, 1)), Box((0, 1), (2, 2)), Box((2, 0), (5, 1))]
>>> missing_boxes(Box.whole((6, 2)), boxes)
(Box((2, 1), (5, 2)), Box((5, 0), (6, 2)))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, islice, pairwise, product
from math import inf, prod
from operator import ge, le, lt
from typing import TYPE_CHECKING

from reshard.errors import CoverageError
from reshard.layout.box import Box

if TYPE_CHECKING:
    from reshard.layout.columns import Ints

# numpy is loaded by the functions that need it, so that inspecting a checkpoint does without.

MAX_STEPS = 5_000_000
"""About five seconds of halving. Overlapping boxes can encode any logical formula, for which no
method is fast; the shards of a real job take a few dozen steps for each box."""
MAX_CUT_ROUNDS = 32  # rounds of straight cuts; boxes that are nested deeper are compared in pairs
PAIRS_AT_ONCE = 1 << 18
MAX_PAIRS = 1 << 20
"""Pairs compared before `missing_boxes` gives up proving that boxes are disjoint, and halves."""
MAX_REPEATED = 1000  # regions that are listed: a hundred boxes that all overlap have millions
FEW_BOXES = 8
STEPS_PER_PART = 8


def box_columns(boxes: Sequence[Box], num_dims: int) -> tuple[Ints, Ints]:
    """The starts and the stops of boxes as two tables with one row per box."""
    import numpy as np

    table = (len(boxes), num_dims)
    return (
        np.array([box.start for box in boxes], dtype=np.int64).reshape(table),
        np.array([box.stop for box in boxes], dtype=np.int64).reshape(table),
    )


def overlapping_pairs(
    starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints
) -> tuple[Ints, Ints]:
    """All pairs of rows, one of each list of boxes, that have elements in common.

    The dim with the fewest candidates is searched; the other dims only filter.
    """
    import numpy as np

    from reshard.layout.columns import spread

    ranges = [
        _candidates(starts[:, d], stops[:, d], other_starts[:, d], other_stops[:, d])
        for d in range(starts.shape[1])
    ]
    if not ranges:
        mine, others = np.indices((len(starts), len(other_starts))).reshape(2, -1)
        return mine, others
    order, low, high = min(ranges, key=lambda r: int((r[2] - r[1]).sum()))
    counts = high - low
    if len(ranges) > 1 and counts.sum() > PAIRS_AT_ONCE + 8 * (len(starts) + len(other_starts)):
        return _pairs_by_band(starts, stops, other_starts, other_stops)
    mine, at = spread(low, counts)
    others = order[at]
    begin = np.maximum(starts[mine], other_starts[others])
    meets = np.flatnonzero((begin < np.minimum(stops[mine], other_stops[others])).all(axis=1))
    return mine[meets], others[meets]


def _pairs_by_band(
    starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints
) -> tuple[Ints, Ints]:
    """The same where boxes are small in every dim: found in bands between neighbouring edges.

    A box is in one band or more of every dim but the last; boxes of equal bands are searched by the
    last dim.
    """
    import numpy as np

    from reshard.layout.columns import distinct, numbered, spread

    low, high = np.concatenate([starts, other_starts]), np.concatenate([stops, other_stops])
    rows = np.flatnonzero((low < high).all(axis=1))
    bands = np.zeros(len(rows), dtype=np.int64)
    for dim in range(low.shape[1] - 1):
        edges = distinct(np.concatenate([low[:, dim], high[:, dim]]))
        first = np.searchsorted(edges, low[rows, dim])
        at, band = spread(first, np.searchsorted(edges, high[rows, dim]) - first)
        _, bands = numbered(bands[at] * len(edges) + band)
        rows = rows[at]
    # Ordinals instead of indices, so that the sum with the bands does not overflow.
    edges, ends = numbered(np.concatenate([low[rows, -1], high[rows, -1]]))
    begin, end = bands * len(edges) + ends.reshape(2, -1)
    mine, others = np.flatnonzero(rows < len(starts)), np.flatnonzero(rows >= len(starts))
    order, first, last = _candidates(begin[mine], end[mine], begin[others], end[others])
    one, at = spread(first, last - first)
    one, other = mine[one], others[order[at]]
    meets = (begin[one] < end[other]) & (begin[other] < end[one])
    pairs = rows[one[meets]] * len(other_starts) + rows[other[meets]] - len(starts)
    return np.divmod(distinct(pairs), len(other_starts))


def _candidates(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, ...]:
    """For each interval the range of others, in order of their starts, that may overlap it."""
    import numpy as np

    order = np.argsort(other_start, kind="stable")
    furthest = np.maximum.accumulate(other_stop[order]) if len(order) else other_stop
    low = np.searchsorted(furthest, start, side="right")
    high = np.searchsorted(other_start[order], stop, side="left")
    return order, low, np.maximum(low, high)


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes with an element in common, or None if all are disjoint.

    >>> first_overlap([Box((0,), (3,)), Box((5,), (6,)), Box((2,), (5,))])
    (0, 2)
    """
    if len(boxes) < 2:
        return None
    if len(boxes) <= FEW_BOXES:
        pairs = combinations(range(len(boxes)), 2)
        return next((pair for pair in pairs if _overlap(*(boxes[i] for i in pair))), None)
    return first_overlapping_rows(*box_columns(boxes, len(boxes[0].start)))


def first_overlapping_rows(starts: Ints, stops: Ints) -> tuple[int, int] | None:
    """The same for boxes as columns."""
    return next((pair for pair in _overlaps(starts, stops) if pair is not None), None)


def _overlap(one: Box, other: Box) -> bool:
    meets = all(map(lt, one.start, other.stop)) and all(map(lt, other.start, one.stop))
    return meets and bool(one.size) and bool(other.size)


def _overlaps(starts: Ints, stops: Ints) -> Iterator[tuple[int, int] | None]:
    """The first overlapping pair of each batch of compared pairs; None for a batch without one."""
    import numpy as np

    from reshard.layout.columns import numbered

    rows = np.flatnonzero((starts < stops).all(axis=1))
    if not starts.shape[1]:
        yield (0, 1) if len(rows) > 1 else None  # a tensor of 0 dims has only one element
        return
    # Ordinals instead of indices: groups are kept apart by an offset, which must not overflow.
    ends = [numbered(edges)[1] for edges in np.concatenate([starts[rows], stops[rows]]).T]
    low, high = np.stack(ends, axis=1).reshape(2, len(rows), len(ends))
    width = 2 * len(rows)
    groups = _separated(low, high, width)
    together = np.flatnonzero(np.bincount(groups)[groups] > 1) if len(rows) else rows
    rows, offset = rows[together], groups[together, None] * width
    low, high = low[together] + offset, high[together] + offset
    for one, other in _pairs_by_dim(low, high):
        meets = (low[one] < high[other]) & (low[other] < high[one])
        hits = np.flatnonzero(meets.all(axis=1))
        if len(hits):
            a, b = int(rows[one[hits[0]]]), int(rows[other[hits[0]]])
            yield min(a, b), max(a, b)
        else:
            yield None


def _separated(low: Ints, high: Ints, width: int) -> Ints:
    """A number for every box: straight cuts separate boxes with different numbers."""
    import numpy as np

    groups = np.zeros(len(low), dtype=np.int64)
    for _ in range(MAX_CUT_ROUNDS if len(low) else 0):
        before = int(groups.max())
        for dim in range(low.shape[1]):
            start, stop = low[:, dim] + groups * width, high[:, dim] + groups * width
            order = np.argsort(start, kind="stable")
            reach = np.maximum.accumulate(stop[order])
            groups = np.zeros(len(low), dtype=np.int64)
            groups[order[1:]] = np.cumsum(start[order[1:]] >= reach[:-1])
        if int(groups.max()) in (before, len(low) - 1):
            break
    return groups


def _pairs_by_dim(low: Ints, high: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of rows that overlap in the dim where the fewest do, in batches."""
    import numpy as np

    from reshard.layout.columns import blocks, spread

    searches = []
    for start, stop in zip(low.T, high.T, strict=True):
        order = np.argsort(start, kind="stable")
        counts = np.searchsorted(start[order], stop[order]) - np.arange(1, len(order) + 1)
        searches.append((order, counts))
    order, counts = min(searches, key=lambda search: int(search[1].sum()))
    for some in blocks(counts, PAIRS_AT_ONCE):
        rows = slice(some.start, some.stop)
        one, other = spread(np.arange(some.start + 1, some.stop + 1), counts[rows])
        yield order[rows][one], order[other]


def missing_boxes(region: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The part of a region that no box covers, as disjoint boxes.

    >>> missing_boxes(Box((0,), (9,)), [Box((0,), (3,)), Box((2,), (6,))])
    (Box((6,), (9,)),)
    """
    present = {*_clipped(region, boxes)}
    if not region.size or region in present or _is_partition(present, region):
        return ()
    return _joined(_parts(region, present, 0, 0))


def repeated_boxes(region: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The part of a region that several boxes cover, as at most 1,000 disjoint boxes.

    >>> repeated_boxes(Box.whole((4,)), [Box((0,), (3,)), Box((2,), (4,))])
    (Box((2,), (3,)),)
    """
    present = _clipped(region, boxes)
    if len(present) < 2 or _is_partition(present, region):
        return ()
    return _joined(islice(_parts(region, present, 2, inf), MAX_REPEATED))


def grid_edges(boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...] | None:
    """The edges of each dim if the boxes are all cells of a grid, each once; otherwise None.

    >>> grid_edges([Box((0, 0), (2, 3)), Box((2, 0), (3, 3))])
    ((0, 2, 3), (0, 3))
    """
    boxes = [*boxes]
    if not boxes:
        return None
    starts = [sorted(set(dim)) for dim in zip(*(box.start for box in boxes), strict=True)]
    ends = [max(dim) for dim in zip(*(box.stop for box in boxes), strict=True)]
    if prod(map(len, starts)) != len(boxes):
        return None
    edges = tuple((*dim, end) for dim, end in zip(starts, ends, strict=True))
    cells = {tuple(zip(box.start, box.stop, strict=True)) for box in boxes}
    return edges if cells.issuperset(product(*map(pairwise, edges))) else None


def _clipped(region: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of boxes inside a region, without boxes that have no element there."""
    return [part for part in (box if box in region else box & region for box in boxes) if part.size]


def _is_partition(boxes: Collection[Box], region: Box) -> bool:
    """Whether boxes cover a region, each element once; False also where that is not quickly seen.

    Disjoint boxes with as many elements as the region leave nothing out.
    """
    if sum(box.size for box in boxes) != region.size:
        return False
    if grid_edges(boxes) is not None:
        return True
    batches = _overlaps(*box_columns([*boxes], len(region.start)))
    disjoint = all(pair is None for pair in islice(batches, MAX_PAIRS // PAIRS_AT_ONCE))
    return disjoint and next(batches, batches) is batches


def _parts(region: Box, boxes: Collection[Box], least: float, most: float) -> Iterator[Box]:
    """The parts of a region that at least and at most so many boxes cover, as disjoint boxes.

    A part that boxes cover unevenly is halved where boxes begin or end, in the dim where most do.
    """
    pending, steps = [(region.start, region.stop, [*boxes])], 0
    while pending:
        low, high, inside = pending.pop()
        spanning = sum(
            all(map(le, box.start, low)) and all(map(ge, box.stop, high)) for box in inside
        )
        if spanning > most or len(inside) < least:
            continue
        if spanning >= least and len(inside) <= most:
            yield Box(low, high)
            continue
        steps += len(inside) + STEPS_PER_PART
        if steps > MAX_STEPS:
            raise CoverageError(
                f"{len(boxes)} boxes in {region} overlap so irregularly that {MAX_STEPS} "
                "steps do not show what is missing: use fewer or disjoint boxes"
            )
        starts = zip(*(box.start for box in inside), strict=True)
        stops = zip(*(box.stop for box in inside), strict=True)
        edges = [
            sorted(edge for edge in {*begins, *ends} if first < edge < last)
            for begins, ends, first, last in zip(starts, stops, low, high, strict=True)
        ]
        dim = max(range(len(edges)), key=lambda dim: len(edges[dim]))
        middle = edges[dim][len(edges[dim]) // 2]
        after = [box for box in inside if box.stop[dim] > middle]
        before = [box for box in inside if box.start[dim] < middle]
        pending.append(((*low[:dim], middle, *low[dim + 1 :]), high, after))
        pending.append((low, (*high[:dim], middle, *high[dim + 1 :]), before))


def _joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes in order, those joined that touch in one dim and are equal in the others."""
    joined = sorted(boxes)
    for dim in reversed(range(len(joined[0].start) if joined else 0)):
        ends: dict[tuple[object, int], Box] = {}  # by its other dims, and where it ends in this one
        for box in joined:
            others = box.start[:dim], box.stop[:dim], box.start[dim + 1 :], box.stop[dim + 1 :]
            before = ends.pop((others, box.start[dim]), None)
            ends[others, box.stop[dim]] = Box(before.start, box.stop) if before else box
        joined = sorted(ends.values())
    return tuple(joined)
