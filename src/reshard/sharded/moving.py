"""Move what ranks have of a sharded tensor to where it should be: along a plan of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.layout.layout import BoxLayout, Layout
from reshard.live.failure.cleanup import with_ticket
from reshard.live.session.session import Ticket
from reshard.planning.plans import ONE
from reshard.sharded.alone import moved_here
from reshard.sharded.content import Content, members
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import whole_on
from reshard.tensors.tensor_move import move_between

__all__ = ["laid_as", "moved_parts", "moved_to", "split", "whole"]


def moved_to(content: Content, want: Layout) -> Content:
    """The same tensor in another layout; shares memory where nothing has to move."""
    parts = moved_parts(content, want)
    return replace(
        content, layout=want, parts=parts, spec=None, stated=None, mesh=None, stated_stride=None
    )


def laid_as(content: Content, target: Content) -> Content:
    """The same tensor in the layout of another content, and on its device."""
    parts = tuple(part.to(target.device) for part in moved_parts(content, target.layout))
    return replace(target, dtype=content.dtype, parts=parts, mesh=None, stated_stride=None)


def moved_parts(content: Content, want: Layout) -> tuple[torch.Tensor, ...]:
    """This rank's parts in another layout."""
    found = _moved(content, want)
    return () if found is None else split(found, want, content.shape)


def whole(content: Content, ranks: Sequence[int] | None = None) -> torch.Tensor | None:
    """The whole tensor on these ranks, or on all of the group; None on the others."""
    return _moved(content, whole_on(tuple(ranks or members(content.group))))


def _moved(content: Content, want: Layout) -> torch.Tensor | None:
    kind = canonical_dtype(content.dtype)
    have, shape, group = content.layout, content.shape, content.group
    local = content.local
    if not dist.is_initialized():
        return moved_here(local, have, want, shape)

    def move(ticket: Ticket) -> torch.Tensor | None:
        one = move_between(have, want, shape, kind)
        unmoved = one.unmoved(ticket, local)
        if unmoved is not None:
            return unmoved
        return one.call(ticket, local, None, content.device).run().get(ONE)

    return with_ticket(group, lambda: {*have.ranks, *want.ranks}, move)


def split(local: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """A local tensor as the parts that its layout lists: views of it, one per box."""
    if not isinstance(layout, BoxLayout):
        return (local,)
    boxes = layout.boxes.get(this_rank(), ())
    if len(boxes) == 1:
        return (local.view(boxes[0].shape),)
    found, at = [], 0
    for box in boxes:
        found.append(local.reshape(-1)[at : at + box.size].view(box.shape))
        at += box.size
    return tuple(found)
