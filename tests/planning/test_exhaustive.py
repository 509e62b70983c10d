"""An exhaustive planner: small cases agree with it, element by element.

It looks at every element and every rank, by the oracle of the tests, and shares no code with the
library. A rank that wants an element and holds it copies it; one that lacks it gets it once, from a
rank that has it by then. Less cannot be sent, so these are the bytes of the best plan. Addends of
an element take one message less than they are to come together at a rank that has one of them, and
one more for each other rank that wants the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

import reshard as rs
from tests.cases import DTYPES, Case, covered
from tests.checks import plan_case, wire_bounds
from tests.generate import random_case
from tests.soak import cases

PAIRS, PARTS = cases(180, 10_000), cases(5, 50)


@dataclass(frozen=True)
class Best:
    """What every rank of the best plan does, as a mask of elements for each rank."""

    copied: dict[int, np.ndarray]
    received: dict[int, np.ndarray]


def best_plan(case: Case) -> Best:
    """Look at every rank and every element."""
    size = math.prod(case.shape)
    have, want = case.have.held(case.shape), case.want.held(case.shape)
    copied: dict[int, np.ndarray] = {}
    received: dict[int, np.ndarray] = {}
    for rank, wanted in want.items():
        holds, wants = np.zeros(size, bool), np.zeros(size, bool)
        wants[wanted.reshape(-1)] = True
        if rank in have:
            holds[have[rank].reshape(-1)] = True
        copied[rank], received[rank] = wants & holds, wants & ~holds
    return Best(copied, received)


def moves(plan: rs.Plan, shape: tuple[int, ...]) -> Iterator[tuple[rs.Step, np.ndarray]]:
    """Every step of every rank in the order of rounds, and its elements; both ends agree on it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = {rank: plan.for_rank(rank) for rank in plan.ranks}
    for number in range(plan.num_rounds):
        sent, received, copied = (
            [step for part in parts.values() for step in getattr(part, kind).of_round(number)]
            for kind in ("sends", "receives", "copies")
        )
        assert sorted(map(repr, sent)) == sorted(map(repr, received))
        for step in [*sent, *copied]:
            assert step.box == step.have_box
            where = tuple(map(slice, step.box.start, step.box.stop))
            yield step, numbers[where].reshape(-1)


def check_moves(case: Case, plan: rs.Plan) -> None:
    """What no addends are pending for: every element once, by a rank that has it, and no other."""
    best, size = best_plan(case), math.prod(case.shape)
    have, total = case.have.held(case.shape), 0
    has = {rank: np.full(size, -1) for rank in plan.ranks}
    copied = {rank: np.zeros(size, bool) for rank in plan.ranks}
    for rank, held in have.items():
        has[rank][held.reshape(-1)] = 0
    for step, elements in moves(plan, case.shape):
        if step.source == step.destination:
            assert (has[step.source][elements] == 0).all(), "copied, and not held"
            assert not copied[step.source][elements].any(), "copied twice"
            copied[step.source][elements] = True
            continue
        came = has[step.source][elements]
        # What was received in a round is there in the next one.
        assert ((came == 0) if step.hop == 0 else (came > 0) & (came <= step.round)).all()
        assert (has[step.destination][elements] == -1).all(), "sent to a rank that has it"
        has[step.destination][elements] = step.round + 1
        total += len(elements)
        assert step.num_bytes == len(elements) * DTYPES[case.dtype]
    for rank in plan.ranks:
        none = np.zeros(size, bool)
        assert (copied[rank] == best.copied.get(rank, none)).all()
        assert ((has[rank] > 0) == best.received.get(rank, none)).all()
    least = sum(int(one.sum()) for one in best.received.values()) * DTYPES[case.dtype]
    assert total * DTYPES[case.dtype] == least == plan.summary().wire_bytes


def check_sums(case: Case, plan: rs.Plan) -> None:
    """What is added up: every rank that wants a value has every addend in it once."""
    size, num = math.prod(case.shape), case.have.num_addends
    _, addend = case.have.addends()
    have, total = case.have.held(case.shape), 0
    holds = {rank: np.zeros(size, bool) for rank in plan.ranks}
    for rank, held in have.items():
        holds[rank][held.reshape(-1)] = True
    parts = {rank: np.zeros((num, size), int) for rank in plan.ranks}
    for step, elements in moves(plan, case.shape):
        if step.hop == 0:
            assert holds[step.source][elements].all()
            assert addend[step.source] == step.addend
            parts[step.destination][step.addend, elements] += 1
        else:
            assert (parts[step.source][:, elements] == 1).all(), "passed on before it was added up"
            parts[step.destination][:, elements] += 1
        total += 0 if step.source == step.destination else step.num_bytes
    wanted = case.want.held(case.shape)
    for rank in plan.ranks:
        wants = np.zeros(size, bool)
        if rank in wanted:
            wants[wanted[rank].reshape(-1)] = True
        assert (parts[rank] == wants).all(), f"rank {rank} lacks an addend, or has one twice"
    least, most = wire_bounds(case)
    assert least <= total <= most
    assert total == plan.summary().wire_bytes


def check(case: Case) -> str:
    """Compare a plan with the exhaustive one; gives what kind of case it was."""
    if case.error is not None:
        assert not covered(case.have, case.want, case.shape)
        with pytest.raises(getattr(rs, case.error)):
            plan_case(case)
        return "impossible"
    assert covered(case.have, case.want, case.shape)
    plan = plan_case(case)
    if case.have.num_addends == 1:
        check_moves(case, plan)
        return "moves"
    if case.want.addends()[0] is None:
        check_sums(case, plan)
        return "sums"
    return "pending"


@pytest.mark.parametrize("part", range(PARTS))
def test_small_cases_agree_with_the_exhaustive_planner(part: int) -> None:
    """Every kind of case is among them; `RESHARD_SOAK=1` runs 10,000 pairs."""
    kinds: dict[str, int] = {}
    for number in range(part, PAIRS, PARTS):
        case = random_case(Random(f"exhaustive {number}"))
        try:
            kind = check(case)
        except Exception as error:
            error.add_note(case.snippet())
            raise
        kinds[kind] = kinds.get(kind, 0) + 1
    assert kinds["moves"] > PAIRS // PARTS // 2
    assert kinds["sums"] > 0
