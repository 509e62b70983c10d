"""Warm moves of large messages, read from or written to the tensors of peers: the same values."""

from __future__ import annotations

import os
import signal
from unittest import mock

import pytest
import torch

import reshard as rs
from reshard.live.program.messages import Policy
from reshard.live.transport import host
from tests.ranks.live import local_of, numbered
from tests.ranks.outcome import Died
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group

FOUR, GRID = rs.Mesh(x=4), rs.Mesh(x=2, y=2)
ROWS, COLUMNS = rs.Layout(FOUR, "x -"), rs.Layout(FOUR, "- x")
PAIRS = [(ROWS, COLUMNS), (COLUMNS, ROWS), (rs.Layout(GRID, "x y"), rs.Layout(GRID, "y x"))]
SHAPE = (512, 1024)
SMALL = 1 << 14


def move_again(rank: int) -> None:
    """All three moves go directly between tensors."""
    full, group = numbered(SHAPE), pool_group(4)
    with mock.patch.object(host, "HOST", Policy(eager_bytes=SMALL)):
        for have, want in PAIRS:
            local, expected = local_of(full, have, rank), local_of(full, want, rank)
            into = torch.full_like(expected, -1)
            rs.move(local, have, want, shape=SHAPE, group=group)
            for _ in range(3):
                found = rs.move(local, have, want, shape=SHAPE, group=group)
                given = rs.move(local, have, want, shape=SHAPE, group=group, into=into)
                assert given is into
                assert torch.equal(found, expected)
                assert torch.equal(into, expected)
                into.fill_(-1)


def test_values(pool: Pool) -> None:
    pool.run(move_again, ranks=range(4))


def move_with_a_strided_one(rank: int, side: str) -> int:
    """One rank's tensor is not contiguous: peers may not access it, so its messages are staged."""
    full, group = numbered(SHAPE), pool_group(4)
    staged = 0
    with mock.patch.object(host, "HOST", Policy(eager_bytes=SMALL)):
        for have, want in PAIRS:
            local, expected = local_of(full, have, rank), local_of(full, want, rank)
            into = torch.full_like(expected, -1)
            rs.move(local, have, want, shape=SHAPE, group=group)
            if rank == 1 and side == "source":
                local = local.t().contiguous().t()
            if rank == 1 and side == "into":
                into = into.t().contiguous().t()
            for _ in range(3):
                rs.move(local, have, want, shape=SHAPE, group=group, into=into)
                assert torch.equal(into, expected), (have, want)
                into.fill_(-1)
            handle = rs.plan(have, want, shape=SHAPE).start(
                {"tensor": local}, into={"tensor": into}, group=group
            )
            handle.wait()
            staged += handle.report.peak_staging
    return staged


@pytest.mark.parametrize("side", ["source", "into"])
def test_one_rank_has_a_strided_tensor(pool: Pool, side: str) -> None:
    assert sum(pool.run(move_with_a_strided_one, side, ranks=range(4))) > 0


def overlap(rank: int) -> None:
    memory = torch.zeros(2 * SHAPE[0] * SHAPE[1] // 4)
    local = memory[: SHAPE[0] * SHAPE[1] // 4].view(SHAPE[0] // 4, SHAPE[1])
    into = memory[64 : 64 + local.numel()].view(SHAPE[0], SHAPE[1] // 4)
    group = pool_group(4)
    with mock.patch.object(host, "HOST", Policy(eager_bytes=SMALL)):
        rs.move(local, ROWS, COLUMNS, shape=SHAPE, group=group)
        with pytest.raises(rs.TensorError, match="overlaps a source"):
            rs.move(local, ROWS, COLUMNS, shape=SHAPE, group=group, into=into)


def test_a_destination_that_overlaps_the_source(pool: Pool) -> None:
    pool.run(overlap, ranks=range(4))


def move_for_ever(rank: int, have: rs.Layout, want: rs.Layout) -> str:
    host.HOST = Policy(eager_bytes=SMALL)
    local = local_of(numbered(SHAPE), have, rank)
    into = torch.empty_like(local_of(numbered(SHAPE), want, rank))
    try:
        for turn in range(10_000):
            rs.move(local, have, want, shape=SHAPE, into=into)
            if rank == 2 and turn == 20:
                os.kill(os.getpid(), signal.SIGKILL)
    except rs.PeerLostError as error:
        return str(error)
    return "all moved"


@pytest.mark.parametrize("pair", PAIRS[:2], ids=["push", "pull"])
def test_a_rank_is_killed(pair: tuple[rs.Layout, rs.Layout]) -> None:
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(move_for_ever, *pair)
    assert isinstance(outcomes.pop(2), Died)
    for outcome in outcomes:
        assert "rank 2 is gone" in getattr(outcome, "value", ""), str(outcome)
