"""Are the boxes of a tensor all of it? What is missing, and what is there more than once?

Most tensors are cut into a regular grid, which is seen at once. Others are swept slab by slab:
between two neighbouring edges of a dim the boxes that are present do not change, so the question
is the same one with a dim less. Where the boxes that span all that is left decide the count, no
dim is looked at any more.

    dim 0   0     2     5     6         slab [0:2]  boxes A, B    dim 1: A B cover it
            +--A--+--C--+     |         slab [2:5]  box C         dim 1: C covers a part
            +--B--+                     slab [5:6]  none          a hole

>>> holes_of((6, 2), [Box((0, 0), (2, 1)), Box((0, 1), (2, 2)), Box((2, 0), (5, 1))])
(Box((2, 1), (5, 2)), Box((5, 0), (6, 2)))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import inf, prod
from operator import lt

from reshard.errors import CheckpointError
from reshard.layout.box import Box

__all__ = ["doubled_in", "grid_of", "holes_of"]

Edges = tuple[tuple[int, ...], tuple[int, ...]]

MOST_STEPS = 24_000_000
"""About two seconds. Boxes can say any logical formula, and no method is quick for all of those; a
tensor that a job has cut takes a few hundred steps for each box."""
MOST_PAIRS = 1 << 20
"""Pairs of boxes that are compared to see whether any two overlap."""
MOST_DOUBLED = 1000
"""Regions with replicas that are listed: a hundred boxes that all overlap have millions."""
ENTERED = 32
"""The steps that a slab takes beside those for its boxes."""


def holes_of(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """What no box covers of a tensor of this shape, as disjoint boxes."""
    whole = Box.whole(shape)
    present = {box for box in boxes if box.size}
    if not whole.size or whole in present or _fills(present, whole) or _tiles(present, whole):
        return ()
    return _regions(_Sweep(whole, len(present), 0, 0), present)


def doubled_in(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """What several boxes cover, as disjoint boxes: replicas, which should be equal.

    There is at least one wherever there are replicas; after a thousand the rest is left out.

    >>> doubled_in((4,), [Box((0,), (3,)), Box((2,), (4,))])
    (Box((2,), (3,)),)
    """
    whole = Box.whole(shape)
    present = [box for box in boxes if box.size]
    if len(present) < 2 or (_fills(set(present), whole) and len(set(present)) == len(present)):
        return ()
    if _tiles(present, whole):
        return ()
    return _regions(_Sweep(whole, len(present), 2, inf, MOST_DOUBLED), present)


def grid_of(boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...] | None:
    """The edges of each dim if the boxes are all cells of a grid, each once; else None.

    >>> grid_of([Box((0, 0), (2, 3)), Box((2, 0), (3, 3))])
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
    following = [dict(pairwise(dim)) for dim in edges]
    regular = all(
        after.get(low) == high
        for box in boxes
        for after, low, high in zip(following, box.start, box.stop, strict=True)
    )
    return edges if regular and len({box.start for box in boxes}) == len(boxes) else None


def _fills(boxes: set[Box], whole: Box) -> bool:
    edges = grid_of(boxes)
    if edges is None:
        return False
    limits = zip(edges, whole.start, whole.stop, strict=True)
    return all(dim[0] == low and dim[-1] == high for dim, low, high in limits)


def _tiles(boxes: Collection[Box], whole: Box) -> bool:
    """Whether boxes of any sizes are all of it, each element once; False also if that takes long.

    Boxes that do not overlap and have as many elements as the tensor leave nothing out.
    """
    if not whole.start or sum(box.size for box in boxes) != whole.size:
        return False
    dim = max(range(len(whole.start)), key=lambda dim: len({box.start[dim] for box in boxes}))
    present: list[Box] = []
    pairs = 0
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        present = [other for other in present if other.stop[dim] > box.start[dim]]
        pairs += len(present)
        if pairs > MOST_PAIRS or any(_meet(box, other) for other in present):
            return False
        present.append(box)
    return True


def _meet(one: Box, two: Box) -> bool:
    return all(map(lt, one.start, two.stop)) and all(map(lt, two.start, one.stop))


def _regions(sweep: _Sweep, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The regions that a wanted number of boxes cover."""
    return tuple(Box(*edges) for edges in islice(sweep.regions([*boxes], 0), sweep.limit))


@dataclass(slots=True)
class _Sweep:
    """A tensor that is being swept for regions with a wanted number of boxes."""

    whole: Box
    num_boxes: int
    least: float
    """The boxes that must cover a region, and the most that may."""
    most: float
    limit: int | None = None
    """Regions that are wanted."""
    steps: int = 0

    def regions(self, boxes: Sequence[Box], dim: int) -> Iterator[Edges]:
        """The regions within the dims from ``dim`` on, as starts and stops of those dims."""
        low, high = self.whole.start[dim:], self.whole.stop[dim:]
        self._spend(8 * len(boxes))
        spanning = sum(box.start[dim:] == low and box.stop[dim:] == high for box in boxes)
        if spanning > self.most or len(boxes) < self.least:
            return
        if spanning >= self.least and len(boxes) <= self.most:
            yield low, high
            return
        begin: int | None = None
        end, before, inner = 0, [], []  # type: int, list[Box], list[Edges]
        for start, stop, present in self._slabs(boxes, dim):
            if begin is None or not _same(present, before):
                yield from _within(begin, end, inner)
                begin, before = start, present
                inner = [*islice(self.regions(present, dim + 1), self.limit)]
            end = stop
        yield from _within(begin, end, inner)

    def _slabs(self, boxes: Sequence[Box], dim: int) -> Iterator[tuple[int, int, list[Box]]]:
        """A dim from edge to edge, with the boxes that span it there."""
        low, high = self.whole.start[dim], self.whole.stop[dim]
        edges = {low, high, *(box.start[dim] for box in boxes), *(box.stop[dim] for box in boxes)}
        waiting = sorted(boxes, key=lambda box: box.start[dim], reverse=True)
        present: list[Box] = []
        for start, stop in pairwise(sorted(edge for edge in edges if low <= edge <= high)):
            self._spend(len(present))
            present = [box for box in present if box.stop[dim] > start]
            while waiting and waiting[-1].start[dim] <= start:
                present.append(waiting.pop())
            yield start, stop, present

    def _spend(self, count: int) -> None:
        self.steps += count + ENTERED
        if self.steps > MOST_STEPS:
            raise CheckpointError(
                f"a tensor of shape {self.whole.stop} is stored in {self.num_boxes} boxes that "
                f"overlap so irregularly that {MOST_STEPS} steps do not tell what is missing: save "
                "it again with fewer or disjoint boxes"
            )


def _within(begin: int | None, end: int, inner: Sequence[Edges]) -> Iterator[Edges]:
    for starts, stops in inner:
        yield (begin or 0, *starts), (end, *stops)


def _same(some: Sequence[Box], others: Sequence[Box]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
