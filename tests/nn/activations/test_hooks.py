"""Saved-tensor hooks with checkpointing, nested modules, threads, exceptions, in-place changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reshard.nn import (
    input_reshard,
    resharding_of,
)
from tests.nn.activations.blocks import MLP, Block
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    check_same,
    checkpointed,
    checkpointed_again,
    numbers,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


class Inside(nn.Module):
    """A module that checkpoints its parts by itself."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


def checkpoints(rank: int) -> None:
    """Resharded outside and inside of what is checkpointed, with both kinds."""
    group, x = pool_group(4), numbers(3, 5, HIDDEN)
    for reentrant in (False, True):
        for patterns in (None, "inner", "inner.mlp", ["inner", "inner.attention"]):
            check_same(
                lambda: Inside(Block(HIDDEN, group, dropout=0.2), reentrant),  # noqa: B023
                lambda one: input_reshard(one, group, 0, modules=patterns),  # noqa: B023
                x,
            )
    for call in (checkpointed, checkpointed_again):
        check_same(
            lambda: Block(HIDDEN, group, 0.2), lambda one: input_reshard(one, group, 0), x, call
        )


def test_B98_checkpointing_of_both_kinds(pool: Pool) -> None:
    pool.run(checkpoints, ranks=FOUR)


def checkpoint_still_saves(rank: int) -> None:
    """What is not kept as a share goes to checkpointing below: nothing else is saved."""
    group = pool_group(4)
    model = MLP(HIDDEN, 64, group)
    input_reshard(model, group, 0)
    kept: list[torch.Tensor] = []

    def seen(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved.detach()

    x = numbers(8, HIDDEN).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda one: one):
        model(x)
    assert sum(one.shape[-1] == 64 // 4 for one in kept) > 0
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda one: one):
        out = checkpoint(model, x, use_reentrant=False)
    assert not [one for one in kept if one.shape[-1] == 64 // 4]
    out.sum().backward()


def test_checkpointing_inside_still_saves_memory(pool: Pool) -> None:
    pool.run(checkpoint_still_saves, ranks=FOUR)


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


def without_gradients(rank: int) -> None:
    group, x = pool_group(4), numbers(4, HIDDEN)
    model = MLP(HIDDEN, 64, group)
    input_reshard(model, group, 0)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()
    assert resharding_of(model).stats().bytes_seen == 0


def test_no_grad(pool: Pool) -> None:
    pool.run(without_gradients, ranks=FOUR)


class Stops(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error("on purpose")


def exceptions(rank: int) -> None:
    group, x = pool_group(4), numbers(4, HIDDEN).requires_grad_()
    for error in (ValueError, KeyboardInterrupt):
        model = nn.Sequential(Stops(error), nn.Identity())
        input_reshard(model, group, 0)
        input_reshard(model[0], group, 0)
        with pytest.raises(error, match="on purpose"):
            model(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    y = numbers(4, 4, seed=rank).requires_grad_()
    (y * y).sum().backward()
    assert torch.equal(y.grad, 2 * y)


def test_D16_exceptions_in_forward(pool: Pool) -> None:
    pool.run(exceptions, ranks=FOUR)


def changed(rank: int) -> None:
    """A change in place after saving raises, of what is kept as a share and of what is not."""
    group = pool_group(4)

    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = x * 2
            return self.inner * self.inner + x * x

    for change in ("input", "inner"):
        model = Squares()
        input_reshard(model, group, 0)
        x = numbers(4, HIDDEN).requires_grad_()
        given = x.clone()
        out = model(given)
        with torch.no_grad():
            (given if change == "input" else model.inner).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_D28_changes_in_place_raise(pool: Pool) -> None:
    pool.run(changed, ranks=FOUR)


class Again(nn.Module):
    """Calls itself."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.mlp = MLP(HIDDEN, 64, group)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = x + self.mlp(x)
        found: torch.Tensor = self(x, depth - 1) if depth else x
        return found


def nested(rank: int) -> None:
    group, x = pool_group(4), numbers(5, HIDDEN)

    def wrap(model: nn.Module) -> None:
        input_reshard(model, group, 0)
        input_reshard(model.mlp, group, 0)
        input_reshard(model.mlp, group, 0)

    check_same(lambda: Again(group), wrap, x)
    check_same(
        lambda: nn.Sequential(*[MLP(HIDDEN, 64, group)] * 2),
        lambda one: input_reshard(one, group, 0, modules=["0", "1"]),
        x,
    )


def test_nested_and_reentrant_modules(pool: Pool) -> None:
    pool.run(nested, ranks=FOUR)


def threads(rank: int) -> None:
    """Hooks of one thread are not those of another."""
    group, x = pool_group(4), numbers(5, HIDDEN)
    model = MLP(HIDDEN, 64, group)
    input_reshard(model, group, 0)
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def elsewhere() -> None:
        inside.wait(30)
        y = numbers(4, 4, seed=rank).requires_grad_()
        (y * y * y).sum().backward()
        found.append(torch.allclose(y.grad, 3 * y * y))
        done.set()

    worker = threading.Thread(target=elsewhere)
    worker.start()

    class Slow(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(30)
            return given * given

    slow = Slow()
    input_reshard(slow, group, 0)
    given = x.clone().requires_grad_()
    slow(given).sum().backward()
    worker.join()
    assert found == [True]
    assert torch.equal(given.grad, 2 * x)


def test_threads(pool: Pool) -> None:
    pool.run(threads, ranks=FOUR)
