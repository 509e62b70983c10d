"""The whole of a sharded tensor on one rank."""

from __future__ import annotations

import torch

from reshard.sharded.content import members
from reshard.sharded.moving import whole
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.meshes import this_rank

__all__ = ["gathered"]


def gathered(
    tensor: ShardedTensor,
    dst: int,
    out: torch.Tensor | None,
    enforce_dtype: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor | None:
    """The whole tensor on rank ``dst`` of the group; None on the others."""
    content, ranks = tensor._content, members(tensor._content.group)
    if not 0 <= dst < len(ranks):
        last = len(ranks) - 1
        raise ValueError(f"dst={dst} is no rank of a group of {len(ranks)}: give 0 to {last}")
    if enforce_dtype and dtype is None:
        raise ValueError("enforce_dtype=True without dtype=: say which")
    if this_rank() == ranks[dst] and out is not None and tuple(out.shape) != content.shape:
        raise ValueError(
            f"out has shape {list(out.shape)} and the tensor {list(content.shape)}: give room for "
            "the whole tensor"
        )
    with torch.no_grad():
        found = whole(content, [ranks[dst]])
        if this_rank() != ranks[dst] or found is None:
            return None
        if dtype is not None:
            found = found.to(dtype)
        if out is None:
            return found.clone() if found is content.local else found
        out.copy_(found)
    return out
