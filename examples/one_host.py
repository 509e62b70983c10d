"""Move a tensor, and then a state dict, between four processes of this machine.

    torchrun --nproc-per-node 4 examples/one_host.py

Nothing here needs a GPU. Processes of one machine read each other's memory: no byte goes through
the network, and nothing has to be set up for that.
"""

import torch
import torch.distributed as dist

import reshard as rs

# Four trainers hold rows; two replicas of two servers want columns. The ranks are the same four.
ROWS = rs.Layout(rs.Mesh(dp=4), "dp -")
COLUMNS = rs.Layout(rs.Mesh(replica=2, tp=2), "- tp")


def move_a_tensor(rank: int) -> None:
    """One tensor: say what this rank holds, and what it should hold."""
    full = torch.arange(4096 * 1024, dtype=torch.float32).reshape(4096, 1024)
    mine = full.chunk(4, dim=0)[rank]  # what a trainer would have: only this

    moved = rs.move(mine, ROWS, COLUMNS, shape=full.shape)

    assert torch.equal(moved, full.chunk(2, dim=1)[rank % 2])
    print(f"rank {rank}: {tuple(mine.shape)} became {tuple(moved.shape)}", flush=True)


def move_a_state_dict(rank: int) -> None:
    """Many tensors: plan them together, and they share messages."""
    shapes = {f"layers.{i}.weight": (1024, 1024) for i in range(16)}
    full = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    have = {name: rs.TensorSpec(shape, "float32", ROWS) for name, shape in shapes.items()}
    # Another dtype on the other side is a cast; the narrower one travels.
    want = {name: rs.TensorSpec(shape, "bfloat16", COLUMNS) for name, shape in shapes.items()}
    plan = rs.plan(have, want)

    mine = {name: tensor.chunk(4, dim=0)[rank] for name, tensor in full.items()}
    moved = plan.run(mine)  # the first time ranks meet, compare plans and work out addresses
    handle = plan.start(mine, into=moved)  # then bytes only move; start is run, with a handle
    handle.wait()

    for name, tensor in full.items():
        assert torch.equal(moved[name], tensor.bfloat16().chunk(2, dim=1)[rank % 2]), name
    if rank == 0:
        print(f"\n{plan}\n\n{handle.report}")


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit("four processes, please: torchrun --nproc-per-node 4 ...")
    move_a_tensor(dist.get_rank())
    move_a_state_dict(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
