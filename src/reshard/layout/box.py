"""A box is a half-open region of a tensor: which elements, in global coordinates?

A piece is a box that a rank holds, with its address in that rank's local tensor.

>>> a = Box((0, 0), (4, 6))
>>> a & Box((2, 3), (9, 9))
Box((2, 3), (4, 6))
>>> [str(part) for part in a - Box((1, 0), (2, 6))]
['[0:1, 0:6]', '[2:4, 0:6]']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import ge, index, le, mul, sub

from reshard.errors import BoxError, LayoutError

MAX_PIECES = 1 << 22  # pieces of one tensor on one rank; beyond, listing them would not end
Interval = tuple[int, int]  # start and stop of a half-open range of indices


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region from ``start`` up to but not including ``stop``, one number per dim.

    >>> box = Box((2, 0), (5, 4))
    >>> box.shape, box.size, str(box)
    ((3, 4), 12, '[2:5, 0:4]')
    """

    start: tuple[int, ...]
    """The first index of each dim."""
    stop: tuple[int, ...]
    """One past the last index of each dim."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(map(index, self.start)))
        object.__setattr__(self, "stop", tuple(map(index, self.stop)))
        if len(self.start) != len(self.stop):
            raise BoxError(
                f"box start {self.start} has {len(self.start)} dims and stop {self.stop} has "
                f"{len(self.stop)}: give one start and one stop per dim"
            )
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= low <= high:
                raise BoxError(
                    f"box dim {dim} goes from {low} to {high}: "
                    "a box is half-open and needs 0 <= start <= stop"
                )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """How long the box is in each dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """The number of elements; 1 for the only box of a 0-d tensor."""
        return prod(map(sub, self.stop, self.start))

    def __str__(self) -> str:
        pairs = zip(self.start, self.stop, strict=True)
        return "[" + ", ".join(f"{low}:{high}" for low, high in pairs) + "]"

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"

    def __contains__(self, other: Box) -> bool:
        self._same_dims(other)
        inside = all(map(le, self.start, other.start)) and all(map(ge, self.stop, other.stop))
        return inside or other.size == 0

    def __and__(self, other: Box) -> Box:
        """The common region; of size 0 where there is none."""
        self._same_dims(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(max, start, map(min, self.stop, other.stop)))
        return Box(start, stop)

    def __sub__(self, other: Box) -> tuple[Box, ...]:
        """What is left of this box without the other, as disjoint boxes."""
        hole = self & other
        if hole.size == 0:
            return (self,) if self.size else ()
        rest, parts = self, list[Box]()
        for dim in range(len(self.start)):
            before, rest = rest.split(dim, hole.start[dim])
            rest, after = rest.split(dim, hole.stop[dim])
            parts += before, after
        return tuple(part for part in parts if part.size)

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """The two boxes before and from index ``at`` of a dim.

        >>> Box((0, 0), (4, 6)).split(1, 2)
        (Box((0, 0), (4, 2)), Box((0, 2), (4, 6)))
        """
        at = min(max(at, self.start[dim]), self.stop[dim])
        stop = (*self.stop[:dim], at, *self.stop[dim + 1 :])
        start = (*self.start[:dim], at, *self.start[dim + 1 :])
        return Box(self.start, stop), Box(start, self.stop)

    def slabs(self, limit: int) -> Iterator[Box]:
        """The box in parts of at most ``limit`` elements, in row-major order.

        >>> [str(part) for part in Box((0, 0), (5, 4)).slabs(8)]
        ['[0:2, 0:4]', '[2:4, 0:4]', '[4:5, 0:4]']
        """
        shape = self.shape
        if self.size <= limit:
            if self.size:
                yield self
            return
        dim = next(dim for dim in range(len(shape)) if shape[dim] > 1)
        rows = max(limit // (self.size // shape[dim]), 1)
        for low in range(self.start[dim], self.stop[dim], rows):
            _, part = self.split(dim, low)
            yield from part.split(dim, low + rows)[0].slabs(limit)

    def shift(self, by: Sequence[int]) -> Box:
        """The same box, moved by so many elements in each dim."""
        return Box(
            tuple(low + d for low, d in zip(self.start, by, strict=True)),
            tuple(high + d for high, d in zip(self.stop, by, strict=True)),
        )

    def _same_dims(self, other: Box) -> None:
        if len(self.start) != len(other.start):
            raise BoxError(
                f"box {self} has {len(self.start)} dims and box {other} has {len(other.start)}: "
                "only boxes of one tensor can be compared"
            )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of this shape.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements ``start`` to ``stop`` of a flattened tensor, in order.

    A range of a tensor of N dims is at most 2 N - 1 boxes: a ragged head, a body, a ragged tail.

    >>> [str(box) for box in flat_range((4, 5), 3, 16)]
    ['[0:1, 3:5]', '[1:3, 0:5]', '[3:4, 0:1]']
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        yield from _within(last, shape[1:], start - last * inner, stop - last * inner)
        return
    yield from _within(first - 1, shape[1:], start - (first - 1) * inner, inner)
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last, *shape[1:]))
    yield from _within(last, shape[1:], 0, stop - last * inner)


