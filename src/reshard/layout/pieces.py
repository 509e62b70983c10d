"""The pieces of a rank: which boxes it holds, and where each sits in its local tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from reshard.errors import LayoutError
from reshard.layout.box import Box, flat_range, row_major
from reshard.layout.tiling import Interval, length_of

__all__ = ["Piece", "pieces_of_flat", "pieces_of_local"]


MAX_PIECES = 1 << 22
"""Pieces of one tensor on one rank; beyond, listing them would not end."""


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
