"""ShardedTensors of ``torch.distributed._shard``: which boxes lie on which ranks?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from reshard.errors import LayoutError
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.tensors.meshes import this_rank

__all__ = ["shard_parts", "sharded_layout"]


def sharded_layout(tensor: ShardedTensor) -> Layout:
    """The boxes of all shards, if this rank's local shards are those the metadata gives it."""
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    rows = sorted((_rank(shard), _box(shard, shape)) for shard in metadata.shards_metadata)
    layout = _layout(shape, tuple(rows))
    rank = this_rank()
    mine = [box for at, box in rows if at == rank]
    held = sorted(_box(shard.metadata, shape) for shard in tensor.local_shards())
    if held != mine:
        raise LayoutError(
            f"rank {rank} holds shards {_listed(held)} and the metadata of the tensor {shape} "
            f"gives it {_listed(mine)}: make both from one sharding spec"
        )
    return layout


@lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], rows: tuple[tuple[int, Box], ...]) -> Layout:
    boxes: dict[int, list[Box]] = {}
    for rank, box in rows:
        boxes.setdefault(rank, []).append(box)
    return Layout.from_boxes(shape, boxes)


def shard_parts(tensor: ShardedTensor) -> tuple[torch.Tensor, ...]:
    """This rank's shards in the order of its boxes, which is the order of their places."""
    shape = tuple(tensor.metadata().size)
    shards = sorted(tensor.local_shards(), key=lambda shard: _box(shard.metadata, shape))
    return tuple(shard.tensor for shard in shards)


def _rank(shard: ShardMetadata) -> int:
    """The global rank of a shard; torch numbers so on sub-groups too."""
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None:
        raise LayoutError(
            f"the shard at {shard.shard_offsets} has placement {shard.placement}, which names no "
            "rank: use placements such as rank:3/cpu"
        )
    return rank


def _box(shard: ShardMetadata, shape: tuple[int, ...]) -> Box:
    """The box of a shard; torch lets an empty one begin past the end, so it is moved inside."""
    sizes = tuple(shard.shard_sizes)
    rows = zip(shard.shard_offsets, sizes, shape, strict=True)
    inside = tuple(min(at, whole - size) if not all(sizes) else at for at, size, whole in rows)
    return Box(inside, tuple(at + size for at, size in zip(inside, sizes, strict=True)))


def _listed(boxes: Iterable[Box]) -> str:
    return ", ".join(map(str, boxes)) or "none"
