"""Operations of which DTensor has a rule that is wrong for some tensors, or fails on one rank.

They are done with whole tensors instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.sharded.tensor import ShardedTensor

__all__ = ["is_misjudged"]

aten = torch.ops.aten

NEVER = {aten.linalg_ldl_solve}
"""Operations that DTensor cuts along dims that must be whole."""
BY_INDEX = {aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce}
"""Operations with an index for every element: (tensor, dim, index, ...)."""
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Convolutions, and how many of their first arguments have batches; then come the weights."""
KEEPS_CONJUGATES = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._unsafe_view, aten.cat, aten.stack,
    aten.index_select, aten.index,
}  # fmt: skip
"""Operations that conjugate nothing on the way."""


def is_misjudged(func: Any, args: Any) -> bool:
    """Whether DTensor has a rule for an operation that gives wrong values, or fails on one rank."""
    packet = func.overloadpacket
    if packet in NEVER:
        return True
    if packet in BY_INDEX:
        tensor, dim, index = args[:3]
        # It takes an index to be cut where the tensor is, which holds for equal sizes only.
        kept = [at for at in range(tensor.ndim) if at != dim % max(tensor.ndim, 1)]
        sources = [one for one in args[3:4] if isinstance(one, torch.Tensor)]
        others = [one.shape for one in (index, *sources)]
        return any(shape[at] != tensor.shape[at] for shape in others for at in kept if shape)
    if packet in CONVOLUTIONS:
        count = CONVOLUTIONS[packet]
        batches, weights = args[:count], args[count : count + 2]
        return any(not _is_cut_by(0, one) for one in batches) or any(
            isinstance(one, ShardedTensor) and not _is_cut_by(None, one) for one in weights
        )
    if func.is_view or packet in KEEPS_CONJUGATES or torch.Tag.reduction in func.tags:
        return False
    return _has_complex(args)


def _has_complex(args: Any) -> bool:
    """Whether DTensor may take an operation apart, and lose the flag of a conjugate on the way."""
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in tree_leaves(args))


def _is_cut_by(dim: int | None, tensor: Any) -> bool:
    """Whether no dim is cut but this one."""
    if not isinstance(tensor, ShardedTensor):
        return dim is None
    content = tensor._content
    boxes = _pieces(content.layout, content.shape)
    return all(
        at == dim or (box.start[at], box.stop[at]) == (0, size)
        for box in boxes
        for at, size in enumerate(content.shape)
    )


@lru_cache(maxsize=4096)
def _pieces(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    return tuple(piece.box for rank in layout.ranks for piece in layout.pieces(rank, shape))
