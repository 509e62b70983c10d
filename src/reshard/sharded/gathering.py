"""The whole of a sharded tensor on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from reshard.dtypes import canonical_dtype
from reshard.errors import TensorError
from reshard.live import api
from reshard.sharded.content import Content, members
from reshard.sharded.moving import whole
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on
from reshard.tensors.tensor_move import move_between

__all__ = ["gathered", "gathered_on"]


def gathered(
    tensor: ShardedTensor, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """The whole tensor on rank ``dst`` of the group; None on the others."""
    content, ranks = tensor._content, members(tensor._content.group)
    if dst not in range(len(ranks)):
        text = f"dst={dst} is no rank of a group of {len(ranks)}: give 0 to {len(ranks) - 1}"
        _refuse(content, ranks[0], text)
    at = ranks[dst]
    if this_rank() == at and out is not None:
        _check_out(content, at, out)
    with torch.no_grad():
        found = whole(content, [at])
        if this_rank() != at or found is None:
            return None
        found = found if dtype is None else found.to(dtype)
        return _own(content, found) if out is None else out.copy_(found)


def gathered_on(tensor: ShardedTensor, ranks: Sequence[int]) -> torch.Tensor | None:
    """The whole tensor on some ranks of its group, with memory of its own; None on the others."""
    if not ranks:
        return None
    with torch.no_grad():
        found = whole(tensor._content, ranks)
        return _own(tensor._content, found) if found is not None and this_rank() in ranks else None


def _own(content: Content, found: torch.Tensor) -> torch.Tensor:
    return found.clone() if _is_of(content, found) else found


def _is_of(content: Content, found: torch.Tensor) -> bool:
    """Whether a tensor is the memory of a shard, which stays the sharded tensor's."""
    memory = found.untyped_storage().data_ptr()
    return any(part.untyped_storage().data_ptr() == memory for part in content.parts)


def _check_out(content: Content, at: int, out: object) -> None:
    if not isinstance(out, torch.Tensor):
        _refuse(content, at, f"out is of type {type(out).__name__}: give a tensor")
    if tuple(out.shape) != content.shape:
        given, wanted = list(out.shape), list(content.shape)
        text = f"out has shape {given} and the tensor {wanted}: give room for the whole tensor"
        _refuse(content, at, text)


def _refuse(content: Content, at: int, text: str) -> NoReturn:
    """Raise here and on the ranks that wait for this one."""
    kind = canonical_dtype(content.dtype)
    move = move_between(content.layout, whole_on((at,)), content.shape, kind)
    api.raise_on_all_ranks(move.plan, TensorError(text), content.group)
