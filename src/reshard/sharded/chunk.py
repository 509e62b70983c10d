"""Chunks cut one dim of a tensor as ``torch.chunk`` does, one for each placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from reshard.sharded.grid import shards_of_cells
from reshard.sharded.metadata import Placement, ShardedTensorMetadata, TensorProperties
from reshard.sharded.sizes import chunk_parts, cut_along
from reshard.sharded.spec import AnyPlacement, ShardingSpec, check_dim, check_placements, dim_of

__all__ = ["ChunkShardingSpec"]


@dataclass(unsafe_hash=True)
class ChunkShardingSpec(ShardingSpec):
    """Cuts a dim into as many chunks as there are placements; they get them in order.

    The placements may name some ranks only, in any order, and a rank several times. A dim
    counts from the back if negative; ``normalized`` makes -1 of 2 dims the same as 1. Both may be
    assigned, as in torch; a tensor keeps the spec as it was when the tensor was made.

    >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    >>> metadata = spec.build_metadata(torch.Size([5, 8]), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:3, 0:8] on 1', '[3:5, 0:8] on 0']
    """

    dim: int
    placements: tuple[Placement, ...]

    def __init__(self, dim: int, placements: Iterable[AnyPlacement]) -> None:
        self.dim = dim
        self.placements = placements  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        known = {"dim": check_dim, "placements": check_placements}.get(name)
        object.__setattr__(self, name, value if known is None else known(value))

    def normalized(self, ndim: int) -> ChunkShardingSpec:
        """The same spec for tensors of so many dims, with the dim counted from the front.

        >>> ChunkShardingSpec(-1, ["rank:0/cpu"]).normalized(3)
        ChunkShardingSpec(2, ['rank:0/cpu'])
        """
        dim = dim_of(self.dim, ndim)
        return self if dim == self.dim else ChunkShardingSpec(dim, self.placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The chunks of a tensor of this size, in the order of the placements."""
        size = torch.Size(tensor_sizes)
        dim = dim_of(self.dim, len(size))
        chunks = chunk_parts(size[dim], len(self.placements))
        shards = shards_of_cells(cut_along(dim, chunks, size), self.placements)
        return ShardedTensorMetadata(shards, size, tensor_properties)

    def __repr__(self) -> str:
        return f"ChunkShardingSpec({self.dim}, {list(map(str, self.placements))})"
