"""Activations kept as shares, together with everything else that looks at saved tensors."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from reshard.nn import input_reshard, resharded_activations, resharding_of
from tests.nn.blocks import MLP, Block
from tests.nn.test_input_reshard import (
    FOUR,
    HIDDEN,
    check_same,
    checkpointed,
    checkpointed_again,
    gradients,
    mesh_of,
    numbers,
    same,
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


def compiled(rank: int) -> None:
    group, x = pool_group(4), numbers(6, HIDDEN)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one, self.two = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.two(F.gelu(self.one(x))) * x
            return found

    def through(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.compile(model, backend="aot_eager")(given)
        return found

    expected = gradients(Plain(), x, through)
    model = Plain()
    input_reshard(model, group, 0)
    same(gradients(model, x, through), expected)
    assert resharding_of(model).stats().bytes_saved > 0
    torch._dynamo.reset()


def test_torch_compile(pool: Pool) -> None:
    pool.run(compiled, ranks=FOUR)


def autocast(rank: int) -> None:
    group, x = pool_group(4), numbers(6, HIDDEN)

    def cast(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(given)
            return found.float()

    check_same(lambda: MLP(HIDDEN, 64, group), lambda one: input_reshard(one, group, 0), x, cast)


def test_autocast(pool: Pool) -> None:
    pool.run(autocast, ranks=FOUR)


class Layers(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)
        parallelize_module(self, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(self, mesh=mesh["dp"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(x)))
        return found.clone()  # FSDP warns of views


def fsdp_and_tp(rank: int) -> None:
    mesh = mesh_of(2, 4)

    def trained(wrap: bool) -> list[torch.Tensor]:
        model = Layers(mesh)
        if wrap:
            input_reshard(model, mesh["tp"], 0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(5):
            x = numbers(6, HIDDEN, seed=10 * step + mesh["dp"].get_local_rank())
            optimizer.zero_grad()
            model(x.requires_grad_()).square().mean().backward()
            optimizer.step()
        if wrap:
            assert resharding_of(model).stats().bytes_saved > 0
        return [param.detach() for param in model.parameters()]

    same(trained(True), trained(False))


def test_B99_D25_fsdp_and_tensor_parallelism(pool: Pool) -> None:
    pool.run(fsdp_and_tp)


def repeated(rank: int) -> None:
    """Gradient accumulation, several forwards before the first backward, in either order."""
    group = pool_group(4)
    inputs = [numbers(4, HIDDEN, seed=seed) for seed in range(3)]

    def collected(wrap: bool, order: Any) -> list[torch.Tensor]:
        model = nn.Sequential(MLP(HIDDEN, 64, group), MLP(HIDDEN, 64, group))
        if wrap:
            input_reshard(model, group, 0, modules="*")
        for _ in range(3):
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


def changed_inside(rank: int) -> None:
    """An input that the module itself has changed is not equal on all ranks any more."""
    group = pool_group(4)

    class Mixes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            return Local()(y) * x

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.add_(dist.get_rank())
            return x.exp() * x

    def wrap(model: nn.Module) -> None:
        input_reshard(model, group, 0)

    check_same(Mixes, wrap, numbers(4, HIDDEN))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local = Local()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.local(x * 1.5)
            return found

    check_same(Outer, lambda one: input_reshard(one, group, 0, modules="local"), numbers(4, HIDDEN))


def test_an_input_changed_in_forward_stays_whole(pool: Pool) -> None:
    pool.run(changed_inside, ranks=FOUR)


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


def code_that_is_no_module(rank: int) -> None:
    group, x = pool_group(4), numbers(6, HIDDEN)
    given = x.clone().requires_grad_()
    y = given * 1.0
    with resharded_activations(group, [y]) as handle:
        out = (y * y.exp()).sum()
    assert handle.stats().bytes_kept * 4 == handle.stats().bytes_seen > 0
    out.backward()
    other = x.clone().requires_grad_()
    z = other * 1.0
    (z * z.exp()).sum().backward()
    same([given.grad], [other.grad])


def test_a_context_for_code_that_is_no_module(pool: Pool) -> None:
    pool.run(code_that_is_no_module, ranks=FOUR)


def copies(rank: int) -> None:
    """Copies and pickles of modules work; nothing is kept alive."""
    import pickle

    group, x = pool_group(2), numbers(4, HIDDEN)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
    input_reshard(model, group, 0, modules="0")
    expected = gradients(model, x)
    same(gradients(copy.deepcopy(model), x), expected)
    loaded = pickle.loads(pickle.dumps(model))
    loaded.zero_grad()
    same(gradients(loaded, x), expected)
    with pytest.raises(ValueError, match="is not resharded"):
        resharding_of(loaded)
    out = model(x.clone().requires_grad_())
    watched = weakref.ref(model[0].weight)
    del out, model, expected
    gc.collect()
    assert watched() is None


def test_copies_of_modules(pool: Pool) -> None:
    pool.run(copies, ranks=range(2))
