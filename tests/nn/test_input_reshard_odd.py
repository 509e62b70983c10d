"""What a critical reader found: each gave wrong gradients, hung or crashed once."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError
from reshard.nn import input_reshard, mark_replicated, resharding_of
from tests.nn.blocks import MLP
from tests.nn.test_input_reshard import (
    FOUR,
    HIDDEN,
    check_same,
    checkpointed,
    gradients,
    mesh_of,
    numbers,
)
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * x


def beside_an_input(rank: int) -> None:
    """What a rank has for itself may lie in one storage with what is equal."""
    group = pool_group(4)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv = nn.Parameter(numbers(HIDDEN, HIDDEN, seed=1))
            self.q = nn.Parameter(numbers(HIDDEN, HIDDEN, seed=10 + rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, kv = F.linear(x, torch.cat([self.q, self.kv])).split(HIDDEN, -1)
            return q * mark_replicated(kv)

    check_same(Fused, lambda one: input_reshard(one, group, 0), numbers(6, HIDDEN))

    class Half(nn.Module):
        def __init__(self, other: torch.Tensor) -> None:
            super().__init__()
            self.other = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.other.exp()

    def with_half(wrap: bool) -> torch.Tensor:
        both = torch.stack([numbers(4, 8), numbers(4, 8, seed=rank)])
        model = Half(both[1])
        if wrap:
            input_reshard(model, group, 0)
        given = both[0].requires_grad_()
        model(given).square().sum().backward()
        return given.grad

    assert torch.equal(with_half(True), with_half(False))


def test_rank_local_memory_beside_an_input_stays(pool: Pool) -> None:
    pool.run(beside_an_input, ranks=FOUR)


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

    def work(seed: int) -> None:
        for turn in range(5):
            x = numbers(4, 8, seed=100 * seed + turn).requires_grad_()
            try:
                model(x).sum().backward()
            except LiveError:
                return
            if not torch.allclose(x.grad, 3 * x.detach() ** 2):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_two_threads_are_never_mixed_up() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(two_threads)


def memory_of_others(rank: int) -> None:
    """A saved tensor is gone, and the next one has its place: they are not the same."""
    mesh = mesh_of(4)

    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.sum() * 0
            for factor in range(1, 13):
                spread = DTensor.from_local(x * factor, mesh, [Replicate()])
                total = total + (spread * spread).to_local().sum()
                del spread
            return total

    check_same(Many, lambda one: input_reshard(one, mesh, 0), numbers(6, 8))
    check_same(Many, lambda one: input_reshard(one, mesh, 0, budget="1MiB"), numbers(6, 8))


def test_memory_that_is_given_to_others(pool: Pool) -> None:
    pool.run(memory_of_others, ranks=FOUR)


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


def marked_for_long(rank: int) -> None:
    from reshard.nn.activations.known import _marked

    before, kept = len(_marked), numbers(4, 8)
    for _ in range(50):
        mark_replicated(kept)
        mark_replicated(numbers(4, 8))
    assert len(_marked) <= before + 3
    assert len(_marked[kept.untyped_storage()._cdata]) == 1


def test_marks_do_not_pile_up(pool: Pool) -> None:
    pool.run(marked_for_long, ranks=[0])


def filled_again(rank: int) -> None:
    """Memory that is filled again behind autograd's back is another tensor in the next call."""
    model = Cube()
    input_reshard(model, pool_group(4), 0)
    x = numbers(4, 8).requires_grad_()
    kept = model(x)
    x.data.copy_(numbers(4, 8, seed=5))
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    del kept


def test_memory_that_is_filled_again(pool: Pool) -> None:
    pool.run(filled_again, ranks=FOUR)


