"""shard_module applies all of a plan or nothing, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reshard as rs
from reshard.nn import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    shard_module,
    shard_parameter,
)
from reshard.sharded.specs import ShardingSpec
from reshard.sharded.splits import ChunkShardingSpec
from tests.nn.shard.models import COLUMNS, FOUR, ROWS, Model, assert_rows, shard, state_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import group_of


def run_parameter(rank: int) -> None:
    layer = nn.Linear(12, 12)
    nn.init.constant_(layer.weight, rank)
    shard_parameter(layer, "weight", ROWS, src_rank=1, process_group=pool_group(4))
    assert isinstance(layer.weight, nn.Parameter)
    assert_rows(layer.weight, torch.ones(12, 12), rank)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_B7_a_parameter_is_replaced(pool: Pool) -> None:
    pool.run(run_parameter, ranks=FOUR)


def run_differing(rank: int) -> None:
    group, layer = pool_group(4), nn.Linear(12, 12)
    before = state_of(layer)
    with pytest.raises(ValueError, match="does not match with src_rank"):
        shard_parameter(layer, "weight", ROWS, src_rank=rank % 2, process_group=group)
    with pytest.raises(ValueError, match="does not match with sharding_spec"):
        shard_parameter(layer, "weight", COLUMNS if rank == 2 else ROWS, process_group=group)
    assert state_of(layer) == before


def test_B8_B12_ranks_that_differ(pool: Pool) -> None:
    pool.run(run_differing, ranks=FOUR)


def run_bad_names(rank: int) -> None:
    model, group = Model(), pool_group(4)
    with pytest.raises(AttributeError, match="has no attribute"):
        shard_parameter(model.fc1, "wieght", ROWS, process_group=group)
    with pytest.raises(ValueError, match=r"Model\.label.*found int"):
        shard_parameter(model, "label", ROWS, process_group=group)


def test_B9_B10_names_of_no_tensor(pool: Pool) -> None:
    pool.run(run_bad_names, ranks=FOUR)


def run_transposed(rank: int) -> None:
    layer, whole = nn.Linear(12, 12), torch.arange(144.0).view(12, 12)
    layer.weight = nn.Parameter(whole.clone().t())
    shard_parameter(layer, "weight", ROWS, process_group=pool_group(4))
    assert_rows(layer.weight, whole.t(), rank)


def test_B11_a_non_contiguous_parameter(pool: Pool) -> None:
    pool.run(run_transposed, ranks=FOUR)


class RowsPlanner(ShardingPlanner):
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        return ShardingPlan({name: ROWS for name, _ in module.named_parameters()})


def run_planner(rank: int) -> None:
    model, whole = Model(), Model()
    shard_module(model, RowsPlanner().build_plan(model), process_group=pool_group(4))
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert_rows(one, other, rank)
        assert one.requires_grad, name


def test_B91_every_parameter_is_sharded(pool: Pool) -> None:
    pool.run(run_planner, ranks=FOUR)


def run_sub_group(rank: int) -> None:
    group = group_of(2, 3)
    model, whole = Model(), Model()
    spec = ChunkShardingSpec(0, ["rank:2/cpu", "rank:3/cpu"])
    shard_module(model, ShardingPlan({"fc1.weight": spec}), process_group=group)
    half = whole.fc1.weight[:6] if rank == 2 else whole.fc1.weight[6:]
    assert torch.equal(model.fc1.weight.local_tensor(), half)


def test_B92_a_sub_group(pool: Pool) -> None:
    pool.run(run_sub_group, ranks=[2, 3])


class Doubled(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * inner.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Doubler(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Doubled(module)


def run_sharder(rank: int) -> None:
    for model in (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)}),
    ):
        old, names = model.get_submodule("0"), [name for name, _ in model.named_children()]
        handle = shard(model, {"0": Doubler()})
        assert type(model.get_submodule("0")) is Doubled
        assert [name for name, _ in model.named_children()] == names
        if isinstance(model, nn.Sequential):
            x = torch.ones(2, 4)
            assert torch.allclose(model(x), model[1](2 * x @ old.weight.t()))
        handle.remove()
        assert model.get_submodule("0") is old


def test_B93_D4_a_sharders_module_is_really_used(pool: Pool) -> None:
    pool.run(run_sharder, ranks=FOUR)


@pytest.mark.parametrize("path", ["0", "1.0", "table.a"])
def test_D4_a_module_is_replaced_under_all_its_names(path: str) -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {"0": layer, "1": nn.Sequential(layer), "table": nn.ModuleDict({"a": layer})}
    )
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    handle = shard_module(model, ShardingPlan({path: Doubler()}))
    assert type(model["0"]) is Doubled
    assert model["0"] is model["1"][0] is model["table"]["a"]
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == names
    handle.remove()
    assert model["0"] is model["1"][0] is model["table"]["a"] is layer


class InPlace(Sharder):
    """Changes the module that it is given, as torch's own test does."""

    def shard(self, module: nn.Module) -> nn.Module:
        module.weight = nn.Parameter(torch.zeros(1))
        module.out_features = 1
        module.register_forward_hook(lambda *_: None)
        return module


