"""Specs that list shards one by one or name a layout, and the spec that given shards follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from reshard.errors import ArgumentError
from reshard.layout.layout import Layout
from reshard.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from reshard.sharded.specs.base import AnyPlacement, ShardingSpec, layout_of_shards
from reshard.sharded.specs.coverage import check_disjoint, check_tensor
from reshard.sharded.specs.grids import ChunkShardingSpec, RaggedShardingSpec

__all__ = ["EnumerableShardingSpec", "LayoutShardingSpec", "infer_sharding_spec"]


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
        """The boxes of the shards by rank."""
        check_tensor(self.shards, shape)
        return layout_of_shards(shape, self.shards)


@dataclass(frozen=True)
class LayoutShardingSpec(ShardingSpec):
    """A layout in any words or boxes, on one device of each of its ranks.

    >>> from reshard import Layout, Mesh
    >>> spec = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp"))
    >>> spec.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata[1].shard_offsets
    (0, 3)
    """

    stated: Layout
    """The layout as it was given, for any shape that it fits."""
    device: str = "cpu"

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        object.__setattr__(self, "stated", layout)
        object.__setattr__(self, "device", device)

    def layout(self, shape: Sequence[int]) -> Layout:
        """The given layout; raises if it does not fit the shape."""
        self.stated.dims(tuple(shape))
        return self.stated

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All boxes on all ranks; replicas are listed once for each rank that holds them."""
        layout, shape = self.layout(tensor_sizes), tuple(tensor_sizes)
        shards = tuple(
            ShardMetadata(piece.box.start, piece.box.shape, f"rank:{rank}/{self.device}")
            for rank in layout.ranks
            for piece in layout.pieces(rank, shape)
        )
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def __repr__(self) -> str:
        return f"LayoutShardingSpec({self.stated!r}, {self.device!r})"


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
    for dim in (split or dims) if len(split) < 2 else ():
        spec = _chunks_along(dim, shards)
        if spec is not None:
            return spec
    return listed


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
    chunks = spec.cells(size).metadata()
    pairs = zip(chunks, rising, strict=True)
    return spec if all(one == _clamped(other, dim, size[dim]) for one, other in pairs) else None


def _clamped(shard: ShardMetadata, dim: int, length: int) -> ShardMetadata:
    """The shard with offsets as ours: torch lets empty chunks begin beyond the end of the dim."""
    if not shard.is_empty or shard.shard_offsets[dim] <= length:
        return shard
    offsets = list(shard.shard_offsets)
    offsets[dim] = length
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)
