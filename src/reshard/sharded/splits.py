"""Specs that split a tensor into one part per placement: chunks, sizes, grids, and listed boxes.

Chunks are those of ``torch.chunk``: all as long as the first, the last ones shorter or empty.

    10 rows over 4:   0 1 2|3 4 5|6 7 8|9        3, 3, 3 and 1 from 0, 3, 6 and 9
     5 rows over 4:   0 1|2 3|4|                 2, 2, 1 and 0 from 0, 2, 4 and 5
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Self

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.sharded.specs import (
    AnyPlacement,
    Placement,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    check_disjoint,
    check_placements,
    check_tensor,
    layout_of_shards,
    rank_of,
)
from reshard.text import quoted

Split = int | tuple[int, ...]
"""How a dim is split: into a number of chunks as ``torch.chunk`` does, or into these sizes."""


@lru_cache(maxsize=128)  # factories use few specs, many times
def _words_layout(splits: tuple[Split, ...], ranks: tuple[int, ...]) -> Layout:
    """The layout of cells on these ranks: dim ``i`` is split by the mesh axis ``d<i>``."""
    axes, words = {}, []
    for dim, split in enumerate(splits):
        num_parts = _num_parts(split)
        if num_parts > 1:
            axes[f"d{dim}"] = num_parts
        sizes = "" if isinstance(split, int) else f"[{','.join(map(str, split))}]"
        words.append(f"d{dim}{sizes}" if num_parts > 1 else "-")
    return Layout(Mesh(ranks=ranks, **(axes or {"d": 1})), " ".join(words) or "...")


def _num_parts(split: Split) -> int:
    return split if isinstance(split, int) else len(split)


def _ends(split: Split, length: int) -> list[int]:
    """Where the parts of a dim begin, and its end: clamped, so that empty parts are inside it."""
    if isinstance(split, int):
        step = get_split_size(length, split)
        return [min(step * index, length) for index in range(split + 1)]
    return list(accumulate(split, initial=0))


class NamedDimError(ArgumentError, NotImplementedError):
    """A sharding dim is given by name."""


class SplitSpec(ShardingSpec):
    """Base class of specs that split dims into a grid: one cell per placement, last dim fastest."""

    placements: tuple[Placement, ...]

    @abstractmethod
    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        """How each dim of a tensor of this shape is split."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The metadata of all shards, in the order of the placements."""
        size = torch.Size(tensor_sizes)
        splits = zip(self._checked_splits(size), size, strict=True)
        ends = [_ends(split, length) for split, length in splits]
        starts = product(*(one[:-1] for one in ends))
        sizes = product(*(np.diff(one).tolist() for one in ends))
        shards = tuple(map(ShardMetadata, starts, sizes, self.placements))
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Words on a mesh of the placements' ranks; boxes if a rank has several shards."""
        splits = self._checked_splits(shape)
        ranks = tuple(rank_of(placement) for placement in self.placements)
        if None not in ranks and len(set(ranks)) == len(ranks):
            return _words_layout(splits, ranks)
        metadata = self.build_metadata(torch.Size(shape), TensorProperties())
        return layout_of_shards(shape, metadata.shards_metadata)

    def _checked_splits(self, shape: Sequence[int]) -> tuple[Split, ...]:
        splits = self.splits_of(shape)
        for dim, split in enumerate(splits):
            if not isinstance(split, int) and sum(split) != shape[dim]:
                raise ArgumentError(
                    f"the parts of dim {dim} have {sum(split)} indices and tensor size "
                    f"{list(shape)} has {shape[dim]} there: give sizes that add up to it, found "
                    f"{quoted(list(split))}"
                )
        return splits

    def __repr__(self) -> str:
        fields = ", ".join(repr(_as_lists(value)) for value in vars(self).values())
        return f"{type(self).__name__}({fields})"


def _as_lists(value: object) -> object:
    if isinstance(value, tuple):
        return [_as_lists(one) for one in value]
    return str(value) if isinstance(value, Placement) else value


class DimSplitSpec(SplitSpec):
    """Base class of specs that split one dim; a negative one counts from the back."""

    dim: int

    def normalized(self, ndim: int) -> Self:
        """The same spec for tensors with ``ndim`` dims, with the dim counted from the front.

        >>> ChunkShardingSpec(-1, ["rank:0/cpu"]).normalized(3)
        ChunkShardingSpec(2, ['rank:0/cpu'])
        """
        dim = _dim_of(self.dim, ndim)
        spec = self if dim == self.dim else copy(self)
        object.__setattr__(spec, "dim", dim)
        return spec

    def _split_dim(self, split: Split, shape: Sequence[int]) -> tuple[Split, ...]:
        at = _dim_of(self.dim, len(shape))
        return tuple(split if dim == at else 1 for dim in range(len(shape)))


@dataclass(unsafe_hash=True, repr=False)
class ChunkShardingSpec(DimSplitSpec):
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
            value = _check_dim(value)
        elif name == "placements":
            value = check_placements(value)  # type: ignore[arg-type]
        object.__setattr__(self, name, value)

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        return self._split_dim(len(self.placements), shape)


