"""Ranks with different plans or options all raise the same error, and nothing moves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import reshard as rs
from tests.live.failure.faults import (
    COLUMNS,
    FOUR,
    ROWS,
    Tried,
    check_same,
    check_soon,
    moves_well,
    plan_of,
    source_of,
    tried,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import soaking

DEALT = rs.Layout(FOUR, "x:2 -")
THREE = rs.Mesh(x=3)
ODD = 2
LATER = 0.3
SOON = 2.0


def plan_of_names(*names: str, **changed: Any) -> rs.Plan:
    have = {name: rs.TensorSpec((16, 24), "float32", ROWS) for name in names}
    want = {name: rs.TensorSpec((16, 24), "float32", COLUMNS) for name in names}
    return rs.plan(
        {**have, **changed}, {**want, **{name: want_of(changed[name]) for name in changed}}
    )


def want_of(spec: rs.TensorSpec) -> rs.TensorSpec:
    return rs.TensorSpec(spec.shape, spec.dtype, COLUMNS)


OTHERS = {
    "shape": lambda: plan_of_names("a", b=rs.TensorSpec((16, 28), "float32", ROWS)),
    "dtype": lambda: plan_of_names("a", b=rs.TensorSpec((16, 24), "float16", ROWS)),
    "layout": lambda: plan_of_names("a", b=rs.TensorSpec((16, 24), "float32", DEALT)),
    "name": lambda: plan_of_names("a", "c"),
    "missing": lambda: plan_of_names("a"),
    "cap": lambda: rs.plan(
        plan_of_names("a", "b").have, plan_of_names("a", "b").want, memory="4KiB"
    ),
}  # fmt: skip
NAMED = {
    "shape": '"b": ranks 0-1,3 have float32[16, 24]',
    "dtype": "rank 2 has float16[16, 24]",
    "layout": 'rank 2 has float32[16, 24] "x:2 -" on x=4',
    "name": '"c": ranks 0-1,3 have nothing, rank 2 has float32[16, 24]',
    "missing": '"b": ranks 0-1,3 have float32[16, 24] "- x" on x=4, rank 2 has nothing',
    "cap": "memory cap: ranks 0-1,3 have 256.0 MiB, rank 2 has 4.0 KiB",
}


def move_otherwise(rank: int, what: str, warm: bool, transport: str) -> Tried:
    group = pool_group(4)
    plan = plan_of_names("a", "b")
    options: Any = {"group": group, "transport": transport, "timeout": 10.0}
    if warm:
        plan.run(source_of(plan, rank), **options)
    if rank == ODD:
        time.sleep(LATER)
        plan = OTHERS[what]()
    into = {
        name: torch.full(spec.layout.local_shape(rank, spec.shape), -1.0)
        for name, spec in plan.want.items()
    }
    if what == "dtype" and rank == ODD:
        into["b"] = into["b"].half()
    outcome = tried(lambda: plan.run(source_of_dtypes(plan, rank), into=into, **options))
    assert all((tensor == -1).all() for tensor in into.values()), "something moved"
    moves_well(rank, group, transport)
    return outcome


def source_of_dtypes(plan: rs.Plan, rank: int) -> dict[str, torch.Tensor]:
    found = source_of(plan, rank)
    dtypes = {name: getattr(torch, spec.dtype) for name, spec in plan.have.items()}
    return {name: tensor.to(dtypes[name]) for name, tensor in found.items()}


WAYS = [
    (what, call == "warm call", transport)
    for at, what in enumerate(OTHERS)
    for number, call in enumerate(("first call", "warm call"))
    for turn, transport in enumerate(("auto", "network"))
    if soaking() or (at + number + turn) % 2 == 0
]


@pytest.mark.parametrize(("what", "warm", "transport"), WAYS)
def test_one_rank_is_given_another_move(pool: Pool, what: str, warm: bool, transport: str) -> None:
    outcomes = pool.run(move_otherwise, what, warm, transport, ranks=range(4))
    check_same(outcomes, "DisagreementError", NAMED[what])
    check_soon(outcomes, SOON)


def lack_a_tensor(rank: int, warm: bool, transport: str) -> Tried:
    group, plan = pool_group(4), plan_of_names("a", "b")
    options: Any = {"group": group, "transport": transport, "timeout": 10.0}
    if warm:
        plan.run(source_of(plan, rank), **options)
    given = source_of(plan, rank)
    if rank == ODD:
        time.sleep(LATER)
        del given["b"]
    outcome = tried(lambda: plan.run(given, **options))
    moves_well(rank, group, transport)
    return outcome


@pytest.mark.parametrize("transport", ["auto", "network"])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "warm call"])
def test_one_rank_lacks_a_tensor(pool: Pool, warm: bool, transport: str) -> None:
    outcomes = pool.run(lack_a_tensor, warm, transport, ranks=range(4))
    check_same(outcomes, "TensorError", '"b"', "rank 2")
    check_soon(outcomes, SOON)


def exchange_other_names(rank: int) -> Tried:
    group = pool_group(4)
    mesh = FOUR if rank != ODD else rs.Mesh(x=2)
    text = "x -" if rank != ODD else "- x"
    have = {"w": rs.TensorSpec((16, 24 + (rank == ODD)), "float32", rs.Layout(mesh, text))}
    outcome = tried(lambda: rs.exchange(have, have, group=group, timeout=10))
    moves_well(rank, group)
    return outcome


def test_ranks_that_describe_one_tensor_otherwise(pool: Pool) -> None:
    outcomes = pool.run(exchange_other_names, ranks=range(4))
    assert {one.kind for one in outcomes} <= {"DisagreementError", "LiveError"}, outcomes
    assert len({one.cause for one in outcomes}) == 1
    assert '"w"' in outcomes[0].cause
    check_soon(outcomes, SOON)


def other_ranks(rank: int, warm: bool) -> Tried:
    group, plan = pool_group(4), plan_of((16, 36))
    if warm:
        plan.run(source_of(plan, rank), group=group, timeout=10)
    if rank == ODD:
        time.sleep(LATER)
        plan = rs.plan(rs.Layout(THREE, "x -"), rs.Layout(THREE, "- x"), shape=(16, 36))
    outcome = tried(lambda: plan.run(source_of(plan, rank), group=group, timeout=10))
    moves_well(rank, group)
    if rank in THREE.ranks:
        # The call that rank 2 made among these ranks counts as made on the others too.
        again = rs.plan(rs.Layout(THREE, "x -"), rs.Layout(THREE, "- x"), shape=(6, 6))
        again.run(source_of(again, rank), group=group, timeout=10)
    return outcome


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "warm call"])
def test_one_rank_moves_among_other_ranks(pool: Pool, warm: bool) -> None:
    outcomes = pool.run(other_ranks, warm, ranks=range(4))
    check_same(outcomes, "DisagreementError", "rank 2 is in call", "among ranks 0-2")
    check_soon(outcomes, SOON)


def wrong_group(rank: int, group: Any) -> Tried:
    plan = plan_of((16, 20))
    given = {"group": group} if rank == ODD else {}
    outcome = tried(lambda: plan.run(source_of(plan, rank), **given, timeout=10))
    plan.run(source_of(plan, rank), timeout=10)
    return outcome


def test_one_rank_gives_a_group_that_is_none(pool: Pool) -> None:
    for group in (3, "world"):
        outcomes = pool.run(wrong_group, group, ranks=range(4))
        check_same(outcomes, "LiveError", f"group= is {group!r}: give a process group")
        check_soon(outcomes, SOON)


def many_tensors(rank: int) -> Tried:
    names = [f"layers.{n}.weight" for n in range(6000)]
    have = {name: rs.TensorSpec((16, 24), "float32", ROWS) for name in names}
    if rank == ODD:
        have["layers.5999.weight"] = rs.TensorSpec((16, 28), "float32", ROWS)
    plan = rs.plan(have, {name: want_of(spec) for name, spec in have.items()})
    given = {name: torch.zeros(4, spec.shape[1]) for name, spec in plan.have.items()}
    return tried(lambda: plan.run(given, group=pool_group(4), timeout=20))


def test_one_of_very_many_tensors(pool: Pool) -> None:
    outcomes = pool.run(many_tensors, ranks=range(4))
    check_same(outcomes, "DisagreementError", '"layers.5999.weight"', "rank 2")
    check_soon(outcomes, 2 * SOON)
