"""A sharding spec that says it with a layout: anything that reshard can say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from reshard.layout.layout import Layout
from reshard.sharded.content import layout_of_shards
from reshard.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from reshard.sharded.spec import ShardingSpec

__all__ = ["LayoutShardingSpec", "lowered"]


@dataclass(frozen=True)
class LayoutShardingSpec(ShardingSpec):
    """Cut as a layout says, on a device of the ranks that it names.

    >>> from reshard import Layout, Mesh
    >>> spec = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp"))
    >>> spec.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata[1].shard_offsets
    (0, 3)
    """

    layout: Layout
    device: str = "cpu"

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All boxes on all ranks; replicas are listed once for each rank that holds them."""
        shape = tuple(tensor_sizes)
        found = [
            ShardMetadata(piece.box.start, piece.box.shape, f"rank:{rank}/{self.device}")
            for rank in self.layout.ranks
            for piece in self.layout.pieces(rank, shape)
        ]
        return ShardedTensorMetadata(tuple(found), tensor_sizes, tensor_properties)


def lowered(
    spec: ShardingSpec, shape: torch.Size, properties: TensorProperties
) -> tuple[Layout, tuple[ShardMetadata, ...] | None]:
    """The layout that a spec gives a tensor, and its shards if the spec lists them."""
    if type(spec).__module__.startswith("reshard."):
        return _known(spec, shape, properties)
    # One of the user's may not be hashable, or equal to another that cuts otherwise.
    return _lowered(spec, shape, properties)


def _lowered(
    spec: ShardingSpec, shape: torch.Size, properties: TensorProperties
) -> tuple[Layout, tuple[ShardMetadata, ...] | None]:
    if isinstance(spec, LayoutShardingSpec):
        spec.layout.dims(tuple(shape))
        return spec.layout, None
    stated = tuple(spec.build_metadata(shape, properties).shards_metadata)
    return layout_of_shards(tuple(shape), stated), stated


_known = lru_cache(maxsize=4096)(_lowered)
"""Training cuts the same tensors in the same ways, step after step."""
