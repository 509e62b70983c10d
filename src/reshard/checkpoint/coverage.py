"""Are the boxes of a tensor all of it? What is missing, and what is there more than once?

Most tensors are cut into a regular grid, which is seen at once. Others are swept slab by slab:
between two neighbouring edges of a dim the boxes that are present do not change, so the question
is the same one with a dim less.

    dim 0   0     2     5     6         slab [0:2]  boxes A, B    dim 1: A B cover it
            +--A--+--C--+     |         slab [2:5]  box C         dim 1: C covers a part
            +--B--+                     slab [5:6]  none          a hole

>>> holes_of((6, 2), [Box((0, 0), (2, 1)), Box((0, 1), (2, 2)), Box((2, 0), (5, 1))])
(Box((2, 1), (5, 2)), Box((5, 0), (6, 2)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

from reshard.box import Box

__all__ = ["doubled_in", "grid_of", "holes_of"]

Edges = tuple[tuple[int, ...], tuple[int, ...]]


def holes_of(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """What no box covers of a tensor of this shape, as disjoint boxes."""
    whole = Box.whole(shape)
    present = {box for box in boxes if box.size}
    if not whole.size or whole in present or _fills(present, whole):
        return ()
    return _regions(whole, present, lambda count: count == 0)


def doubled_in(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """What several boxes cover, as disjoint boxes: replicas, which should be equal.

    >>> doubled_in((4,), [Box((0,), (3,)), Box((2,), (4,))])
    (Box((2,), (3,)),)
    """
    whole = Box.whole(shape)
    present = [box for box in boxes if box.size]
    if len(present) < 2 or (_fills(set(present), whole) and len(set(present)) == len(present)):
        return ()
    return _regions(whole, present, lambda count: count > 1)


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


def _regions(whole: Box, boxes: Iterable[Box], wanted: Callable[[int], bool]) -> tuple[Box, ...]:
    """The regions that a wanted number of boxes cover."""
    return tuple(Box(*edges) for edges in _sweep(whole, [*boxes], 0, wanted))


def _sweep(
    whole: Box, boxes: Sequence[Box], dim: int, wanted: Callable[[int], bool]
) -> Iterator[Edges]:
    """The regions within the dims from ``dim`` on, as starts and stops of those dims."""
    if dim == len(whole.start):
        if wanted(len(boxes)):
            yield (), ()
        return
    begin: int | None = None
    end, before, inner = 0, [], []  # type: int, list[Box], list[Edges]
    for low, high, present in _slabs(whole, boxes, dim):
        if begin is None or not _same(present, before):
            yield from _within(begin, end, inner)
            begin, before, inner = low, present, [*_sweep(whole, present, dim + 1, wanted)]
        end = high
    yield from _within(begin, end, inner)


def _within(begin: int | None, end: int, inner: Sequence[Edges]) -> Iterator[Edges]:
    for starts, stops in inner:
        yield (begin or 0, *starts), (end, *stops)


def _same(some: Sequence[Box], others: Sequence[Box]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _slabs(whole: Box, boxes: Sequence[Box], dim: int) -> Iterator[tuple[int, int, list[Box]]]:
    """A dim from edge to edge, with the boxes that span it there."""
    low, high = whole.start[dim], whole.stop[dim]
    edges = {low, high, *(box.start[dim] for box in boxes), *(box.stop[dim] for box in boxes)}
    waiting = sorted(boxes, key=lambda box: box.start[dim], reverse=True)
    present: list[Box] = []
    for start, stop in pairwise(sorted(edge for edge in edges if low <= edge <= high)):
        present = [box for box in present if box.stop[dim] > start]
        while waiting and waiting[-1].start[dim] <= start:
            present.append(waiting.pop())
        yield start, stop, present
