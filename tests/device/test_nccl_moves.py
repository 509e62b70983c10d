"""Moves between GPUs: values, streams, memory, and what happens when a rank is late or lost.

Four ranks share one GPU. `test_stand_in_moves` runs the same moves where there is none.
"""

import os
import subprocess
import sys
import tempfile
import time
import unittest

import torch

from tests.device.test_nccl_group import ROOT, free_port, read

SECONDS = 240


def run_ranks(*scenarios: str, codes: tuple[int, ...] = (0, 0, 0, 0), **settings: str) -> None:
    """Four ranks; each must end as it should, and in time."""
    command = [sys.executable, "-u", "-m", "tests.device.move_ranks", *scenarios]
    logs = [tempfile.TemporaryFile() for _ in range(4)]  # noqa: SIM115 - `read` closes them
    shared = {"PORT": str(free_port()), "PYTHONPATH": str(ROOT / "src"), **settings}
    shared |= {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
    ranks = []
    for rank, log in enumerate(logs):
        env = {**os.environ, **shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop and any(one.poll() is None for one in ranks):
        time.sleep(0.1)
        if any(one.poll() for one in ranks):
            stop = min(stop, time.monotonic() + 15)
    for one in ranks:
        one.kill()
        one.wait()
    outputs = [read(log) for log in logs]
    found = tuple(one.returncode for one in ranks)
    if os.environ.get("VERBOSE"):
        print("\n".join(outputs))
    assert found == codes, f"{found}\n" + "\n".join(outputs)


def on_gpu(
    *scenarios: str, backend: str, transport: str = "", codes: tuple[int, ...] = (0, 0, 0, 0)
) -> None:
    """Moves with one transport: by default NCCL where the backend is NCCL, else the host."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a CUDA device, and torch sees none")
    transport = transport or ("nccl" if backend == "nccl" else "shared")
    run_ranks(*scenarios, codes=codes, BACKEND=backend, RESHARD_TRANSPORT=transport)


def test_random_moves_on_gpus() -> None:
    on_gpu("pairs", "states", backend="nccl")


def test_moves_on_gpus() -> None:
    names = ("casts", "sums", "given_ways", "disjoint", "in_flight", "overtaken", "streams")
    on_gpu(*names, "large", "gathers", "dtensors", "gradients", backend="nccl")


def test_failures_on_gpus() -> None:
    on_gpu("refusals", "absent", "behind", backend="nccl")


def test_a_killed_rank_on_gpus() -> None:
    on_gpu("killed", backend="nccl", codes=(0, 0, 0, -9))


def test_processes_that_end_on_gpus() -> None:
    on_gpu("leave", backend="nccl")
    on_gpu("leave", "destroy", backend="nccl")


def test_gpu_tensors_by_way_of_the_host() -> None:
    names = ("casts", "sums", "given_ways", "disjoint", "in_flight", "mixed", "gradients")
    on_gpu(*names, "refusals", "pairs", backend="gloo")


def test_mixed_devices_in_a_group_of_both() -> None:
    names = ("mixed", "casts", "in_flight", "gradients")
    on_gpu(*names, backend="cpu:gloo,cuda:nccl", transport="auto")