class Broken(InPlace):
    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        raise OSError("a file is missing")


class NoModule(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return [module]  # type: ignore[return-value]


def run_rollback(rank: int) -> None:
    model = Model()
    before = state_of(model)
    with pytest.raises(TypeError, match=r'NoModule.shard of module "fc2".*found list'):
        shard(model, {"fc10.weight": ROWS, "fc1": InPlace(), "fc2": NoModule()})
    assert state_of(model) == before
    with pytest.raises(OSError, match="a file is missing"):
        shard(model, {"fc1": Doubler(), "fc2": Broken()})
    assert state_of(model) == before
    with pytest.raises(AttributeError, match="has no attribute"):
        shard(model, {"fc1": Doubler()}, {"fc2": ROWS, "fc1.gone": ROWS})
    assert state_of(model) == before
    assert model.fc1.out_features == 12


def test_D21_a_failing_sharder_leaves_the_module_as_it_was(pool: Pool) -> None:
    pool.run(run_rollback, ranks=FOUR)


def run_bad_plans(rank: int) -> None:
    model = Model()
    before = state_of(model)
    for plan in (
        ShardingPlan({"fc1.weight": ROWS, "fc3.weight": ROWS}),
        ShardingPlan({"fc1.weight": ROWS}, output_plan={"fc3": ROWS}),
        ShardingPlan({"fc1.weight": ROWS}, return_local_tensor=["fc3"]),
    ):
        with pytest.raises(AttributeError, match="has no attribute"):
            shard_module(model, plan, process_group=pool_group(4))
        assert state_of(model) == before
    with pytest.raises(TypeError, match="plan should be a ShardingPlan, found dict"):
        shard_module(model, {"fc1.weight": ROWS}, process_group=pool_group(4))
    with pytest.raises(ValueError, match="Invalid sharding dim"):
        shard(model, {"fc1.weight": ROWS, "fc1.bias": COLUMNS})
    assert state_of(model) == before


def test_D21_a_bad_plan_changes_nothing(pool: Pool) -> None:
    pool.run(run_bad_plans, ranks=FOUR)


def run_one_rank_fails(rank: int) -> str:
    model = Model()
    before = state_of(model)
    path = "fc3.weight" if rank == 2 else "fc2.weight"
    with pytest.raises(AttributeError, match="has no attribute") as raised:
        shard(model, {"fc1.weight": ROWS, path: ROWS})
    with pytest.raises(OSError, match="on rank 1: a file is missing"):
        shard(model, {"fc1": Broken() if rank == 1 else Doubler()})
    with pytest.raises(rs.DisagreementError, match=r"rank 3 has .* give the same"):
        shard(model, {"fc1.bias" if rank == 3 else "fc1.weight": ROWS})
    assert state_of(model) == before
    return str(raised.value)


def test_D21_an_error_of_one_rank_is_one_of_all(pool: Pool) -> None:
    texts = pool.run(run_one_rank_fails, ranks=FOUR)
    assert [text.startswith("on rank 2: ") for text in texts] == [True] * 4


def run_tied(rank: int) -> None:
    model = Model()
    model.fc2.weight = original = model.fc1.weight
    model.fc10.weight.requires_grad_(False)
    original.kept_mark = "no decay"
    handle = shard(model, {"fc*.weight": ROWS})
    assert_rows(model.fc1.weight, original, rank)
    assert model.fc2.weight is model.fc1.weight
    assert len(list(model.parameters())) == 5
    assert model.fc1.weight.kept_mark == "no decay"
    assert model.fc1.weight.requires_grad
    assert not model.fc10.weight.requires_grad
    handle.remove()
    assert model.fc2.weight is model.fc1.weight is original
    assert not model.fc10.weight.requires_grad


def test_D22_D23_ties_and_frozen_flags_stay(pool: Pool) -> None:
    pool.run(run_tied, ranks=FOUR)


def run_marked(rank: int) -> None:
    model = Model()
    model.fc1.weight.kept_mark = "no decay"
    whole = model.fc1.weight.detach().clone()
    handle = shard(model, {"fc1.weight": ROWS})  # the original is freed
    model.fc1.weight.later_mark = 3
    handle.remove()
    assert type(model.fc1.weight) is nn.Parameter
    assert torch.equal(model.fc1.weight, whole)
    assert vars(model.fc1.weight) == {"kept_mark": "no decay", "later_mark": 3}


def test_attributes_of_a_parameter_come_back(pool: Pool) -> None:
    pool.run(run_marked, ranks=FOUR)


def run_buffer(rank: int) -> None:
    model = Model()
    handle = shard(model, {"table": ROWS})
    assert_rows(model.table, torch.arange(24.0).view(12, 2), rank)
    assert not isinstance(model.table, nn.Parameter)
    assert [name for name, _ in model.named_buffers()] == ["table"]
    assert not model.table.requires_grad
    handle.remove()
    assert type(model.table) is torch.Tensor
    assert torch.equal(model.table, torch.arange(24.0).view(12, 2))


def test_D23_a_buffer_stays_a_buffer(pool: Pool) -> None:
    pool.run(run_buffer, ranks=FOUR)


def run_twice(rank: int) -> None:
    model = Model()
    shard(model, {"fc1.weight": ROWS})
    with pytest.raises(ValueError, match=r'"fc1.weight" is sharded already'):
        shard(model, {"fc1.weight": COLUMNS})
    with pytest.warns(UserWarning, match="matches nothing"):
        shard(model, {"gc*.weight": ROWS})
    before = state_of(model)
    shard(model, {})
    assert state_of(model) == before


def test_B122_a_second_and_an_empty_plan(pool: Pool) -> None:
    pool.run(run_twice, ranks=FOUR)


class OwnSpec(ShardingSpec):
    """A user's spec that cuts in its own way."""

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any) -> Any:
        return ROWS.build_metadata(tensor_sizes, tensor_properties)

    def shard(self, tensor: Any, src_rank: int = 0, process_group: Any = None) -> Any:
        raise NotImplementedError("not implemented yet!")


