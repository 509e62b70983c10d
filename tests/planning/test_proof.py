"""The proof of a plan fails for rows that were changed."""

from __future__ import annotations

import tracemalloc
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


@pytest.mark.parametrize(("row", "gets"), [(7, 42), (9, 30)], ids=["twice", "missing"])
def test_the_proof_counts_what_is_filled_with_zeros(row: int, gets: int) -> None:
    """Rank 1 wants rows 7 to 13, of which the last five are padding."""
    halves = rs.Layout(rs.Mesh(tp=2), "tp -")
    have, want = (
        {name: rs.TensorSpec((rows, 6), "float32", halves)} for name, rows in (("v", 8), ("w", 13))
    )
    plan = rs.plan(have, want, names={"w": rs.take("v", pad={0: 13})})
    plan.check()
    (fill,) = plan.fills
    assert fill.box == rs.Box((8, 0), (13, 6))
    plan.fills = (replace(fill, box=rs.Box((row, 0), (13, 6))),)
    with pytest.raises(rs.ProofError, match=f'rank 1 wants 36 elements of "w" and gets {gets}'):
        plan.check()


def test_the_proof_notices_another_order_of_rows() -> None:
    """Messages have no names: what one rank packs the other must unpack in the same order."""
    have = rs.Layout(rs.Mesh(dp=2), "dp:1 -")
    plan = rs.plan(have, SERVERS, shape=(8, 8))
    plan.check()
    tampered(plan, backwards, "receives")
    with pytest.raises(rs.ProofError, match="rank 0 sends to rank 8 is not what rank 8 expects"):
        plan.check()


def backwards(rows: Rows) -> Rows:
    order = np.arange(len(rows.transfers))[::-1]
    return replace(rows, transfers=rows.transfers.take(order))


def test_the_proof_notices_a_rank_outside_the_plan() -> None:
    plan = rs.plan("dp=2: dp -", "tp=2: - tp", shape=(4, 4))
    plan.check()

    def from_another_rank(rows: Rows) -> Rows:
        source = np.full(len(rows.transfers), 77)
        return replace(rows, transfers=replace(rows.transfers, source=source))

    tampered(plan, from_another_rank, "receives")
    with pytest.raises(rs.ProofError, match="rank 77"):
        plan.check()


def test_ranks_of_a_line_with_different_pieces_are_proven_in_blocks() -> None:
    """400 ranks hold the first half, of which each destination wants 4, and 4 elements alone."""
    num, half = 400, 1600
    alone = {r: rs.Box((half + 4 * r,), (half + 4 * r + 4,)) for r in range(num)}
    whole = rs.Box((0,), (half,))
    have = {rank: [whole, box] for rank, box in alone.items()}
    want = {num + r: [rs.Box((4 * r,), (4 * r + 4,)), box] for r, box in alone.items()}
    sides = (rs.Layout.from_boxes((2 * half,), side) for side in (have, want))
    plan = rs.plan(*sides, shape=(2 * half,))
    plan.traffic  # noqa: B018 - what the plan keeps is no part of the proof
    tracemalloc.start()
    plan.check()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20, f"{peak} bytes for {num * num} pairs of a cell and a rank"


@pytest.mark.parametrize("column", ["source", "destination", "all"])
def test_the_proof_notices_rows_of_other_pairs_of_ranks(column: str) -> None:
    """Rank 0 says that its rows to rank 8 are of rank 1, or go to rank 9, or lists none."""
    plan = rs.plan(rs.Layout(rs.Mesh(dp=2), "- dp"), SERVERS, shape=(8, 8))

    def other(rows: Rows) -> Rows:
        transfers = rows.transfers
        if column == "all":
            return replace(rows, transfers=transfers.take(np.arange(0)))
        ends = getattr(transfers, column)
        wrong = np.where((transfers.source == 0) & (transfers.destination == 8), ends ^ 1, ends)
        return replace(rows, transfers=replace(transfers, **{column: wrong}))

    tampered(plan, other, "sends")
    with pytest.raises(rs.ProofError, match="what rank 0 sends to rank 8 is not what rank 8"):
        plan.check()
