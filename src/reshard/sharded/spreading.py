"""An operand of an operation on elements, as every part of another tensor needs it."""

from __future__ import annotations

from typing import Any

import torch

from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout
from reshard.sharded.content import Content
from reshard.sharded.gradients import as_content
from reshard.sharded.moving import moved_to, whole
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.kinds import this_rank

__all__ = ["parts_like", "plain"]


def parts_like(leaf: Any, like: Content) -> Any:
    """An argument for every part of a content: its own parts, or the same value for all.

    A rank without parts gets a tensor without elements: results then have the same dtype there.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.shape and like.shape:
        return plain(leaf)
    content = as_content(leaf, like)
    if content.shape != like.shape:
        return _spread(content, like)
    if not content.is_like(like):
        content = moved_to(content, like.layout)
    return content.parts if like.parts else torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def plain(leaf: Any) -> Any:
    """A sharded tensor as a whole one; anything else as it is."""
    return whole(leaf._content) if isinstance(leaf, ShardedTensor) else leaf


def _spread(content: Content, like: Content) -> Any:
    """A smaller tensor, of which every part gets the elements that meet its own."""
    found = whole(content)
    assert found is not None
    wide = found.expand(like.shape)
    if not like.parts:
        return wide.new_empty(0)
    if isinstance(like.layout, BoxLayout):
        return tuple(wide[_slices(box)] for box in like.layout.boxes[this_rank()])
    spread = as_content(wide.contiguous(), like)
    return moved_to(spread, like.layout).parts


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))
