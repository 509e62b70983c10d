"""What a rank holds: the intervals of each dim, and the pieces (boxes with an address) they make.

Every word keeps the order of the elements, so a rank's share of a dim is a rising list of
intervals, and where an element sits in the local dim is how many held elements come before it.
That makes nesting simple: the next word acts on the positions 0, 1, 2, ... of that list.

    >>> from reshard.layout.notation import parse
    >>> cuts = parse("(tp:2 dp)").dims[0]
    >>> held(cuts, 10, {"tp": 2, "dp": 2}, {"tp": 0, "dp": 1})
    [(5, 6), (8, 10)]

Here tp=0 holds 0 1 | 4 5 | 8 9, and the second half of those six is 5 8 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

from reshard.errors import LayoutError
from reshard.layout.box import Box, flat_range, row_major
from reshard.layout.words import Chunk, Cut, Cuts, Cyclic, Packed, Ragged, Units, ZigZag, axes_of

__all__ = [
    "Interval",
    "Piece",
    "Tiling",
    "check_sum",
    "held",
    "is_mixed",
    "length_of",
    "pieces_of_flat",
    "pieces_of_local",
    "tiling",
]

MAX_BLOCKS = 1 << 22
"""Blocks of a block-cyclic dim are listed one by one."""
MAX_PIECES = 1 << 22
"""Pieces of one tensor on one rank; beyond, listing them would not end."""

Interval = tuple[int, int]
"""Start and stop of a half-open range of indices."""


def held(
    cuts: Cuts, length: int, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> list[Interval]:
    """The intervals of a dim that one coordinate holds, in rising order."""
    mine = [(0, length)] if length else []
    for cut in cuts:
        mine = _select(mine, _held_by(cut, length_of(mine), sizes, coords))
    return mine


def length_of(intervals: Sequence[Interval]) -> int:
    """How many elements the intervals have together."""
    return sum(stop - start for start, stop in intervals)


def _held_by(
    cut: Cut, length: int, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> list[Interval]:
    """The positions of a local dim that one coordinate keeps after one cut."""
    if not isinstance(cut, Packed):
        return tiling(cut, length, sizes[cut.axis]).of(coords[cut.axis])
    check_sum(cut, [segment.size for segment in cut.segments], length)
    starts = accumulate((segment.size for segment in cut.segments), initial=0)
    return [
        (start + low, start + high)
        for start, segment in zip(starts, cut.segments, strict=False)
        for low, high in held(segment.cuts, segment.size, sizes, coords)
    ]


def _select(intervals: list[Interval], positions: list[Interval]) -> list[Interval]:
    """The elements at these positions of a list of intervals; both are in rising order."""
    if len(intervals) == 1 and intervals[0][0] == 0:
        return positions
    chosen: list[Interval] = []
    first, before = 0, 0
    for low, high in positions:
        while first < len(intervals) and before + _length(intervals[first]) <= low:
            before += _length(intervals[first])
            first += 1
        index, seen = first, before
        while index < len(intervals) and seen < high:
            start, stop = intervals[index]
            chosen.append((start + max(low - seen, 0), min(stop, start + high - seen)))
            seen += stop - start
            index += 1
    return [(start, stop) for start, stop in chosen if stop > start]


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


@dataclass(frozen=True, slots=True)
class Tiling:
    """A length divided into blocks without gaps: where each starts, and which coordinate holds it.

    Ranges stay ranges, so that sixteen thousand shards cost no more than four.
    """

    length: int
    starts: Sequence[int]
    owners: Sequence[int]

    def of(self, owner: int) -> list[Interval]:
        """The blocks of one coordinate."""
        if isinstance(self.owners, range):
            numbers: Sequence[int] = [owner] if owner in self.owners else []
        else:
            numbers = [i for i, other in enumerate(self.owners) if other == owner]
        return [(self.starts[i], self._stop(i)) for i in numbers]

    def _stop(self, number: int) -> int:
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.length


def tiling(cut: Cut, length: int, num: int) -> Tiling:
    """How one word divides a length over the ``num`` coordinates of its axis.

    >>> [tiling(Chunk("tp"), 10, 4).of(c) for c in range(4)]
    [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    >>> tiling(ZigZag("cp"), 8, 2).of(1)
    [(2, 4), (4, 6)]
    """
    match cut:
        case Chunk():
            return _even(length, _ceil(length, num))
        case Units(unit=unit):
            return _even(length, _ceil(_ceil(length, unit), num) * unit)
        case ZigZag():
            return _even(length, _ceil(length, 2 * num), [*range(num), *reversed(range(num))])
        case Cyclic(block=block):
            _check_blocks(cut, length, block)
            return _even(length, block, [*range(num)] * _ceil(length, block * num))
        case Ragged(sizes=sizes):
            return _ragged(cut, sizes, length, num)
        case Packed():
            raise TypeError("a packed word has segments, each with a tiling of its own")


def _check_blocks(cut: Cyclic, length: int, block: int) -> None:
    if _ceil(length, block) > MAX_BLOCKS:
        raise LayoutError(
            f'"{cut}" deals {_ceil(length, block)} blocks of a dim of {length}: at most '
            f"{MAX_BLOCKS} work; use larger blocks"
        )


def _ceil(length: int, parts: int) -> int:
    return -(-length // parts)


def _even(length: int, block: int, owners: Sequence[int] | None = None) -> Tiling:
    starts = range(0, length, block) if length else range(0)
    return Tiling(length, starts, range(len(starts)) if owners is None else owners[: len(starts)])


def _ragged(cut: Ragged, sizes: Sequence[int], length: int, num: int) -> Tiling:
    if len(sizes) != num:
        raise LayoutError(
            f'"{cut}" gives {len(sizes)} sizes and axis {cut.axis} has {num} ranks: '
            "give one size per rank"
        )
    check_sum(cut, sizes, length)
    starts = accumulate(sizes, initial=0)
    kept = [
        (start, owner)
        for owner, (start, size) in enumerate(zip(starts, sizes, strict=False))
        if size
    ]
    return Tiling(length, [start for start, _ in kept], [owner for _, owner in kept])


def check_sum(cut: Cut, sizes: Sequence[int], length: int) -> None:
    """Refuse sizes that do not add up to the length they divide."""
    if sum(sizes) != length:
        raise LayoutError(
            f'the sizes of "{cut}" add up to {sum(sizes)} and the dim it cuts has {length}: '
            "make them equal"
        )


def is_mixed(cuts: Cuts) -> bool:
    """Whether segments of a packed word name different axes, so that some replicate more.

    >>> from reshard.layout.notation import parse
    >>> is_mixed(parse("{8 (kv rep), 4 kv}").dims[0]), is_mixed(parse("tp{8,4}").dims[0])
    (True, False)
    """
    for cut in cuts:
        if isinstance(cut, Packed):
            axes = {frozenset(axes_of(segment.cuts)) for segment in cut.segments}
            if len(axes) > 1 or any(is_mixed(segment.cuts) for segment in cut.segments):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a rank holds, and where it sits in that rank's local tensor, in elements."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def pieces_of_local(
    intervals: Sequence[Sequence[Interval]], local: Box, offset: int
) -> Iterator[Piece]:
    """The global boxes behind a box of the local tensor whose first element sits at ``offset``."""
    shape = tuple(map(length_of, intervals))
    strides = row_major(shape)
    start = offset - sum(i * s for i, s in zip(local.start, strides, strict=True))
    per_dim = [
        list(_slices(dim, low, high))
        for dim, low, high in zip(intervals, local.start, local.stop, strict=True)
    ]
    if prod(map(len, per_dim)) > MAX_PIECES:
        raise LayoutError(
            f"a rank holds {prod(map(len, per_dim))} pieces, at most {MAX_PIECES} work: "
            "use larger blocks"
        )
    for parts in product(*per_dim):
        box = Box(tuple(part[0] for part in parts), tuple(part[1] for part in parts))
        at = sum(part[2] * stride for part, stride in zip(parts, strides, strict=True))
        if box.size:
            yield Piece(box, start + at, strides)


def _slices(intervals: Sequence[Interval], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The global slices (start, stop) of local positions low to high, and where each begins."""
    before = 0
    for start, stop in intervals:
        first, last = max(low, before), min(high, before + stop - start)
        if first < last:
            yield start + first - before, start + last - before, first
        before += stop - start


def pieces_of_flat(
    intervals: Sequence[Sequence[Interval]], local: tuple[int, ...], ranges: Iterable[Interval]
) -> Iterator[Piece]:
    """The pieces of a flattened local tensor of which only these ranges are kept."""
    before = 0
    for low, high in ranges:
        at = before
        for box in flat_range(local, low, high):
            yield from pieces_of_local(intervals, box, at)
            at += box.size
        before += high - low
