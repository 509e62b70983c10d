"""Optimizers, clipping and conversions see the shards, and do what they do to whole parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import (
    ShardedOptimizer,
    ShardedTensor,
    ShardingSpec,
    load_with_process_group,
    named_params_with_sharded_tensor,
    shard_tensor,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    boxes,
    check_close,
    check_lies_like,
    chunk,
    numbered,
    sharded,
    values,
    whole,
)
from tests.soak import cases, soaking

F64 = torch.float64
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "adam foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5, centered=True),
    "rmsprop foreach": lambda params: torch.optim.RMSprop(params, lr=0.1, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adagrad foreach": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


class Model(nn.Module):
    """Two layers and a scale; ``tied`` uses the first layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7, dtype=F64)
        self.down = nn.Linear(7, 6, dtype=F64)
        self.scale = nn.Parameter(torch.ones(6, dtype=F64))
        with torch.no_grad():
            for at, param in enumerate(self.parameters()):
                param.copy_(values(*param.shape, seed=at))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [_usable(layer.weight) for layer in (self.up, self.down)]
        hidden = torch.tanh(nn.functional.linear(x, weights[0], self.up.bias))
        return nn.functional.linear(hidden, weights[1], self.down.bias) * self.scale


def _usable(weight: torch.Tensor) -> torch.Tensor:
    """Boxes are made rows, which DTensor can express."""
    return weight.resharded(chunk(0)) if isinstance(weight, ShardedTensor) else weight


def sharded_model(specs: dict[str, ShardingSpec]) -> Model:
    model = Model()
    shard_module(model, ShardingPlan(specs), process_group=pool_group(4))
    return model


LAYOUTS: dict[str, dict[str, ShardingSpec]] = {
    "rows and columns": {"up.weight": chunk(0), "up.bias": chunk(0), "down.weight": chunk(1)},
    "boxes": {"up.weight": boxes(7, 6), "down.weight": chunk(0, [2, 1])},
}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float = 0) -> Any:
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(values(4, 6, seed=50 + step)) ** 2).mean()
        loss.backward()
        if clip:
            found.append(float(whole(clip_grad_norm_(model.parameters(), clip))))
        optimizer.step()
        found.append(float(whole(loss.detach())))
    return found


