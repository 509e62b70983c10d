"""Attention on sharded tensors: heads that are whole on a rank are that rank's own business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reshard.layout.layout import BoxLayout
from reshard.sharded.content import Content, members
from reshard.sharded.gradients import from_local, to_local
from reshard.sharded.tensor import ShardedTensor

__all__ = ["attended"]

HEADS = 1
"""The dim of heads; tensors are (batch, heads, sequence, head dim)."""

Attention = Callable[..., Any]


def attended(func: Attention, args: Any, kwargs: Any) -> Any:
    """Attention head by head where ranks have whole heads; else in steps that DTensor knows."""
    return _attended(func, *args, **kwargs)


def _attended(
    func: Attention,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    rest = (attn_mask, *rest)
    if _have_whole_heads(query, key, value) and _is_for_all_heads(attn_mask):
        local = func(to_local(query), to_local(key), to_local(value), *rest, **kwargs)
        content: Content = query._content
        return from_local(local, content.sized((*content.shape[:-1], local.shape[-1])))
    with sdpa_kernel(SDPBackend.MATH), torch._C.DisableTorchFunctionSubclass():
        return func(query, key, value, *rest, **kwargs)


def _have_whole_heads(*tensors: torch.Tensor) -> bool:
    """Whether all three are cut in the same way, between heads and nowhere else."""
    if not all(isinstance(one, ShardedTensor) and one.ndim == 4 for one in tensors):
        return False
    contents = [one._content for one in tensors]  # type: ignore[attr-defined]
    layout = contents[0].layout
    everyone = set(layout.ranks) == set(members(contents[0].group))
    if any(one.layout != layout for one in contents) or layout.reduce or not everyone:
        return False
    if isinstance(layout, BoxLayout):
        return False  # its boxes may be cut anywhere
    cuts = layout.dims(contents[0].shape)
    if any(cuts[dim] for dim in range(len(cuts)) if dim != HEADS):
        return False
    # Unevenly cut, a rank's query heads need not be those of its key heads.
    return all(one.shape[HEADS] % len(layout.ranks) == 0 for one in contents)


def _is_for_all_heads(mask: torch.Tensor | None) -> bool:
    """Whether a mask is the same for all heads, and for all ranks."""
    if mask is None:
        return True
    plain = not isinstance(mask, ShardedTensor) and not mask.requires_grad
    return plain and (mask.ndim < 3 or mask.shape[-3] == 1)
