"""DTensors on one mesh, with DTensor's own rule for gradients.

A gradient of a DTensor says itself how it lies, so nothing has to be assumed: it goes back to the
placements of the source. Where a reduction was pending in the source, whichever it is, the gradient
is that of the reduced value, and replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.dtypes import canonical_dtype
from reshard.errors import LayoutError, TensorError
from reshard.live.failure.cleanup import with_ticket
from reshard.live.session.session import Ticket
from reshard.tensors.box_moves import BoxMove, Placed
from reshard.tensors.dtensors import (
    Reading,
    check_shape_of,
    dtensor_local,
    dtensor_of,
    dtensor_with,
    expected_of,
    reading_of,
)
from reshard.tensors.local_work import LocalWork, work_for
from reshard.tensors.meshes import mesh_of, this_rank
from reshard.tensors.motion import Motion
from reshard.tensors.placements import OPS, as_placed, layout_from, read_placements

__all__ = [
    "Redistribution",
    "Settings",
    "is_special",
    "redistribute",
    "redistribution",
    "settled",
    "wrapped",
]

Target = tuple[DeviceMesh, Sequence[Placement]]

AS_NESTED: Reading = (None, True)
"""How torch reads placements that are given to ``redistribute``."""


@dataclass(frozen=True, eq=False)
class Settings:
    """What holds for a redistribution and for its gradients."""

    memory: int
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]
    backward: torch.dtype | None = None
    """The dtype in which gradients travel; their own, if none is given."""


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A move of a DTensor to other placements on its mesh."""

    motion: Motion
    target: Target
    backward: torch.dtype | None = None
    work: LocalWork | None = None
    """What is done to local tensors before and after the move."""
    boxes: BoxMove | None = None
    """The move as boxes, where no words say it."""
    travels: torch.dtype | None = None
    """The dtype to which the source is cast before the move."""
    result: str | None = None
    """The dtype of the result, if it is not the one that the motion gives."""
    reading: Reading = AS_NESTED
    """How the placements of the result are read."""

    @property
    def is_plain(self) -> bool:
        """Whether the motion is all of it."""
        strided = any(isinstance(one, _StridedShard) for one in self.target[1])
        usual = self.reading == AS_NESTED or not strided
        return self.work is None and self.boxes is None and self.travels is None and usual

    def check_into(self) -> None:
        """Refuse to write a result that is computed from what was moved into other memory."""
        if not self.is_plain:
            raise TensorError(
                f"to {list(self.target[1])} the result is computed from what was moved: leave out "
                "into="
            )

    @property
    def settings(self) -> Settings:
        """What holds for its gradients as well."""
        motion = self.motion
        return Settings(motion.memory, motion.group, motion.options, self.backward)

    def run(
        self, ticket: Ticket, tensor: DTensor, into: torch.Tensor | None, wanted: bool
    ) -> DTensor:
        """Move the values."""
        if not self.is_plain:
            return self._run_with_work(ticket, tensor, wanted)
        moved = self._moved(ticket, dtensor_local(tensor), into, wanted)
        kind, stride = getattr(torch, self.motion.cast), tensor.stride()
        return dtensor_of(moved, *self.target, self.motion.shape, stride=stride, dtype=kind)

    def _moved(
        self,
        ticket: Ticket,
        local: torch.Tensor | None,
        into: torch.Tensor | None,
        wanted: bool,
    ) -> torch.Tensor | None:
        found = self.motion.stays(ticket, local) if into is None else None
        if found is not None:
            return found
        device = self.target[0].device_type
        return self.motion.moved(ticket, local, into, device, wanted)[0]

    def _run_with_work(self, ticket: Ticket, tensor: DTensor, wanted: bool) -> DTensor:
        mesh = self.target[0]
        kind: torch.dtype = getattr(torch, self.result or self.motion.cast)
        if mesh.get_coordinate() is None:
            self._moved(ticket, None, None, wanted)
            return dtensor_with(torch.empty(0, dtype=kind), self.target, tensor, self.reading)
        local = dtensor_local(tensor, self._local_shape())
        if local is not None and self.travels is not None:
            local = local.to(self.travels)
        if local is not None and self.work is not None:
            local = self.work.before(local)
        moved = self._values(ticket, local, wanted)
        if self.work is not None:
            moved = self.work.after(moved, mesh, kind)
        return dtensor_with(moved.to(kind), self.target, tensor, self.reading)

    def _local_shape(self) -> tuple[int, ...]:
        if self.boxes is not None:
            return self.boxes.have.local_shape(self.boxes.shape, this_rank())
        return self.motion.have.local_shape(this_rank(), self.motion.shape)

    def _values(self, ticket: Ticket, local: torch.Tensor | None, wanted: bool) -> torch.Tensor:
        rank, motion, device = this_rank(), self.motion, self.target[0].device_type
        kind: torch.dtype = getattr(torch, motion.cast)
        if self.boxes is not None:
            joined = None if local is None else self.boxes.joined(local, rank)
            found = motion.moved(ticket, joined, None, device, wanted)[0]
            return self.boxes.local(found, rank, kind, device)
        moved = self._moved(ticket, local, None, wanted)
        shape = motion.want.local_shape(rank, motion.shape)
        return torch.empty(shape, dtype=kind, device=device) if moved is None else moved


