"""Ranks that read each other's GPU memory, forked from one process that has imported torch.

The forking process never uses CUDA, so its children may. Each scenario is a function of a rank, the
number of ranks and a pipe to the parent.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session.session import all_connections
from reshard.live.transport.gpu_memory import GpuMemory

CUDA = torch.device("cuda", 0)
Scenario = Callable[[int, int, Any], None]


def run(scenario: Scenario, size: int, seconds: float, backend: str = "gloo") -> None:
    """Fork ranks, and raise if one fails or does not end in time."""
    context: Any = mp.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(
            target=_be, args=(scenario, rank, size, store.port, pipes[rank][1], backend)
        )
        for rank in range(size)
    ]
    for one in ranks:
        one.start()
    end = time.monotonic() + seconds
    for one in ranks:
        one.join(max(end - time.monotonic(), 0.1))
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        if one.is_alive():
            one.kill()
            one.join()
    assert codes == [0] * size, f"{scenario.__name__} ended with {codes}"


def _be(
    scenario: Scenario, rank: int, size: int, port: int, pipe: Any, backend: str, prefix: str = "t"
) -> None:
    try:
        torch.cuda.set_device(CUDA)
        if backend != "none":
            connect(rank, size, port, prefix, backend)
        scenario(rank, size, pipe)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def connect(rank: int, size: int, port: int, prefix: str, backend: str = "gloo") -> None:
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    given = dist.PrefixStore(prefix, store)
    dist.init_process_group(backend, store=given, rank=rank, world_size=size)


def rows_to_columns(size: int, side: int, dtype: str = "float32") -> rs.Plan:
    line = rs.Mesh(tp=size)
    have, want = rs.Layout(line, "tp -"), rs.Layout(line, "- tp")
    return rs.plan(have, want, shape=(side, side), dtype=dtype)


def overwritten(rank: int, size: int, pipe: Any) -> None:
    """Sources are overwritten right after the call and results used at once, 1,000 times."""
    side = 1024
    plan = rows_to_columns(size, side)
    rows = torch.arange(float(side * side), device=CUDA).reshape(side, side)
    mine, right = rows.chunk(size)[rank], rows.chunk(size, 1)[rank]
    source, into = torch.empty_like(mine), torch.empty_like(right)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    side_stream = torch.cuda.Stream()
    for number in range(1000):
        stream = side_stream if number % 3 == 2 else torch.cuda.default_stream()
        other = torch.cuda.default_stream() if stream is side_stream else side_stream
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            source.copy_(mine).add_(number)
            plan.run({"tensor": source}, into={"tensor": into}, timeout=20)
            source.fill_(-1)
            wrong += (into != right + number).sum()
            into.fill_(-2)
    torch.cuda.synchronize()
    assert int(wrong) == 0, int(wrong)
    print(f"rank {rank}: 1000 overwritten moves, no difference", flush=True)


def changing(rank: int, size: int, pipe: Any) -> None:
    """10,000 moves of tensors that come and go: nothing leaks."""
    plans = [rows_to_columns(size, side) for side in (64, 256, 512, 1024, 2048)]
    pick, kept = random.Random(0), []
    before: tuple[int, ...] = ()
    for number in range(10_000):
        side = pick.choice((64, 256, 512, 1024, 2048))
        plan = plans[(64, 256, 512, 1024, 2048).index(side)]
        source = torch.full((side // size, side), float(number), device=CUDA)
        out = plan.run({"tensor": source}, timeout=20)["tensor"]
        kept = [*kept[-5:], source, out]
        if number % 200 == 0:
            assert bool((out == number).all()), number
            kept, source, out = [], None, None
            torch.cuda.empty_cache()  # the driver frees what peers have mapped
        if number in (2000, 9999):
            gc.collect()
            memory = all_connections()[0].resource(GpuMemory)
            mapped = sum(map(len, memory.mappings._mapped.values()))
            exported, unused = len(memory.exports._known), len(memory.mappings._unused)
            fds = len(list(Path("/proc/self/fd").iterdir()))
            buffers = len(all_connections()[0].buffers._free)
            now = (mapped, exported, unused, fds, buffers)
            if rank == 0:
                free = torch.cuda.mem_get_info()[0] >> 20
                print(
                    f"after {number}: mapped, exported, unused, fds, buffers {now}; "
                    f"{free} MiB free, RSS {resident()} MiB",
                    flush=True,
                )
            if before:
                assert all(n <= b + 12 for n, b in zip(now, before, strict=True)), (before, now)
            before = now
    dist.barrier()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def unexportable(rank: int, size: int, pipe: Any) -> None:
    """Memory that CUDA cannot export, and strided tensors, are packed: values are right."""
    side = 512
    plan, full = rows_to_columns(size, side), torch.arange(512.0 * 512).reshape(512, 512)
    mine = full.chunk(size)[rank].to(CUDA)
    for source in (mine, mine.t().contiguous().t()):
        for _ in range(3):
            out = plan.run({"tensor": source}, timeout=20)["tensor"]
            assert torch.equal(out.cpu(), full.chunk(size, 1)[rank])
    memory = all_connections()[0].resource(GpuMemory)
    assert memory.packing is not None
    print(f"rank {rank}: packed", flush=True)
    dist.barrier()


def by_default(rank: int, size: int, pipe: Any) -> None:
    """Ranks that share a GPU under NCCL: peer memory by default, and NCCL is never opened."""
    from reshard.live.transport.nccl import NcclGroups

    plan, full = rows_to_columns(size, 64), torch.arange(64.0 * 64).reshape(64, 64)
    handle = plan.start({"tensor": full.chunk(size)[rank].to(CUDA)})
    assert torch.equal(handle.wait()["tensor"].cpu(), full.chunk(size, 1)[rank])
    assert set(handle.report.transports.values()) == {"GPU peer memory"}
    assert all_connections()[0].resources.get(NcclGroups) is None
    refused = ""
    try:
        plan.run({"tensor": full.chunk(size)[rank].to(CUDA)}, transport="nccl")
    except rs.LiveError as error:
        refused = str(error)
    assert "share a GPU" in refused, refused
    print(f"rank {rank}: {str(handle.report).splitlines()[-4]}", flush=True)


def lives_on(rank: int, size: int, pipe: Any) -> None:
    """One of the ranks that outlive others: one session after another, each loses a rank."""
    full = torch.arange(240.0 * 240, device=CUDA).reshape(240, 240)
    slowest = 0.0
    while (given := pipe.recv()) is not None:
        number, port = given
        connect(rank, size, port, f"kill {number}")
        try:
            plan = rows_to_columns(size, 240)
            mine = full.chunk(size)[rank].contiguous()
            plan.run({"tensor": mine}, timeout=20)
            pipe.send("ready")
            last = time.monotonic()
            try:
                while True:
                    plan.run({"tensor": mine}, timeout=20)
                    last = time.monotonic()
            except rs.PeerLostError:
                slowest = max(slowest, time.monotonic() - last)
            rest = rows_to_columns(size - 1, 240)
            out = rest.run({"tensor": full.chunk(size - 1)[rank].contiguous()}, sync=True)
            assert torch.equal(out["tensor"], full.chunk(size - 1, 1)[rank]), number
            torch.cuda.synchronize()
        finally:
            dist.destroy_process_group()
        pipe.send("lives")
    print(f"rank {rank}: raised within {slowest:.2f} s of its last move", flush=True)


def is_killed(rank: int, size: int, pipe: Any) -> None:
    full = torch.arange(240.0 * 240, device=CUDA).reshape(240, 240)
    plan, mine = rows_to_columns(size, 240), full.chunk(size)[rank].contiguous()
    plan.run({"tensor": mine}, timeout=20)
    pipe.send("ready")
    while True:
        plan.run({"tensor": mine}, timeout=20)


def run_kills(count: int, size: int = 4, seconds: float = 120) -> None:
    """Kill a rank at a random moment, again and again; the others live on."""
    context: Any = mp.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(size - 1)]
    ranks = [
        context.Process(target=_be, args=(lives_on, rank, size, 0, pipes[rank][1], "none"))
        for rank in range(size - 1)
    ]
    for one in ranks:
        one.start()
    pick, end = random.Random(1), time.monotonic() + seconds
    done = 0
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            args = (is_killed, size - 1, size, store.port, theirs, "gloo", f"kill {number}")
            victim = context.Process(target=_be, args=args)
            victim.start()
            for pipe, _ in pipes:
                pipe.send((number, store.port))
            waiting = [ours, *(pipe for pipe, _ in pipes)]
            for pipe in waiting:
                assert pipe.poll(max(end - time.monotonic(), 0.1)), (number, "nobody began")
                assert pipe.recv() == "ready"
            time.sleep(pick.random() * 0.05)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            for pipe, _ in pipes:
                assert pipe.poll(min(20, max(end - time.monotonic(), 0.1))), (number, "no answer")
                assert pipe.recv() == "lives", number
            done += 1
            if time.monotonic() > end:
                break
        for pipe, _ in pipes:
            pipe.send(None)
        for one in ranks:
            one.join(10)
        assert [one.exitcode for one in ranks] == [0] * (size - 1)
    finally:
        print(f"{done} of {count} kills", flush=True)
        for one in ranks:
            one.kill()
    assert done == count