@dataclass(frozen=True, repr=False)
class RaggedShardingSpec(DimSplitSpec):
    """One dim split into consecutive parts of given sizes, one for each placement.

    >>> RaggedShardingSpec(0, [4, 1], ["rank:0/cpu", "rank:1/cpu"]).layout((5, 8))
    Layout(Mesh(d0=2), 'd0[4,1] -')
    """

    dim: int
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __init__(self, dim: int, sizes: Iterable[int], placements: Iterable[AnyPlacement]) -> None:
        lengths, where = _check_split(tuple(sizes), dim), check_placements(placements)
        vars(self).update(dim=_check_dim(dim), sizes=lengths, placements=where)
        if len(self.sizes) != len(where):
            raise ArgumentError(
                f"there are {len(self.sizes)} sizes of parts and {len(where)} placements: "
                "give one size per placement"
            )

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        return self._split_dim(self.sizes, shape)


@dataclass(frozen=True, repr=False)
class GridShardingSpec(SplitSpec):
    """Each dim split into parts; the cells, last dim fastest, go to the placements in order.

    A dim is split into a number of chunks as ``torch.chunk`` makes them, or into parts of given
    sizes; a dim of 1 chunk stays whole.

    >>> GridShardingSpec([2, [1, 3]], [f"rank:{rank}/cpu" for rank in range(4)]).layout((6, 4))
    Layout(Mesh(d0=2, d1=2), 'd0 d1[1,3]')
    """

    splits: tuple[Split, ...]
    placements: tuple[Placement, ...]

    def __init__(
        self, splits: Iterable[int | Sequence[int]], placements: Iterable[AnyPlacement]
    ) -> None:
        checked = tuple(_check_split(split, dim) for dim, split in enumerate(splits))
        vars(self).update(splits=checked, placements=check_placements(placements))
        counts = [_num_parts(split) for split in checked]
        if prod(counts) != len(self.placements):
            raise ArgumentError(
                f"a grid of {' x '.join(map(str, counts)) or 1} has {prod(counts)} cells and there "
                f"are {len(self.placements)} placements: give one placement per cell, last dim "
                "fastest"
            )

    def splits_of(self, shape: Sequence[int]) -> tuple[Split, ...]:
        if len(self.splits) != len(shape):
            raise ArgumentError(
                f"the grid cuts {len(self.splits)} dims and tensor size {list(shape)} has "
                f"{len(shape)}: give one split per dim, 1 for a dim that stays whole"
            )
        return self.splits


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


def _check_dim(dim: object) -> int:
    """The dim of a spec: any whole number, since the tensor is not known yet."""
    if isinstance(dim, str):
        raise NamedDimError(
            f'a ShardingSpec does not support named dimension "{dim}": give the number of the dim'
        )
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool):
        raise ArgumentError(
            f"sharding dim needs to be an integer, found {dim!r} of type {type(dim).__name__}: "
            "give the number of a dim, such as 0 or -1"
        )
    return int(dim)


def _dim_of(dim: int, ndim: int) -> int:
    """The dim of a tensor with ``ndim`` dims, counted from the front."""
    if not -ndim <= dim < ndim:
        advice = f"give one from {-ndim} to {ndim - 1}" if ndim else "a scalar cannot be cut"
        raise ArgumentError(f"Invalid sharding dim {dim} for a tensor of {ndim} dims: {advice}")
    return dim % ndim


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
    """The start and the length of the chunk of a rank, one of as many as there are placements.

    >>> get_chunk_sharding_params(10, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 0)
    (5, 5)
    """
    chunks = [at for at, placement in enumerate(spec.placements) if placement.rank() == rank]
    if len(chunks) != 1:
        placements = quoted(", ".join(map(str, spec.placements)))
        raise ArgumentError(
            f"rank {rank} of {world_size} holds {len(chunks)} chunks under placements {placements} "
            "and not 1: ask a rank that holds 1, or read all chunks from spec.build_metadata"
        )
    start, stop = _ends(len(spec.placements), sharding_dim_size)[chunks[0] :][:2]
    return start, stop - start


@dataclass(frozen=True)
class EnumerableShardingSpec(ShardingSpec):
    """A list of all shards: any boxes that cover the tensor without overlap, on any ranks.

    >>> top = ShardMetadata([0, 0], [2, 4], "rank:0/cpu")
    >>> rest = ShardMetadata([2, 0], [3, 4], "rank:1/cpu")
    >>> EnumerableShardingSpec([top, rest]).layout((5, 4)).boxes
    {0: (Box((0, 0), (2, 4)),), 1: (Box((2, 0), (5, 4)),)}
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Iterable[ShardMetadata]) -> None:
        vars(self).update(shards=tuple(shards))
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

    The shards may come in any order; if chunks of several dims are these shards, the first counts.

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
    # torch lets empty chunks begin beyond the end of the dim.
    clamped = tuple(
        ShardMetadata(map(min, one.shard_offsets, size), one.shard_sizes, one.placement)
        for one in rising
    )
    chunks = spec.build_metadata(size, TensorProperties()).shards_metadata
    return spec if chunks == clamped else None
