"""Shards listed one by one, or as consecutive parts of a dim of any sizes.

Listed shards must be apart and cover the tensor. To find two that overlap among many, boxes are
first parted by straight cuts, dim after dim, as long as that parts any further:

    +---+-----+        +---+-----+
    |   |     |        |   |     |        grids and all that straight cuts can make
    +---+-+---+   ->   +---+-----+   ->   end as single boxes, without comparing
    |     |   |        +-----+---+        any two
    +-----+---+        |     |   |
                       +-----+---+

What is still together is compared pair by pair, but only where two meet in the dim in which the
fewest do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.layout.box import Box
from reshard.layout.columns import Ints, numbered
from reshard.layout.coverage import missing_boxes
from reshard.sharded.grid import check_split, check_sum, shards_of_cells
from reshard.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from reshard.sharded.sizes import cut_along, sized_parts
from reshard.sharded.spec import AnyPlacement, ShardingSpec, check_dim, check_placements, dim_of

__all__ = ["EnumerableShardingSpec", "RaggedShardingSpec", "check_disjoint", "check_tensor"]

MOST_ROUNDS = 32
"""Rounds of straight cuts; boxes that need more, one cut inside the other, are compared."""
PAIRS_AT_ONCE = 1 << 20
"""Pairs compared at once; more would only take more memory."""
FEW_BOXES = 32
"""So few boxes can be taken out of a region one by one."""


@dataclass(frozen=True)
class EnumerableShardingSpec(ShardingSpec):
    """Lists every shard: any boxes that cover the tensor without overlap, on any ranks.

    >>> top = ShardMetadata([0, 0], [2, 4], "rank:0/cpu")
    >>> rest = ShardMetadata([2, 0], [3, 4], "rank:1/cpu")
    >>> metadata = EnumerableShardingSpec([top, rest]).build_metadata((5, 4), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:2, 0:4] on 0', '[2:5, 0:4] on 1']
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Iterable[ShardMetadata]) -> None:
        object.__setattr__(self, "shards", tuple(shards))
        if not self.shards:
            raise ValueError("Empty shard list provided: give at least 1 shard")
        check_disjoint(self.shards)

    @staticmethod
    def from_sizes(
        dim: int, sizes: Iterable[int], placements: Iterable[AnyPlacement]
    ) -> RaggedShardingSpec:
        """Consecutive parts of these sizes along a dim, for tensors of any size in other dims."""
        return RaggedShardingSpec(dim, sizes, placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The listed shards, once they are known to make up a tensor of this size."""
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(self.shards, tensor_sizes, tensor_properties)


@dataclass(frozen=True)
class RaggedShardingSpec(ShardingSpec):
    """Cuts a dim into consecutive parts of given sizes, one for each placement.

    >>> spec = RaggedShardingSpec(0, [4, 0, 1], ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu"])
    >>> metadata = spec.build_metadata(torch.Size([5, 8]), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:4, 0:8] on 0', '[4:4, 0:8] on 1', '[4:5, 0:8] on 2']
    """

    dim: int
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __init__(self, dim: int, sizes: Iterable[int], placements: Iterable[AnyPlacement]) -> None:
        lengths, where = tuple(sizes), check_placements(placements)
        object.__setattr__(self, "dim", check_dim(dim))
        object.__setattr__(self, "sizes", check_split(lengths, self.dim))
        object.__setattr__(self, "placements", where)
        if len(lengths) != len(where):
            raise ValueError(
                f"there are {len(lengths)} sizes of parts and {len(where)} placements: "
                "give one size per placement"
            )

    def normalized(self, ndim: int) -> RaggedShardingSpec:
        """The same spec for tensors of so many dims, with the dim counted from the front."""
        dim = dim_of(self.dim, ndim)
        return self if dim == self.dim else RaggedShardingSpec(dim, self.sizes, self.placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The parts of a tensor of this size, in the order of the placements."""
        size = torch.Size(tensor_sizes)
        dim = dim_of(self.dim, len(size))
        check_sum(self.sizes, dim, size)
        parts = sized_parts(self.sizes)
        shards = shards_of_cells(cut_along(dim, parts, size), self.placements)
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def __repr__(self) -> str:
        placements = list(map(str, self.placements))
        return f"RaggedShardingSpec({self.dim}, {list(self.sizes)}, {placements})"


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """Refuse shards that have an element in common; one without elements overlaps nothing."""
    for shard in shards:
        if len(shard.shard_sizes) != len(shards[0].shard_sizes):
            raise ValueError(
                f"Found inconsistent ranks for shards: {shard.box} has {len(shard.shard_sizes)} "
                f"dims and {shards[0].box} has {len(shards[0].shard_sizes)}; give shards of one "
                "tensor"
            )
    found = _overlapping([shard for shard in shards if not shard.is_empty])
    if found is not None:
        one, other = found
        raise ValueError(
            f"Shards {_named(one)} and {_named(other)} overlap in {one.box & other.box}: "
            "cut one of them, every element is in one shard"
        )


def check_tensor(shards: Sequence[ShardMetadata], tensor_sizes: Sequence[int]) -> None:
    """Refuse shards that do not make up a tensor of this size; they are apart already."""
    size = tuple(tensor_sizes)
    for shard in shards:
        if len(shard.shard_sizes) != len(size):
            raise ValueError(
                f"Rank of tensor is {len(size)}, but shards rank is {len(shard.shard_sizes)}: give "
                f"shard {_named(shard)} one offset and one size per dim of {list(size)}"
            )
        for dim, (stop, length) in enumerate(zip(shard.box.stop, size, strict=True)):
            if stop > length:
                raise ValueError(
                    f"shard {_named(shard)} exceeds tensor dim {dim}: it ends at {stop} and the "
                    f"dim has {length}, give shards inside {list(size)}"
                )
    covered = sum(prod(shard.shard_sizes) for shard in shards)
    if covered == prod(size):
        return
    raise ValueError(
        f"the {len(shards)} shards have {covered} elements, which does not match tensor volume "
        f"{prod(size)} of size {list(size)}: "
        + (
            f"they do not cover the entire tensor, add a shard for {_missing(shards, size)}"
            if covered < prod(size)
            else "some overlap, every element is in one shard"
        )
    )


def _named(shard: ShardMetadata) -> str:
    return f"{shard.box}" if shard.placement is None else f"{shard.box} on {shard.placement}"


def _overlapping(shards: Sequence[ShardMetadata]) -> tuple[ShardMetadata, ShardMetadata] | None:
    """Two shards that overlap, of shards that all have elements."""
    if len(shards) < 2:
        return None
    if not shards[0].shard_sizes:
        return shards[0], shards[1]  # a tensor of 0 dims has only one element
    offsets = np.array([shard.shard_offsets for shard in shards], dtype=np.int64).T
    stops = offsets + np.array([shard.shard_sizes for shard in shards], dtype=np.int64).T
    spans = [_Span.of(low, high) for low, high in zip(offsets, stops, strict=True)]
    groups = _parted(spans)
    together = np.flatnonzero(np.bincount(groups)[groups] > 1)
    if not len(together):
        return None
    spans = [span.within(groups).at(together) for span in spans]
    for one, other in _meeting_pairs(min(spans, key=lambda span: int(span.num_met.sum()))):
        hits = np.flatnonzero(np.all([span.meet(one, other) for span in spans], axis=0))
        if len(hits):
            first = hits[0]
            return shards[together[one[first]]], shards[together[other[first]]]
    return None


@dataclass(frozen=True, eq=False, slots=True)
class _Span:
    """What boxes cover of one dim, in numbers that keep the order but are small."""

    low: Ints
    high: Ints
    width: int
    """More than any number before groups were told apart."""

    @staticmethod
    def of(low: Ints, high: Ints) -> _Span:
        """Spans between these offsets, which may be as large as tensors are."""
        ends, number = numbered(np.concatenate([low, high]))
        return _Span(number[: len(low)], number[len(low) :], len(ends))

    def within(self, groups: Ints) -> _Span:
        """The spans of each group moved away from those of the others."""
        return _Span(self.low + groups * self.width, self.high + groups * self.width, self.width)

    def at(self, places: Ints) -> _Span:
        """The spans at some places."""
        return _Span(self.low[places], self.high[places], self.width)

    def meet(self, one: Ints, other: Ints) -> NDArray[np.bool_]:
        """For pairs of places, whether the spans have anything in common."""
        met: NDArray[np.bool_] = self.low[one] < self.high[other]
        return met & (self.low[other] < self.high[one])

    @property
    def order(self) -> Ints:
        """The places in the order in which the spans begin."""
        return np.argsort(self.low, kind="stable")

    @property
    def num_met(self) -> Ints:
        """In that order, how many of those after each it meets."""
        low, high = self.low[self.order], self.high[self.order]
        met: Ints = np.searchsorted(low, high) - np.arange(1, len(low) + 1)
        return met


def _parted(spans: Sequence[_Span]) -> Ints:
    """A number for every box: those of different numbers are apart by straight cuts."""
    num_boxes = len(spans[0].low)
    groups = np.zeros(num_boxes, dtype=np.int64)
    for _ in range(MOST_ROUNDS):
        num_before = int(groups.max()) + 1
        for span in spans:
            groups = _cut(span.within(groups))
        if int(groups.max()) + 1 in (num_before, num_boxes):
            break
    return groups


def _cut(span: _Span) -> Ints:
    """A number for every span: it changes where no span reaches across."""
    order = span.order
    reach = np.maximum.accumulate(span.high[order])
    groups = np.zeros(len(order), dtype=np.int64)
    groups[order[1:]] = np.cumsum(span.low[order[1:]] >= reach[:-1])
    return groups


def _meeting_pairs(span: _Span) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of places whose spans meet, some at a time."""
    order, num_met = span.order, span.num_met
    ends = np.cumsum(num_met)
    first = 0
    while first < len(order):
        done = int(ends[first] - num_met[first])
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS_AT_ONCE, side="right")))
        counts = num_met[first:last]
        one = np.repeat(np.arange(first, last), counts)
        before = np.repeat(ends[first:last] - counts - done, counts)
        other = one + 1 + np.arange(len(one)) - before
        yield order[one], order[other]
        first = last


def _missing(shards: Sequence[ShardMetadata], size: Sequence[int]) -> Box:
    """A box of the tensor that is in no shard, of shards too small to cover it."""
    region = Box.whole(size)
    boxes = [shard.box for shard in shards if not shard.is_empty]
    while len(boxes) > FEW_BOXES:
        # Of two halves at least one is not covered either.
        for half in _halves(region, boxes):
            inside = [part for part in (box & half for box in boxes) if part.size]
            if sum(part.size for part in inside) < half.size:
                region, boxes = half, inside
                break
    return max(missing_boxes(region, boxes), key=lambda box: box.size)


def _halves(region: Box, boxes: Sequence[Box]) -> tuple[Box, Box]:
    """The region cut in two where a box begins, in the dim where most begin."""
    begins = [
        sorted({box.start[dim] for box in boxes} - {low}) for dim, low in enumerate(region.start)
    ]
    dim = max(range(len(begins)), key=lambda dim: len(begins[dim]))
    return region.split(dim, begins[dim][len(begins[dim]) // 2])
