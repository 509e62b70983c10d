"""shard_module: all of a plan or nothing, and what stays as it was."""

from __future__ import annotations

import gc
import weakref
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
    load_with_process_group,
    shard_module,
    shard_parameter,
)
from reshard.sharded.chunk import ChunkShardingSpec
from reshard.sharded.spec import ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

FOUR = range(4)
PLACES = [f"rank:{rank}/cpu" for rank in FOUR]
ROWS, COLUMNS = ChunkShardingSpec(0, PLACES), ChunkShardingSpec(1, PLACES)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = nn.Linear(12, 12)
        self.fc2 = nn.Linear(12, 12)
        self.fc10 = nn.Linear(12, 12)
        self.register_buffer("table", torch.arange(24.0).view(12, 2))
        self.label = 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc10(self.fc2(self.fc1(x)))


class Hands(nn.Module):
    """Gives its own parameter, in a tuple."""

    def __init__(self, rows: int = 24) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(rows * 12.0).view(rows, 12))

    def forward(self) -> tuple[torch.Tensor, str]:
        return self.weight, "label"


def shard(module: nn.Module, plan: dict[str, Any], *rest: Any, **options: Any) -> Any:
    return shard_module(module, ShardingPlan(plan, *rest), process_group=pool_group(4), **options)


def state_of(module: nn.Module) -> list[object]:
    """Everything that sharding might change, by identity."""
    return [
        [(name, id(child)) for name, child in module.named_modules()],
        [(name, id(one)) for name, one in module.named_parameters(remove_duplicate=False)],
        [(name, id(one)) for name, one in module.named_buffers()],
        [len(child._forward_hooks) for child in module.modules()],
        [sorted(vars(child)) for child in module.modules()],
    ]


def assert_rows(tensor: torch.Tensor, whole: torch.Tensor, rank: int) -> None:
    assert isinstance(tensor, ShardedTensor)
    assert len(tensor.local_shards()) == 1
    assert torch.equal(tensor.local_tensor(), whole[3 * rank : 3 * rank + 3])


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
    group = dist.new_group([2, 3], use_local_synchronization=True)
    model, whole = Model(), Model()
    spec = ChunkShardingSpec(0, ["rank:2/cpu", "rank:3/cpu"])
    shard_module(model, ShardingPlan({"fc1.weight": spec}), process_group=group)
    half = whole.fc1.weight[:6] if rank == 2 else whole.fc1.weight[6:]
    assert torch.equal(model.fc1.weight.local_tensor(), half)
    dist.destroy_process_group(group)


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
    with pytest.raises(RuntimeError if rank != 1 else OSError, match="a file is missing"):
        shard(model, {"fc1": Broken() if rank == 1 else Doubler()})
    with pytest.raises(rs.DisagreementError, match="on rank 3"):
        shard(model, {"fc1.bias" if rank == 3 else "fc1.weight": ROWS})
    assert state_of(model) == before
    return str(raised.value)


def test_D21_an_error_of_one_rank_is_one_of_all(pool: Pool) -> None:
    texts = pool.run(run_one_rank_fails, ranks=FOUR)
    assert [text.startswith("on rank 2: ") for text in texts] == [True, True, False, True]


def run_tied(rank: int) -> None:
    model = Model()
    model.fc2.weight = original = model.fc1.weight
    model.fc10.weight.requires_grad_(False)
    original.kept_mark = "no decay"
    handle = shard(model, {"fc?.weight": ROWS, "fc10.weight": ROWS})
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


def run_state_dict(rank: int) -> None:
    model = nn.ModuleDict({"inner": Model()})
    shard(model, {"inner.fc1.weight": ROWS})
    state = model.state_dict()
    assert_rows(state["inner.fc1.weight"], Model().fc1.weight, rank)
    assert type(state["inner.fc1.bias"]) is torch.Tensor
    other = nn.ModuleDict({"inner": Model()})
    nn.init.zeros_(other.inner.fc1.weight)
    shard(other, {"inner.fc1.weight": ROWS})
    with load_with_process_group(pool_group(4)):
        other.load_state_dict(state)
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
