"""Boxes of a local tensor, one by one: taken out and joined, put back, added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reshard.errors import LiveError
from reshard.layout.box import Box
from reshard.layout.boxlist import LocalPieces
from reshard.layout.layout import BoxLayout, Layout

__all__ = ["Boxes", "added", "listed"]


class Boxes:
    """Boxes of a rank's local tensor, as views."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], rank: int) -> None:
        self.pieces = LocalPieces(layout.pieces(rank, shape), len(shape))

    def view(self, tensor: Tensor, box: Box) -> Tensor:
        """A box of the local tensor, which is contiguous."""
        found = self.pieces.find(box)
        if found is None:
            raise LiveError(f"box {box} is not on this rank: this is a mistake in reshard")
        return tensor.as_strided(box.shape, found[1], tensor.storage_offset() + found[0])

    def joined(self, tensor: Tensor, boxes: Sequence[Box]) -> Tensor:
        """Boxes as ``Layout.from_boxes`` has them: one as it is, several flattened and joined."""
        tensor = tensor.contiguous()
        views = [self.view(tensor, box) for box in boxes]
        if len(views) == 1:
            return views[0].contiguous()
        return torch.cat([view.reshape(-1) for view in views]) if views else tensor.new_zeros(0)

    def split_into(self, tensor: Tensor, boxes: Sequence[Box], joined: Tensor) -> None:
        """Put joined boxes back into a local tensor."""
        flat, at = joined.reshape(-1), 0
        for box in boxes:
            self.view(tensor, box).copy_(flat[at : at + box.size].view(box.shape))
            at += box.size


def listed(layout: Layout, rank: int) -> Sequence[Box]:
    """The boxes of a rank, in the order in which they were given."""
    return layout.boxes.get(rank, ()) if isinstance(layout, BoxLayout) else ()


def added(total: Tensor, boxes: Sequence[Box], more: Tensor, which: Sequence[Box]) -> Tensor:
    """Add joined boxes to those of the same boxes among others."""
    starts, at = {}, 0
    for box in boxes:
        starts[box] = at
        at += box.size
    flat, flat_more, at = total.reshape(-1).clone(), more.reshape(-1), 0
    for box in which:
        flat[starts[box] : starts[box] + box.size] += flat_more[at : at + box.size]
        at += box.size
    return flat.view(total.shape)
