"""Attention on sharded tensors: ranks that hold whole heads compute them without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reshard.layout.layout import BoxLayout
from reshard.sharded.content import Content, ContentTensor
from reshard.sharded.groups import members
from reshard.sharded.move.autograd import from_local, to_local

__all__ = ["attend"]

HEADS = 1
"""The dim of heads; tensors are (batch, heads, sequence, head dim)."""


def attend(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Attention head by head if ranks hold whole heads; else in steps that DTensor knows."""
    contents = [_content(one) for one in (query, key, value)]
    if _have_whole_heads(contents) and _is_for_all_heads(attn_mask):
        locals_ = (to_local(one) for one in (query, key, value))  # type: ignore[arg-type]
        local = func(*locals_, attn_mask, *args, **kwargs)
        first = contents[0]
        assert first is not None
        return from_local(local, first.sized((*first.shape[:-1], local.shape[-1])))
    with sdpa_kernel(SDPBackend.MATH), torch._C.DisableTorchFunctionSubclass():
        return func(query, key, value, attn_mask, *args, **kwargs)


def _content(tensor: object) -> Content | None:
    return tensor._content if isinstance(tensor, ContentTensor) else None


def _have_whole_heads(contents: list[Content | None]) -> bool:
    """Whether all three tensors have the same layout, which shards nothing but the heads."""
    first = contents[0]
    if first is None or any(one is None or one.ndim != 4 for one in contents):
        return False
    layout = first.layout
    if isinstance(layout, BoxLayout) or layout.reduce:
        return False
    if set(layout.ranks) != set(members(first.group)):
        return False
    cuts = layout.dims(first.shape)
    if any(cuts[dim] for dim in range(len(cuts)) if dim != HEADS):
        return False
    # With uneven shards, a rank's query heads need not be those of its key heads.
    return all(
        one is not None and one.layout == layout and one.shape[HEADS] % len(layout.ranks) == 0
        for one in contents
    )


def _is_for_all_heads(mask: torch.Tensor | None) -> bool:
    """Whether a mask is the same for all heads, and on all ranks."""
    if mask is None:
        return True
    plain = not isinstance(mask, ContentTensor) and not mask.requires_grad
    return plain and (mask.ndim < 3 or mask.shape[-3] == 1)
