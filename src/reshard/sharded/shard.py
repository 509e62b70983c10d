"""One shard on this rank: its tensor, and where in the whole tensor it lies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from reshard.sharded.metadata import ShardMetadata

if TYPE_CHECKING:
    from reshard.sharded.tensor import ShardedTensor

__all__ = ["Shard"]


class Shard:
    """One shard on this rank.

    One of ``st.local_shards()`` stays with its tensor: it follows ``requires_grad_``, and a tensor
    that is assigned to it becomes that part of the sharded tensor.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 8), [4, 0], rank=1).metadata.shard_sizes
    (2, 8)
    """

    __slots__ = ("_number", "_owner", "_seen", "_tensor", "metadata")

    metadata: ShardMetadata

    def __init__(self, tensor: torch.Tensor, metadata: ShardMetadata) -> None:
        _check(tensor, metadata)
        self._tensor, self.metadata = tensor, metadata
        self._owner: ShardedTensor | None = None
        self._number = 0
        self._seen: tuple[Any, bool, torch.Tensor] | None = None

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """A shard of a rank, with the size and the device of its tensor."""
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), placement))

    @classmethod
    def of(cls, owner: ShardedTensor, number: int, one: Shard) -> Shard:
        """The shard of this number of a sharded tensor, of whose content it is ``one``."""
        made = cls(one._tensor, one.metadata)
        made._owner, made._number = owner, number
        return made

    @property
    def tensor(self) -> torch.Tensor:
        """Its values: memory of the sharded tensor, if it is of one; gradients flow back."""
        owner = self._owner
        if owner is None:
            return self._tensor
        state = owner._content, owner.requires_grad and torch.is_grad_enabled()
        if self._seen is None or (self._seen[0] is not state[0] or self._seen[1] != state[1]):
            self._seen = (*state, owner.shard_tensor(self._number))
        return self._seen[2]

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        _check(tensor, self.metadata)
        if self._owner is None:
            self._tensor = tensor
        else:
            _assign(self._owner, self._number, tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        values = self.tensor
        made = values.detach().clone().requires_grad_(values.requires_grad)
        return Shard(made, copy.deepcopy(self.metadata, memo))

    def __reduce__(self) -> Any:
        return Shard, (self.tensor.detach(), self.metadata)

    def __repr__(self) -> str:
        return f"Shard(tensor={self.tensor}, metadata={self.metadata})"


def _assign(owner: ShardedTensor, number: int, tensor: torch.Tensor) -> None:
    """Make a tensor the memory of one of the shards that this rank has of another."""
    content = owner._content
    if tensor.dtype != content.dtype:
        raise ValueError(
            f"a shard of {tensor.dtype} is assigned to a ShardedTensor of {content.dtype}: cast "
            "one to the other"
        )
    if len(content.parts) == len(content.shards):
        parts = list(content.parts)
        parts[number] = tensor.detach()
        owner._content = replace(content, parts=tuple(parts))
    else:  # several boxes in one part
        with torch.no_grad():
            content.shards[number].tensor.copy_(tensor)
    if tensor.requires_grad and not owner.requires_grad:
        owner.requires_grad_()


def _check(tensor: torch.Tensor, metadata: ShardMetadata) -> None:
    found, stated = tuple(tensor.size()), metadata.shard_sizes
    if found != stated:
        raise ValueError(
            "Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size "
            f"{list(found)}, metadata.shard_lengths {list(stated)}: give the tensor of this shard"
        )
    placement = metadata.placement
    if placement is not None and placement.device() != tensor.device:
        raise ValueError(
            "Local shard tensor device does not match with local Shard's placement! Found "
            f"{tensor.device} and {placement.device()}: move one to the other"
        )
