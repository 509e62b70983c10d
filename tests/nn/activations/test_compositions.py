"""Resharded activations with torch.compile, autocast, FSDP, torch.func, and copies of modules."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard.nn import (
    input_reshard,
    resharded_activations,
    resharding_of,
)
from tests.nn.activations.blocks import MLP
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Cube,
    check_same,
    gradients,
    numbers,
    same,
)
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases


def compiled(rank: int, size: int) -> None:
    group, x = pool_group(size), numbers(6, HIDDEN)

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
    size = cases(2, 4)  # each rank imports the compiler
    pool.run(compiled, size, ranks=range(size))


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
        for step in range(cases(2, 5)):
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


def copies(rank: int) -> None:
    """Copies and pickles of modules work; nothing is kept alive."""
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
