"""DTensors on one mesh that get other placements, with DTensor's own rule for gradients.

A gradient of a DTensor has its own placements, so no assumption is needed: the gradient moves back
to the placements of the source. If the source had a pending reduction of any kind, the gradient is
that of the reduced value, and replicated.

Training repeats the same moves in every step. The specs of source and destination, and the move
between them, are cached, so that a repeated move costs one look-up besides the exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.dtypes import canonical_dtype
from reshard.errors import LayoutError
from reshard.live.api import skip_exchange
from reshard.live.call import Call
from reshard.live.failure.cleanup import with_ticket
from reshard.live.inputs.request import Options, options_from
from reshard.live.session.session import Ticket
from reshard.planning.plans import ONE
from reshard.tensors.autograd import gradient_options, linear
from reshard.tensors.dtensor.boxes import BoxMove, box_move
from reshard.tensors.dtensor.placements import OPS, Placed, layout_from, mesh_of, positive_dims
from reshard.tensors.dtensor.reductions import LocalWork, work_for
from reshard.tensors.dtensor.wrapping import (
    Reading,
    SpecFields,
    check_shape_of,
    dtensor_local,
    dtensor_of,
    dtensor_with,
    expected_of,
    fields_of,
    gradient_placements,
    reading_of,
    spec_from,
)
from reshard.tensors.dtensor.wrapping import differentiable_local as differentiable_local
from reshard.tensors.kinds import this_rank
from reshard.tensors.tensor_move import NO_OPTIONS, USUAL_MEMORY, TensorMove, move_between

OnMesh = tuple[DeviceMesh, Sequence[Placement]]

NESTED: Reading = (None, True)
"""How torch reads placements that are given to ``redistribute``."""


@dataclass(frozen=True, eq=False)
class Settings:
    """Settings that a redistribution shares with the moves of its gradients."""

    memory: int
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]
    backward: torch.dtype | None = None
    """The dtype in which gradients are sent; None: their own."""


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A move of a DTensor to other placements on its mesh."""

    move: TensorMove
    target: OnMesh
    settings: Settings
    work: LocalWork | None = None
    """What is computed on local tensors before and after the move."""
    boxes: BoxMove | None = None
    """The move as boxes, where no words of a layout express it."""
    sent: torch.dtype | None = None
    """The dtype to which the source is cast before the move."""
    result: str | None = None
    """The dtype of the result, if it is not the one that the move gives."""
    reading: Reading = NESTED
    """How the placements of the result are read."""

    @property
    def is_plain(self) -> bool:
        """Whether the redistribution is one move, without computation before or after it."""
        strided = any(isinstance(one, _StridedShard) for one in self.target[1])
        usual = self.reading == NESTED or not strided
        return self.work is None and self.boxes is None and self.sent is None and usual

    def run(
        self, ticket: Ticket, tensor: DTensor, into: torch.Tensor | None, grad: bool
    ) -> DTensor:
        if self.is_plain:
            moved = self._move(ticket, dtensor_local(tensor), into, grad)
            kind, stride = getattr(torch, self.move.cast), tensor.stride()
            return dtensor_of(moved, *self.target, self.move.shape, stride=stride, dtype=kind)
        mesh, kind = self.target[0], getattr(torch, self.result or self.move.cast)
        if mesh.get_coordinate() is None:
            self._move(ticket, None, None, grad)
            empty = torch.empty(0, dtype=kind, device="cpu")
            return dtensor_with(empty, self.target, tensor, self.reading)
        if self.boxes is not None:
            expected = self.boxes.local_shape(this_rank())
        else:
            expected = self.move.have.local_shape(this_rank(), self.move.shape)
        local = dtensor_local(tensor, expected)
        if local is not None and self.sent is not None:
            local = local.to(self.sent)
        if local is not None and self.work is not None:
            local = self.work.before(local)
        moved = self._move_local(ticket, local, grad)
        if self.work is not None:
            moved = self.work.after(moved, mesh, kind)
        return dtensor_with(moved.to(kind), self.target, tensor, self.reading)

    def _move(
        self, ticket: Ticket, local: torch.Tensor | None, into: torch.Tensor | None, grad: bool
    ) -> torch.Tensor | None:
        options = self.settings.options
        unmoved = self.move.unmoved(ticket, local, options) if into is None else None
        if unmoved is not None:
            return unmoved
        device = self.target[0].device_type
        return self.move.call(ticket, local, into, device, grad, options).run().get(ONE)

    def _move_local(self, ticket: Ticket, local: torch.Tensor | None, grad: bool) -> torch.Tensor:
        rank, move, device = this_rank(), self.move, self.target[0].device_type
        kind: torch.dtype = getattr(torch, move.cast)
        if self.boxes is not None:
            joined = None if local is None else self.boxes.join(local, rank)
            call = move.call(ticket, joined, None, device, grad, self.settings.options)
            return self.boxes.local(call.run().get(ONE), rank, kind, device)
        moved = self._move(ticket, local, None, grad)
        shape = move.want.local_shape(rank, move.shape)
        return torch.empty(shape, dtype=kind, device=device) if moved is None else moved


