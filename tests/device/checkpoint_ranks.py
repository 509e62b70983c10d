"""Checkpoints that are loaded into tensors on GPUs; a rank of `test_gpu_peer`, in `move_ranks`."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard import checkpoint


def checkpoint_load(rank: int) -> None:
    """What was saved in one layout is loaded in others, in several dtypes."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0)] * 2]
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    whole = {
        f"layer.{number}.{kind}": (torch.arange(37 * 24) + number).reshape(37, 24).to(kind)
        for number in range(8)
        for kind in kinds
    }
    folder = Path(tempfile.gettempdir()) / f"checkpoint-{os.environ['PORT']}"

    def state(shift: int, fill: bool) -> dict[str, torch.Tensor]:
        found = {}
        for number, (name, full) in enumerate(whole.items()):
            given = full if fill else torch.zeros_like(full)
            found[name] = distribute_tensor(given.cuda(), mesh, layouts[(number + shift) % 4])
        return found

    checkpoint.save(state(0, fill=True), folder)
    dist.barrier()
    for shift in range(1, 4):
        loaded = state(shift, fill=False)
        checkpoint.load(folder, loaded)
        for name, full in whole.items():
            assert torch.equal(loaded[name].full_tensor().cpu(), full), (name, shift)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


SCENARIOS = {"checkpoint_load": checkpoint_load}
