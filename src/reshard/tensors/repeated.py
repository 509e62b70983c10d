"""Moves of DTensors that were made before, as training makes them in every step.

What is known of a move by the specs of its ends is kept, so that making it again costs one look-up
beside the exchange itself. Whatever is not as it was goes the long way, which knows every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.live.api import skip_exchange
from reshard.live.session.session import Ticket
from reshard.planning.plans import DEFAULT_MEMORY
from reshard.tensors.motion import Motion
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["remember", "repeated"]

Target = tuple["DeviceMesh", Sequence[Placement]]

MOST_KEPT = 4096
USUAL = parse_bytes(DEFAULT_MEMORY)


class _Known(NamedTuple):
    """What is known of a move."""

    have: DeviceMesh
    want: DeviceMesh
    local_shape: torch.Size
    motion: Motion
    is_at_rest: bool
    spec: DTensorSpec
    """The spec of the result."""


_known: dict[tuple[DTensorSpec, tuple[Placement, ...]], _Known] = {}


def repeated(ticket: Ticket, tensor: DTensor, target: Target) -> DTensor | None:
    """The tensor with other placements, if this move was made before; else None."""
    spec, local = tensor._spec, tensor._local_tensor
    known = _known.get((spec, tuple(target[1])))
    # Equal meshes may have dead groups, so it must be these.
    if known is None or known.have is not spec.mesh or known.want is not target[0]:
        return None
    if type(local) is not torch.Tensor or local.shape != known.local_shape:
        return None
    if known.is_at_rest:
        if not skip_exchange(ticket, known.motion.plan, {}):
            return None
        return _wrapped(local.detach(), known.spec)
    moved, _ = known.motion.moved(ticket, local, None, local.device, False)
    return None if moved is None else _wrapped(moved, known.spec)


def remember(tensor: DTensor, target: Target, motion: Motion, moved: DTensor) -> None:
    """Keep what is known of a move of all defaults that was just made."""
    spec, placements = tensor._spec, (*tensor.placements, *target[1])
    shape, result = tensor._local_tensor.shape, moved._local_tensor.shape
    if motion.cast != motion.dtype or motion.memory != USUAL or motion.group or motion.options:
        return
    # Strided shards are read in several ways, and of nothing there may be several shapes.
    if any(isinstance(one, _StridedShard) for one in placements) or not shape.numel():
        return
    is_at_rest = motion.at_rest(tensor._local_tensor) is not None
    if is_at_rest and shape != result:
        return
    if len(_known) >= MOST_KEPT:
        _known.clear()
    _known[_fresh(spec), tuple(target[1])] = _Known(
        spec.mesh, target[0], shape, motion, is_at_rest, _fresh(moved._spec)
    )


def _wrapped(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor as its constructor makes it, without the layers around that."""
    made: DTensor = DTensor.__new__(DTensor, local, _fresh(spec), requires_grad=False)
    return made


def _fresh(spec: DTensorSpec) -> DTensorSpec:
    """A copy, because torch may change the spec of a tensor."""
    made = DTensorSpec.__new__(DTensorSpec)
    made.__dict__.update(spec.__dict__)
    return made