def redistribution(
    tensor: DTensor,
    target: OnMesh,
    settings: Settings,
    cast: str | None = None,
    sent: torch.dtype | None = None,
    reading: Reading = NESTED,
) -> Redistribution:
    """How a DTensor gets other placements on its mesh.

    ``sent`` is a dtype to which it is cast before the move, ``cast`` the one of the result.
    """
    mesh, shape = target[0], tuple(tensor.shape)
    placed = positive_dims(target[1], shape)
    if len(placed) != mesh.ndim:
        layout_from(mesh, placed, shape)  # raises what is wrong with them
    if placed == tensor.placements:
        reading = reading_of(tensor._spec)
    dtype = canonical_dtype(sent or tensor.dtype)
    result = cast or dtype
    work = work_for(tuple(mesh.shape), tensor.placements, placed, getattr(torch, dtype))
    before, after = (tensor.placements, placed) if work is None else (work.have, work.want)
    kinds = (dtype, result) if work is None else work.dtypes(dtype, result)
    boxes, destination = None, Placed(mesh_of(mesh), after, *reading)
    try:
        have, expected = expected_of(tensor, before)
        want = destination.layout(shape)
    except LayoutError:
        source = Placed(destination.mesh, before, *reading_of(tensor._spec))
        boxes = box_move(source, destination, shape)  # raises if anything is wrong with them
        boxes.check(kinds[0])
        have, want = boxes.layouts
        inside = mesh.get_coordinate() is not None
        expected = boxes.local_shape(this_rank()) if inside else None
    check_shape_of(tensor, expected, "they are read here")
    moved_shape = shape if boxes is None else boxes.whole
    move = move_between(have, want, moved_shape, *kinds, settings.memory)
    sent = None if sent in (None, tensor.dtype) else sent
    return Redistribution(move, (mesh, placed), settings, work, boxes, sent, result, reading)


def is_special(tensor: DTensor, target: Sequence[Any]) -> bool:
    """Whether two layouts alone do not express a redistribution."""
    placements = target[1] if len(target) == 2 else ()
    both = (*tensor.placements, *placements)
    known = all(isinstance(one, Placement) for one in placements)
    if not known or len(placements) != len(tensor.placements):
        return False  # it is refused where it is read
    if any(isinstance(one, _StridedShard) for one in both):
        return True
    pending = [one for one in both if isinstance(one, Partial)]
    if not pending:
        return False
    if any(one.reduce_op not in OPS for one in pending):
        return True
    sizes, placed = tuple(tensor.device_mesh.shape), positive_dims(placements, tensor.shape)
    return work_for(sizes, tensor.placements, placed, tensor.dtype) is not None


def expressible(tensor: DTensor) -> tuple[Placement, ...] | None:
    """The nearest placements that a layout can express; None if those of the tensor are such."""
    try:
        expected_of(tensor, tensor.placements)
    except LayoutError:
        plain = (Shard, Replicate)
        return tuple(one if isinstance(one, plain) else Replicate() for one in tensor.placements)
    return None


def redistribute(
    ticket: Ticket, tensor: DTensor, how: Redistribution, into: torch.Tensor | None = None
) -> Any:
    """Move a DTensor; gradients of the result flow back to it."""
    grad = tensor.requires_grad and torch.is_grad_enabled()
    if grad:
        how.move.check_differentiable(into is not None, dtensors=True)
    moved = how.run(ticket, tensor, into, grad)
    if not grad:
        return moved
    placements, dtype, reading = tensor.placements, tensor.dtype, reading_of(tensor._spec)

    def back(gradient: DTensor) -> Any:
        kept = tuple(
            placement if not placement.is_partial() or current == placement else Replicate()
            for placement, current in zip(placements, gradient.placements, strict=True)
        )
        return _redistribute_back(gradient, (how.target[0], kept), how.settings, dtype, reading)

    return linear(lambda: moved, back, tensor)


def _redistribute_back(
    gradient: DTensor,
    target: OnMesh,
    settings: Settings,
    dtype: torch.dtype,
    reading: Reading = NESTED,
) -> Any:
    """Move a gradient, in a call of its own; differentiable, so that it has a gradient itself."""

    def move(ticket: Ticket) -> Any:
        cast, sent = canonical_dtype(dtype), settings.backward
        kept = replace(settings, options=gradient_options(settings.options))
        how = redistribution(gradient, target, kept, cast, sent, reading)
        return redistribute(ticket, gradient, how)

    return with_ticket(settings.group, lambda: mesh_of(target[0]).ranks, move)


