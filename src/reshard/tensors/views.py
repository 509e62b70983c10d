"""Views of a local tensor: the memory of one of its pieces."""

from __future__ import annotations

import numpy as np
import torch

from reshard.layout.box import Box
from reshard.layout.pieces import Piece

__all__ = ["inner_view", "piece_view"]


def piece_view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a local tensor; pieces count elements as if it were contiguous."""
    if local.is_contiguous() or local.ndim == 1:
        # The elements of a flat local tensor may have gaps between them, all of the same size.
        step = local.stride(0) if local.ndim == 1 else 1
        strides = [stride * step for stride in piece.strides]
        at = local.storage_offset() + piece.offset * step
        return local.as_strided(piece.box.shape, strides, at)
    start = np.unravel_index(piece.offset, tuple(local.shape))
    lengths = zip(start, piece.box.shape, strict=True)
    return local[tuple(slice(int(low), int(low) + length) for low, length in lengths)]


def inner_view(tensor: torch.Tensor, outer: Box, box: Box) -> torch.Tensor:
    """The part of a tensor, which holds the elements of ``outer``, that lies in a box."""
    inner = outer & box
    limits = zip(inner.start, inner.stop, outer.start, strict=True)
    return tensor[tuple(slice(low - at, high - at) for low, high, at in limits)]
