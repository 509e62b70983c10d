"""Push weights from trainer ranks to inference ranks of one job, after every training step.

    torchrun --nproc-per-node 4 examples/trainer_to_inference.py

Ranks 0 and 1 train: each weight is a DTensor, cut by rows over them, as FSDP does. Ranks 2 and 3
serve by tensor parallelism, and want query, key and value as one tensor, heads apart. Neither side
knows how the other cuts its weights: they tell each other, and a plan is made of both.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard as rs

HIDDEN, HEADS, KV_HEADS, SIZE = 512, 8, 4, 64
SHAPES = {
    "q_proj.weight": (HEADS * SIZE, HIDDEN),
    "k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "o_proj.weight": (HIDDEN, HEADS * SIZE),
}
SEGMENTS = [SHAPES[f"{part}_proj.weight"][0] for part in "qkv"]
STEPS = 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    mesh = DeviceMesh("cpu", [0, 1])  # a collective: the inference ranks take part in it
    trains = rank in (0, 1)
    weights = trainer_weights(first, mesh) if trains else inference_weights(rank)

    # Every rank says what it has or wants, and hears it from all. Then all make the same plan.
    if trains:
        have, want = rs.exchange(have=rs.describe(weights))
    else:
        have, want = rs.exchange(want=inference_specs())
    names = {"qkv.weight": rs.join("q_proj.weight", "k_proj.weight", "v_proj.weight", dim=0)}
    plan = rs.plan(have, want, names=names)
    if rank == 0:
        print(f"{plan}\n")

    # Into the memory that the model serves from: nothing is allocated, nothing is swapped.
    mine, into = (weights, {}) if trains else ({}, weights)
    for step in range(STEPS):
        if trains:
            train(weights, step)
        dist.barrier()  # only so that the time below is that of the move
        began = time.perf_counter()
        plan.run(mine, into=into)
        seconds = time.perf_counter() - began
        if not trains:
            check(weights, first, step, rank)
        if rank == 2:
            print(f"step {step}: {seconds * 1e3:.1f} ms{' (ranks meet)' if step == 0 else ''}")
    dist.destroy_process_group()


def trainer_weights(first: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in first.items()}


def inference_specs() -> dict[str, rs.TensorSpec]:
    """As an engine for tensor parallelism has them: of q, k and v every rank has its heads."""
    mesh = rs.Mesh(tp=2, ranks=[2, 3])
    packed = rs.Layout(mesh, f"tp{{{','.join(map(str, SEGMENTS))}}} -")  # tp{512,256,256} -
    return {
        "qkv.weight": rs.TensorSpec((sum(SEGMENTS), HIDDEN), "bfloat16", packed),
        "o_proj.weight": rs.TensorSpec((HIDDEN, HEADS * SIZE), "bfloat16", rs.Layout(mesh, "- tp")),
    }


def inference_weights(rank: int) -> dict[str, torch.Tensor]:
    """The weights of an inference rank, before the trainer has sent any."""
    return {
        name: torch.zeros(spec.layout.local_shape(rank, spec.shape), dtype=torch.bfloat16)
        for name, spec in inference_specs().items()
    }


def train(weights: dict[str, torch.Tensor], step: int) -> None:
    """Stands for a step of an optimizer."""
    for weight in weights.values():
        weight.mul_(0.5).add_(step)


def check(
    weights: dict[str, torch.Tensor], first: dict[str, torch.Tensor], step: int, rank: int
) -> None:
    """Train everything here as well, and cut it by hand."""
    now = {name: value.clone() for name, value in first.items()}
    for earlier in range(step + 1):
        train(now, earlier)
    parts = [now[f"{part}_proj.weight"].chunk(2)[rank - 2] for part in "qkv"]
    columns = now["o_proj.weight"].chunk(2, dim=1)[rank - 2]
    assert torch.equal(weights["qkv.weight"], torch.cat(parts).bfloat16())
    assert torch.equal(weights["o_proj.weight"], columns.bfloat16())


if __name__ == "__main__":
    main()
