"""Whole tensors on chosen ranks, and the comparison of two sharded tensors on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.errors import OperationError, TensorError
from reshard.live import api
from reshard.sharded.content import Content
from reshard.sharded.groups import members
from reshard.sharded.move.engine import whole
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on
from reshard.tensors.tensor_move import move_between

__all__ = ["all_agree", "gather_on", "gather_to"]


class MixedOperandError(OperationError, TypeError):
    """A sharded tensor is compared with a tensor that is not sharded."""


def gather_to(
    content: Content, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """The whole tensor on rank ``dst`` of the group; None on the others."""
    ranks = members(content.group)
    if dst not in range(len(ranks)):
        text = f"dst={dst} is no rank of a group of {len(ranks)}: give 0 to {len(ranks) - 1}"
        _refuse(content, ranks[0], text)
    rank = ranks[dst]
    if this_rank() == rank and out is not None:
        _check_out(content, rank, out)
    with torch.no_grad():
        full = whole(content, [rank])
        if this_rank() != rank or full is None:
            return None
        full = full if dtype is None else full.to(dtype)
        return _unshared(content, full) if out is None else out.copy_(full)


def gather_on(content: Content, ranks: Sequence[int]) -> torch.Tensor | None:
    """The whole tensor on some ranks of its group, in memory of its own; None on the others."""
    if not ranks:
        return None
    with torch.no_grad():
        full = whole(content, ranks)
        return _unshared(content, full) if full is not None and this_rank() in ranks else None


def _unshared(content: Content, full: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a clone if it is the memory of a shard."""
    memory = full.untyped_storage().data_ptr()
    shared = any(part.untyped_storage().data_ptr() == memory for part in content.parts)
    return full.clone() if shared else full


def _check_out(content: Content, rank: int, out: object) -> None:
    if not isinstance(out, torch.Tensor):
        _refuse(content, rank, f"out is of type {type(out).__name__}: give a tensor")
    if tuple(out.shape) != content.shape:
        given, wanted = list(out.shape), list(content.shape)
        text = f"out has shape {given} and the tensor {wanted}: give room for the whole tensor"
        _refuse(content, rank, text)


def _refuse(content: Content, rank: int, text: str) -> NoReturn:
    """Raise here and on the ranks that wait for this one."""
    kind = canonical_dtype(content.dtype)
    move = move_between(content.layout, whole_on((rank,)), content.shape, kind)
    api.raise_on_all_ranks(move.plan, TensorError(text), content.group)


def all_agree(
    one: object, other: object, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    """Whether two contents have equal layouts and ``same`` holds for their parts on all ranks."""
    for operand in (one, other):
        if not isinstance(operand, Content):
            raise MixedOperandError(
                f"a ShardedTensor is compared with a {type(operand).__name__}: both must be "
                "ShardedTensors; compare full_tensor() with a plain one"
            )
    assert isinstance(one, Content)
    assert isinstance(other, Content)
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_like(other):
        return False
    here = all(same(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    if not dist.is_initialized():
        return here
    everywhere = torch.tensor([int(here)], device=one.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=one.group)
    return bool(everywhere.item())
