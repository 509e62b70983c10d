"""Moves of DTensors that are repeated, as training does in every step.

What is known of a move by the specs of source and destination is kept, so that the same move costs
one look-up beside the exchange. Any other move takes the usual way, which knows every case.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.live.api import skip_exchange
from reshard.live.session.session import Ticket
from reshard.planning.plans import ONE
from reshard.tensors.dtensor.redistribution import Redistribution
from reshard.tensors.dtensor.wrapping import SpecFields, fields_of, spec_from
from reshard.tensors.tensor_move import NO_OPTIONS, USUAL_MEMORY, TensorMove

__all__ = ["remember", "repeat"]

OnMesh = tuple[DeviceMesh, Sequence[Placement]]

MAX_REPEATED = 1024
"""Moves that are kept per mesh; each is a few hundred bytes."""


class _Repeated(NamedTuple):
    """What is known of a move with default settings that was made before.

    Nothing here keeps a mesh, and so its process groups, or a plan alive.
    """

    have: weakref.ref[DeviceMesh]
    want: weakref.ref[DeviceMesh]
    move: weakref.ref[TensorMove]
    local_shape: torch.Size
    is_unmoved: bool
    fields: SpecFields
    """The spec of the result."""


_repeated: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[object, ...], _Repeated]] = (
    weakref.WeakKeyDictionary()
)


def repeat(ticket: Ticket, tensor: DTensor, target: OnMesh) -> DTensor | None:
    """Make a move once more that `remember` knows; None if it does not, or gradients are wanted."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return None
    spec, local = tensor._spec, tensor._local_tensor
    known = _repeated.get(spec.mesh)
    kept = None if known is None else known.get(_key(spec, target))
    # Equal meshes may have process groups that were destroyed, so it must be the same ones.
    if kept is None or kept.have() is not spec.mesh or kept.want() is not target[0]:
        return None
    move = kept.move()
    if move is None or type(local) is not torch.Tensor or local.shape != kept.local_shape:
        return None
    if kept.is_unmoved:
        if not skip_exchange(ticket, move.plan, NO_OPTIONS):
            return None
        moved: torch.Tensor | None = local.detach()
    else:
        moved = move.call(ticket, local, None, local.device, False).run().get(ONE)
    if moved is None:
        return None
    # As the constructor makes it, without the layers around that.
    fresh = spec_from(target[0], kept.fields)
    result: DTensor = DTensor.__new__(DTensor, moved, fresh, requires_grad=False)
    return result


def _key(spec: DTensorSpec, target: OnMesh) -> tuple[object, ...]:
    return spec.placements, spec.tensor_meta, spec.shard_order, tuple(target[1])


def remember(tensor: DTensor, how: Redistribution, moved: DTensor) -> None:
    """Keep what is known of a move with default settings that was just made."""
    spec, move, settings = tensor._spec, how.move, how.settings
    shape, result = tensor._local_tensor.shape, moved._local_tensor.shape
    if move.cast != move.dtype or move.memory != USUAL_MEMORY:
        return
    if settings.group is not None or settings.options:
        return
    # Strided shards are read in several ways, and empty local tensors may have several shapes.
    both = (*tensor.placements, *how.target[1])
    if any(isinstance(one, _StridedShard) for one in both) or not shape.numel():
        return
    is_unmoved = move.unmoved_local(tensor._local_tensor) is not None
    if is_unmoved and shape != result:
        return
    known = _repeated.setdefault(spec.mesh, {})
    if len(known) >= MAX_REPEATED:
        known.clear()
    have, want = weakref.ref(spec.mesh), weakref.ref(how.target[0])
    fields = fields_of(moved._spec)
    known[_key(spec, how.target)] = _Repeated(
        have, want, weakref.ref(move), shape, is_unmoved, fields
    )
