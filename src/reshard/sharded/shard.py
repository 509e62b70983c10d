"""One shard on this rank: its tensor, and where in the whole tensor it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reshard.sharded.metadata import ShardMetadata

__all__ = ["Shard"]


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """One shard on this rank.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 8), [4, 0], rank=1).metadata.shard_sizes
    (2, 8)
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        found, stated = tuple(self.tensor.size()), self.metadata.shard_sizes
        if found != stated:
            raise ValueError(
                f"the shard's tensor has size {list(found)} and its metadata says {list(stated)}, "
                "which does not match: give the tensor of this shard"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise ValueError(
                f"the shard's tensor is on {self.tensor.device} and its placement says "
                f"{placement.device()}, which does not match: move one to the other"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """A shard of a rank, with the size and the device of its tensor."""
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), placement))
