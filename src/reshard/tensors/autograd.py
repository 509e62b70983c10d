"""Gradients of a move: from the ranks that got the tensor to the ranks that held it.

All ranks of the move take part in the backward. A rank without a source has a hidden leaf, a rank
without a result an empty one, so that autograd calls the backward on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from reshard.dtypes import accumulator
from reshard.errors import TensorError
from reshard.layout.box import Box
from reshard.layout.boxlist import LocalPieces
from reshard.layout.layout import BoxLayout
from reshard.live import api
from reshard.live.inputs.bound import materialize
from reshard.planning.adjoint import SumMove
from reshard.planning.plans import ONE, Plan
from reshard.tensors.kinds import joined, not_compiled

T = TypeVar("T")


def gradient_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a move for that of its gradient, which is not donated: autograd may use it for
    other tensors too."""
    return {name: value for name, value in options.items() if name != "donate"}


@dataclass(frozen=True, eq=False)
class Backward:
    """The move of gradients from one layout to another; its own backward moves them back."""

    move: SumMove
    count: int
    """What the sums are divided by: the number of addends of an average, otherwise 1."""
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]

    def run(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """This rank's part of the gradients at the other end; None if it has none."""
        move = self.move
        if not prod(move.shape):
            return None
        if move.direct is None:
            result = self._sum_then_spread(gradient, device)
        else:
            sources = {} if gradient is None else {ONE: gradient}
            result = self._run(move.direct, sources, device).get(ONE)
        if result is None or self.count == 1:
            return result
        # By a tensor: by a number a GPU multiplies with its rounded inverse.
        return result / torch.full((), self.count, dtype=result.dtype, device=result.device)

    def _run(
        self, plan: Plan, sources: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        return plan.run(sources, group=self.group, device=device, **self.options)

    def _sum_then_spread(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """Add up at the first holder of each box, then send the sums where they are wanted."""
        rank, move = dist.get_rank(), self.move
        spread = move.spread
        try:
            total = self._sum_boxes(gradient, device)
        except BaseException as error:
            # Other ranks may have finished the first move: the second must fail on them.
            api.raise_on_all_ranks(spread.spread, error, self.group)
        sources = {"sum": total} if total is not None else {}
        sums = self._run(spread.spread, sources, device).get("sum")
        if move.want.holds(rank) is None:
            return None
        shape = move.want.local_shape(rank, move.shape)
        kind: torch.dtype = getattr(torch, move.cast or move.dtype)
        result = torch.zeros(shape, dtype=kind, device=device)
        if sums is not None:
            pieces = LocalPieces(move.want.pieces(rank, move.shape), len(move.shape))
            for box, part in _by_box(sums.reshape(-1), spread.wanting[rank]):
                _view(result, pieces, box).copy_(part.view(box.shape))
        return result

    def _sum_boxes(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """The sums, not rounded yet, of the boxes that this rank is the first to hold, if any."""
        rank, move = dist.get_rank(), self.move
        own = [boxes.get(rank, ()) for boxes in move.spread.holding]
        total, later = None, dict[int, Tensor]()
        if gradient is not None and any(own):
            pieces = LocalPieces(move.have.pieces(rank, move.shape), len(move.shape))
            gradient = gradient.contiguous()
            for number, boxes in enumerate(own):
                part = joined([_view(gradient, pieces, box) for box in boxes])
                if part is not None:
                    later[number] = part.contiguous()
            wide: torch.dtype = getattr(torch, accumulator(move.dtype))
            total = later.pop(0).to(wide) if 0 in later else None
        gather = move.spread.gather
        if gather is None:
            return total
        sources = {move.spread.name(n): part for n, part in later.items()}
        arrived = self._run(gather, sources, device)
        if total is None:
            return None
        flat = total.reshape(-1).clone()
        sums = dict(_by_box(flat, own[0]))
        for name, more in arrived.items():
            layout = gather.want[name].layout
            boxes = layout.boxes.get(rank, ()) if isinstance(layout, BoxLayout) else ()
            for box, part in _by_box(more.reshape(-1), boxes):
                sums[box] += part
        return flat.view(total.shape)


def _view(tensor: Tensor, pieces: LocalPieces, box: Box) -> Tensor:
    """The view of a box in a rank's local tensor, which is contiguous and has all of the box."""
    place = pieces.find(box)
    assert place is not None
    return tensor.as_strided(box.shape, place[1], tensor.storage_offset() + place[0])


def _by_box(flat: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """The part of each box in a tensor of joined boxes."""
    return zip(boxes, flat.split_with_sizes([box.size for box in boxes]), strict=True)


@not_compiled
def backward(moved: Tensor | None) -> None:
    """Take part in the backward of a move whose result this rank does not use.

    A rank that has a part of the source and none of the result, or the other way round, has no loss
    of its own, but others wait for its part of the gradients. A rank that had no part in the move
    got None, and does nothing here either.
    """
    if moved is None:
        return
    if not moved.requires_grad:
        raise TensorError("this result carries no gradients: nothing that was moved requires them")
    torch.autograd.backward(moved, torch.zeros_like(moved))


def attach(source: Tensor | None, moved: Tensor, backward: Backward) -> Tensor:
    """The result of a move with its gradient function: from the source, or from a hidden leaf."""
    leaf = torch.zeros(0, device=moved.device, requires_grad=True) if source is None else source
    places = {one.untyped_storage().data_ptr() for one in (leaf, moved)}
    shares_memory = moved.numel() > 0 and len(places) == 1
    like = _like(leaf)
    return linear(
        # A view, so that in-place writes raise: they would change the source as well.
        (lambda: moved.view_as(moved)) if shares_memory else (lambda: moved),
        lambda gradient: _move_back(gradient, backward, like),
        leaf,
    )


def _move_back(gradient: Tensor, backward: Backward, like: Mapping[str, Any]) -> Tensor:
    """The gradient of a source or a leaf that is like this, differentiable again."""
    kind: torch.dtype = getattr(torch, backward.move.dtype)

    def compute() -> Tensor:
        # A rank that got nothing has an empty gradient, a rank without a source an empty leaf.
        holds = backward.move.have.holds(dist.get_rank()) is not None
        local = materialize(_cast_gradient(gradient.detach(), kind)) if holds else None
        result = backward.run(local, like["device"])
        if result is None or not result.numel():
            return torch.zeros(**like)
        return _cast_gradient(result, like["dtype"])

    back, like_gradient = replace(backward, move=backward.move.back), _like(gradient)
    return linear(compute, lambda again: _move_back(again, back, like_gradient), gradient)


def _cast_gradient(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient of a cast; that of a real number is real."""
    if tensor.is_complex() and not kind.is_complex:
        tensor = tensor.real
    return tensor.to(kind)


def _like(tensor: Tensor) -> dict[str, Any]:
    """What ``torch.zeros`` needs for a gradient of this tensor."""
    return {"size": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}


class Linear(torch.autograd.Function):
    """A linear function of tensors, and the adjoint that backward calls."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Any], adjoint: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        ctx.adjoint = adjoint
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        adjoints = ctx.adjoint(*gradients)
        return None, None, *(adjoints if isinstance(adjoints, tuple) else (adjoints,))


def linear(compute: Callable[[], T], adjoint: Callable[..., Any], *tensors: Tensor) -> T:
    """What ``compute`` makes of tensors by a linear function; backward calls ``adjoint``.

    Autograd keeps ``adjoint`` until backward, so it must not refer to the parts of a tensor. If it
    is made of functions that use ``linear`` too, gradients of gradients work.
    """
    result: T = Linear.apply(compute, adjoint, *tensors)  # type: ignore[no-untyped-call]
    return result
