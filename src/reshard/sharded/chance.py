"""Random numbers of which several ranks have the same ones: one rank draws, the others are told.

Every rank draws with its own generator; replicas would otherwise be different tensors from then on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.sharded.content import Content
from reshard.sharded.moving import moved_to
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.kinds import this_rank

__all__ = ["agreed"]


def agreed(result: Any) -> Any:
    """A result that was drawn, with the same values in all replicas."""
    return tree_map(_agree, result)


def _agree(value: Any) -> Any:
    if isinstance(value, ShardedTensor) and _repeats(value.cut, tuple(value.shape)):
        content = _drawn_by_first(value._content)
        with torch.no_grad():
            for part, drawn in zip(value._content.parts, content.parts, strict=True):
                part.copy_(drawn)
    return value


def _drawn_by_first(content: Content) -> Content:
    later = _repeats(content.layout, content.shape)
    parts = () if this_rank() in later else content.parts
    first = replace(content, layout=content.layout.without(later), parts=parts)
    return moved_to(first, content.layout)


@lru_cache(maxsize=4096)
def _repeats(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold nothing but what an earlier rank holds as well."""
    seen: set[tuple[Box, ...]] = set()
    found = []
    for rank in layout.ranks:
        held = tuple(piece.box for piece in layout.pieces(rank, shape))
        if held in seen:
            found.append(rank)
        seen.add(held)
    return tuple(found)
