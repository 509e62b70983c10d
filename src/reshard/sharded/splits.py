"""Specs that split a tensor into one part per placement: chunks, sizes, grids, and listed boxes.

Chunks are those of ``torch.chunk``: all as long as the first, the last ones shorter or empty.

    10 rows over 4:   0 1 2|3 4 5|6 7 8|9        3, 3, 3 and 1 from 0, 3, 6 and 9
     5 rows over 4:   0 1|2 3|4|                 2, 2, 1 and 0 from 0, 2, 4 and 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_disjoint,
    check_tensor,
)
from reshard.sharded.specs import (
    AnyPlacement,
    ShardingSpec,
    check_dim,
    check_placements,
    dim_of,
    layout_of_shards,
)
from reshard.text import quoted

Split = int | tuple[int, ...]
"""How a dim is split: into a number of chunks as ``torch.chunk`` does, or into these sizes."""


@lru_cache(maxsize=128)  # factories use few specs, many times
def _words_layout(splits: tuple[Split, ...], ranks: tuple[int, ...]) -> Layout:
    """The layout of cells on these ranks: dim ``i`` is split by the mesh axis ``d<i>``."""
    axes, words = {}, []
    for dim, split in enumerate(splits):
        if _count(split) == 1:
            words.append("-")
            continue
        axes[f"d{dim}"] = _count(split)
        sizes = "" if isinstance(split, int) else f"[{','.join(map(str, split))}]"
        words.append(f"d{dim}{sizes}")
    return Layout(Mesh(ranks=ranks, **(axes or {"d": 1})), " ".join(words) or "...")


def _count(split: Split) -> int:
    return split if isinstance(split, int) else len(split)


def _ends(split: Split, length: int) -> list[int]:
    """Where the parts of a dim begin, and its end: clamped, so that empty parts are inside it."""
    if isinstance(split, int):
        step = get_split_size(length, split)
        return [min(step * index, length) for index in range(split + 1)]
    return list(accumulate(split, initial=0))


class SplitSpec(ShardingSpec):
    """Base class of specs that split dims into a grid: one cell per placement, last dim fastest.

    Metadata and layout follow from how each dim is split.
    """

    placements: tuple[Placement, ...]

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        """How each dim of a tensor of this shape is split; raises if that does not fit it."""
        raise NotImplementedError

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The metadata of all shards, in the order of the placements."""
        size = torch.Size(tensor_sizes)
        splits = zip(self.splits_of(size), size, strict=True)
        ends = [_ends(split, length) for split, length in splits]
        starts, stops = product(*(one[:-1] for one in ends)), product(*(one[1:] for one in ends))
        shards = tuple(
            ShardMetadata(start, [b - a for a, b in zip(start, stop, strict=True)], placement)
            for start, stop, placement in zip(starts, stops, self.placements, strict=True)
        )
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Words on a mesh of the placements' ranks; boxes if a rank has several shards."""
        splits = self.splits_of(shape)
        placed = (ShardMetadata((), (), placement).rank for placement in self.placements)
        ranks = tuple(rank for rank in placed if rank is not None)
        if len(set(ranks)) == len(self.placements):
            return _words_layout(splits, ranks)
        metadata = self.build_metadata(torch.Size(shape), TensorProperties())
        return layout_of_shards(shape, metadata.shards_metadata)


@dataclass(unsafe_hash=True)
class ChunkShardingSpec(SplitSpec):
    """One dim split into as many chunks as there are placements, in their order.

    The placements may name some ranks only, in any order, and a rank several times. A negative dim
    counts from the back; ``normalized`` makes -1 of 2 dims the same as 1. Both fields may be
    assigned, as in torch; a tensor keeps the spec as it was when the tensor was made.

    >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    >>> metadata = spec.build_metadata(torch.Size([5, 8]), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:3, 0:8] on 1', '[3:5, 0:8] on 0']
    >>> spec.layout((5, 8))
    Layout(Mesh(d0=2, ranks=[1, 0]), 'd0 -')
    """

    dim: int
    placements: tuple[Placement, ...]

    def __init__(self, dim: int, placements: Iterable[AnyPlacement]) -> None:
        self.dim = dim
        self.placements = placements  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "dim":
            value = check_dim(value)
        elif name == "placements":
            value = check_placements(value)  # type: ignore[arg-type]
        object.__setattr__(self, name, value)

    def normalized(self, ndim: int) -> ChunkShardingSpec:
        """The same spec for tensors with ``ndim`` dims, with the dim counted from the front.

        >>> ChunkShardingSpec(-1, ["rank:0/cpu"]).normalized(3)
        ChunkShardingSpec(2, ['rank:0/cpu'])
        """
        dim = dim_of(self.dim, ndim)
        return self if dim == self.dim else ChunkShardingSpec(dim, self.placements)

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        return _split_one(self.dim, len(self.placements), shape)

    def __repr__(self) -> str:
        return f"ChunkShardingSpec({self.dim}, {list(map(str, self.placements))})"


