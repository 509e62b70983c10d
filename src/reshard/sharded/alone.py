"""Shards of one process, where there is no process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.coverage import missing_boxes
from reshard.layout.layout import Layout
from reshard.layout.pieces import Piece
from reshard.tensors.kinds import this_rank

__all__ = ["cut_here", "moved_here"]


def cut_here(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The local tensor of this process, cut out of the whole one."""
    shape = tuple(tensor.shape)
    local = tensor.new_empty(layout.local_shape(this_rank(), shape))
    for piece in layout.pieces(this_rank(), shape):
        _at(local, piece).copy_(tensor[_slices(piece.box)])
    return local


def moved_here(
    local: torch.Tensor | None, have: Layout, want: Layout, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """The local tensor of this process in another layout; None where that gives it nothing."""
    if want.holds(this_rank()) is None:
        return None
    pieces = have.pieces(this_rank(), shape)
    _check_all_here(pieces, want, shape)
    if local is None:
        raise CoverageError(f"this process has no shard of a tensor {list(shape)}: give it one")
    whole = local.new_empty(shape)
    for piece in pieces:
        whole[_slices(piece.box)] = _at(local, piece)
    return cut_here(whole, want)


def _check_all_here(pieces: Sequence[Piece], want: Layout, shape: tuple[int, ...]) -> None:
    held = [piece.box for piece in pieces]
    for wanted in want.pieces(this_rank(), shape):
        missing = missing_boxes(wanted.box, held)
        if missing:
            raise CoverageError(
                f"{missing[0]} of a tensor {list(shape)} is on another rank, and there is no "
                "process group to ask: call torch.distributed.init_process_group first"
            )


def _at(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Where a piece lies in a local tensor."""
    flat = local.contiguous() if not local.is_contiguous() else local
    return flat.as_strided(piece.box.shape, piece.strides, flat.storage_offset() + piece.offset)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))
