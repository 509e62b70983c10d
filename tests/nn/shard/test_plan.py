"""Plans: what is wrong with one is found before anything happens."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import reshard as rs
from reshard.nn.plan import Sharder, ShardingPlan, ShardingPlanner, resolve_modules
from reshard.sharded.specs import LayoutShardingSpec
from reshard.sharded.splits import ChunkShardingSpec

PLACES = [f"rank:{rank}/cpu" for rank in range(4)]
ROWS, COLUMNS = ChunkShardingSpec(0, PLACES), ChunkShardingSpec(1, PLACES)


class Keep(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in (1, 2, 10):
            self.add_module(f"fc{number}", nn.Linear(8, 8))
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.register_buffer("table", torch.ones(8))
        self.label = 7


def tensors_of(plan: ShardingPlan, model: nn.Module | None = None) -> dict[str, object]:
    resolved = plan.resolve(Model() if model is None else model)
    return {entry.path: entry.value for entry in resolved.tensors}


def sharders_of(plan: ShardingPlan) -> list[str]:
    return [entry.path for entry in plan.resolve(Model()).sharders]


@pytest.mark.parametrize("value", [1, None, "rows", ChunkShardingSpec])
def test_B88_a_value_that_is_no_spec_and_no_sharder(value: object) -> None:
    plan = ShardingPlan({"fc1.weight": value})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="Only `ShardingSpec` and `Sharder`") as raised:
        plan.validate(Model())
    assert '"fc1.weight"' in str(raised.value)
    assert type(value).__name__ in str(raised.value)


@pytest.mark.parametrize("value", [1, Keep()])
def test_B89_an_output_value_that_is_no_spec(value: object) -> None:
    plan = ShardingPlan({}, output_plan={"fc1": value})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r'Only `ShardingSpec`.*"fc1" has'):
        plan.validate(Model())


@pytest.mark.parametrize(
    "plan",
    [
        ShardingPlan({"fc3.weight": ROWS}),
        ShardingPlan({"fc1.wieght": ROWS}),
        ShardingPlan({"fc3": Keep()}),
        ShardingPlan({}, output_plan={"fc3": ROWS}),
        ShardingPlan({}, return_local_tensor=["fc3"]),
    ],
)
def test_B90_an_unknown_path(plan: ShardingPlan) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        plan.validate(Model())


def test_B10_a_path_to_something_else() -> None:
    with pytest.raises(ValueError, match=r"Model\.label.*found int"):
        ShardingPlan({"label": ROWS}).validate(Model())


class RowsPlanner(ShardingPlanner):
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        return ShardingPlan({name: ROWS for name, _ in module.named_parameters()})


def test_B91_a_planner_names_every_parameter() -> None:
    model = Model()
    plan = RowsPlanner().build_plan(model)
    assert [*tensors_of(plan, model)] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("value", [ROWS, Keep()])
def test_B94_the_path_must_not_be_empty(value: object) -> None:
    with pytest.raises(KeyError, match="must not be empty"):
        ShardingPlan({"": value}).validate(Model())  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("below", "value"), [("tower.0.weight", ROWS), ("tower.0", Keep()), ("tower.*.bias", ROWS)]
)
def test_B95_nothing_below_a_sharder(below: str, value: object) -> None:
    # A wildcard gives way to what is written out, so the Sharder is a wildcard where it is one.
    above = "tow*r" if "*" in below else "tower"
    plan = ShardingPlan({above: Keep(), below: value})  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="should not conflict") as raised:
        plan.validate(Model())
    assert '"tower.0' in str(raised.value)


def test_D5_fc1_does_not_conflict_with_fc10() -> None:
    plan = ShardingPlan({"fc1": Keep(), "fc10.weight": ROWS})
    assert [*tensors_of(plan)] == ["fc10.weight"]
    assert sharders_of(plan) == ["fc1"]


def test_B96_the_root_is_a_path_of_outputs() -> None:
    plan = ShardingPlan({}, output_plan={"": ROWS}, return_local_tensor=[""])
    resolved = plan.resolve(Model())
    assert (dict(resolved.outputs), [*resolved.local]) == ({"": ROWS}, [""])


def test_B122_wildcards() -> None:
    found = tensors_of(ShardingPlan({"fc*.weight": ROWS, "tower.{i}.bias": COLUMNS}))
    rows = {f"fc{number}.weight": ROWS for number in (1, 2, 10)}
    assert found == {**rows, "tower.0.bias": COLUMNS}
    assert sharders_of(ShardingPlan({"fc*": Keep()})) == ["fc1", "fc2", "fc10"]
    assert tensors_of(ShardingPlan({"tab*": ROWS})) == {"table": ROWS}


def test_B122_explicit_beats_wildcard_in_any_order() -> None:
    for order in (("fc1.weight", "fc*.weight"), ("fc*.weight", "fc1.weight")):
        specs = {"fc1.weight": COLUMNS, "fc*.weight": ROWS}
        found = tensors_of(ShardingPlan({path: specs[path] for path in order}))
        assert (found["fc1.weight"], found["fc2.weight"]) == (COLUMNS, ROWS)


def test_B122_an_explicit_sharder_beats_a_wildcard_below_it() -> None:
    plan = ShardingPlan({"**.weight": ROWS, "fc1": Keep()})
    assert sorted(tensors_of(plan)) == ["fc10.weight", "fc2.weight", "tower.0.weight"]


def test_B122_wildcards_that_disagree() -> None:
    with pytest.raises(ValueError, match=r'"fc\*.weight" and "\*\*.weight" both match "fc1'):
        ShardingPlan({"fc*.weight": ROWS, "**.weight": COLUMNS}).validate(Model())
    ShardingPlan({"fc*.weight": ROWS, "**.weight": ROWS}).validate(Model())


@pytest.mark.parametrize(
    "plan",
    [
        ShardingPlan({"gc*.weight": ROWS}),
        ShardingPlan({"gc*": Keep()}),
        ShardingPlan({}, output_plan={"gc*": ROWS}),
        ShardingPlan({}, return_local_tensor=["gc*"]),
    ],
)
def test_B122_a_wildcard_without_a_match_is_a_warning(plan: ShardingPlan) -> None:
    with pytest.warns(UserWarning, match=r'"gc.*matches nothing'):
        plan.validate(Model())


def test_B122_a_pattern_of_older_versions_is_one_of_the_errors() -> None:
    plan = ShardingPlan({"no.weight": ROWS, "fc?.weight": ROWS, "*.weight": ROWS})
    with pytest.raises(rs.PathError, match=r'"no\.weight"') as raised:
        plan.validate(Model())
    assert ["write {i}" in note for note in raised.value.__notes__] == [True, True]


def test_B122_an_empty_plan_is_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tensors_of(ShardingPlan({})) == {}


def test_D21_all_errors_are_told() -> None:
    plan = ShardingPlan({"fc1.weight": ROWS, "no.weight": ROWS, "label": ROWS}, {"gone": ROWS})
    with pytest.raises(AttributeError, match=r'"no\.weight"') as raised:
        plan.validate(Model())
    assert len(raised.value.__notes__) == 2
    assert "Model.label" in raised.value.__notes__[0]
    assert '"gone"' in raised.value.__notes__[1]


def test_D22_tied_parameters_have_one_entry() -> None:
    model = Model()
    model.fc2.weight = model.fc1.weight
    assert [*tensors_of(ShardingPlan({"fc*.weight": ROWS}), model)] == ["fc1.weight", "fc10.weight"]
    both = ShardingPlan({"fc1.weight": ROWS, "fc2.weight": COLUMNS})
    with pytest.raises(ValueError, match=r'"fc1.weight" and "fc2.weight" are tied'):
        both.validate(model)
    found = tensors_of(ShardingPlan({"**.weight": ROWS, "fc2.weight": COLUMNS}), model)
    assert found["fc2.weight"] == COLUMNS
    assert "fc1.weight" not in found


def test_outputs_below_a_sharder_are_looked_at_later() -> None:
    plan = ShardingPlan({"fc1": Keep()}, output_plan={"fc1.made": ROWS})
    assert dict(plan.resolve(Model()).outputs) == {"fc1.made": ROWS}
    with pytest.raises(AttributeError, match="has no attribute"):
        ShardingPlan({"fc1": Keep()}, output_plan={"fc2.made": ROWS}).validate(Model())


def test_a_plan_is_a_copy_and_frozen() -> None:
    given = {"fc1.weight": ROWS}
    plan = ShardingPlan(given)
    given["fc2.weight"] = COLUMNS
    assert [*plan.plan] == ["fc1.weight"]
    assert plan == copy.deepcopy(plan)
    with pytest.raises(AttributeError):
        plan.plan = {}  # type: ignore[misc]


def test_a_plan_that_is_no_plan() -> None:
    with pytest.raises(TypeError, match="a list of paths"):
        ShardingPlan({}, return_local_tensor="fc1")
    with pytest.raises(TypeError, match="found list"):
        ShardingPlan(["fc1.weight"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found int"):
        ShardingPlan({1: ROWS}).validate(Model())  # type: ignore[dict-item]


RULES = """
axes = ["tp", "pp"]
[tensors]
"fc*.weight"    = "tp -"
"fc10.weight"   = "- tp"
"*"             = "..."
"tower.*.weight" = { layout = "- -", on = "pp = 1" }
"""


def test_a_plan_from_rules() -> None:
    rules, mesh = rs.Rules.parse(RULES), rs.Mesh(tp=4)
    plan = ShardingPlan.from_rules(rules, Model(), mesh, device="cpu")
    rows, columns = (LayoutShardingSpec(rs.Layout(mesh, text)) for text in ("tp -", "- tp"))
    assert plan.plan == {"fc1.weight": rows, "fc2.weight": rows, "fc10.weight": columns}
    plan.validate(Model())


def test_a_plan_from_rules_keeps_what_only_some_ranks_hold() -> None:
    rules, mesh = rs.Rules.parse(RULES), rs.Mesh(pp=2)
    plan = ShardingPlan.from_rules(rules, Model(), mesh)
    assert plan.plan == {"tower.0.weight": LayoutShardingSpec(rs.Layout(mesh, "- - | on pp=1"))}


def test_a_plan_from_a_shipped_family() -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "o_proj": nn.Linear(8, 8)})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": layer})])})
    plan = ShardingPlan.from_rules(
        rs.Rules.load("llama", head_dim=4, kv_heads=2), model, rs.Mesh(tp=2)
    )
    found = {name: str(spec.stated) for name, spec in plan.plan.items()}
    start = "layers.0.self_attn"
    assert found == {f"{start}.q_proj.weight": "tp*4 -", f"{start}.o_proj.weight": "- tp*4"}


def test_outputs_of_a_module_with_two_names() -> None:
    model = Model()
    model.fc2 = model.fc1
    same, other = {"fc1": ROWS, "fc2": ROWS}, {"fc1": ROWS, "fc2": COLUMNS}
    ShardingPlan({}, output_plan=same).validate(model)
    assert resolve_modules(model, same) == [("fc1", ROWS)]
    assert resolve_modules(model, {"fc*": COLUMNS, "fc2": ROWS})[0] == ("fc2", ROWS)
    with pytest.raises(ValueError, match=r'"fc1" and "fc2" are tied, .*: give both the same'):
        ShardingPlan({}, output_plan=other).validate(model)
