"""A budget for saved activations: what gives way, and what is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reshard.errors import MemoryCapError
from reshard.nn import input_reshard, resharding_of
from reshard.nn.activations.ledger import Entry, Ledger
from tests.nn.blocks import MLP
from tests.nn.test_input_reshard import FOUR, HIDDEN, check_same, numbers
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

SIZES = st.lists(
    st.tuples(st.integers(1, 100), st.booleans(), st.booleans()), min_size=1, max_size=12
)


def peak_of(entries: list[Entry]) -> int:
    """What is there at most, if nothing is freed before all are made whole, two at a time."""
    moved = sorted((one.size for one in entries if one.place != "whole"), reverse=True)
    return sum(one.kept for one in entries) + sum(moved[:2])


@given(SIZES, st.integers(1, 400), st.integers(2, 8))
def test_a_budget_is_kept_or_refused(
    sizes: list[tuple[int, bool, bool]], budget: int, num_ranks: int
) -> None:
    ledger = Ledger(budget, num_ranks)
    entries = [Entry(*one) for one in sizes]
    for entry in entries:
        ledger.add(entry)
    assert ledger.kept == sum(one.kept for one in entries)
    if ledger.smallest <= budget:
        ledger.check()
        assert peak_of(entries) <= budget
    else:
        with pytest.raises(MemoryCapError, match="the smallest that works here is"):
            ledger.check()
    for entry in entries:
        ledger.remove(entry)
    assert ledger.kept == 0


@given(SIZES, st.integers(2, 8))
def test_the_smallest_budget_works(sizes: list[tuple[int, bool, bool]], num_ranks: int) -> None:
    first = Ledger(0, num_ranks)
    for one in sizes:
        first.add(Entry(*one))
    smallest = first.smallest
    again = Ledger(smallest, num_ranks)
    for one in sizes:
        again.add(Entry(*one))
    again.check()
    assert again.kept <= smallest


def test_nothing_gives_way_while_all_fits() -> None:
    ledger = Ledger(100, 4)
    entries = [Entry(25, True, True) for _ in range(4)]
    assert [ledger.add(one) for one in entries] == [[], [], [], []]


def test_equal_ones_are_cut_before_others_are_offloaded() -> None:
    ledger = Ledger(80, 4)
    equal = [Entry(20, True, True) for _ in range(3)]
    other = Entry(20, False, True)
    assert [ledger.add(one) for one in (*equal, other)] == [[], [], [], []]
    assert ledger.add(Entry(5, False, False)) == equal  # 3 * 5 + 20 + 5, and room for 40
    assert {one.place for one in equal} == {"share"}
    assert ledger.add(Entry(10, False, False)) == [other]
    assert other.place == "host"


def budgets(rank: int) -> list[int]:
    """With much room all stays whole, with less it is cut, and gradients are the same."""
    group, x = pool_group(4), numbers(16, HIDDEN)
    size = 16 * HIDDEN * 4
    # Three layers of an input each; GELU and the layer after it save what a rank has for itself.
    local = 3 * 2 * (size // 2)
    found = []
    for budget in (10 * size, local + 3 * size + size // 4, local + 2 * size + 3 * size // 4):
        model = check_same(
            lambda: nn.Sequential(*(MLP(HIDDEN, 64, group) for _ in range(3))),
            lambda one: input_reshard(one, group, 0, budget=budget, modules="*"),  # noqa: B023
            x,
        )
        found.append(resharding_of(model).stats().restores)
    return found


def test_a_budget_decides_what_is_cut(pool: Pool) -> None:
    for found in pool.run(budgets, ranks=FOUR):
        assert found[0] == 0
        assert found[1] == 0
        assert found[2] == 2 * 3


def too_small(rank: int) -> int:
    group, x = pool_group(4), numbers(16, HIDDEN).requires_grad_()
    model = nn.Sequential(MLP(HIDDEN, 64, group), MLP(HIDDEN, 64, group))
    input_reshard(model, group, 0, budget=1000)
    with pytest.raises(
        MemoryCapError, match=r"the smallest that works here is \d+ bytes"
    ) as caught:
        model(x)
    smallest = int(str(caught.value).split("works here is ")[1].split()[0])
    input_reshard(model, group, 0, budget=smallest)
    model(x).sum().backward()
    input_reshard(model, group, 0, budget=smallest - 1)
    with pytest.raises(MemoryCapError):
        model(x)
    return smallest


def test_a_budget_that_cannot_be_met(pool: Pool) -> None:
    assert len(set(pool.run(too_small, ranks=FOUR))) == 1
