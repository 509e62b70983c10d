"""The proof of a plan fails for rows that were changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.planning.rank import RankPlan, Rows, Steps

SERVERS = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "tp -")


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
