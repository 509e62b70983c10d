"""Gradients of a move: from the ranks that got the tensor to the ranks that brought it.

All ranks of the move take part. One that brought nothing has a hidden leaf, one that got nothing an
empty result, so that autograd calls every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from reshard.dtypes import accumulator
from reshard.live import api
from reshard.planning.adjoint import SumMove
from reshard.planning.plans import ONE, Plan
from reshard.tensors.boxes import Boxes, added, listed
from reshard.tensors.kinds import computed

__all__ = ["WayBack", "attached"]

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class WayBack:
    """Gradients on their way from one layout to another, perhaps more than once."""

    move: SumMove
    count: int
    """What the sums are divided by: how many addends an average has, else 1."""
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]

    @property
    def back(self) -> WayBack:
        """The gradient of this."""
        return replace(self, move=self.move.back)

    @property
    def kind(self) -> torch.dtype:
        """The dtype in which gradients travel and are added up."""
        found: torch.dtype = getattr(torch, self.move.dtype)
        return found

    def run(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """This rank's part of the gradients at the other end; None where it has none."""
        move = self.move
        if not prod(move.shape):
            return None
        if move.direct is None:
            found = self._spread(gradient, device)
        else:
            given = {} if gradient is None else {ONE: gradient}
            found = self._run(move.direct, given, device).get(ONE)
        if found is None or self.count == 1:
            return found
        # By a tensor: by a number a GPU multiplies with its rounded inverse.
        return found / torch.full((), self.count, dtype=found.dtype, device=found.device)

    def _run(
        self, plan: Plan, given: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        return plan.run(given, group=self.group, device=device, **self.options)

    def _spread(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """Add up at first holders, box by box, then send the sums to whoever wants them."""
        rank, move = dist.get_rank(), self.move
        spread = move.spread
        try:
            total = self._total(gradient, device)
        except BaseException as error:
            # Other ranks may have gathered and be in the second call: it counts here as well.
            api.raise_on_all_ranks(spread.spread, error, self.group)
        given = {"sum": total} if total is not None else {}
        sums = self._run(spread.spread, given, device).get("sum")
        if move.want.holds(rank) is None:
            return None
        shape = move.want.local_shape(rank, move.shape)
        kind: torch.dtype = getattr(torch, move.cast or move.dtype)
        result = torch.zeros(shape, dtype=kind, device=device)
        if sums is not None:
            Boxes(move.want, move.shape, rank).split_into(result, spread.wanting[rank], sums)
        return result

    def _total(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """The sums of the boxes that this rank is the first to hold, not rounded yet.

        None if there are none.
        """
        rank, move = dist.get_rank(), self.move
        own = [boxes.get(rank, ()) for boxes in move.spread.holding]
        total, later = None, {}
        if gradient is not None and any(own):
            mine = Boxes(move.have, move.shape, rank)
            wide: torch.dtype = getattr(torch, accumulator(move.dtype))
            total = mine.joined(gradient, own[0]).to(wide) if own[0] else None
            later = {n: mine.joined(gradient, boxes) for n, boxes in enumerate(own) if n and boxes}
        gather = move.spread.gather
        if gather is not None:
            given = {move.spread.name(n): part for n, part in later.items()}
            for name, more in self._run(gather, given, device).items():
                if total is not None:
                    total = added(total, own[0], more, listed(gather.want[name].layout, rank))
        return total


def attached(
    source: Tensor | None, leaf: Tensor | None, moved: Tensor, back: WayBack, device: Any
) -> Tensor:
    """The result of a move as autograd sees it: made from the source, or from a hidden leaf."""
    hidden = source is None
    if source is not None:
        leaf = source
    elif leaf is None:
        leaf = torch.zeros(0, device=device, requires_grad=True)
    # In a list: for autograd it is then a result, and no input that is handed through as a view,
    # into which nothing could be written. What shares the source's memory stays such a view.
    given = moved if _shares_memory(source, moved) else [moved]
    found: Tensor = _moved(leaf, given, back, hidden)
    return found


def _shares_memory(source: Tensor | None, moved: Tensor) -> bool:
    if source is None or not moved.numel():
        return False
    return source.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()


def _as(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient of a cast; that of a real number is real."""
    if tensor.is_complex() and not kind.is_complex:
        tensor = tensor.real
    return tensor.to(kind)


class _Moved(torch.autograd.Function):
    """Makes the result of a move the result of its input."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, moved: Tensor | list[Tensor], back: WayBack, hidden: bool
    ) -> Tensor:
        ctx.back, ctx.like = back, _Like(source)
        ctx.hidden = hidden
        return moved[0] if isinstance(moved, list) else moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _back(gradients[0], ctx.back, ctx.like, ctx.hidden), None, None, None


class _Like:
    """What a gradient must look like."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.kind, self.device = tensor.shape, tensor.dtype, tensor.device

    def of(self, found: Tensor | None) -> Tensor:
        """The gradient as it must be; zeros where nothing came."""
        if found is None:
            return torch.zeros(self.shape, dtype=self.kind, device=self.device)
        return _as(found, self.kind)


class _Back(torch.autograd.Function):
    """Gradients going back, differentiable again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, back: WayBack, like: _Like, hidden: bool) -> Tensor:
        ctx.back, ctx.like = back.back, _Like(gradient)
        # A rank that got nothing has an empty gradient, one that brought nothing an empty leaf.
        holds = back.move.have.holds(dist.get_rank()) is not None
        local = computed(_as(gradient.detach(), back.kind)) if holds else None
        found = back.run(local, like.device)
        return like.of(None if hidden else found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _back(gradients[0], ctx.back, ctx.like, False), None, None, None


_moved: Callable[..., Tensor] = _Moved.apply
_back: Callable[..., Tensor] = _Back.apply
