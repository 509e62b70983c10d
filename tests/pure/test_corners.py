"""Corners that were wrong once: digests and rows, casts with sums and relays, slips in names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.planning.rank import RankPlan, Rows, Steps

SERVERS = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "tp -")


def spec(shape: tuple[int, ...], dtype: str, layout: rs.Layout) -> rs.TensorSpec:
    return rs.TensorSpec(shape=shape, dtype=dtype, layout=layout)


def boxes_sent(plan: rs.Plan, rank: int) -> list[tuple[int, str]]:
    return [(step.destination, str(step.box)) for step in plan.for_rank(rank).sends]


def test_plans_with_one_digest_have_the_same_rows() -> None:
    """The order of replicas in a mesh does not matter, neither for the digest nor for the rows."""
    one, other = (rs.Layout(rs.Mesh(r=2, ranks=ranks), "...") for ranks in ([0, 1], [1, 0]))
    first, second = (rs.plan(have, SERVERS, shape=(8, 4)) for have in (one, other))
    assert first.digest == second.digest
    for rank in first.ranks:
        assert boxes_sent(first, rank) == boxes_sent(second, rank)


def test_names_with_separators_do_not_collide() -> None:
    have, want = spec((4, 4), "int8", SERVERS), spec((4, 4), "int8", rs.Layout(rs.Mesh(), "..."))
    two = rs.plan({"a": have, "b": have}, {"a": want, "b": want})
    one = rs.plan({"a\0a\0b": have}, {"b": want}, names={"b": "a\0a\0b"})
    assert two.digest != one.digest


@pytest.mark.parametrize("cap", [96, 300, 4096])
@pytest.mark.parametrize("dtypes", [("float64", "int8"), ("float32", "float16"), ("int8", "int64")])
def test_a_sum_with_a_cast_costs_what_it_states(dtypes: tuple[str, str], cap: int) -> None:
    mesh = rs.Mesh(dp=4)
    have = spec((64,), dtypes[0], rs.Layout(mesh, "... | sum dp"))
    plan = rs.plan({"g": have}, {"g": spec((64,), dtypes[1], rs.Layout(mesh, "..."))}, memory=cap)
    plan.check()
    addends = {r: {"g": (np.arange(64) % 7 + r).astype(dtypes[0])} for r in range(4)}
    out, report = rs.simulate(plan, addends, report=True)
    assert report.wire_bytes == plan.summary().wire_bytes
    assert max(report.peak_bytes.values()) <= plan.summary().peak_bytes <= cap
    expected = (np.arange(64) % 7 * 4 + 6).astype(dtypes[1])
    assert all((out[rank]["g"] == expected).all() for rank in range(4))


@pytest.mark.parametrize("dtypes", [("int32", "complex64"), ("int64", "complex128")])
def test_replicas_agree_after_a_cast(dtypes: tuple[str, str]) -> None:
    """What is passed on must not be rounded a second time."""
    have = spec((8,), dtypes[0], rs.Layout(rs.Mesh(tp=1), "tp"))
    want = spec((8,), dtypes[1], rs.Layout(rs.Mesh(r=4, ranks=[1, 2, 3, 4]), "..."))
    value = np.full(8, np.iinfo(dtypes[0]).max, dtype=dtypes[0])
    out = rs.simulate(rs.plan({"w": have}, {"w": want}), {0: {"w": value}})
    assert all((out[rank]["w"] == value.astype(dtypes[1])).all() for rank in (1, 2, 3, 4))


def test_not_strict_moves_only_what_both_have() -> None:
    one = spec((4, 4), "int8", SERVERS)
    plan = rs.plan({"a": one, "x": one}, {"a": one, "z": one}, strict=False)
    assert set(plan.want) == {"a"}
    with pytest.raises(rs.NamesError, match=r'"z".*"x"'):
        rs.plan({"a": one, "x": one}, {"a": one, "z": one})


def test_a_name_that_matches_nothing_is_an_error() -> None:
    one = spec((4, 4), "int8", SERVERS)
    with pytest.raises(rs.NamesError, match=r"layers\.0\.qq"):
        rs.plan({"layers.0.q": one}, {"layers.0.q": one}, names={"layers.0.qq": "layers.0.q"})


@pytest.mark.parametrize(
    "array", [np.zeros((2, 4), np.int32), np.zeros((4, 2), np.float32), np.zeros(8, np.float32)]
)
def test_simulate_refuses_other_arrays(array: np.ndarray) -> None:
    plan = rs.plan(rs.Layout(rs.Mesh(dp=1), "..."), SERVERS, shape=(2, 4), dtype="float32")
    with pytest.raises(rs.PlanError, match=r'"tensor".*\(2, 4\)'):
        rs.simulate(plan, {0: {"tensor": array}})


def tampered(plan: rs.Plan, change: Callable[[Rows], Rows], kind: str) -> None:
    """Let the plan give every rank rows that were changed."""

    def derive(rank: int) -> RankPlan:
        mine = RankPlan.of(rank, plan.flows, plan.schedule.slots, plan.fills)
        rows = [change(one) for one in getattr(mine, kind).rows]
        return replace(mine, **{kind: Steps(rows)})

    plan.for_rank = derive  # type: ignore[method-assign]


def other_columns(rows: Rows) -> Rows:
    cells = rows.transfers.cells
    moved = replace(cells, have_low=cells.have_low[:, ::-1].copy())
    return replace(rows, transfers=replace(rows.transfers, cells=moved))


def test_the_proof_notices_other_elements() -> None:
    plan = rs.plan(rs.Layout(rs.Mesh(dp=1), "..."), SERVERS, shape=(8, 8))
    plan.check()
    tampered(plan, other_columns, "sends")
    with pytest.raises(rs.ProofError, match="other elements"):
        plan.check()


def test_the_proof_notices_a_missing_addend() -> None:
    mesh = rs.Mesh(dp=3)
    plan = rs.plan(rs.Layout(mesh, "... | sum dp"), rs.Layout(mesh, "dp"), shape=(9,))
    plan.check()

    def without_last(rows: Rows) -> Rows:
        kept = np.flatnonzero(np.full(len(rows.transfers), rows.transfers.addend != 2))
        return replace(rows, transfers=rows.transfers.take(kept))

    tampered(plan, without_last, "receives")
    with pytest.raises(rs.ProofError, match="addend 2"):
        plan.check()


@pytest.mark.parametrize("layout", ["a:1 b:1"])
def test_too_many_blocks_are_refused(layout: str) -> None:
    have = rs.Layout(rs.Mesh(a=2, b=2), layout)
    want = rs.Layout(rs.Mesh(a=3, b=2), layout)
    with pytest.raises(rs.ReshardError, match="larger blocks"):
        rs.plan(have, want, shape=(10**6, 10**6)).for_rank(0)
    with pytest.raises(rs.ReshardError, match="larger blocks"):
        have.pieces(0, (10**5, 10**5))
