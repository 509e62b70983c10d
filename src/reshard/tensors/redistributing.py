"""DTensors on one mesh, with DTensor's own rule for gradients.

A gradient of a DTensor says itself how it lies, so nothing has to be assumed: it goes back to the
placements of the source. Where the source was a pending sum every addend gets the same gradient,
which therefore is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from reshard.run.live.session import Ticket, counted
from reshard.tensors.describe import spec_of
from reshard.tensors.dtensors import dtensor_local, dtensor_of
from reshard.tensors.motion import Motion
from reshard.tensors.placements import layout_from

__all__ = ["Redistribution", "redistribute", "wrapped"]

Target = tuple[DeviceMesh, Sequence[Placement]]


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A move of a DTensor to other placements on its mesh."""

    motion: Motion
    target: Target

    def run(
        self, ticket: Ticket, tensor: DTensor, into: torch.Tensor | None, wanted: bool
    ) -> DTensor:
        """Move the values."""
        motion, local = self.motion, dtensor_local(tensor)
        moved = motion.stays(ticket, local) if into is None else None
        if moved is None:
            moved, _ = motion.moved(ticket, local, into, self.target[0].device_type, wanted)
        kind, stride = getattr(torch, motion.cast), tensor.stride()
        return dtensor_of(moved, *self.target, motion.shape, stride=stride, dtype=kind)

    def of(self, tensor: DTensor, placements: Sequence[Placement], cast: str) -> Redistribution:
        """The same kind of move for another tensor on the mesh."""
        spec, target = spec_of(tensor), (self.target[0], placements)
        want = layout_from(*target, spec.shape)
        motion = replace(self.motion, have=spec.layout, want=want, dtype=spec.dtype, cast=cast)
        return Redistribution(motion, target)

    def back(self, gradient: DTensor, placements: Sequence[Placement]) -> Redistribution:
        """From where a gradient lies to the placements of the source."""
        kept = tuple(
            placement if not placement.is_partial() or current == placement else Replicate()
            for placement, current in zip(placements, gradient.placements, strict=True)
        )
        return self.of(gradient, kept, self.motion.dtype)


def redistribute_back(tensor: DTensor, how: Redistribution) -> Any:
    """Move a gradient, in a call of its own."""
    motion = how.motion
    ranks = lambda: motion.plan.parties  # noqa: E731
    return counted(motion.group, ranks, lambda ticket: redistribute(ticket, tensor, how))


def redistribute(
    ticket: Ticket, tensor: DTensor, how: Redistribution, into: torch.Tensor | None = None
) -> Any:
    """Move a DTensor; gradients of the result find their way back to it."""
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    if wanted:
        how.motion.check_differentiable(into is not None, dtensors=True)
    moved = how.run(ticket, tensor, into, wanted)
    # In a list, so that autograd does not take it for an input that is handed through.
    return _redistributed(tensor, [moved], how) if wanted else moved


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, moved: list[DTensor], how: Redistribution) -> DTensor:
        ctx.how, ctx.placements = how, tensor.placements
        return moved[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        # Not run() but the differentiable whole, so that a gradient has a gradient.
        gradient = gradients[0]
        back = ctx.how.back(gradient, ctx.placements)
        return redistribute_back(gradient, back), None, None


def wrapped(
    local: torch.Tensor | None, motion: Motion, target: Target, stride: Sequence[int] | None
) -> DTensor:
    """The local result of a move from elsewhere, as a DTensor of the mesh that it went to."""
    kind = getattr(torch, motion.cast)
    if local is None or not local.requires_grad:
        return dtensor_of(local, *target, motion.shape, stride=stride, dtype=kind)
    part = None if target[0].get_coordinate() is None else local.detach()
    made = dtensor_of(part, *target, motion.shape, stride=stride, dtype=kind)
    found: DTensor = _wrapped(local, [made], Redistribution(motion, target))
    return found


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, made: list[DTensor], how: Redistribution) -> DTensor:
        ctx.how = how
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        # Ranks outside the mesh cannot see how a gradient lies, so it is laid out like the result.
        gradient, placements = gradients[0], ctx.how.target[1]
        kept = tuple(Replicate() if one.is_partial() else one for one in placements)
        if gradient.placements != kept:
            how = ctx.how.of(gradient, kept, spec_of(gradient).dtype)
            gradient = redistribute_back(gradient, how)
        return gradient.to_local(grad_placements=kept), None, None


_redistributed: Callable[..., Any] = _Redistributed.apply
_wrapped: Callable[..., Any] = _Wrapped.apply
