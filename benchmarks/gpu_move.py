"""How fast do moves between processes that share a GPU run? Compared with NCCL, DTensor, a copy.

    PYTHONPATH=src python3 benchmarks/gpu_move.py [--ranks 2 4] [--rounds 5] [--json FILE]
    PYTHONPATH=src python3 benchmarks/gpu_move.py --collectives [--ranks 2 4] [--rounds 5]

Needs one CUDA device, torch with NCCL, Triton and numpy. NCCL refuses two ranks on one GPU, so each
process has a ``NCCL_HOSTID`` of its own: its messages then go over sockets. In every round all ways
run once, one after the other, between barriers; figures are medians over rounds of the slowest
rank, per call. "copy" is a plain device copy of as many bytes as a rank has of the destination, on
all ranks at the same time. "host" is the time until the call returns.

With --collectives: NCCL's collectives, sends of the same bytes, and sums of ours over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard as rs

DEVICE = torch.device("cuda", 0)
PLACEMENTS = {"tp -": "Shard(0)", "- tp": "Shard(1)", "- -": "Replicate()"}


@dataclass(frozen=True)
class Case:
    """Tensors of one shape, moved together from one layout to another."""

    name: str
    count: int
    shape: tuple[int, int]
    have: str = "tp -"
    want: str = "- tp"
    calls: int = 20
    """Calls between two barriers; 1 for cases that take long."""
    slow: int = 1
    """Rounds of the ways that go over sockets."""


def cases() -> list[Case]:
    found = [
        Case("7 GiB, 64 tensors", 64, (4096, 14336), calls=3),
        Case("18,000 expert slices", 18000, (64, 512), calls=3, slow=0),
        Case("200 small tensors", 200, (64, 64), calls=50, slow=0),
    ]
    for side in (256, 1024, 4096, 8192):
        for have, want in (("tp -", "- tp"), ("tp -", "- -"), ("- -", "tp -")):
            name = f"{side}: {PLACEMENTS[have]} to {PLACEMENTS[want]}"
            found.append(Case(name, 1, (side, side), have, want, slow=3))
    return found


class Ways:
    """The ways in which a case can run on this rank."""

    def __init__(self, case: Case, rank: int, size: int) -> None:
        self.case = case
        line, names = rs.Mesh(tp=size), [f"w{n}" for n in range(case.count)]
        have, want = rs.Layout(line, case.have), rs.Layout(line, case.want)
        shapes = [layout.local_shape(rank, case.shape) for layout in (have, want)]
        torch.manual_seed(rank)
        self.source, self.into = (
            {name: torch.randn(shape, device=DEVICE).to(torch.bfloat16) for name in names}
            for shape in shapes
        )
        specs = [rs.TensorSpec(case.shape, "bfloat16", layout) for layout in (have, want)]
        self.plan = rs.plan(*(dict.fromkeys(names, spec) for spec in specs))
        self.size = size

    def peer(self) -> None:
        self.plan.run(self.source, into=self.into)

    def nccl(self) -> None:
        self.plan.run(self.source, into=self.into, transport="nccl")

    def dtensor(self) -> Callable[[], None]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = init_device_mesh("cuda", (self.size,))
        places: dict[str, Any] = {"tp -": [Shard(0)], "- tp": [Shard(1)], "- -": [Replicate()]}
        given = [
            DTensor.from_local(one, mesh, places[self.case.have], run_check=False)
            for one in self.source.values()
        ]

        def move() -> None:
            for one in given:
                one.redistribute(mesh, places[self.case.want])

        return move

    def copy(self) -> Callable[[], None]:
        """As many bytes as this rank has of the destination."""
        num_bytes = sum(one.nbytes for one in self.into.values())
        one, other = (torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))

        def copy() -> None:
            other.copy_(one)

        return copy


def timed(action: Callable[[], object], calls: int) -> tuple[float, float]:
    """Seconds per call until the GPU is done, and until the call returns; of the slowest rank."""
    torch.cuda.synchronize()
    barrier()
    start = time.perf_counter()
    for _ in range(calls):
        action()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    both = torch.tensor([time.perf_counter() - start, host], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=GLOO)
    return tuple((both / calls).tolist())


def barrier() -> None:
    dist.barrier(group=GLOO)


def peak(action: Callable[[], None]) -> int:
    """Bytes that an action takes beyond what is allocated, on the rank that takes most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    used = torch.tensor([torch.cuda.max_memory_allocated() - before])
    dist.all_reduce(used, dist.ReduceOp.MAX, group=GLOO)
    return int(used)


