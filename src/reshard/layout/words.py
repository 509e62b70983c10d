"""The words of a layout as values, and which intervals of a dim a coordinate holds by them.

Every word keeps the order of the elements, so a rank's share of a dim is a rising list of
intervals, and where an element sits in the local dim is how many held elements come before it.
That makes nesting simple: the next word acts on the positions 0, 1, 2, ... of that list.

    >>> held_intervals((Cyclic("tp", 2), Chunk("dp")), 10, {"tp": 2, "dp": 2}, {"tp": 0, "dp": 1})
    [(5, 6), (8, 10)]

Here tp=0 holds 0 1 | 4 5 | 8 9, and the second half of those six is 5 8 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import index
from typing import TypeAlias

from reshard.errors import LayoutError
from reshard.layout.box import Interval, length_of, select
from reshard.layout.mesh import format_ranks

MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48  # more than any tensor has; beyond, bytes could not be counted exactly
MAX_BLOCKS = 1 << 22  # blocks of a block-cyclic dim are listed one by one
OPS = ("sum", "avg", "max", "min", "prod")  # how addends of a pending reduction become the value


@dataclass(frozen=True, slots=True)
class Chunk:
    """``tp``: as ``torch.chunk`` cuts, sizes rounded up, trailing shards shorter or empty.

    ``tp*128``: the same in whole units of 128.
    """

    axis: str
    unit: int = 1

    def __str__(self) -> str:
        return f"{self.axis}*{self.unit}" if self.unit > 1 else self.axis


@dataclass(frozen=True, slots=True)
class Cyclic:
    """``tp:128``: blocks of 128 dealt round-robin, a rank's blocks joined in order."""

    axis: str
    block: int

    def __str__(self) -> str:
        return f"{self.axis}:{self.block}"


