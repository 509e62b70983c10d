"""A DeviceMesh as a Mesh: what are its axes called, and which rank sits where?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard.layout.mesh import RESERVED, Mesh

__all__ = ["axis_names", "mesh_of", "this_rank"]

_REFUSED = RESERVED | {"self"}
"""Names that an axis cannot have; ``self`` because ``Mesh`` takes axes as keywords."""

_known: WeakKeyDictionary[DeviceMesh, tuple[int, Mesh]] = WeakKeyDictionary()
"""What each DeviceMesh was read as, and on which rank; weak, so that groups can go."""


def this_rank() -> int:
    """The global rank of this process; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def mesh_of(device_mesh: DeviceMesh, rank: int | None = None) -> Mesh:
    """The same axes and the same global ranks; a sub-mesh is the one this rank is in."""
    rank = this_rank() if rank is None else rank
    known = _known.get(device_mesh)
    # Sub-meshes of different ranks compare equal, so the rank is part of the question.
    if known is None or known[0] != rank:
        known = _known[device_mesh] = rank, _read(device_mesh)
    return known[1]


def _read(device_mesh: DeviceMesh) -> Mesh:
    places = device_mesh.mesh
    names = axis_names(device_mesh.mesh_dim_names, places.ndim)
    axes = dict(zip(names, places.shape, strict=True))
    return Mesh(ranks=places.flatten().tolist(), **axes)


def axis_names(names: Sequence[str] | None, num_axes: int) -> tuple[str, ...]:
    """Names that the notation allows, one per axis, as close to the given ones as can be.

    >>> axis_names(("dp-shard", "sum", "tp"), 3), axis_names(None, 2)
    (('dp_shard', 'sum_', 'tp'), ('d0', 'd1'))
    """
    if names is None:
        return tuple(f"d{axis}" for axis in range(num_axes))
    taken: list[str] = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_]", "_", str(name))
        if not safe or safe[0].isdigit():
            safe = f"_{safe}"
        while safe in _REFUSED or safe in taken:
            safe += "_"
        taken.append(safe)
    return tuple(taken)
