"""This rank's part of a tensor, box by box: views of its memory, whatever kind of tensor it is."""

from __future__ import annotations

from functools import lru_cache

import torch

from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.pieces import Piece
from reshard.tensors.reading import layout_of, parts_of
from reshard.tensors.views import inner_view, piece_view

__all__ = ["boxes_of", "part_of", "views_of"]

View = tuple[Box, torch.Tensor]


@lru_cache(maxsize=1024)
def boxes_of(layout: Layout, shape: tuple[int, ...]) -> dict[int, tuple[Box, ...]]:
    """The boxes of every rank, in rising order; ranks with none are left out."""
    found = {rank: _boxes(layout, rank, shape) for rank in layout.ranks}
    return {rank: boxes for rank, boxes in found.items() if boxes}


def _boxes(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
    return tuple(sorted(piece.box for piece in _pieces(layout, rank, shape)))


@lru_cache(maxsize=1024)
def _pieces(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of one rank that hold anything."""
    return tuple(piece for piece in layout.pieces(rank, shape) if piece.box.size)


def views_of(tensor: torch.Tensor, shape: tuple[int, ...], rank: int) -> list[View]:
    """The boxes that this rank holds, in rising order, and the memory of each.

    Writing to that changes the tensor. How it lies is asked of the tensor itself: what all ranks
    together say of it may be said in other words.
    """
    parts, layout = [part.detach() for part in parts_of(tensor)], layout_of(tensor)
    if isinstance(layout, BoxLayout):
        pairs = zip(layout.boxes.get(rank, ()), parts, strict=True)
        found = [(box, part) for box, part in pairs if box.size]
    elif parts:
        found = [(p.box, piece_view(parts[0], p)) for p in _pieces(layout, rank, shape)]
    else:
        found = []
    return sorted(found, key=lambda view: view[0])


def part_of(view: View, box: Box) -> torch.Tensor:
    """The part of a view that lies in a box."""
    outer, tensor = view
    return inner_view(tensor, outer, box)
