"""Keep one tensor as a share, and get it back: what the hooks of the original did by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from reshard.nn.activations.keeping import Keeper, Options, SavedTensor, SavedView
from reshard.nn.activations.known import Known, Source, axis_along, is_simple
from reshard.nn.activations.meeting import Meeting, group_of
from reshard.nn.activations.owned import Owned
from reshard.nn.activations.restoring import restorer_of

__all__ = ["pack_activation", "unpack_activation"]


def pack_activation(
    mesh_or_group: Meeting, dim: int, tensor: torch.Tensor
) -> SavedView | SavedTensor:
    """What to keep of a tensor that is equal on all ranks: a share, where it can be cut."""
    keeper = Keeper(restorer_of(group_of(mesh_or_group)), Options())
    ranks = keeper.restorer.ranks
    simple = is_simple(tensor) and tensor.numel() > 0
    known = Known([Source.of(tensor, "a tensor")] if simple else [], ranks, Owned(None))
    kept = keeper.kept(tensor, known, "pack_activation", 0) if len(ranks) > 1 else None
    return SavedTensor(tensor) if kept is None else kept


def unpack_activation(mesh_or_group: Meeting, dim: int, packed: Any) -> torch.Tensor:
    """The tensor again, on all ranks; a DTensor that is cut over the ranks becomes a whole one."""
    if isinstance(packed, SavedView | SavedTensor):
        return packed.tensor()
    if isinstance(packed, DTensor):
        return _whole(packed, restorer_of(group_of(mesh_or_group)).ranks)
    if isinstance(packed, torch.Tensor):
        return packed
    raise TypeError(f"{type(packed).__name__} is not what pack_activation gives")


def _whole(tensor: DTensor, ranks: tuple[int, ...]) -> torch.Tensor:
    axis = axis_along(tensor.device_mesh, ranks)
    if axis is None:
        return tensor
    from reshard.tensors.move import move

    placements = list(tensor.placements)
    placements[axis] = Replicate()
    found: torch.Tensor = move(tensor, to=(tensor.device_mesh, placements))
    return found
