"""Moves in which ranks read each other's GPU memory; `test_stand_in_moves` has them without a GPU.

Four ranks share one GPU.
"""

from tests.device.test_nccl_moves import on_gpu


def by_peer_memory(
    *scenarios: str, backend: str = "gloo", codes: tuple[int, ...] = (0,) * 4
) -> None:
    on_gpu(*scenarios, backend=backend, transport="gpu_peer", codes=codes)


def test_random_moves_by_peer_memory() -> None:
    by_peer_memory("pairs", "states")


def test_moves_by_peer_memory() -> None:
    names = ("casts", "sums", "given_ways", "disjoint", "in_flight", "overtaken", "streams")
    by_peer_memory(*names, "large", "dtensors", "gradients", backend="nccl")


def test_failures_by_peer_memory() -> None:
    by_peer_memory("refusals", "absent", "behind")


def test_a_killed_rank_by_peer_memory() -> None:
    by_peer_memory("killed", codes=(0, 0, 0, -9))


def test_processes_that_end_by_peer_memory() -> None:
    by_peer_memory("leave")
    by_peer_memory("leave", "destroy")
