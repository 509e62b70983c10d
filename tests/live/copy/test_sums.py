"""Sums of large tensors, block by block or in an accumulator: the same bits."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import reshard as rs
from reshard.dtypes import reduce_in_order
from reshard.live.copy import reduce
from reshard.live.program.messages import Policy
from reshard.live.transport import host
from reshard.tensors.tensor_move import _kept
from tests.ranks.live import local_of
from tests.ranks.outcome import Died
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group

FOUR, GRID = rs.Mesh(x=4), rs.Mesh(x=2, y=2)
PAIRS = [
    (rs.Layout(FOUR, "- - | sum x"), rs.Layout(FOUR, "x -")),
    (rs.Layout(FOUR, "- - | avg x"), rs.Layout(FOUR, "- x")),
    (rs.Layout(FOUR, "- - | max x"), rs.Layout(FOUR, "- -")),
    (rs.Layout(GRID, "y - | sum x"), rs.Layout(GRID, "y -")),
]
SHAPE = (64, 96)
DTYPES = ["float32", "bfloat16", "float16", "int64", "float64"]


def addend_of(rank: int, dtype: str) -> torch.Tensor:
    """What a rank brings to the whole tensor: so far apart that the order of a sum matters."""
    made = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(rank))
    made = made[0] * 100 * 2.0 ** (made[1] * 3).clamp(-12, 6).round()
    return made.to(getattr(torch, dtype))


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def expected_of(have: rs.Layout, want: rs.Layout, rank: int, dtype: str) -> np.ndarray[Any, Any]:
    """A rank's part of all addends, added up in their order."""
    ranks = range(4) if have.mesh == FOUR else (rank % 2, rank % 2 + 2)
    assert have.reduce is not None
    addends = [bits_of(local_of(addend_of(one, dtype), want, rank)) for one in ranks]
    return reduce_in_order(have.reduce[0], addends, dtype, dtype)


def add_up(rank: int, dtype: str, least: int, options: dict[str, Any]) -> int:
    """Returns how often blocks were added up directly."""
    group = pool_group(4)
    _kept.clear()  # sums are compiled with the limits of the first call
    with (
        mock.patch.object(reduce, "MIN_BLOCK", least),
        mock.patch.object(reduce, "FEW_BLOCKS", 0),
        mock.patch.object(reduce, "add_up", side_effect=reduce.add_up) as straight,
    ):
        for have, want in PAIRS:
            assert have.reduce is not None
            if have.reduce[0] == "avg" and dtype == "int64":
                continue
            local = local_of(addend_of(rank, dtype), have, rank)
            for _ in range(2):
                found = rs.move(local, have, want, shape=SHAPE, group=group, **options)
                expected = expected_of(have, want, rank, dtype)
                assert np.array_equal(bits_of(found), expected), (have, want)
        return straight.call_count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"transport": "network"}], ids=["host", "network"])
def test_straight_sums(pool: Pool, dtype: str, options: dict[str, Any]) -> None:
    assert all(pool.run(add_up, dtype, 1, options, ranks=range(4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_an_accumulator(pool: Pool, dtype: str) -> None:
    assert not any(pool.run(add_up, dtype, 1 << 40, {}, ranks=range(4)))


def add_up_again(rank: int, dtype: str, small: int, odd: int) -> None:
    """Warm sums; one rank's tensor may be strided."""
    group = pool_group(4)
    with mock.patch.object(host, "HOST", Policy(eager_bytes=small)):
        for have, want in (PAIRS[0], PAIRS[3]):  # with nothing to be passed on
            local = local_of(addend_of(rank, dtype), have, rank)
            rs.move(local, have, want, shape=SHAPE, group=group)
            expected = expected_of(have, want, rank, dtype)
            if rank == odd:
                local = local.t().contiguous().t()
            for _ in range(3):
                found = rs.move(local, have, want, shape=SHAPE, group=group)
                assert np.array_equal(bits_of(found), expected), (have, want)


@pytest.mark.parametrize("odd", [-1, 2], ids=["all", "not all"])
@pytest.mark.parametrize("small", [64, 1 << 20], ids=["large", "small"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepared_sums(pool: Pool, dtype: str, small: int, odd: int) -> None:
    pool.run(add_up_again, dtype, small, odd, ranks=range(4))


def add_up_under_a_cap(rank: int, odd: int) -> None:
    """Small messages whose sender waits: three of them would exceed the memory limit."""
    group = pool_group(4)
    have, want = PAIRS[0]
    plan = rs.plan(have, want, shape=SHAPE, dtype="float32", memory=60_000)
    assert plan.summary().num_rounds == 1
    expected = expected_of(have, want, rank, "float32")
    local = local_of(addend_of(rank, "float32"), have, rank)
    for turn in range(4):
        given = local.t().contiguous().t() if rank == odd and turn else local
        found = rs.move(given, have, want, shape=SHAPE, group=group, memory=60_000)
        assert np.array_equal(bits_of(found), expected)


@pytest.mark.parametrize("odd", [-1, 2], ids=["all", "not all"])
def test_prepared_sums_under_a_cap(pool: Pool, odd: int) -> None:
    pool.run(add_up_under_a_cap, odd, ranks=range(4))


def die_while_adding(rank: int) -> str:
    """Rank 2 is killed before it releases its messages, in a warm sum."""
    host.HOST = Policy(eager_bytes=64)
    have, want = PAIRS[0]
    local = local_of(addend_of(rank, "float32"), have, rank)
    rs.move(local, have, want, shape=SHAPE)
    rs.move(local, have, want, shape=SHAPE)
    if rank == 2:
        reduce.add_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        rs.move(local, have, want, shape=SHAPE)
    except rs.PeerLostError as error:
        return str(error)
    return "moved"


def test_a_rank_is_killed_while_it_adds_up() -> None:
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(die_while_adding)
    assert isinstance(outcomes.pop(2), Died)
    for outcome in outcomes:
        said = getattr(outcome, "value", "")
        assert "rank 2 is gone" in said, str(outcome)
        assert "it to take its part" in said
