"""Restores in other orders, from several threads, and after failures of one rank."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError
from reshard.nn import (
    input_reshard,
)
from reshard.nn.activations import restore
from reshard.tensors.tensor_move import PLAN_BYTES
from tests.nn.activations.blocks import MLP
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Cube,
    numbers,
    same,
)
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.soak import cases


def other_orders(rank: int) -> None:
    """Ranks that go backward in another order get an error, never each other's tensors."""
    model = Cube()
    input_reshard(model, pool_group(4), 0)
    losses = [model(numbers(4, 8, seed=seed).requires_grad_()).sum() for seed in range(2)]
    order = (1, 0) if rank == 0 else (0, 1)
    with pytest.raises(DisagreementError, match="ranks ask for different tensors"):
        losses[order[0]].backward()
    for _ in range(3):
        x = numbers(4, 8).requires_grad_()
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_another_order_on_one_rank_is_an_error(pool: Pool) -> None:
    pool.run(other_orders, ranks=FOUR)


def two_threads(rank: int) -> None:
    """Two threads on one group: right, or an error; never wrong."""
    model = Cube()
    input_reshard(model, pool_group(4), 0, timeout=10)
    wrong: list[object] = []
    ended: list[str] = []

    def work(seed: int) -> None:
        for turn in range(5):
            x = numbers(4, 8, seed=100 * seed + turn).requires_grad_()
            try:
                model(x).sum().backward()
            except LiveError:
                ended.append("with an error")
                return
            if not torch.allclose(x.grad, 3 * x.detach() ** 2):
                wrong.append((seed, turn))
        ended.append("right")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert len(ended) == 2, "any other exception"


def test_two_threads_are_never_mixed_up() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(two_threads)


def different_liveness(rank: int) -> None:
    """One rank keeps a graph that the others have dropped."""
    box = nn.ModuleDict({"a": Cube(), "b": Cube()})
    input_reshard(box, pool_group(4), 0, modules="*")
    for _ in range(2):
        box["b"](box["a"](numbers(4, 8).requires_grad_())).sum().backward()
    kept = box["a"](numbers(4, 8).requires_grad_())
    if rank:
        del kept
    for _ in range(3):
        x = numbers(4, 8, seed=3).requires_grad_()
        box["b"](x).sum().backward()
        torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_ranks_may_keep_different_graphs(pool: Pool) -> None:
    pool.run(different_liveness, ranks=FOUR)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.fails:
            raise ValueError("on purpose")
        return gradients[0], None


def failing_backward(rank: int) -> None:
    """A backward that fails on one rank, while others may have had all they need, and go on."""
    box = nn.ModuleDict({name: Cube() for name in "abcd"})
    input_reshard(box, pool_group(4), 0, modules="*", timeout=20)

    def step(fails: bool) -> None:
        y = x = numbers(4, 8).mul(0.5).requires_grad_()
        for name, layer in box.items():
            y = Fails.apply(layer(y), fails) if name == "b" else layer(y)
        y.sum().backward()
        torch.testing.assert_close(x.grad, 81 * x.detach() ** 80, rtol=1e-3, atol=1e-12)

    step(False)
    step(False)
    if rank == 2:
        with pytest.raises(ValueError, match="on purpose"):
            step(True)
    else:
        step(False)
    for _ in range(4):
        step(False)


def test_a_backward_that_fails_on_one_rank() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(failing_backward)


def repeated(rank: int) -> None:
    """Gradient accumulation, several forwards before the first backward, in either order."""
    group = pool_group(4)
    inputs = [numbers(4, HIDDEN, seed=seed) for seed in range(3)]

    def collected(wrap: bool, order: Any) -> list[torch.Tensor]:
        model = nn.Sequential(MLP(HIDDEN, 64, group), MLP(HIDDEN, 64, group))
        if wrap:
            input_reshard(model, group, 0, modules="*")
        for _ in range(cases(2, 3)):
            losses = [model(x).square().sum() for x in inputs]
            for number in order:
                losses[number].backward()
            for x in inputs:
                model(x).square().sum().backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        same(collected(True, order), collected(False, order), order)


def test_accumulated_gradients_and_pipelines(pool: Pool) -> None:
    pool.run(repeated, ranks=FOUR)


def twice(rank: int) -> None:
    """A second derivative, and backward twice through a retained graph."""
    group, x = pool_group(4), numbers(4, HIDDEN, seed=3)

    class Smooth(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.exp() * x.sin()).sum()

    def second(wrap: bool) -> list[torch.Tensor]:
        model = Smooth()
        if wrap:
            input_reshard(model, group, 0)
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(given), given, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), given)
        out = model(given)
        kept = [torch.autograd.grad(out, given, retain_graph=True)[0] for _ in range(3)]
        return [first.detach(), found, *kept]

    same(second(True), second(False))


def test_second_derivatives_and_retained_graphs(pool: Pool) -> None:
    pool.run(twice, ranks=FOUR)


def skipped(rank: int) -> str:
    """Rank 2 leaves out a backward: the others hear of it in time, and it does when it is back."""
    group = pool_group(4)
    model = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(model, group, 0, timeout=2)
    out = model(numbers(4, HIDDEN).requires_grad_()).sum()
    if rank == 2:
        dist.barrier(group)
    began = time.monotonic()
    with pytest.raises(MoveTimeoutError) as caught:
        out.backward()
    assert time.monotonic() - began < 8
    if rank != 2:
        dist.barrier(group)
    x = numbers(4, HIDDEN).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(4, HIDDEN))
    return str(caught.value)


def test_D29_a_rank_that_skips_backward(pool: Pool) -> None:
    texts = pool.run(skipped, ranks=FOUR)
    for rank in FOUR:
        assert "rank 2 has not called" in texts[rank], texts[rank]
        assert "Linear, argument 0" in texts[rank], texts[rank]


def other_shapes(rank: int) -> None:
    """Inputs of different shapes are an error on all ranks, no hang and no wrong gradient."""
    group = pool_group(4)
    model = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(model, group, 0, timeout=5)
    out = model(numbers(4 + (rank == 1), HIDDEN).requires_grad_()).sum()
    with pytest.raises(LiveError):
        out.backward()


def test_inputs_of_different_shapes(pool: Pool) -> None:
    pool.run(other_shapes, ranks=FOUR)


def many_exchanges(rank: int) -> tuple[int, int]:
    """Exchanges of many sizes with a small limit: how many were made, and how many plans kept."""
    with patch.object(restore, "MAX_PLAN_BYTES", 1 << 20):
        restorer = restore.Restorer(pool_group(4))
    for count in range(1, 41):
        plan = restorer.plan_for(("a",), ((64 * count, 1),))
        assert plan.have["a"].shape == (64 * count,)
        assert restorer.gather([rank] * count, timeout=30) == [[other] * count for other in FOUR]
    return count, len(restorer._plans._values)


def test_kept_plans_are_bounded_in_bytes(pool: Pool) -> None:
    for made, kept in pool.run(many_exchanges, ranks=FOUR):
        assert made == 40
        assert 1 <= kept <= (1 << 20) // PLAN_BYTES
