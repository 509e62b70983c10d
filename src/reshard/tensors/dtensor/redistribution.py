"""DTensors on one mesh that get other placements, with DTensor's own rule for gradients.

A gradient of a DTensor has its own placements, so no assumption is needed: the gradient moves back
to the placements of the source. If the source had a pending reduction of any kind, the gradient is
that of the reduced value, and replicated.

The specs of source and destination, and the move between them, are cached: a move that training
repeats costs one look-up besides the exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

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
from reshard.tensors.dtensor.placements import Placed, mesh_of
from reshard.tensors.dtensor.placements import placed_on as placed_on
from reshard.tensors.dtensor.reductions import LocalWork, work_for
from reshard.tensors.dtensor.wrapping import (
    SpecFields,
    check_shape_of,
    dtensor_of,
    dtensor_with,
    expected_of,
    gradient_placements,
    placed_of,
    spec_fields,
    spec_from,
)
from reshard.tensors.dtensor.wrapping import dtensor_local as dtensor_local
from reshard.tensors.kinds import this_rank, wait_ready
from reshard.tensors.tensor_move import NO_OPTIONS, USUAL_MEMORY, TensorMove, move_between

OnMesh = tuple[DeviceMesh, Sequence[Placement]]


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
    """A move of a tensor to placements on a mesh."""

    move: TensorMove
    mesh: DeviceMesh
    want: Placed
    settings: Settings
    work: LocalWork | None = None
    """What is computed on local tensors before and after the move."""
    boxes: BoxMove | None = None
    """The move as boxes, where no words of a layout express it."""
    result: str | None = None
    """The dtype of the result, if it is not the one that the move gives."""

    @property
    def is_plain(self) -> bool:
        """Whether the redistribution is one move, without computation before or after it."""
        usual = self.want.nested or not self.want.is_strided
        return self.work is None and self.boxes is None and usual

    def run(
        self, ticket: Ticket, tensor: DTensor, into: torch.Tensor | None, grad: bool
    ) -> DTensor:
        move, work, boxes, mesh = self.move, self.work, self.boxes, self.mesh
        rank, device, local = this_rank(), mesh.device_type, None
        is_inside = mesh.get_coordinate() is not None
        if is_inside:
            local = wait_ready(tensor._local_tensor)
            if not local.numel():  # the shape of an empty one may differ from the layout's
                shape = move.shape
                local = local.reshape(
                    move.have.local_shape(rank, shape) if boxes is None else boxes.local_shape(rank)
                )
            local = local.to(getattr(torch, move.dtype))
            local = local if work is None else work.before(local)
            local = local if boxes is None else boxes.join(local, rank)
        moved = move.values(ticket, local, into, device, grad, self.settings.options)
        kind: torch.dtype = getattr(torch, self.result or move.cast)
        if is_inside and boxes is not None:
            moved = boxes.local(moved, rank, getattr(torch, move.cast), device)
        elif moved is None:
            shape = move.want.local_shape(rank, move.shape) if is_inside else (0,)
            moved = torch.empty(shape, dtype=kind, device=device)
        if is_inside and work is not None:
            moved = work.after(moved, mesh, kind)
        return dtensor_with(moved.to(kind), mesh, self.want, tensor)


def redistribution(
    tensor: DTensor,
    mesh: DeviceMesh,
    want: Placed,
    settings: Settings,
    cast: str | None = None,
    sent: torch.dtype | None = None,
) -> Redistribution:
    """How a DTensor gets other placements on its mesh; ``sent`` is the dtype that is moved,
    ``cast`` the one of the result, if they are not its own."""
    shape, have = tuple(tensor.shape), placed_of(tensor)
    if want.placements == have.placements:
        want = have  # read in the same way
    elif len(want.placements) != mesh.ndim or not all(
        isinstance(one, Placement) for one in want.placements
    ):
        want.layout(shape)  # raises what is wrong with them
    dtype = canonical_dtype(sent or tensor.dtype)
    result = cast or dtype
    work = work_for(tuple(mesh.shape), have.placements, want.placements, dtype)
    source, destination, kinds = have, want, (dtype, result)
    if work is not None:
        kinds = work.dtypes(dtype, result)
        source, destination = (
            have._replace(placements=work.have),
            want._replace(placements=work.want),
        )
    boxes = None
    try:
        (layout, expected), moved_shape = expected_of(source, shape, this_rank()), shape
        layouts, by = (layout, destination.layout(shape)), f'layout "{layout}"'
    except LayoutError:
        boxes = box_move(source, destination, shape)  # raises if anything is wrong with them
        boxes.check(kinds[0])
        layouts, moved_shape, by = boxes.layouts, boxes.whole, "they are read here"
        inside = mesh.get_coordinate() is not None
        expected = boxes.local_shape(this_rank()) if inside else None
    check_shape_of(tensor, expected, by)
    move = move_between(*layouts, moved_shape, *kinds, settings.memory)
    return Redistribution(move, mesh, want, settings, work, boxes, result)


def expressible(tensor: DTensor) -> tuple[Placement, ...] | None:
    """The nearest placements that a layout can express; None if those of the tensor are such."""
    try:
        expected_of(placed_of(tensor), tuple(tensor.shape), this_rank())
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
    have, dtype = placed_of(tensor), tensor.dtype

    def back(gradient: DTensor) -> Any:
        kept = tuple(
            placement if not placement.is_partial() or current == placement else Replicate()
            for placement, current in zip(have.placements, gradient.placements, strict=True)
        )
        want = have._replace(placements=kept)
        return _redistribute_back(gradient, how.mesh, want, how.settings, dtype)

    return linear(lambda: moved, back, tensor)


def _redistribute_back(
    gradient: DTensor, mesh: DeviceMesh, want: Placed, settings: Settings, dtype: torch.dtype
) -> Any:
    """Move a gradient, in a call of its own; differentiable, so that it has a gradient itself."""

    def move(ticket: Ticket) -> Any:
        cast, sent = canonical_dtype(dtype), settings.backward
        kept = replace(settings, options=gradient_options(settings.options))
        how = redistribution(gradient, mesh, want, kept, cast, sent)
        return redistribute(ticket, gradient, how)

    return with_ticket(settings.group, lambda: mesh_of(mesh).ranks, move)


def wrap_moved(
    local: torch.Tensor | None, how: Redistribution, stride: Sequence[int] | None
) -> DTensor:
    """The local result of a move from another mesh, as a DTensor of the destination mesh."""
    mesh, want, shape, kind = how.mesh, how.want, how.move.shape, getattr(torch, how.move.cast)
    if local is None or not local.requires_grad:
        return dtensor_of(local, mesh, want, shape, stride=stride, dtype=kind)
    part = None if mesh.get_coordinate() is None else local.detach()
    wrapped = dtensor_of(part, mesh, want, shape, stride=stride, dtype=kind)

    def back(gradient: Any) -> Any:
        # Ranks outside the mesh do not know the placements of the gradient: it gets the result's.
        kept = gradient_placements(want.placements)
        if gradient.placements != kept:
            own = want._replace(placements=kept)
            gradient = _redistribute_back(gradient, mesh, own, how.settings, gradient.dtype)
        return gradient.to_local(grad_placements=kept)

    return linear(lambda: wrapped, back, local)


MAX_REPEATED = 1024
"""Moves that are kept; each is a few hundred bytes."""


class _Repeated(NamedTuple):
    """A move with default settings that was made before, on the mesh of its source. References are
    weak: they keep no mesh, process group or plan alive."""

    source: tuple[object, ...]
    """Placements, shape and order of the source."""
    mesh: weakref.ref[DeviceMesh]
    move: weakref.ref[TensorMove]
    local_shape: torch.Size
    is_unmoved: bool
    options: Options
    fields: SpecFields
    """Those of the result's spec."""


