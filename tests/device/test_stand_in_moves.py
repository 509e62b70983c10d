"""Moves between "GPUs" that are the host, over a stand-in for NCCL; these run on any machine."""

from tests.device.test_nccl_moves import run_ranks


def test_moves_over_a_stand_in() -> None:
    names = ("casts", "sums", "given_ways", "disjoint", "in_flight", "overtaken", "gradients")
    run_ranks(*names, "pairs", "states", BACKEND="gloo", STAND_IN="1", NUM_CASES="40")


def test_failures_over_a_stand_in() -> None:
    run_ranks("refusals", "absent", BACKEND="gloo", STAND_IN="1")


def test_late_gpus_over_a_stand_in() -> None:
    run_ranks("behind", BACKEND="gloo", STAND_IN="1")


def test_processes_that_end_over_a_stand_in() -> None:
    run_ranks("leave", BACKEND="gloo", STAND_IN="1")


def test_a_killed_rank_over_a_stand_in() -> None:
    run_ranks("killed", codes=(0, 0, 0, -9), BACKEND="gloo", STAND_IN="1")
