"""Warm moves of small messages, which are eager: the same values, and the same errors."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.transport.host import PeerMemory
from tests.ranks.live import local_of, numbered
from tests.ranks.outcome import Died
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.soak import cases, soaking

FOUR, GRID = rs.Mesh(x=4), rs.Mesh(x=2, y=2)
ROWS, COLUMNS, WHOLE = (rs.Layout(FOUR, words) for words in ("x -", "- x", "- -"))
PLAIN = [
    (ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, WHOLE), (COLUMNS, WHOLE), (WHOLE, ROWS),
    (WHOLE, COLUMNS), (ROWS, rs.Layout(FOUR, "x:1 -")), (ROWS, rs.Layout(GRID, "x y")),
    (rs.Layout(GRID, "x -"), WHOLE), (rs.Layout(GRID, "(x y) -"), rs.Layout(GRID, "y -")),
]  # fmt: skip
ADDED = [rs.Layout(FOUR, words) for words in ("- -", "x -", "- x")]
SHAPE = (13, 10)
DTYPES = ["float32", "bfloat16", "int64", "uint8", "complex64"]


def again(local: torch.Tensor, have: rs.Layout, want: rs.Layout, **options: Any) -> torch.Tensor:
    """The third result of a move."""
    for _ in range(2):
        rs.move(local, have, want, shape=SHAPE, group=pool_group(4), **options)
    return rs.move(local, have, want, shape=SHAPE, group=pool_group(4), **options)


def move_plain(rank: int, dtype: str) -> None:
    """Every pair for float32; the other dtypes take turns in the usual run."""
    full, first = numbered(SHAPE, dtype), DTYPES.index(dtype)
    for have, want in PLAIN if soaking() or not first else PLAIN[first % 3 :: 3]:
        found = again(local_of(full, have, rank), have, want)
        assert torch.equal(found, local_of(full, want, rank)), (have, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(pool: Pool, dtype: str) -> None:
    pool.run(move_plain, dtype, ranks=range(4))


def add_up(rank: int, op: str, dtype: str) -> None:
    addends = [numbered(SHAPE, dtype, first=7 * n) + 1 for n in range(4)]
    plan_of = {"shape": SHAPE, "dtype": dtype}
    for words, holders in ((f"- - | {op} x", FOUR), (f"- - | {op} x y", GRID)):
        have = rs.Layout(holders, words)
        for want in ADDED:
            plan = rs.plan(have, want, **plan_of)
            given = {n: {"tensor": addend.numpy()} for n, addend in enumerate(addends)}
            expected = rs.simulate(plan, given)[rank]["tensor"]
            found = again(addends[rank], have, want)
            assert torch.equal(found, torch.from_numpy(expected)), (have, want)


KINDS = [(op, dtype) for dtype in ("float32", "float64") for op in ("sum", "avg", "max", "min")]


@pytest.mark.parametrize(("op", "dtype"), KINDS[: cases(5, 8)])
def test_sums(pool: Pool, op: str, dtype: str) -> None:
    pool.run(add_up, op, dtype, ranks=range(4))


def move_with_a_strided_one(rank: int) -> None:
    """Peers do not read the addresses of its tensors: it may have returned from the call."""
    full = numbered(SHAPE)
    for have, want in PLAIN:
        local = local_of(full, have, rank)
        again(local, have, want)
        given = local.t().contiguous().t() if rank == 1 else local
        unread = AssertionError("reads the addresses of a peer that does not wait")
        with mock.patch.object(PeerMemory, "table", side_effect=unread):
            for _ in range(3):
                found = rs.move(given, have, want, shape=SHAPE, group=pool_group(4))
                assert torch.equal(found, local_of(full, want, rank)), (have, want)


def test_one_rank_has_a_strided_tensor(pool: Pool) -> None:
    pool.run(move_with_a_strided_one, ranks=range(4))


def differ(rank: int, what: str) -> tuple[str, str]:
    full, group = numbered(SHAPE), pool_group(4)
    local = local_of(full, ROWS, rank)
    again(local, ROWS, COLUMNS)
    try:
        if rank != 2:
            rs.move(local, ROWS, COLUMNS, shape=SHAPE, group=group)
        elif what == "grad":
            rs.move(local.requires_grad_(), ROWS, COLUMNS, shape=SHAPE, group=group)
        else:
            rs.move(local, ROWS, WHOLE, shape=SHAPE, group=group)
    except rs.DisagreementError as error:
        found = local_of(full, ROWS, rank)
        assert torch.equal(again(found, ROWS, COLUMNS), local_of(full, COLUMNS, rank))
        return type(error).__name__, str(error)
    return "moved", ""


@pytest.mark.parametrize("what", ["grad", "layout"])
def test_one_rank_is_given_another_move(pool: Pool, what: str) -> None:
    for kind, message in pool.run(differ, what, ranks=range(4)):
        assert kind == "DisagreementError"
        assert ("requires gradients" if what == "grad" else '"- -"') in message


def move_and_destroy(rank: int) -> None:
    for have, want in ((ROWS, COLUMNS), (WHOLE, ROWS)):
        local = local_of(numbered(SHAPE), have, rank)
        for _ in range(3):
            rs.move(local, have, want, shape=SHAPE)
    dist.barrier()
    dist.destroy_process_group()
    for have, want in ((ROWS, COLUMNS), (WHOLE, ROWS)):
        with pytest.raises((ValueError, rs.LiveError), match="init_process_group"):
            rs.move(local_of(numbered(SHAPE), have, rank), have, want, shape=SHAPE)


def test_a_group_that_is_gone() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(move_and_destroy)


def move_for_ever(rank: int) -> str:
    local = local_of(numbered(SHAPE), ROWS, rank)
    for _ in range(3):
        rs.move(local, ROWS, WHOLE, shape=SHAPE)
    try:
        while True:
            rs.move(local, ROWS, WHOLE, shape=SHAPE)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except rs.PeerLostError as error:
        return str(error)


def test_a_rank_is_killed() -> None:
    began = time.monotonic()
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(move_for_ever)
    assert isinstance(outcomes.pop(2), Died)
    for outcome in outcomes:
        assert "rank 2 is gone" in getattr(outcome, "value", ""), str(outcome)
    assert time.monotonic() - began < 60
