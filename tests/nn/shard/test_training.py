"""A sharded module: its outputs, its state dict, and the way back to what it was."""

from __future__ import annotations

import gc
import io
import weakref

import torch
from torch import nn

from reshard.nn import load_with_process_group
from tests.nn.shard.models import COLUMNS, FOUR, ROWS, Hands, Model, assert_rows, shard, state_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


def run_outputs(rank: int) -> None:
    module = Hands()
    handle = shard(module, {"weight": ROWS}, {"": COLUMNS})
    tensor, label = module()
    assert (tensor.local_tensor().shape, label) == ((24, 3), "label")
    assert module.weight.sharding_spec() == ROWS
    handle.remove()
    module = nn.Sequential()
    module.add_module("hands", Hands())
    handle = shard(module, {"hands.*": ROWS}, {"hands": COLUMNS}, ["hands"])
    tensor, label = module.hands()
    assert type(tensor) is torch.Tensor
    assert tensor.shape == (24, 3)
    handle.remove()
    tensor, _ = module.hands()
    assert tensor is module.hands.weight
    assert not module.hands._forward_hooks


def test_B96_D20_outputs_of_the_root_and_of_children(pool: Pool) -> None:
    pool.run(run_outputs, ranks=FOUR)


def run_forward(rank: int) -> None:
    model, whole, x = Model(), Model(), torch.ones(2, 12)
    plan = {"fc1.weight": ROWS, "fc1.bias": ROWS, "fc2.weight": COLUMNS}
    handle = shard(model, plan, None, [""])
    assert torch.allclose(model(x), whole(x))
    model(x).sum().backward()
    whole(x).sum().backward()
    assert_rows(model.fc1.weight.grad, whole.fc1.weight.grad, rank)
    handle.remove()
    assert torch.allclose(model(x), whole(x))


def test_B93_outputs_equal_those_of_the_whole_model(pool: Pool) -> None:
    pool.run(run_forward, ranks=FOUR)


def run_remove(rank: int) -> None:
    model, before = Model(), Model()
    weight, hold = model.fc1.weight, state_of(model)
    handle = shard(model, {"*.weight": ROWS, "table": COLUMNS}, {"fc1": ROWS}, ["fc2"])
    assert handle.sharded == ("table", "fc1.weight", "fc2.weight", "fc10.weight")
    with torch.no_grad():
        model.fc1.weight.mul_(3)
    handle.remove()
    assert model.fc1.weight is weight
    assert torch.equal(weight, 3 * before.fc1.weight)
    assert torch.equal(model.fc2.weight, before.fc2.weight)
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in hold[1]]
    assert not any(child._forward_hooks for child in model.modules())
    handle.remove()
    assert model.fc1.weight is weight


def test_remove_brings_back_the_parameters_with_their_values(pool: Pool) -> None:
    pool.run(run_remove, ranks=FOUR)


def run_other_dtype(rank: int) -> None:
    model = Model()
    weight = model.fc1.weight
    handle = shard(model, {"fc*.weight": ROWS})
    model.to(torch.float64)
    model.fc1.weight.requires_grad_(False)
    handle.remove()
    assert model.fc1.weight is weight
    assert model.fc2.weight.dtype == weight.dtype == torch.float64
    assert not weight.requires_grad
    assert model.fc2.weight.requires_grad
    assert torch.equal(weight, Model().fc1.weight.double())


def test_remove_keeps_what_was_changed_since(pool: Pool) -> None:
    pool.run(run_other_dtype, ranks=FOUR)


def run_memory(rank: int) -> None:
    model = Model()
    watch = weakref.ref(model.fc1.weight)
    handle = shard(model, {"fc1.weight": ROWS})
    gc.collect()
    assert watch() is None
    handle.remove()
    assert type(model.fc1.weight) is nn.Parameter
    assert model.fc1.weight.requires_grad
    assert torch.equal(model.fc1.weight, Model().fc1.weight)


def test_a_handle_does_not_keep_the_whole_parameter(pool: Pool) -> None:
    pool.run(run_memory, ranks=FOUR)


def run_state_dict(rank: int) -> None:
    model = nn.ModuleDict({"inner": Model()})
    shard(model, {"inner.fc1.weight": ROWS})
    state = model.state_dict()
    assert_rows(state["inner.fc1.weight"], Model().fc1.weight, rank)
    assert type(state["inner.fc1.bias"]) is torch.Tensor
    other = nn.ModuleDict({"inner": Model()})
    nn.init.zeros_(other.inner.fc1.weight)
    shard(other, {"inner.fc1.weight": ROWS})
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with load_with_process_group(pool_group(4)):
        other.load_state_dict(torch.load(file))
    assert_rows(other.inner.fc1.weight, Model().fc1.weight, rank)


def test_B47_B48_state_dicts_of_sharded_modules(pool: Pool) -> None:
    pool.run(run_state_dict, ranks=FOUR)


def run_plain(rank: int) -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    assert all(type(tensor) is torch.Tensor for tensor in model.state_dict().values())
    assert state_of(model)[3] == [0, 0, 0, 0]


def test_B49_ordinary_modules_are_left_alone(pool: Pool) -> None:
    pool.run(run_plain, ranks=FOUR)