def run_own_spec(rank: int) -> None:
    model = Model()
    before = state_of(model)
    with pytest.raises(NotImplementedError, match="not implemented yet!"):
        shard(model, {"fc2.weight": ROWS, "fc1.weight": OwnSpec()})
    assert state_of(model) == before


def test_B16_a_spec_with_its_own_shard_is_asked(pool: Pool) -> None:
    pool.run(run_own_spec, ranks=FOUR)


def run_rules(rank: int) -> None:
    model, whole = Model(), Model()
    text = 'axes = ["tp"]\n[tensors]\n"*.weight" = "- tp"\n"*" = "..."'
    plan = ShardingPlan.from_rules(rs.Rules.parse(text), model, rs.Mesh(tp=4))
    shard_module(model, plan, process_group=pool_group(4))
    columns = whole.fc10.weight[:, 3 * rank : 3 * rank + 3]
    assert torch.equal(model.fc10.weight.local_tensor(), columns)
    assert type(model.fc10.bias) is nn.Parameter


def test_a_plan_from_rules_is_applied(pool: Pool) -> None:
    pool.run(run_rules, ranks=FOUR)


def run_count(rank: int, num_layers: int) -> int:
    calls: list[str] = []
    real = dist.all_gather
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(num_layers)])

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_gather")
        return real(*args, **kwargs)

    dist.all_gather = counted
    try:
        shard(model, {"*.weight": ROWS})
    finally:
        dist.all_gather = real
    return len(calls)


def test_D31_the_ranks_compare_once_however_many_parameters(pool: Pool) -> None:
    few, many = (pool.run(run_count, count, ranks=FOUR) for count in (1, 40))
    assert few == many
    assert max(many) <= 4
