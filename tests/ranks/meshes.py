"""Meshes of torch over ranks of the pool, made once on each rank."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks.rank import pool_group

__all__ = ["mesh_of"]


@cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh of the first ranks, or of all eight on two axes."""
    if len(sizes) == 1:
        return DeviceMesh.from_group(pool_group(sizes[0]), "cpu")
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
