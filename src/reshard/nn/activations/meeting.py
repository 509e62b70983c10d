"""Which ranks have the same inputs? Those of a mesh of one axis, or of a process group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Meeting", "group_of"]

Meeting = DeviceMesh | dist.ProcessGroup | None
"""A mesh of one axis, or a process group; None is the default one."""


def group_of(meeting: Meeting) -> dist.ProcessGroup:
    """The process group of ranks that have the same inputs, with this rank in it."""
    if isinstance(meeting, DeviceMesh):
        if meeting.ndim != 1:
            names = meeting.mesh_dim_names or tuple(map(str, range(meeting.ndim)))
            raise ValueError(
                f"the mesh has {meeting.ndim} axes, {names}: give the one along which inputs are "
                f'the same, such as mesh["{names[-1]}"]'
            )
        if meeting.get_coordinate() is None:
            ranks = meeting.mesh.flatten().tolist()
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh of ranks {ranks}")
        return meeting.get_group()
    if meeting is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(f"rank {dist.get_rank()} is not in the process group that was given")
    if meeting is not None and not isinstance(meeting, dist.ProcessGroup):
        kind = type(meeting).__name__
        raise TypeError(f"mesh_or_group is a {kind}: give a DeviceMesh or a process group")
    group = meeting or dist.group.WORLD
    if group is None:
        raise RuntimeError("input_reshard needs a process group: call init_process_group first")
    return group