def measure(case: Case, rank: int, size: int, rounds: int) -> dict[str, Any]:
    ways = Ways(case, rank, size)
    actions: dict[str, Callable[[], None]] = {"peer": ways.peer, "copy": ways.copy()}
    if case.slow:
        actions |= {"nccl": ways.nccl, "dtensor": ways.dtensor()}
    start = time.perf_counter()
    ways.peer()
    torch.cuda.synchronize()
    cold = time.perf_counter() - start
    for action in actions.values():
        action()
        action()
    extra = peak(ways.peer)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for number in range(rounds):
        for name, action in actions.items():
            slow = name in ("nccl", "dtensor")
            if not slow or number < case.slow:
                calls = case.calls if not slow else min(case.calls, 5 if case.count == 1 else 1)
                times[name].append(timed(action, calls))
    found = {
        name: [statistics.median(column) for column in zip(*both, strict=True)]
        for name, both in times.items()
    }
    ways.plan.release()
    return {"case": case.name, "ranks": size, "cold": cold, "peak": extra, **found}


def collectives(side: int, rank: int, size: int) -> dict[str, Callable[[], object]]:
    """NCCL's collectives for a matrix, the same by sends, and sums of ours."""
    full, summed = (torch.ones(side, side, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    part, other = full.chunk(size)[rank].clone(), torch.empty_like(full.chunk(size)[rank])
    line = rs.Mesh(tp=size)

    def sends(parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        ends = [peer for peer in range(size) if peer != rank]
        ops = [dist.P2POp(dist.irecv, into[peer], peer) for peer in ends]
        ops += [dist.P2POp(dist.isend, parts[peer], peer) for peer in ends]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def our_sum(want: str, into: torch.Tensor) -> Callable[[], object]:
        layouts = rs.Layout(line, "- - | sum tp"), rs.Layout(line, want)
        plan = rs.plan(*layouts, shape=(side, side), dtype="bfloat16")
        return lambda: plan.run({"tensor": full}, into={"tensor": into}, transport="nccl")

    flat = part.view(-1).chunk(size), other.view(-1).chunk(size)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(summed, part),
        "its sends": lambda: sends([part] * size, summed.chunk(size)),
        "all_to_all": lambda: dist.all_to_all_single(other, part),
        "its sends ": lambda: sends(*flat),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(other, full),
        "our sum": our_sum("tp -", other),
        "all_reduce": lambda: dist.all_reduce(summed),
        "our sum ": our_sum("- -", summed),
    }


def measure_collectives(rank: int, size: int, rounds: int) -> None:
    for side in (256, 1024, 4096, 8192):
        actions = collectives(side, rank, size)
        for action in (*actions.values(), *actions.values()):
            action()
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(rounds):
            for name, action in actions.items():
                times[name].append(timed(action, 4)[0])
        cells = [f"{name.strip()} {statistics.median(t) * 1e3:.2f}" for name, t in times.items()]
        if rank == 0:
            print(f"{side}, {size} ranks, ms: {', '.join(cells)}", flush=True)


def be_rank(rounds: int, names: Sequence[str]) -> None:
    global GLOO
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    GLOO = dist.new_group(backend="gloo")
    if list(names) == [COLLECTIVES]:
        measure_collectives(rank, size, rounds)
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        found = measure(case, rank, size, rounds)
        if rank == 0:
            print(json.dumps(found), flush=True)
        barrier()
        torch.cuda.empty_cache()
    sys.stdout.flush()
    os._exit(0)


GLOO: Any = None
COLLECTIVES = "collectives only"


def start(size: int, rounds: int, names: Sequence[str]) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--cases", *names]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(size)
    ]
    found = []
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("{"):
            found.append(json.loads(line))
        print(row(found[-1]) if line.startswith("{") else line.rstrip(), flush=True)
    for one in ranks:
        one.wait(60)
    return found


HEAD = (
    f"{'case':34} ranks |  peer ms     x copy  host ms |  copy ms |  nccl ms  times |"
    " dtensor ms  times | first ms  extra MiB"
)


def row(found: dict[str, Any]) -> str:
    peer, copy = found["peer"], found["copy"]
    cells = f"{peer[0] * 1e3:8.3f} {peer[0] / copy[0]:10.2f} {peer[1] * 1e3:8.3f}"
    text = f"{found['case']:34} {found['ranks']:5} | {cells} | {copy[0] * 1e3:8.3f} |"
    for name, width in (("nccl", 8), ("dtensor", 10)):
        if name in found:
            text += f" {found[name][0] * 1e3:{width}.2f} {found[name][0] / peer[0]:6.1f} |"
        else:
            text += " " * (width + 8) + " |"
    return f"{text} {found['cold'] * 1e3:8.0f} {found['peak'] / 2**20:10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=[], help="words of the cases to run")
    parser.add_argument("--collectives", action="store_true", help="only NCCL's collectives")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(options.rounds, options.cases)
    if options.collectives:
        options.cases = [COLLECTIVES]
    else:
        print(HEAD, flush=True)
    found = [one for size in options.ranks for one in start(size, options.rounds, options.cases)]
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
