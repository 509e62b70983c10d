"""Are two sharded tensors the same? All ranks of the group ask together, and hear the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import OperationError
from reshard.sharded.tensor import ShardedTensor

__all__ = ["allclose", "equal"]


class MixedOperandError(OperationError, TypeError):
    """A sharded tensor is compared with something that is none."""


Compare = Callable[[torch.Tensor, torch.Tensor], bool]


def equal(one: Any, other: Any) -> bool:
    """Whether all elements are equal, and lie alike."""
    return _compared(one, other, torch.equal)


def allclose(one: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether all elements are close, and lie alike."""
    return _compared(one, other, lambda a, b: torch.allclose(a, b, *args, **kwargs))


def _compared(one: Any, other: Any, same: Compare) -> bool:
    for operand in (one, other):
        if not isinstance(operand, ShardedTensor):
            raise MixedOperandError(
                f"a ShardedTensor is compared with a {type(operand).__name__}: both must be "
                "ShardedTensors; compare full_tensor() with a plain one"
            )
    mine, theirs = one._content, other._content
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not mine.is_like(theirs):
        return False
    here = all(same(a, b) for a, b in zip(mine.parts, theirs.parts, strict=True))
    if not dist.is_initialized():
        return here
    told = torch.tensor([int(here)], device=mine.device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=mine.group)
    return bool(told.item())
