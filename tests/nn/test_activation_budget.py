"""A budget for saved activations: what gives way, and what is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reshard.errors import MemoryCapError
from reshard.nn import input_reshard, resharding_of
from reshard.nn.activations.budget import Budget, kept_whole
from tests.nn.blocks import MLP
from tests.nn.test_input_reshard import FOUR, HIDDEN, check_same, numbers
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

SIZES = st.lists(st.integers(1, 100), max_size=12)


@given(SIZES, st.integers(0, 100), st.integers(0, 900), st.integers(2, 8))
def test_what_stays_whole_fits(sizes: list[int], beside: int, budget: int, ranks: int) -> None:
    shares = [-(-size // ranks) for size in sizes]
    whole = kept_whole(sizes, shares, beside, budget)
    pairs = list(zip(sizes, shares, whole, strict=True))
    kept = beside + sum(size if stays else share for size, share, stays in pairs)
    largest = max(sizes, default=0)
    if all(whole):
        assert kept <= budget or not sizes
    elif any(whole):
        assert kept + 2 * largest <= budget
    least = beside + min(sum(sizes), sum(shares) + 2 * largest)
    if budget >= least and not all(whole):
        assert kept + 2 * largest <= budget


def test_the_first_forward_cuts_all_and_later_ones_what_they_must() -> None:
    budget = Budget(24)
    assert [budget.stays_whole(4, 1) for _ in range(4)] == [False] * 4
    assert not budget.goes_away(2, False)
    assert (budget.needed, budget.beside) == (4 + 2 + 8, 2)
    budget.learn(2, True)
    budget.is_counted = True
    assert [budget.stays_whole(4, 1) for _ in range(5)] == [True] * 4 + [False]
    budget.learn(2, True)
    budget.is_counted = True
    assert [budget.stays_whole(4, 1) for _ in range(5)] == [True] * 5
    budget.is_counted = True
    assert [budget.stays_whole(8, 2) for _ in range(2)] == [False] * 2  # another forward
    budget.learn(2, False)
    budget.is_counted = True
    assert [budget.stays_whole(8, 2) for _ in range(2)] == [False] * 2  # ranks were not alike


def test_what_a_rank_has_for_itself_goes_to_the_host_in_time() -> None:
    budget = Budget(20)
    assert [budget.goes_away(8, True) for _ in range(3)] == [False, False, True]
    assert [budget.goes_away(8, False) for _ in range(2)] == [False, False]
    with pytest.raises(MemoryCapError, match="the smallest that works here is 32 bytes"):
        budget.check(budget.needed)


def budgets(rank: int) -> list[int]:
    """With much room all stays whole from the second step on, with less all is cut."""
    group, x = pool_group(4), numbers(16, HIDDEN)
    size = 16 * HIDDEN * 4
    # Three layers of an input each; GELU and the layer after it save what a rank has for itself.
    local = 3 * 2 * (size // 2)
    found = []
    for budget in (10 * size, local + 2 * size + 3 * size // 4):
        model = check_same(
            lambda: nn.Sequential(*(MLP(HIDDEN, 64, group) for _ in range(3))),
            lambda one: input_reshard(one, group, 0, budget=budget, modules="*"),  # noqa: B023
            x,
        )
        found.append(resharding_of(model).stats().restores)
    return found


def test_a_budget_decides_what_is_cut(pool: Pool) -> None:
    for found in pool.run(budgets, ranks=FOUR):
        assert found == [3, 2 * 3]


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
