"""Move a tensor between two machines: neighbours share memory, the others use the network.

The same command on both machines:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id demo \\
        --rdzv-endpoint FIRST_MACHINE:29500 examples/two_hosts.py

If ranks cannot reach each other, a machine has several network interfaces and the wrong one was
picked. Say which one to use, on both: export GLOO_SOCKET_IFNAME=eth0
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import reshard as rs

SHAPE = (4096, 2048)


def main(trace: str | None = None) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    have, want = rs.Layout(rs.Mesh(tp=size), "tp -"), rs.Layout(rs.Mesh(tp=size), "- tp")
    full = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    plan = rs.plan(have, want, shape=SHAPE, dtype="float32")

    # Which ranks share a machine is found out, not asked; transport="network" would force one way.
    mine = {"tensor": full.chunk(size, dim=0)[rank]}
    moved = plan.run(mine, timeout=30)  # the first time ranks meet, and make their connections
    handle = plan.start(mine, into=moved)
    handle.wait()
    assert torch.equal(moved["tensor"], full.chunk(size, dim=1)[rank])

    # Every rank has its own report; the first one collects them, for one picture of all.
    reports: list[rs.RunReport] = [handle.report] * size
    dist.gather_object(handle.report, reports if rank == 0 else None)
    if rank == 0:
        for report in reports:
            for way, peers in report.peers().items():
                print(f"rank {report.rank} reaches ranks {peers} through {way}")
        print(f"\n{handle.report}")
        if trace is not None:
            Path(trace).write_text(rs.RunReport.merged(reports))  # open it in ui.perfetto.dev
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