def wrap_moved(
    local: torch.Tensor | None, how: Redistribution, stride: Sequence[int] | None
) -> DTensor:
    """The local result of a move from another mesh, as a DTensor of the destination mesh."""
    target, shape, kind = how.target, how.move.shape, getattr(torch, how.move.cast)
    if local is None or not local.requires_grad:
        return dtensor_of(local, *target, shape, stride=stride, dtype=kind)
    part = None if target[0].get_coordinate() is None else local.detach()
    wrapped = dtensor_of(part, *target, shape, stride=stride, dtype=kind)

    def back(gradient: Any) -> Any:
        # Ranks outside the mesh do not know the placements of the gradient: it gets the result's.
        kept = gradient_placements(target[1])
        if gradient.placements != kept:
            pair = target[0], kept
            gradient = _redistribute_back(gradient, pair, how.settings, gradient.dtype)
        return gradient.to_local(grad_placements=kept)

    return linear(lambda: wrapped, back, local)


MAX_REPEATED = 1024
"""Moves that are kept; each is a few hundred bytes."""


class _Repeated(NamedTuple):
    """A move with default settings that was made before, on the mesh of its source.

    All references are weak: this keeps no mesh, process group or plan alive.
    """

    source: tuple[object, ...]
    """Placements, shape and order of the source."""
    mesh: weakref.ref[DeviceMesh]
    move: weakref.ref[TensorMove]
    local_shape: torch.Size
    is_unmoved: bool
    asks_grad: bool
    options: Options
    fields: SpecFields


_repeated: dict[tuple[int, tuple[Placement, ...]], _Repeated] = {}
"""By the hash of the source's spec and the placements of the result."""


def repeat(
    ticket: Ticket,
    tensor: DTensor,
    target: OnMesh,
    otherwise: Callable[[Ticket, DTensor, OnMesh], Any],
) -> Any:
    """Repeat a move on the mesh of the tensor that `remember` has cached.

    Any other move, and one with gradients, is made by ``otherwise``.
    """
    spec, local, (mesh, placements) = tensor._spec, tensor._local_tensor, target
    try:
        # The hash of a spec is kept in it; what it is made of is compared below.
        kept = _repeated.get((hash(spec), tuple(placements)))
    except TypeError:  # these are no placements
        kept = None
    if kept is None:
        return otherwise(ticket, tensor, target)
    source, find_mesh, find_move, local_shape, is_unmoved, asks_grad, options, fields = kept
    move = find_move()
    if (
        # An equal mesh may have process groups that were destroyed, so it must be the same one.
        (move is None or mesh is not find_mesh())
        or source != (spec.placements, spec.tensor_meta, spec.shard_order)
        or (type(local) is not torch.Tensor or local.shape != local_shape)
        or not (local.is_cpu if options.device is None else local.device == options.device)
        or (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return otherwise(ticket, tensor, target)
    if is_unmoved:
        if not skip_exchange(ticket, move.plan, NO_OPTIONS):
            return otherwise(ticket, tensor, target)
        moved = local.detach()
    else:
        sources = {ONE: local.detach() if local.requires_grad else local}
        call = Call(
            ticket, move.plan, sources, None, options, grad=False, ask_grad=asks_grad, resolves=True
        )
        moved = call.run()[ONE]
    # The same as the constructor of DTensor, without its checks.
    return DTensor.__new__(DTensor, moved, spec_from(mesh, fields), requires_grad=False)


def remember(tensor: DTensor, how: Redistribution, moved: DTensor) -> None:
    """Cache a move with default settings that was just made."""
    spec, move, (mesh, placements) = tensor._spec, how.move, how.target
    shape, settings = tensor._local_tensor.shape, how.settings
    is_default = move.cast == move.dtype and move.memory == USUAL_MEMORY
    if not is_default or settings.group is not None or settings.options or mesh is not spec.mesh:
        return
    # Strided shards are read in several ways, and empty local tensors may have several shapes.
    both = (*tensor.placements, *placements)
    if any(isinstance(one, _StridedShard) for one in both) or not shape.numel():
        return
    local = tensor._local_tensor
    is_unmoved = move.unmoved_local(local) is not None
    if is_unmoved and shape != moved._local_tensor.shape:
        return
    options = options_from(NO_OPTIONS, None if local.is_cpu else local.device)
    if len(_repeated) >= MAX_REPEATED:
        _repeated.clear()
    source = (spec.placements, spec.tensor_meta, spec.shard_order)
    kept = _Repeated(
        source, weakref.ref(mesh), weakref.ref(move), shape, is_unmoved, move.asks_grad(NO_OPTIONS),
        options, fields_of(moved._spec),
    )  # fmt: skip
    _repeated[hash(spec), tuple(placements)] = kept
