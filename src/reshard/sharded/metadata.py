"""Where the shards of a tensor lie, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.remote_device import _remote_device

from reshard.layout.box import Box

__all__ = ["Placement", "ShardMetadata", "ShardedTensorMetadata", "TensorProperties"]

Placement = _remote_device
"""A rank, or an RPC worker, and a device: made from texts such as "rank:3/cuda:1"."""


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """One shard: where it begins, how large it is, and who holds it.

    >>> shard = ShardMetadata([4, 0], [2, 8], "rank:1/cpu")
    >>> shard.shard_sizes, shard.placement.rank()
    ((2, 8), 1)
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: Placement | None = None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: str | Placement | None = None,
    ) -> None:
        offsets, sizes = tuple(map(int, shard_offsets)), tuple(map(int, shard_sizes))
        if len(offsets) != len(sizes):
            raise ValueError(
                f"shard_offsets {offsets} and shard_sizes {sizes} should have the same number of "
                f"elements, found {len(offsets)} and {len(sizes)}"
            )
        if any(number < 0 for number in offsets):
            raise ValueError(f"shard_offsets should be >=0, found {offsets}")
        if any(number < 0 for number in sizes):
            raise ValueError(f"shard_sizes should be >= 0, found {sizes}")
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        where = Placement(placement) if isinstance(placement, str) else placement
        object.__setattr__(self, "placement", where)

    @property
    def box(self) -> Box:
        """The part of the tensor that it is."""
        ends = zip(self.shard_offsets, self.shard_sizes, strict=True)
        return Box(self.shard_offsets, tuple(at + size for at, size in ends))

    @property
    def rank(self) -> int | None:
        """The global rank that holds it, where its placement says so; RPC knows its workers."""
        if self.placement is None:
            return None
        rank, worker = self.placement.rank(), self.placement.worker_name()
        if rank is None and worker is not None:
            from reshard.sharded.rpc import worker_rank

            return worker_rank(worker)
        return rank

    def on(self, device: torch.device) -> ShardMetadata:
        """The same shard on another device of the rank that holds it."""
        if self.placement is None or self.rank is None:
            return self
        return ShardMetadata(self.shard_offsets, self.shard_sizes, f"rank:{self.rank}/{device}")

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shard_sizes


@dataclass(frozen=True, slots=True)
class TensorProperties:
    """What all shards of a tensor have in common."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of a tensor."""
        return TensorProperties(
            tensor.dtype,
            tensor.layout,
            tensor.requires_grad,
            torch.contiguous_format,
            tensor.device.type != "meta" and tensor.is_pinned(),
        )


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """All shards of a tensor, on all ranks."""

    shards_metadata: tuple[ShardMetadata, ...] = ()
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards_metadata", tuple(self.shards_metadata))
        object.__setattr__(self, "size", torch.Size(self.size))
