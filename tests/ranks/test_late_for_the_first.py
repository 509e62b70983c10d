"""A rank that is too late for the first move along a plan: all hear of it, the next one works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

LINE = rs.Mesh(tp=4)


def run(size: int, timeout: float = 2) -> None:
    specs = [rs.TensorSpec((size,), "uint8", rs.Layout(LINE, words)) for words in ("tp", "-")]
    plan = rs.plan({"w": specs[0]}, {"w": specs[1]})
    local = torch.full((size // 4,), dist.get_rank(), dtype=torch.uint8)
    found = plan.run({"w": local}, group=pool_group(4), timeout=timeout)["w"]
    assert torch.equal(found, torch.arange(4, dtype=torch.uint8).repeat_interleave(size // 4))


def late(rank: int, size: int) -> str:
    """Rank 2 calls when the others have given up; then all call again."""
    run(64)  # the team is there
    if rank == 2:
        dist.barrier(pool_group(4))
    with pytest.raises(rs.MoveTimeoutError) as caught:
        run(size)
    if rank != 2:
        dist.barrier(pool_group(4))
    run(size)
    run(size)
    return str(caught.value)


def test_the_next_move_works(pool: Pool) -> None:
    for number in range(2):
        for told in pool.run(late, 1024 * (number + 1), ranks=range(4)):
            assert "rank 2 has not called within 2 s" in told


def forgotten(rank: int) -> None:
    """A rank that has compared a plan meets others that have not, or have forgotten."""
    from reshard.live.session.session import sessions

    run(4096)
    if rank != 1:
        for session in sessions(pool_group(4)):
            session.agreed.clear()
    run(4096)
    run(4096)


def test_ranks_that_have_forgotten_compare_again(pool: Pool) -> None:
    pool.run(forgotten, ranks=range(4))