def buffers(rank: int) -> None:
    """A buffer that is given as an argument is one all the same."""
    group = pool_group(4)

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask.exp()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.register_buffer("mask", numbers(6, HIDDEN, seed=rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x, self.mask)
            return found

    check_same(Outer, lambda one: input_reshard(one, group, 0, modules="inner"), numbers(6, HIDDEN))


def test_buffers_as_arguments_stay(pool: Pool) -> None:
    pool.run(buffers, ranks=FOUR)


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


def absent_while_checking(rank: int) -> None:
    """A rank whose first forward fails does not hang those that compare checksums."""

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                raise ValueError("on purpose")
            return x * x

    model = Picky()
    input_reshard(model, pool_group(4), 0, check=True, timeout=2)
    with pytest.raises((ValueError, MoveTimeoutError)):
        model(numbers(4, 8).requires_grad_())


def test_a_rank_that_fails_while_others_compare() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(absent_while_checking)


def checked_when_there_is_something(rank: int) -> None:
    model = Cube()
    input_reshard(model, pool_group(4), 0, check=True)
    checkpointed(model, numbers(4, 8).requires_grad_())
    with pytest.raises(DisagreementError, match=r"Cube, argument 0 is not the same"):
        model(numbers(4, 8, seed=rank).requires_grad_())


def test_a_call_without_saved_tensors_does_not_count_as_checked(pool: Pool) -> None:
    pool.run(checked_when_there_is_something, ranks=FOUR)


def strides(rank: int) -> None:
    """Inputs with gaps come back with their strides, and are kept once."""
    group = pool_group(4)

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.exp()).sum() + (x.t() * x.t().sin()).sum() + x.chunk(2, -1)[0].exp().sum()

    seen: list[tuple[int, ...]] = []

    def called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        big = torch.cat([x, x], -1)
        found: torch.Tensor = model(big[:, : x.shape[1]])
        seen.append(big.stride())
        return found

    model = check_same(Views, lambda one: input_reshard(one, group, 0), numbers(8, HIDDEN), called)
    # In each of two steps: x once, though x and x.t() are saved.
    assert resharding_of(model).stats().bytes_seen == 2 * 8 * HIDDEN * 4
    dense = check_same(Views, lambda one: input_reshard(one, group, 0), numbers(8, HIDDEN))
    assert resharding_of(dense).stats().bytes_seen == 2 * 8 * HIDDEN * 4


def test_views_with_gaps(pool: Pool) -> None:
    pool.run(strides, ranks=FOUR)


def transforms(rank: int) -> None:
    """Where hooks are not possible a module does what it did."""
    group, model = pool_group(4), Cube()
    input_reshard(model, group, 0)
    x = numbers(4, 8)
    torch.testing.assert_close(torch.vmap(model)(x), x**3)
    torch.testing.assert_close(torch.func.grad(lambda y: model(y).sum())(x), 3 * x**2)
    with torch.inference_mode():
        made = numbers(4, 8)
    scale = torch.ones(4, 8, requires_grad=True)
    (model(made.clone()) * scale).sum().backward()
    nested = nn.Sequential(nn.Linear(8, 8))
    input_reshard(nested, group, 0)
    assert nested(made.clone()).requires_grad


def test_transforms_of_torch_func(pool: Pool) -> None:
    pool.run(transforms, ranks=FOUR)


def wrappers(rank: int) -> None:
    """Somebody has wrapped forward after us, or made a copy: each can be undone."""
    group, x = pool_group(4), numbers(4, HIDDEN)
    model = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(model, group, 0)
    handle, ours = resharding_of(model), model.forward
    model.forward = lambda y: ours(y) + 1
    expected = model(x).detach()
    handle.remove()
    assert torch.equal(model(x), expected)
    other = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(other, group, 0)
    double = copy.deepcopy(other)
    resharding_of(double).remove()
    for one in (other, double):
        assert "forward" not in vars(one)
    same = gradients(other, x)
    assert all(map(torch.equal, gradients(double, x), same))


def test_wrapped_and_copied_modules(pool: Pool) -> None:
    pool.run(wrappers, ranks=FOUR)


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


def nested_in_checkpoint(rank: int) -> None:
    group = pool_group(4)
    model = nn.Sequential(MLP(HIDDEN, 64, group))
    input_reshard(model, group, 0)
    input_reshard(model[0], group, 0)
    out = checkpointed(model, numbers(4, HIDDEN).requires_grad_())
    assert resharding_of(model[0]).stats().bytes_seen == 0
    out.sum().backward()
    assert resharding_of(model[0]).stats().bytes_seen == 0


def test_nothing_is_kept_inside_of_a_checkpoint(pool: Pool) -> None:
    pool.run(nested_in_checkpoint, ranks=FOUR)
