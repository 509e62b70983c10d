"""State dicts as specs: every tensor is in, everything else is named or harmless."""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import reshard as rs
from reshard.tensors.local import layout_of
from reshard.tensors.state_dicts import describe, tensors_in
from tests.tensors.worlds import playing

HERE = rs.Layout(rs.Mesh(rank=1, ranks=[1]), "...")


def test_every_kind_of_tensor() -> None:
    with playing(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        chunks = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
        state = OrderedDict(
            sharded=DTensor.from_local(torch.zeros(3, 2).bfloat16(), mesh, [Shard(0), Shard(1)]),
            old=sharded_tensor.empty(chunks, 10, 4, dtype=torch.float64),
            plain=torch.zeros(2, 0, dtype=torch.float8_e4m3fn),
            scalar=torch.tensor(True),
            parameter=nn.Parameter(torch.zeros(3)),
        )
        assert describe(state) == {
            "sharded": rs.TensorSpec((6, 4), "bf16", rs.Layout(rs.Mesh(dp=2, tp=2), "dp tp")),
            "old": rs.TensorSpec((10, 4), "float64", rs.Layout(rs.Mesh(tp=4), "tp -")),
            "plain": rs.TensorSpec((2, 0), "float8_e4m3fn", HERE),
            "scalar": rs.TensorSpec((), "bool", HERE),
            "parameter": rs.TensorSpec((3,), "float32", HERE),
        }


def test_an_optimizer_of_a_sharded_model() -> None:
    with playing(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = nn.Linear(6, 10)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        specs = describe(optimizer.state_dict())
        rows = rs.TensorSpec((10, 6), "float32", rs.Layout(rs.Mesh(dp=4), "dp -"))
        assert specs["state.0.exp_avg"] == specs["state.0.exp_avg_sq"] == rows
        assert specs["state.1.step"] == rs.TensorSpec((), "float32", HERE)
        assert set(specs) == {
            f"state.{i}.{name}" for i in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")
        }
        assert tensors_in(optimizer.state_dict()).keys() == specs.keys()


def test_numbers_and_texts_are_left_out() -> None:
    state = {"a": 1, "b": 2.5, "c": None, "d": "x", "e": True, "f": {}, "g": [1, torch.zeros(2)]}
    assert list(describe(state)) == ["g.1"]


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": b"bytes"}}, '"a.b" is a bytes, which cannot be moved'),
        ({"_extra_state": BytesIO()}, '"_extra_state" is a BytesIO'),
        ({"a": [torch.zeros(1), object()]}, '"a.1" is a object'),
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, 'called "a.b"'),
        ({(1, 2): torch.zeros(1)}, r'the key "\(1, 2\)" .* is a tuple'),
        ({"s": torch.zeros(2).to_sparse()}, '"s": the tensor is torch.sparse_coo'),
        ({"n": [nested()]}, '"n.0": the tensor is nested: only dense'),
        ({"l": nn.UninitializedParameter()}, '"l": the tensor is an UninitializedParameter, which'),
        (torch.zeros(2), "a Tensor is no state dict: give a dict"),
        (None, "a NoneType is no state dict"),
    ],
)
def test_what_cannot_be_moved_is_named(state: Any, named: str) -> None:
    with pytest.raises(rs.TensorError, match=named):
        describe(state)


def test_a_dict_that_holds_itself() -> None:
    state: dict[str, object] = {"a": torch.zeros(1)}
    state["me"] = state
    with pytest.raises(rs.TensorError, match="more than 64 deep"):
        describe(state)


def test_errors_name_the_tensor() -> None:
    with playing(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        odd = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], shape=torch.Size((14,)), stride=(1,)
        )
        with pytest.raises(rs.LayoutError, match=r'"layers.0.odd": rank 1 holds .*\(3,\)'):
            describe({"layers": [{"odd": odd}]})
    halves = torch.empty(2, dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(rs.DtypeError, match=r'"q": "torch.float4_e2m1fn_x2" is not a dtype'):
        describe({"q": halves})


def test_eighteen_thousand_tensors_take_no_time() -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state = {
            f"model.layers.{i % 48}.mlp.experts.{i}.down_proj.weight": DTensor.from_local(
                torch.zeros(2, 2), mesh, [Shard(0), Shard(1)]
            )
            for i in range(18_000)
        }
        assert len(describe(state)) == 18_000
        assert min(seconds(lambda: describe(state)) for _ in range(3)) < 0.6
        tensor = next(iter(state.values()))
        many = range(1000)
        per_call = min(seconds(lambda: [layout_of(tensor) for _ in many]) for _ in range(5)) / 1000
        assert per_call < 20e-6


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call, so that a busy machine does not count."""
    started = time.process_time()
    call()
    return time.process_time() - started