_repeated: dict[tuple[int, tuple[Placement, ...]], _Repeated] = {}
"""By the hash of the source's spec and the placements of the result."""


def repeat(ticket: Ticket, tensor: DTensor, target: OnMesh) -> DTensor | None:
    """Repeat a move that `remember` has cached; None for any other, and if gradients are wanted."""
    spec, local, (mesh, placements) = tensor._spec, tensor._local_tensor, target
    try:
        # The hash of a spec is kept in it; what it is made of is compared below.
        kept = _repeated.get((hash(spec), tuple(placements)))
    except TypeError:  # these are no placements
        kept = None
    if kept is None:
        return None
    source, find_mesh, find_move, local_shape, is_unmoved, options, fields = kept
    move = find_move()
    if (
        # An equal mesh may have process groups that were destroyed, so it must be the same one.
        (move is None or mesh is not find_mesh())
        or source != (spec.placements, spec.tensor_meta, spec.shard_order)
        or (type(local) is not torch.Tensor or local.shape != local_shape)
        or not (local.is_cpu if options.device is None else local.device == options.device)
        or (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return None
    if is_unmoved:
        if not skip_exchange(ticket, move.plan):
            return None
        moved = local.detach()
    else:
        sources = {ONE: local.detach() if local.requires_grad else local}
        call = Call(
            ticket, move.plan, sources, None, options, grad=False, ask_grad=True, resolves=True
        )
        moved = call.run()[ONE]
    # The same as the constructor of DTensor, without its checks.
    return DTensor.__new__(DTensor, moved, spec_from(mesh, fields), requires_grad=False)


def remember(
    tensor: DTensor, placements: Sequence[Placement], how: Redistribution, moved: DTensor
) -> None:
    """Cache a move to these placements that was just made, if it had default settings."""
    spec, move, settings, local = tensor._spec, how.move, how.settings, tensor._local_tensor
    is_default = how.is_plain and moved.dtype == tensor.dtype and move.memory == USUAL_MEMORY
    is_default = is_default and settings.group is None and not settings.options
    placed, meta = how.want.placements, spec.tensor_meta
    if not is_default or how.mesh is not spec.mesh or meta is None:
        return
    if any(one.is_partial() for one in placed):  # it may have a mask, of one tensor
        return
    # Strided shards are read in several ways, and empty local tensors may have several shapes.
    if how.want.is_strided or placed_of(tensor).is_strided or not local.numel():
        return
    is_unmoved = move.unmoved_shapes() is not None
    if is_unmoved and local.shape != moved._local_tensor.shape:
        return
    options = options_from(NO_OPTIONS, None if local.is_cpu else local.device)
    if len(_repeated) >= MAX_REPEATED:
        _repeated.clear()
    source = (spec.placements, spec.tensor_meta, spec.shard_order)
    _repeated[hash(spec), tuple(placements)] = _Repeated(
        source, weakref.ref(how.mesh), weakref.ref(move), local.shape, is_unmoved, options,
        spec_fields(how.mesh, placed, meta),
    )  # fmt: skip
