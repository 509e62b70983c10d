"""DTensor to DTensor, on the same mesh or another, with DTensor's own rule for gradients.

A gradient of a DTensor says itself how it lies, so nothing has to be assumed: it goes back to the
placements of the source. Where the source was a pending sum every addend gets the same gradient,
which therefore is replicated. Between meshes a gradient is first laid out like the result, because
ranks that are not in its mesh cannot see how it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from reshard.errors import TensorError
from reshard.tensors.describe import spec_of
from reshard.tensors.dtensors import dtensor_local, dtensor_of
from reshard.tensors.motion import NOT_INTO, Motion
from reshard.tensors.placements import layout_from
from reshard.tensors.reading import local_of

__all__ = ["Redistribution", "redistribute"]

Target = tuple[DeviceMesh, Sequence[Placement]]


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A move whose two ends are DTensors."""

    motion: Motion
    target: Target

    def run(
        self, tensor: DTensor, into: torch.Tensor | None, wanted: bool | None
    ) -> tuple[DTensor, bool]:
        """Move the values; gives also whether anyone wants gradients."""
        motion, local = self.motion, dtensor_local(tensor)
        at_rest = motion.at_rest(local) if into is None else None
        if at_rest is None:
            place = None if into is None else local_of(into)
            device = self.target[0].device_type
            at_rest, wanted = motion.moved(local, place, device, wanted)
        kind, stride = getattr(torch, motion.cast), tensor.stride()
        moved = dtensor_of(at_rest, *self.target, motion.shape, stride=stride, dtype=kind)
        return moved, bool(wanted)

    def back(self, gradient: DTensor, source: Target) -> Redistribution:
        """From where a gradient lies to the placements of the source."""
        mesh, placements = source
        same = gradient.device_mesh == mesh
        kept = tuple(
            placement
            if not placement.is_partial() or (same and gradient.placements[at].is_partial())
            else Replicate()
            for at, placement in enumerate(placements)
        )
        return self._of(gradient, (mesh, kept), self.motion.dtype)

    def _of(self, tensor: DTensor, target: Target, cast: str) -> Redistribution:
        """The same kind of move with other ends."""
        spec = spec_of(tensor)
        want = layout_from(*target, spec.shape)
        motion = replace(self.motion, have=spec.layout, want=want, dtype=spec.dtype, cast=cast)
        return Redistribution(motion, target)

    def laid_out(self, gradient: DTensor) -> DTensor:
        """A gradient of the result with the placements of the result, and nothing pending."""
        mesh, placements = self.target
        kept = tuple(Replicate() if one.is_partial() else one for one in placements)
        if gradient.placements == kept:
            return gradient
        how = self._of(gradient, (mesh, kept), spec_of(gradient).dtype)
        found: DTensor = redistribute(gradient, how, None)
        return found


def redistribute(tensor: DTensor, how: Redistribution, into: torch.Tensor | None) -> Any:
    """Move a DTensor; gradients of the result find their way back to it."""
    enabled = torch.is_grad_enabled()
    wanted: bool | None = tensor.requires_grad and enabled
    if wanted:
        how.motion.check_differentiable(into is not None, dtensors=True)
    elif enabled and tensor.device_mesh.get_coordinate() is None:
        # A rank outside the mesh holds nothing that could require them.
        wanted = None
    moved, wanted = how.run(tensor, into, wanted)
    if not wanted:
        return moved if into is None else into
    if into is not None:
        raise TensorError(NOT_INTO)
    leaf = tensor if tensor.requires_grad else torch.zeros(0, requires_grad=True)
    # In a list, so that autograd does not take it for an input that is handed through.
    return _redistributed(leaf, [moved], how, (tensor.device_mesh, tensor.placements))


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, moved: list[DTensor], how: Redistribution, source: Target
    ) -> DTensor:
        ctx.how, ctx.source, ctx.hidden = how, source, not isinstance(leaf, DTensor)
        return moved[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        gradient, how = gradients[0], ctx.how
        if gradient.device_mesh != ctx.source[0]:
            gradient = how.laid_out(gradient)
        # Not run() but the differentiable whole, so that a gradient has a gradient.
        found = redistribute(gradient, how.back(gradient, ctx.source), None)
        return None if ctx.hidden else found, None, None, None


_redistributed: Callable[..., Any] = _Redistributed.apply