def _within(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    boxes = flat_range(shape, start, stop)
    return (Box((row, *box.start), (row + 1, *box.stop)) for box in boxes)


def length_of(intervals: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def select(intervals: Sequence[Interval], positions: list[Interval]) -> list[Interval]:
    """The elements at these positions of a list of intervals; both are in rising order.

    >>> select([(0, 4), (10, 14)], [(1, 2), (3, 6)])
    [(1, 2), (3, 4), (10, 12)]
    """
    if len(intervals) == 1 and intervals[0][0] == 0:
        return positions
    chosen, at, before = list[Interval](), 0, 0
    for start, stop in intervals:
        after = before + stop - start
        while at < len(positions) and positions[at][0] < after:
            low, high = max(positions[at][0], before), min(positions[at][1], after)
            if low < high:
                chosen.append((start + low - before, start + high - before))
            if positions[at][1] > after:
                break
            at += 1
        before = after
    return chosen


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a rank holds, and where it sits in that rank's local tensor, in elements."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def local_pieces(
    intervals: Sequence[Sequence[Interval]], ranges: Iterable[Interval] | None
) -> Iterator[Piece]:
    """The pieces of a rank that holds these intervals of each dim, in their local order.

    Of a flattened tensor it keeps only these ranges of what it would hold.
    """
    local = [*map(length_of, intervals)]
    parts: Iterable[Box] = [Box.whole(local)]
    if ranges is not None:
        parts = (part for low, high in ranges for part in flat_range(local, low, high))
    strides, offset = row_major(local), 0
    for part in parts:
        yield from _global_pieces(intervals, part, strides, offset)
        offset += part.size


def _global_pieces(
    intervals: Sequence[Sequence[Interval]], local: Box, strides: tuple[int, ...], offset: int
) -> Iterator[Piece]:
    """The global boxes behind a box of the local tensor whose first element is at ``offset``."""
    base = offset - sum(map(mul, local.start, strides))
    per_dim = [*map(list, map(_slices, intervals, local.start, local.stop))]
    count = prod(map(len, per_dim))
    if count > MAX_PIECES:
        raise LayoutError(
            f"a rank holds {count} pieces, at most {MAX_PIECES} work: use larger blocks"
        )
    for slices in product(*per_dim):
        starts, stops, positions = zip(*slices, strict=True) if slices else ((), (), ())
        yield Piece(Box(starts, stops), base + sum(map(mul, positions, strides)), strides)


def _slices(intervals: Sequence[Interval], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The global slices (start, stop) of local positions low to high, and where each begins."""
    for start, stop in select(intervals, [(low, high)]):
        yield start, stop, low
        low += stop - start