@dataclass(frozen=True, slots=True)
class Ragged:
    """``tp[3,1,4,2]``: these sizes, 0 allowed."""

    axis: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.axis}[{','.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class ZigZag:
    """``cp~``: 2n blocks, rank i holds block i and then block 2n-1-i."""

    axis: str

    def __str__(self) -> str:
        return f"{self.axis}~"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a packed dim: its length and the cuts that act on it."""

    size: int
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Packed:
    """``tp{4096,1024}`` or ``{4096 (kv rep), 1024 kv}``: segments, each cut on its own."""

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        first = self.segments[0].cuts
        alike = all(segment.cuts == first for segment in self.segments)
        if first and alike and not any(isinstance(cut, Packed) for cut in first):
            sizes = ",".join(str(segment.size) for segment in self.segments)
            return f"{format_cuts(first)}{{{sizes}}}"
        parts = (f"{part.size} {format_cuts(part.cuts) or '-'}" for part in self.segments)
        return "{" + ", ".join(parts) + "}"


PlainCut: TypeAlias = Chunk | Cyclic | Ragged | ZigZag
Cut: TypeAlias = PlainCut | Packed
Cuts: TypeAlias = tuple[Cut, ...]  # what happens to a dim, left to right; empty means it is whole


@dataclass(frozen=True, slots=True)
class Words:
    """A parsed layout text."""

    dims: tuple[Cuts, ...]  # the cuts of each dim that has a word of its own
    rest: int | None = None  # where ``...`` stands among the dims, if it does
    on: tuple[tuple[str, tuple[int, ...]], ...] = ()  # coordinates that hold it, if not all
    reduce: tuple[str, tuple[str, ...]] | None = None  # the operation and the axes that are pending
    flat: Cuts = ()  # how the flattened local tensor is cut
    without: tuple[int, ...] = ()  # the ranks that are lost

    def __str__(self) -> str:
        words = [format_cuts(cuts) or "-" for cuts in self.dims]
        if self.rest is not None:
            words.insert(self.rest, "...")
        parts = [" ".join(words)]
        if self.on:
            on = (f"{axis}={','.join(map(str, at))}" for axis, at in self.on)
            parts.append(f"on {' '.join(on)}")
        if self.reduce:
            parts.append(" ".join((self.reduce[0], *self.reduce[1])))
        if self.flat:
            parts.append(f"flat {format_cuts(self.flat)}")
        if self.without:
            parts.append(f"without {format_ranks(self.without)}")
        return " | ".join(parts)

    @property
    def axes(self) -> list[str]:
        """Every axis that is named; once for each cut that names it, and each other place.

        >>> Words(((Chunk("tp"), Chunk("dp")),), on=(("pp", (1,)),), reduce=("sum", ("cp",))).axes
        ['tp', 'dp', 'cp', 'pp']
        """
        cuts = [cut for word in (*self.dims, self.flat) for cut in word]
        named = [axis for cut in cuts for axis in axes_of((cut,))]
        return [*named, *(self.reduce[1] if self.reduce else ()), *(axis for axis, _ in self.on)]

    def expand(self, num_dims: int) -> tuple[Cuts, ...] | None:
        """The cuts of each of ``num_dims`` dims, or None if the words do not fit."""
        missing = num_dims - len(self.dims)
        if missing == 0:
            return self.dims
        if self.rest is None or missing < 0:
            return None
        return self.dims[: self.rest] + ((),) * missing + self.dims[self.rest :]


def format_cuts(cuts: Cuts) -> str:
    """The word for these cuts; empty for a whole dim."""
    text = " ".join(map(str, cuts))
    return f"({text})" if len(cuts) > 1 else text


def axes_of(cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The axes that cuts name, in order of first appearance.

    >>> axes_of([Chunk("kv"), Cyclic("rep", 4)])
    ('kv', 'rep')
    """
    return tuple({cut.axis: None for cut in plain_cuts(cuts)})


def plain_cuts(cuts: Iterable[Cut]) -> Iterator[PlainCut]:
    """All cuts by one axis, those of segments included."""
    for cut in cuts:
        if isinstance(cut, Packed):
            for segment in cut.segments:
                yield from plain_cuts(segment.cuts)
        else:
            yield cut


def placed_segments(packed: Packed, length: int) -> list[tuple[int, int, Cuts]]:
    """The segments that divide a length: where each starts, its size and its cuts."""
    sizes = [segment.size for segment in packed.segments]
    check_sum(packed, sizes, length)
    starts = accumulate(sizes, initial=0)
    return [(at, part.size, part.cuts) for at, part in zip(starts, packed.segments, strict=False)]


def held_intervals(
    cuts: Cuts, length: int, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> list[Interval]:
    """The intervals of a dim that one coordinate holds, in rising order."""
    mine = [(0, length)] if length else []
    for cut in cuts:
        if isinstance(cut, Packed):
            kept = [
                (at + low, at + high)
                for at, size, inner in placed_segments(cut, length_of(mine))
                for low, high in held_intervals(inner, size, sizes, coords)
            ]
        else:
            kept = _blocks_of(coords[cut.axis], cut, length_of(mine), sizes[cut.axis])
        mine = select(mine, kept)
    return mine


def _blocks_of(coord: int, cut: PlainCut, length: int, num: int) -> list[Interval]:
    starts, owners = tiling(cut, length, num)
    if isinstance(owners, range):
        numbers: Sequence[int] = [coord] if coord in owners else []
    else:
        numbers = [number for number, owner in enumerate(owners) if owner == coord]
    last = len(starts) - 1
    return [(starts[at], starts[at + 1] if at < last else length) for at in numbers]


def tiling(cut: PlainCut, length: int, num: int) -> tuple[Sequence[int], Sequence[int]]:
    """How one word divides a length into blocks: where each starts, and which coordinate holds it.

    Ranges stay ranges, so that sixteen thousand shards cost no more than four.

    >>> tiling(Chunk("tp"), 10, 4), tiling(ZigZag("cp"), 8, 2)
    ((range(0, 10, 3), range(0, 4)), (range(0, 8, 2), [0, 1, 1, 0]))
    """
    match cut:
        case Chunk(unit=unit):
            return _even(length, _ceil(_ceil(length, unit), num) * unit)
        case ZigZag():
            return _even(length, _ceil(length, 2 * num), [*range(num), *reversed(range(num))])
        case Cyclic(block=block):
            if _ceil(length, block) > MAX_BLOCKS:
                raise LayoutError(
                    f'"{cut}" deals {_ceil(length, block)} blocks of a dim of {length}: at most '
                    f"{MAX_BLOCKS} work; use larger blocks"
                )
            return _even(length, block, [*range(num)] * _ceil(length, block * num))
        case Ragged(sizes=sizes):
            check_sum(cut, sizes, length)
            starts = [*accumulate(sizes, initial=0)]
            kept = [n for n, size in enumerate(sizes) if size]
            return [starts[n] for n in kept], kept


def _ceil(length: int, parts: int) -> int:
    return -(-length // parts)


def _even(
    length: int, block: int, owners: Sequence[int] | None = None
) -> tuple[Sequence[int], Sequence[int]]:
    starts = range(0, length, block) if length else range(0)
    return starts, range(len(starts)) if owners is None else owners[: len(starts)]


def check_sum(cut: Cut, sizes: Sequence[int], length: int) -> None:
    """Refuse sizes that do not add up to the length they divide."""
    if sum(sizes) != length:
        raise LayoutError(
            f'the sizes of "{cut}" add up to {sum(sizes)} and the dim it cuts has {length}: '
            "make them equal"
        )


def is_mixed(cuts: Cuts) -> bool:
    """Whether segments of a packed word name different axes, so that some replicate more.

    >>> kv, rep = Chunk("kv"), Chunk("rep")
    >>> is_mixed((Packed((Segment(8, (kv, rep)), Segment(4, (kv,)))),))
    True
    """
    packed = [[part.cuts for part in cut.segments] for cut in cuts if isinstance(cut, Packed)]
    return any(
        len({frozenset(axes_of(part)) for part in parts}) > 1 or any(map(is_mixed, parts))
        for parts in packed
    )


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a shape; refuses negative ones, and what is no shape.

    >>> check_shape([8, 4])
    (8, 4)
    """
    try:
        sizes = tuple(map(index, shape))
    except TypeError:
        raise LayoutError(f"{shape!r} is no shape: give sizes, such as (8192, 4096)") from None
    for dim, size in enumerate(sizes):
        if size < 0:
            raise LayoutError(f"shape {sizes} has size {size} in dim {dim}: sizes are >= 0")
    return sizes


def countable_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a shape; refuses one too large to count its bytes exactly."""
    sizes = check_shape(shape)
    if len(sizes) > MAX_DIMS:
        raise LayoutError(f"a shape of {len(sizes)} dims: at most {MAX_DIMS} work")
    if prod(size or 1 for size in sizes) > MAX_ELEMENTS:
        raise LayoutError(f"shape {sizes} has {prod(sizes)} elements: at most {MAX_ELEMENTS} work")
    return sizes