def redistribution(
    tensor: DTensor,
    target: Target,
    settings: Settings,
    cast: str | None = None,
    travels: torch.dtype | None = None,
    reading: Reading = AS_NESTED,
) -> Redistribution:
    """How a DTensor gets other placements on its mesh.

    ``travels`` is a dtype to which it is cast before, ``cast`` the one of the result.
    """
    mesh, shape = target[0], tuple(tensor.shape)
    placed = as_placed(target[1], shape)
    if len(placed) != mesh.ndim:
        layout_from(mesh, placed, shape)  # which refuses them
    if placed == tensor.placements:
        reading = reading_of(tensor._spec)
    dtype = canonical_dtype(travels or tensor.dtype)
    result = cast or dtype
    work = work_for(tuple(mesh.shape), tensor.placements, placed, getattr(torch, dtype))
    before, after = (tensor.placements, placed) if work is None else (work.have, work.want)
    kinds = (dtype, result) if work is None else work.dtypes(dtype, result)
    boxes = None
    try:
        have, expected = expected_of(tensor, before)
        order, nested = reading
        want = read_placements(mesh_of(mesh), after, order, shape, nested)
    except LayoutError:
        boxes = _boxes(tensor, before, after, reading, kinds[0])
        have, want = boxes.layouts
        inside = mesh.get_coordinate() is not None
        expected = boxes.have.local_shape(shape, this_rank()) if inside else None
    check_shape_of(tensor, expected, "they are read here")
    motion = Motion(
        have, want, shape if boxes is None else boxes.whole, *kinds, settings.memory, "replicated",
        settings.group, settings.options,
    )  # fmt: skip
    early = None if travels in (None, tensor.dtype) else travels
    return Redistribution(
        motion, (mesh, placed), settings.backward, work, boxes, early, result, reading
    )


def is_special(tensor: DTensor, placements: Sequence[Placement]) -> bool:
    """Whether the layouts of source and destination do not say all of a redistribution."""
    both = (*tensor.placements, *placements)
    known = all(isinstance(one, Placement) for one in placements)
    if not known or len(placements) != len(tensor.placements):
        return False  # it is refused where it is read
    if any(isinstance(one, _StridedShard) for one in both):
        return True
    pending = [one for one in both if isinstance(one, Partial)]
    if not pending:
        return False
    sizes, placed = tuple(tensor.device_mesh.shape), as_placed(placements, tensor.shape)
    if any(one.reduce_op not in OPS for one in pending):
        return True
    return work_for(sizes, tensor.placements, placed, tensor.dtype) is not None


def settled(tensor: DTensor) -> tuple[Placement, ...] | None:
    """The nearest placements that a layout says; None if it says those of the tensor."""
    try:
        expected_of(tensor, tensor.placements)
    except LayoutError:
        plain = (Shard, Replicate)
        return tuple(one if isinstance(one, plain) else Replicate() for one in tensor.placements)
    return None


def _boxes(
    tensor: DTensor,
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    reading: Reading,
    dtype: str,
) -> BoxMove:
    """The same move as boxes; raises what is wrong with the placements, if anything is."""
    mesh = mesh_of(tensor.device_mesh)
    have = Placed(mesh, before, *reading_of(tensor._spec))
    boxes = BoxMove(have, Placed(mesh, after, *reading), tuple(tensor.shape))
    boxes.check(dtype)
    return boxes


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


def _redistribute_back(
    gradient: DTensor,
    target: Target,
    settings: Settings,
    dtype: torch.dtype,
    reading: Reading = AS_NESTED,
) -> Any:
    """Move a gradient, in a call of its own; differentiable, so that it has a gradient itself."""

    def move(ticket: Ticket) -> Any:
        cast, travels = canonical_dtype(dtype), settings.backward
        how = redistribution(gradient, target, settings, cast, travels, reading)
        return redistribute(ticket, gradient, how)

    return with_ticket(settings.group, lambda: mesh_of(target[0]).ranks, move)


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, moved: list[DTensor], how: Redistribution) -> DTensor:
        ctx.how, ctx.placements, ctx.dtype = how, tensor.placements, tensor.dtype
        ctx.reading = reading_of(tensor._spec)
        return moved[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        gradient, mesh = gradients[0], ctx.how.target[0]
        kept = tuple(
            placement if not placement.is_partial() or current == placement else Replicate()
            for placement, current in zip(ctx.placements, gradient.placements, strict=True)
        )
        target, settings = (mesh, kept), ctx.how.settings
        found = _redistribute_back(gradient, target, settings, ctx.dtype, ctx.reading)
        return found, None, None


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
        gradient, (mesh, placements) = gradients[0], ctx.how.target
        kept = tuple(Replicate() if one.is_partial() else one for one in placements)
        if gradient.placements != kept:
            settings = ctx.how.settings
            gradient = _redistribute_back(gradient, (mesh, kept), settings, gradient.dtype)
        return gradient.to_local(grad_placements=kept), None, None


_redistributed: Callable[..., Any] = _Redistributed.apply
_wrapped: Callable[..., Any] = _Wrapped.apply
