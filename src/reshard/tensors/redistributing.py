"""DTensor to DTensor, on the same mesh or another, with DTensor's own rule for gradients.

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

from reshard.tensors.describe import spec_of
from reshard.tensors.dtensors import dtensor_local, dtensor_of
from reshard.tensors.motion import Motion
from reshard.tensors.placements import layout_from
from reshard.tensors.reading import local_of

__all__ = ["Redistribution", "redistribute"]

Target = tuple[DeviceMesh, Sequence[Placement]]


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A move whose two ends are DTensors."""

    motion: Motion
    target: Target

    def run(self, tensor: DTensor, into: torch.Tensor | None = None) -> DTensor:
        """Move the values, without gradients."""
        motion, local = self.motion, dtensor_local(tensor)
        kind = getattr(torch, motion.cast)
        if motion.is_still and into is None:
            moved = local
        else:
            place = None if into is None else local_of(into)
            moved = motion.run(
                None if local is None else local.detach(), place, self.target[0].device_type
            )
        return dtensor_of(moved, *self.target, motion.shape, stride=tensor.stride(), dtype=kind)

    def back(self, gradient: DTensor, source: Target) -> Redistribution:
        """From where a gradient lies to the placements of the source."""
        spec, (mesh, placements) = spec_of(gradient), source
        same = gradient.device_mesh == mesh
        kept = tuple(
            placement
            if not placement.is_partial() or (same and gradient.placements[at].is_partial())
            else Replicate()
            for at, placement in enumerate(placements)
        )
        motion = replace(
            self.motion,
            have=spec.layout,
            want=layout_from(mesh, kept, spec.shape),
            dtype=spec.dtype,
            cast=self.motion.dtype,
        )
        return Redistribution(motion, (mesh, kept))


def redistribute(tensor: DTensor, how: Redistribution, into: torch.Tensor | None) -> Any:
    """Move a DTensor; gradients of the result find their way back to it."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return how.run(tensor, into)
    how.motion.check_differentiable(dtensors=True)
    return _redistributed(tensor, how)


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, how: Redistribution) -> DTensor:
        ctx.how = how
        ctx.source = (tensor.device_mesh, tensor.placements)
        return how.run(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        gradient = gradients[0]
        back = ctx.how.back(gradient, ctx.source)
        # Not run() but the differentiable whole, so that a gradient has a gradient.
        return redistribute(gradient, back, None), None


_redistributed: Callable[..., Any] = _Redistributed.apply