def trained(rank: int, layout: str, names: list[str]) -> None:
    for name in names:
        whole_model, model = Model(), sharded_model(LAYOUTS[layout])
        before = [copy.deepcopy(param) for param in model.parameters()]
        steps = cases(2, 3)
        wanted = losses(whole_model, OPTIMIZERS[name](whole_model.parameters()), steps)
        found = losses(model, OPTIMIZERS[name](model.parameters()), steps)
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12), name
        pairs = zip(model.parameters(), whole_model.parameters(), before, strict=True)
        for param, plain, old in pairs:
            torch.testing.assert_close(whole(param).detach(), plain.detach(), rtol=1e-9, atol=1e-12)
            if isinstance(param, ShardedTensor):
                check_lies_like(param, old)
                check_lies_like(param.grad, param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_D17_plain_optimizers_train_like_the_whole_model(pool: Pool, layout: str) -> None:
    every = 1 if soaking() or layout == "rows and columns" else 2
    pool.run(trained, layout, list(OPTIMIZERS)[::every], ranks=FOUR)


def clipped(rank: int) -> None:
    for layout in LAYOUTS.values():
        whole_model, model = Model(), sharded_model(layout)
        make = OPTIMIZERS["momentum"]
        wanted = losses(whole_model, make(whole_model.parameters()), 2, clip=0.01)
        found = losses(model, make(model.parameters()), 2, clip=0.01)
        assert found == pytest.approx(wanted, rel=1e-10)
        for kind in (2.0, 1.0, torch.inf):
            for foreach in (None, False):
                norms = [
                    get_total_norm([p.grad for p in one.parameters()], kind, foreach=foreach)
                    for one in (model, whole_model)
                ]
                assert float(whole(norms[0])) == pytest.approx(float(norms[1]), rel=1e-10)
        grads = [p.grad for p in model.parameters() if isinstance(p, ShardedTensor)]
        plain = [p.grad for p, q in zip(whole_model.parameters(), model.parameters(), strict=True)
                 if isinstance(q, ShardedTensor)]  # fmt: skip
        assert float(whole(get_total_norm(grads))) == pytest.approx(float(get_total_norm(plain)))
        for one in (model, whole_model):
            clip_grad_value_(one.parameters(), 1e-4)
        for p, q in zip(model.parameters(), whole_model.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-12)


def test_D17_clip_grad_norm_of_plain_and_sharded_parameters(pool: Pool) -> None:
    pool.run(clipped, ranks=FOUR)


def zeroed(rank: int) -> None:
    model = sharded_model(LAYOUTS["boxes"])
    model(values(4, 6)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    for param in model.parameters():
        check_close(whole(param.grad), torch.zeros(param.shape, dtype=F64))
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_D17_zero_grad(pool: Pool) -> None:
    pool.run(zeroed, ranks=FOUR)


def converted(rank: int) -> None:
    for layout in LAYOUTS.values():
        for change in (nn.Module.float, nn.Module.half, nn.Module.double, nn.Module.bfloat16):
            model, plain = sharded_model(layout), change(Model())
            before = dict(model.named_parameters())
            cuts = {n: p.cut for n, p in before.items() if isinstance(p, ShardedTensor)}
            model(values(4, 6)).sum().backward()
            assert change(model) is model
            for (name, param), other in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert isinstance(param, nn.Parameter)
                assert param.requires_grad
                assert param.dtype == other.dtype
                assert param.grad is not None
                assert param.grad.dtype == other.dtype
                check_close(param.detach(), other.detach())
                if name in cuts:
                    assert isinstance(param, ShardedTensor)
                    assert param.cut == cuts[name]
        model = sharded_model(layout).to(torch.float32).to("cpu", torch.float64)
        wanted = Model().to(torch.float32).to(torch.float64)
        found = losses(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        same = losses(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1), 2)
        assert found == pytest.approx(same, rel=1e-10)


def test_D17_module_to_half_and_double(pool: Pool) -> None:
    pool.run(converted, ranks=FOUR)


def resumed(rank: int) -> None:
    for at, name in enumerate(("adamw", "momentum", "adagrad")):
        for layout in LAYOUTS.values() if soaking() else [[*LAYOUTS.values()][at % 2]]:
            model = sharded_model(layout)
            optimizer = OPTIMIZERS[name](model.parameters())
            losses(model, optimizer, 2)
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)
            file.seek(0)
            wanted = losses(model, optimizer, 2)
            with load_with_process_group(pool_group(4)):
                saved = torch.load(file, weights_only=True)
            other = sharded_model(layout)
            again = OPTIMIZERS[name](other.parameters())
            other.load_state_dict(saved["model"])
            again.load_state_dict(saved["optim"])
            assert losses(other, again, 2) == wanted


def test_D17_the_state_of_an_optimizer_is_saved_and_loaded(pool: Pool) -> None:
    pool.run(resumed, ranks=FOUR)


def sharded_optimizer(rank: int) -> None:
    for layout in LAYOUTS.values():
        whole_model, model = Model(), sharded_model(layout)
        named = dict(named_params_with_sharded_tensor(model))
        assert list(named) == [name for name, _ in model.named_parameters()]
        assert sum(isinstance(one, ShardedTensor) for one in named.values()) == len(layout)
        optimizer = ShardedOptimizer(named, torch.optim.AdamW, lr=0.1)
        other = torch.optim.AdamW(whole_model.parameters(), lr=0.1)
        assert losses(model, optimizer, 3) == pytest.approx(
            losses(whole_model, other, 3), rel=1e-10
        )
        optimizer.param_groups[0]["lr"] = 0.0
        before = model.scale.detach().clone()
        assert optimizer.step(lambda: 2.5) == 2.5
        check_close(model.scale.detach(), before)
        again = ShardedOptimizer(named, torch.optim.AdamW, lr=0.3)
        again.load_state_dict(optimizer.state_dict())
        assert again.param_groups[0]["lr"] == 0.0
        scheduler = torch.optim.lr_scheduler.StepLR(again, 1)
        assert scheduler.get_last_lr() == [0.0]
        with pytest.raises(ValueError, match="differ in"):
            ShardedOptimizer({"x": before}, torch.optim.SGD, lr=0.1).load_state_dict(
                optimizer.state_dict()
            )
        again.zero_grad()
        assert model.scale.grad is None
    with pytest.raises(TypeError, match='parameter "x" is a int'):
        ShardedOptimizer({"x": 1}, torch.optim.SGD, lr=0.1)  # type: ignore[dict-item]


def test_B76_sharded_optimizer(pool: Pool) -> None:
    pool.run(sharded_optimizer, ranks=FOUR)


def tied(rank: int) -> None:
    found = []
    for cut in (False, True):
        model = nn.ModuleList([nn.Linear(6, 6, dtype=F64), nn.Linear(6, 6, dtype=F64)])
        with torch.no_grad():
            for at, param in enumerate(model.parameters()):
                param.copy_(values(*param.shape, seed=at))
        model[1].weight = model[0].weight
        if cut:
            plan = ShardingPlan({"0.weight": chunk(0)})
            shard_module(model, plan, process_group=pool_group(4))
            assert model[1].weight is model[0].weight
        named = dict(named_params_with_sharded_tensor(model))
        assert list(named) == ["0.weight", "0.bias", "1.bias"]
        optimizer = ShardedOptimizer(named, torch.optim.SGD, lr=0.1, momentum=0.9)
        run = nn.Sequential(*model)
        found.append(losses(run, optimizer, 3))
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def test_B76_tied_parameters_are_stepped_once(pool: Pool) -> None:
    pool.run(tied, ranks=FOUR)


def state_that_lies_otherwise(rank: int, is_plain: bool) -> None:
    full = numbered(8, 6) / 10
    whole, one = nn.Parameter(full.clone()), nn.Parameter(sharded(full, chunk(0)))
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in (whole, one)]
    for step in range(4):
        if step == 2:
            state = optimizers[1].state[one]
            for name in ("exp_avg", "exp_avg_sq"):
                moved = state[name].resharded(chunk(1))
                state[name] = moved.full_tensor() if is_plain else moved
        for parameter, optimizer in zip((whole, one), optimizers, strict=True):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(one.full_tensor(), whole.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_plain", [False, True])
def test_fused_optimizers_change_state_that_lies_otherwise(pool: Pool, is_plain: bool) -> None:
    pool.run(state_that_lies_otherwise, is_plain, ranks=FOUR)


def scaled_losses(rank: int) -> list[float]:
    one, plain = (
        nn.Parameter(sharded(numbered(8, 2), chunk(0))),
        nn.Parameter(torch.ones(3).double()),
    )
    optimizer = torch.optim.SGD([one, plain], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        # Only the last element, which one rank has, becomes infinite.
        weight = torch.ones(8, 2, dtype=torch.float64)
        weight[7, 1] = factor
        scaler.scale((one * weight).sum() + plain.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert torch.equal(one.full_tensor(), numbered(8, 2) - 0.5)
    assert torch.equal(plain.detach(), torch.full((3,), 0.5).double())
    return scales


def test_loss_scaling_skips_a_step_on_all_ranks_alike(pool: Pool) -> None:
    assert pool.run(scaled_losses, ranks=FOUR) == [[4.0, 2.0]] * 4


def test_one_process_scales_losses_without_a_group() -> None:
    one = nn.Parameter(shard_tensor(numbered(8, 2), chunk(0, [0])))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([one], lr=0.5)
    scaler.scale(one.local_tensor().sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(one.full_tensor(), numbered(8, 2) - 0.5)


def copied_optimizers(rank: int) -> None:
    one = nn.Parameter(sharded(numbered(8, 2), chunk(0)))
    optimizer = ShardedOptimizer({"one": one}, torch.optim.SGD, lr=0.5, momentum=0.9)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    (one * 2).sum().backward()
    optimizer.step()
    assert calls == [1]
    twin = copy.deepcopy(optimizer)
    (other,) = twin.named_params.values()
    assert other is not one
    twin.step()
    assert torch.equal(one.full_tensor(), numbered(8, 2) - 1)
    assert torch.equal(other.full_tensor(), numbered(8, 2) - 1 - 0.5 * (2 + 0.9 * 2))


def test_an_optimizer_is_copied_with_its_parameters(pool: Pool) -> None:
    pool.run(copied_optimizers, ranks=FOUR)


def loaded_state(rank: int) -> None:
    weight = nn.Parameter(sharded(torch.sin(numbered(6, 5)), chunk(0)))
    other = nn.Parameter(sharded(torch.sin(numbered(6, 5)), chunk(1)))
    for param in (weight, other):
        param.grad = sharded(torch.cos(numbered(6, 5)), chunk(0))
    first = torch.optim.AdamW([weight])
    first.step()
    second = ShardedOptimizer({"w": other}, torch.optim.AdamW)
    second.load_state_dict(first.state_dict())
    kept = second.state[other]["exp_avg"]
    assert kept.cut == other.cut
    assert torch.equal(kept.full_tensor(), first.state[weight]["exp_avg"].full_tensor())


def test_loaded_state_lies_as_its_parameter(pool: Pool) -> None:
    pool.run(loaded_state, ranks=FOUR)
