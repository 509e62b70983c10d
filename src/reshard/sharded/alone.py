"""Shards of one process, where there is no process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reshard.sharded.content import Content
from reshard.tensors.meshes import this_rank

__all__ = ["cut_here"]


def cut_here(
    given: Mapping[str, torch.Tensor], contents: Mapping[str, Content]
) -> dict[str, torch.Tensor]:
    """The local tensors of this rank, cut out of whole ones."""
    found = {}
    for name, tensor in given.items():
        content = contents[name]
        local = torch.empty(
            content.layout.local_shape(this_rank(), content.shape), dtype=tensor.dtype
        )
        for piece in content.layout.pieces(this_rank(), content.shape):
            place = tuple(
                slice(start, stop)
                for start, stop in zip(piece.box.start, piece.box.stop, strict=True)
            )
            local.as_strided(piece.box.shape, piece.strides, piece.offset).copy_(tensor[place])
        found[name] = local
    return found
