"""Which spec cuts a tensor into these shards?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reshard.sharded.chunk import ChunkShardingSpec
from reshard.sharded.enumerable import EnumerableShardingSpec
from reshard.sharded.metadata import ShardMetadata, TensorProperties
from reshard.sharded.spec import ShardingSpec

__all__ = ["infer_sharding_spec"]


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The chunk spec that gives exactly these shards, or else one that lists them.

    The shards may come in any order: the placements of the chunk spec follow the offsets. Where
    chunks of several dims would be the same shards, it is the first such dim.

    >>> shards = [ShardMetadata([2], [2], "rank:0/cpu"), ShardMetadata([0], [2], "rank:1/cpu")]
    >>> infer_sharding_spec(shards)
    ChunkShardingSpec(0, ['rank:1/cpu', 'rank:0/cpu'])
    """
    listed = EnumerableShardingSpec(shards_metadata)
    for dim in _dims_to_try(listed.shards):
        found = _chunks_along(dim, listed.shards)
        if found is not None:
            return found
    return listed


_infer_sharding_spec_from_shards_metadata = infer_sharding_spec


def _dims_to_try(shards: Sequence[ShardMetadata]) -> Sequence[int]:
    """The dim along which shards lie; all dims where every shard begins at 0."""
    ndim = len(shards[0].shard_sizes)
    dims = [dim for dim in range(ndim) if any(shard.shard_offsets[dim] for shard in shards)]
    if len(dims) > 1:
        return ()
    return dims or range(ndim)


def _chunks_along(dim: int, shards: Sequence[ShardMetadata]) -> ChunkShardingSpec | None:
    # Empty chunks all begin at the end of the dim; sorting keeps these in the order given.
    rising = sorted(shards, key=lambda shard: shard.shard_offsets[dim])
    placements = [shard.placement for shard in rising if shard.placement is not None]
    if len(placements) != len(rising):
        return None
    spec = ChunkShardingSpec(dim, placements)
    size = _size_around([shard for shard in shards if not shard.is_empty] or shards)
    found = spec.build_metadata(size, TensorProperties()).shards_metadata
    pairs = zip(found, rising, strict=True)
    return spec if all(one == _clamped(other, dim, size[dim]) for one, other in pairs) else None


def _clamped(shard: ShardMetadata, dim: int, length: int) -> ShardMetadata:
    """A shard as we have it: torch lets empty chunks begin behind the end of the dim."""
    if not shard.is_empty or shard.shard_offsets[dim] <= length:
        return shard
    offsets = list(shard.shard_offsets)
    offsets[dim] = length
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


def _size_around(shards: Sequence[ShardMetadata]) -> torch.Size:
    """The size of the smallest tensor that has all of these shards."""
    return torch.Size(map(max, zip(*(shard.box.stop for shard in shards), strict=True)))
