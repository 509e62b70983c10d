"""Losses that compare element by element and then average: each element first, then all at once.

Done on every rank's own elements, the average and its gradient would count these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from reshard.sharded.tensor import ShardedTensor

__all__ = ["is_loss", "loss_of"]

aten = torch.ops.aten

FORWARD = {
    aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss,
}  # fmt: skip
BACKWARD = {
    aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward,
    aten.binary_cross_entropy_backward, aten.soft_margin_loss_backward,
}  # fmt: skip
NONE, MEAN = 0, 1
"""How torch numbers what is done with the elements; 2 is their sum."""


def is_loss(func: Any) -> bool:
    """Whether an operation is such a loss, or the gradient of one."""
    return func.overloadpacket in FORWARD or func.overloadpacket in BACKWARD


def loss_of(func: Any, args: Any, kwargs: Any, one_by_one: Callable[..., Any]) -> Any:
    """Do a loss, or the gradient of one."""
    given = _named(func, args, kwargs)
    reduction = given["reduction"]
    given["reduction"] = NONE
    if func.overloadpacket in BACKWARD:
        if reduction == MEAN:
            given["grad_output"] = given["grad_output"] / max(prod(given["self"].shape), 1)
        return one_by_one(func, *_ordered(func, given))
    each: ShardedTensor = one_by_one(func, *_ordered(func, given))
    if reduction == NONE:
        return each
    return each.mean() if reduction == MEAN else each.sum()


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments by their names, those left out as well."""
    stated = func._schema.arguments
    found: dict[str, Any] = {
        one.name: one.default_value for one in stated if one.has_default_value()
    }
    found |= {one.name: value for one, value in zip(stated, args, strict=False)}
    found.update(kwargs)
    return found


def _ordered(func: Any, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    stated = func._schema.arguments
    by_place = tuple(given[one.name] for one in stated if not one.kwarg_only)
    return by_place, {one.name: given[one.name] for one in stated if one.kwarg_only}
