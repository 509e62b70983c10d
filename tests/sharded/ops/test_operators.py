"""Torch's operator database on ShardedTensors: right, or refused on all ranks alike."""

from __future__ import annotations

import pytest

from tests.ranks.pool import Pool
from tests.sharded.ops.operators import (
    ALL_RIGHT,
    RIGHT,
    Outcome,
    database,
    run_all,
    run_operator,
    table,
)
from tests.soak import soaking

A_FEW = ("__rmatmul__", "exp", "fft.hfft", "gather", "sgn")
"""Operators that were wrong once, or took another way on each rank."""
SAMPLES = 4
"""Per operator, when soaking; ``python -m tests.sharded.ops.operators`` runs all."""


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{one.kind}: {one.case}: {one.text}" for one in outcomes if one.kind not in ALL_RIGHT]


def a_few(rank: int) -> list[Outcome]:
    return [
        outcome
        for name in A_FEW
        for dtype in ("float64", "complex128")
        for outcome in run_operator(rank, name, dtype, 2, 1, None, 0)
    ]


def test_some_operators(pool: Pool) -> None:
    found = pool.run(a_few, ranks=range(2))[0]
    assert not failures(found)
    assert {one.case.split()[0] for one in found if one.kind == RIGHT} == {*A_FEW}
    assert len(found) > 50


@pytest.mark.skipif(not soaking(), reason="takes half an hour: make soak")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_operators(ranks: int) -> None:
    outcomes = list(run_all(sorted(database()), ("float64", "complex128"), ranks, SAMPLES))
    print(table(outcomes))
    assert not failures(outcomes)
    assert len({one.case.split()[0] for one in outcomes if one.kind == RIGHT}) > 500
