"""Moves in which ranks read each other's GPU memory; `test_stand_in_moves` has them without a GPU.

Four ranks share one GPU.
"""

import os
import subprocess
import sys
import unittest

import torch

from tests.device.test_nccl_group import ROOT
from tests.device.test_nccl_moves import on_gpu


def by_peer_memory(
    *scenarios: str, backend: str = "gloo", codes: tuple[int, ...] = (0,) * 4
) -> None:
    on_gpu(*scenarios, backend=backend, transport="gpu_peer", codes=codes)


def test_random_moves_by_peer_memory() -> None:
    by_peer_memory("pairs", "states")


def test_random_gradients_by_peer_memory() -> None:
    by_peer_memory("adjoints")


def by_default(*scenarios: str) -> None:
    """Ranks that share a GPU read each other's memory unless they are told otherwise."""
    on_gpu(*scenarios, backend="nccl", transport="auto")


def test_sharded_tensors_by_peer_memory() -> None:
    by_default("sharded_tensors", "sharded_devices", "sharded_training")


def test_activations_by_peer_memory() -> None:
    by_default("activations_train", "activations_offload")


def test_checkpoints_are_loaded_by_peer_memory() -> None:
    by_default("checkpoint_load")


def test_moves_by_peer_memory() -> None:
    names = ("casts", "sums", "given_ways", "disjoint", "in_flight", "overtaken", "streams")
    by_peer_memory(*names, "crossed", "large", "dtensors", "gradients", backend="nccl")


def test_failures_by_peer_memory() -> None:
    by_peer_memory("refusals", "absent", "behind", "released", "gives_up")


def test_a_killed_rank_by_peer_memory() -> None:
    by_peer_memory("killed", codes=(0, 0, 0, -9))


def test_processes_that_end_by_peer_memory() -> None:
    by_peer_memory("leave")
    by_peer_memory("leave", "destroy")


def on_one_gpu(scenario: str, size: int, seconds: float, backend: str = "gloo") -> None:
    """Fork ranks in a process of its own, which never uses CUDA itself."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a CUDA device, and torch sees none")
    code = (
        "from tests.device import peer_ranks as p; "
        f"p.run(p.{scenario}, {size}, {seconds}, {backend!r})"
        if scenario != "kills"
        else f"from tests.device import peer_ranks as p; p.run_kills({size})"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    if scenario == "unexportable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=seconds)


def test_sources_are_overwritten_after_the_call() -> None:
    on_one_gpu("overwritten", 4, 100)


def test_nothing_leaks_over_10_000_moves() -> None:
    on_one_gpu("changing", 2, 150)


def test_memory_that_cannot_be_exported() -> None:
    on_one_gpu("unexportable", 4, 60)


def test_ranks_that_share_a_gpu() -> None:
    on_one_gpu("by_default", 2, 60, "nccl")


def test_50_kills() -> None:
    on_one_gpu("kills", 50, 150)
