"""The memory budget of saved activations: what is kept whole, as a share or on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reshard.errors import MemoryCapError
from reshard.nn import (
    input_reshard,
    resharding_of,
)
from reshard.nn.activations.policy import Budget, choose_whole
from tests.nn.activations.blocks import MLP
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Cube,
    check_same,
    numbers,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

SIZES = st.lists(st.integers(1, 100), max_size=12)


@given(SIZES, st.integers(0, 100), st.integers(0, 900), st.integers(2, 8))
def test_what_stays_whole_fits(sizes: list[int], rank_local: int, budget: int, ranks: int) -> None:
    shares = [-(-size // ranks) for size in sizes]
    whole = choose_whole(sizes, shares, rank_local, budget)
    pairs = list(zip(sizes, shares, whole, strict=True))
    kept = rank_local + sum(size if stays else share for size, share, stays in pairs)
    largest = max(sizes, default=0)
    if all(whole):
        assert kept <= budget or not sizes
    elif any(whole):
        assert kept + 2 * largest <= budget
    least = rank_local + min(sum(sizes), sum(shares) + 2 * largest)
    if budget >= least and not all(whole):
        assert kept + 2 * largest <= budget


def test_the_first_forward_keeps_shares_and_later_ones_what_fits() -> None:
    budget = Budget(24)
    assert [budget.stays_whole(4, 1) for _ in range(4)] == [False] * 4
    assert not budget.should_offload(2, False)
    assert (budget.needed, budget.rank_local) == (4 + 2 + 8, 2)
    budget.plan(2, True)
    budget.was_read = True
    assert [budget.stays_whole(4, 1) for _ in range(5)] == [True] * 4 + [False]
    budget.plan(2, True)
    budget.was_read = True
    assert [budget.stays_whole(4, 1) for _ in range(5)] == [True] * 5
    budget.was_read = True
    assert [budget.stays_whole(8, 2) for _ in range(2)] == [False] * 2  # another forward
    budget.plan(2, False)
    budget.was_read = True
    assert [budget.stays_whole(8, 2) for _ in range(2)] == [False] * 2  # ranks were not alike


def test_rank_local_tensors_are_offloaded_when_the_budget_is_reached() -> None:
    budget = Budget(20)
    assert [budget.should_offload(8, True) for _ in range(3)] == [False, False, True]
    assert [budget.should_offload(8, False) for _ in range(2)] == [False, False]
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


def test_a_budget_decides_what_is_kept_whole(pool: Pool) -> None:
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


def forwards_without_backward(rank: int) -> None:
    """What was saved for nothing, and is gone, does not count against a budget."""
    model = Cube()
    size = 16 * 8 * 4
    input_reshard(model, pool_group(4), 0, budget=4 * size)
    for _ in range(20):
        model(numbers(16, 8).requires_grad_())
    x = numbers(16, 8).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_forwards_without_a_backward_do_not_count(pool: Pool) -> None:
    pool.run(forwards_without_backward, ranks=FOUR)


def uneven_locals(rank: int) -> None:
    """Ranks that keep different amounts for themselves decide alike, and fail together."""
    group = pool_group(4)

    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mine = x.sum() * torch.ones(16, 8 * (rank + 1))
            return (x * x).sum() + mine.exp().sum() * 0

    def made() -> nn.Module:
        return nn.Sequential(Uneven())

    size = 16 * HIDDEN * 4
    check_same(
        made,
        lambda one: input_reshard(one, group, 0, budget=5 * size),
        numbers(16, HIDDEN).mul(0.01),
    )
    model = made()
    input_reshard(model, group, 0, budget=size // 8)
    with pytest.raises(ValueError, match="the smallest that works here"):
        model(numbers(16, HIDDEN).requires_grad_())


def test_a_budget_where_ranks_differ(pool: Pool) -> None:
    pool.run(uneven_locals, ranks=FOUR)