@dataclass(frozen=True)
class RaggedShardingSpec(SplitSpec):
    """One dim split into consecutive parts of given sizes, one for each placement.

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
        object.__setattr__(self, "sizes", _check_split(lengths, self.dim))
        object.__setattr__(self, "placements", where)
        if len(lengths) != len(where):
            raise ArgumentError(
                f"there are {len(lengths)} sizes of parts and {len(where)} placements: "
                "give one size per placement"
            )

    def normalized(self, ndim: int) -> RaggedShardingSpec:
        """The same spec for tensors with ``ndim`` dims, with the dim counted from the front."""
        dim = dim_of(self.dim, ndim)
        return self if dim == self.dim else RaggedShardingSpec(dim, self.sizes, self.placements)

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        return _split_one(self.dim, self.sizes, shape)

    def __repr__(self) -> str:
        placements = list(map(str, self.placements))
        return f"RaggedShardingSpec({self.dim}, {list(self.sizes)}, {placements})"


@dataclass(frozen=True)
class GridShardingSpec(SplitSpec):
    """Each dim split into parts; the cells, last dim fastest, go to the placements in order.

    A dim is split into a number of chunks as ``torch.chunk`` makes them, or into parts of given
    sizes; a dim of 1 chunk stays whole.

    >>> spec = GridShardingSpec([2, [1, 3]], [f"rank:{rank}/cpu" for rank in range(4)])
    >>> metadata = spec.build_metadata(torch.Size([6, 4]), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:3, 0:1] on 0', '[0:3, 1:4] on 1', '[3:6, 0:1] on 2', '[3:6, 1:4] on 3']
    """

    splits: tuple[Split, ...]
    placements: tuple[Placement, ...]

    def __init__(
        self, splits: Iterable[int | Sequence[int]], placements: Iterable[AnyPlacement]
    ) -> None:
        checked = tuple(_check_split(split, dim) for dim, split in enumerate(splits))
        object.__setattr__(self, "splits", checked)
        object.__setattr__(self, "placements", check_placements(placements))
        counts, given = [_count(split) for split in checked], len(self.placements)
        if prod(counts) != given:
            raise ArgumentError(
                f"a grid of {' x '.join(map(str, counts)) or 1} has {prod(counts)} cells and there "
                f"are {given} placements: give one placement per cell, last dim fastest"
            )

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        if len(self.splits) != len(shape):
            raise ArgumentError(
                f"the grid cuts {len(self.splits)} dims and tensor size {list(shape)} has "
                f"{len(shape)}: give one split per dim, 1 for a dim that stays whole"
            )
        for dim, split in enumerate(self.splits):
            _check_sum(split, dim, shape)
        return self.splits

    def __repr__(self) -> str:
        splits = [split if isinstance(split, int) else list(split) for split in self.splits]
        return f"GridShardingSpec({splits}, {list(map(str, self.placements))})"


def _split_one(dim: int, split: Split, shape: Sequence[int]) -> tuple[Split, ...]:
    at = dim_of(dim, len(shape))
    _check_sum(split, at, shape)
    return tuple(split if one == at else 1 for one in range(len(shape)))


def _check_split(split: int | Sequence[int], dim: int) -> Split:
    """The split of a dim, as a value that the caller cannot change."""
    if isinstance(split, int | np.integer):
        if split < 1 or isinstance(split, bool):
            raise ArgumentError(f"dim {dim} is cut into {split!r} chunks: give 1 or more")
        return int(split)
    sizes = tuple(split)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ArgumentError(
            f"the sizes of the parts of dim {dim} are {quoted(sizes)}: give whole numbers >= 0"
        )
    return tuple(map(int, sizes))


def _check_sum(split: Split, dim: int, tensor_size: Sequence[int]) -> None:
    """Refuse sizes of parts that do not add up to the size of the dim."""
    if not isinstance(split, int) and sum(split) != tensor_size[dim]:
        raise ArgumentError(
            f"the parts of dim {dim} have {sum(split)} indices and tensor size "
            f"{list(tensor_size)} has {tensor_size[dim]} there: give sizes that add up to it, "
            f"found {quoted(list(split))}"
        )


def get_split_size(dim_size: int, chunks: int) -> int:
    """The length of the chunks of a dim, except the last ones.

    >>> get_split_size(10, 4)
    3
    """
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The length of chunk ``idx``: 0 once nothing is left.

    >>> [get_chunked_dim_size(5, 2, idx) for idx in range(4)]
    [2, 2, 1, 0]
    """
    return max(min(dim_size - split_size * idx, split_size), 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """The start and the length of the chunk of a rank.

    There are as many chunks as the spec has placements, which may be fewer than ``world_size``.

    >>> get_chunk_sharding_params(10, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 0)
    (5, 5)
    """
    held = [at for at, placement in enumerate(spec.placements) if placement.rank() == rank]
    if len(held) != 1:
        placements = quoted(", ".join(map(str, spec.placements)))
        raise ArgumentError(
            f"rank {rank} of {world_size} holds {len(held)} chunks under placements {placements} "
            "and not 1: ask a rank that holds 1, or read all chunks from spec.build_metadata"
        )
    start, stop = _ends(len(spec.placements), sharding_dim_size)[held[0] :][:2]
    return start, stop - start


@dataclass(frozen=True)
class EnumerableShardingSpec(ShardingSpec):
    """A list of all shards: any boxes that cover the tensor without overlap, on any ranks.

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
            raise ArgumentError("Empty shard list provided: give at least 1 shard")
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
        """The listed shards; raises if they do not cover a tensor of this size."""
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(self.shards, tensor_sizes, tensor_properties)

    def layout(self, shape: Sequence[int]) -> Layout:
        check_tensor(self.shards, shape)
        return layout_of_shards(shape, self.shards)


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The chunk spec with exactly these shards, or the spec that lists them.

    The shards may come in any order: the placements of the chunk spec follow the offsets. If chunks
    of several dims are the same shards, the spec has the first such dim.

    >>> shards = [ShardMetadata([2], [2], "rank:0/cpu"), ShardMetadata([0], [2], "rank:1/cpu")]
    >>> infer_sharding_spec(shards)
    ChunkShardingSpec(0, ['rank:1/cpu', 'rank:0/cpu'])
    """
    listed = EnumerableShardingSpec(shards_metadata)
    shards = listed.shards
    dims = range(len(shards[0].shard_sizes))
    split = [dim for dim in dims if any(shard.shard_offsets[dim] for shard in shards)]
    specs = (_chunks_along(dim, shards) for dim in split or dims) if len(split) < 2 else ()
    return next((spec for spec in specs if spec is not None), listed)


def _chunks_along(dim: int, shards: Sequence[ShardMetadata]) -> ChunkShardingSpec | None:
    # Empty chunks all begin at the end of the dim; sorting keeps these in the given order.
    rising = sorted(shards, key=lambda shard: shard.shard_offsets[dim])
    placements = [shard.placement for shard in rising if shard.placement is not None]
    if len(placements) != len(rising):
        return None
    stops = [shard.box.stop for shard in shards if not shard.is_empty]
    stops = stops or [shard.box.stop for shard in shards]
    size = torch.Size(map(max, zip(*stops, strict=True)))
    spec = ChunkShardingSpec(dim, placements)
    chunks = spec.build_metadata(size, TensorProperties()).shards_metadata
    pairs = zip(chunks, rising, strict=True)
    return spec if all(one == _clamped(other, dim, size[dim]) for one, other in pairs) else None


def _clamped(shard: ShardMetadata, dim: int, length: int) -> ShardMetadata:
    """The shard with offsets as ours: torch lets empty chunks begin beyond the end of the dim."""
    if not shard.is_empty or shard.shard_offsets[dim] <= length:
        return shard
    offsets = list(shard.shard_offsets)
    offsets[dim] = length
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)
