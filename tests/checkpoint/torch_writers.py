"""Checkpoints written by torch itself, as several ranks would, in one process.

Torch's fake process group lets a process say that it is rank 2 of 4; each rank's plan is made
under that name, and then all of them are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.storage.local import Storage
from reshard.dtypes import itemsize

State = dict[str, Any]


def save_as_ranks(writer: Any, num_ranks: int, make: Callable[[int, DeviceMesh], State]) -> None:
    """Save what ``make(rank, mesh)`` gives on each rank, with a torch storage writer."""
    planners, plans = [], []
    for rank in range(num_ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        try:
            state = make(rank, init_device_mesh("cpu", (num_ranks,)))
            planner = DefaultSavePlanner()
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            planners.append(planner)
        finally:
            dist.destroy_process_group()
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    done = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, done)


def write_distcp(folder: Path, num_ranks: int, full: Mapping[str, Any]) -> None:
    """A `.distcp` folder; tensors are cut in the dim that ``full`` says, others replicated."""
    save_as_ranks(FileSystemWriter(folder), num_ranks, lambda r, mesh: _shards(full, r, mesh))


def write_sharded_hf(folder: Path, num_ranks: int, full: Mapping[str, Any]) -> None:
    """Sharded safetensors, one file for each rank."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save_as_ranks(writer, num_ranks, lambda rank, mesh: _shards(full, rank, mesh))


def _shards(full: Mapping[str, Any], rank: int, mesh: DeviceMesh) -> State:
    """What a rank holds: ``(tensor, dim)`` is cut, ``(tensor, None)`` replicated."""
    return {
        name: distributed(*value, rank, mesh) if isinstance(value, tuple) else value
        for name, value in full.items()
    }


def distributed(tensor: torch.Tensor, dim: int | None, rank: int, mesh: DeviceMesh) -> DTensor:
    parts = [tensor] if dim is None else list(tensor.chunk(mesh.size(), dim))
    empty = tensor.narrow(dim or 0, 0, 0) if tensor.dim() else tensor
    local = parts[0] if dim is None else parts[rank] if rank < len(parts) else empty
    placement = Replicate() if dim is None else Shard(dim)
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        local.contiguous(), mesh, [placement], run_check=False, shape=shape, stride=stride
    )


def gathered(storage: Storage, catalog: Catalog) -> dict[str, bytes]:
    """Every tensor as its bytes in row-major order, put together from its pieces one by one."""
    return {name: whole_bytes(storage, catalog, t) for name, t in catalog.tensors.items()}


def whole_bytes(storage: Storage, catalog: Catalog, tensor: StoredTensor) -> bytes:
    size = itemsize(tensor.dtype)
    out = np.full((*tensor.shape, size), 0xEE, dtype=np.uint8)
    for piece in tensor.pieces:
        path = catalog.files[piece.file].path
        data = np.empty((*piece.box.shape, size), dtype=np.uint8)
        for index in np.ndindex(piece.box.shape):
            at = sum(i * stride for i, stride in zip(index, piece.strides, strict=True))
            data[index] = np.frombuffer(storage.read(path, piece.offset + at * size, size), "u1")
        cut = tuple(map(slice, piece.box.start, piece.box.stop))
        out[cut] = data
    return out.tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
