"""Models of transformers, trained with FSDP2 and tensor parallelism, go live to other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import reshard as rs
from reshard import checkpoint
from reshard.layout.layout import BoxLayout
from reshard.tensors.state_dicts import tensors_in
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

State = dict[str, Any]

TIMEOUT = 30.0
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 27,  # odd: FSDP cuts the embedding into uneven parts
    "use_cache": False,
}


def model_of(kind: str) -> Any:
    """A small model with random weights."""
    import transformers as hf

    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    config = hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config)


def tensor_parallel(model: Any, tp: DeviceMesh, ep: DeviceMesh | None = None) -> Any:
    """The usual plan: attention and MLP are cut; norms, embedding and head are not in it."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows: tuple[str, ...] = ("self_attn.o_proj",)
    if ep is None:
        columns, rows = (*columns, "mlp.gate_proj", "mlp.up_proj"), (*rows, "mlp.down_proj")
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    parallelize_module(model, tp, plan)
    for layer in model.model.layers if ep is not None else ():
        experts = layer.mlp.experts
        for name, whole in list(experts.named_parameters()):
            cut = distribute_tensor(whole.detach(), ep, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(cut))
    return model


def trainer(kind: str) -> tuple[Any, Any]:
    """A model on ranks 0 to 3, dp=2 tp=2, after a step of AdamW; experts have a mesh of their own.

    What is not in the plan of tensor parallelism is on a dp mesh alone, ranks 0,2 or ranks 1,3.
    Experts are on ranks 0,2 or ranks 1,3 of another mesh, and FSDP leaves them alone.
    """
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    own = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("edp", "ep"))
    if mesh.get_coordinate() is None:
        return None, None
    torch.manual_seed(0)
    model = tensor_parallel(model_of(kind), mesh["tp"], own["ep"] if kind == "mixtral" else None)
    experts = {one for name, one in model.named_parameters() if "experts" in name}
    fully_shard([model.model.norm, model.lm_head], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], ignored_params=experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "llama":
        tokens = torch.arange(12).reshape(2, 6)
        model(input_ids=tokens, labels=tokens).loss.backward()
    else:
        for parameter in model.parameters():  # experts as DTensors have no forward
            parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    return model, optimizer


def server(kind: str) -> tuple[Any, Any]:
    """The model on ranks 4 and 5, by tensor parallelism alone, with other weights."""
    mesh = DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
    if mesh.get_coordinate() is None:
        return None, None
    torch.manual_seed(1)
    model = tensor_parallel(model_of(kind), mesh, mesh if kind == "mixtral" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> State:
    """A state dict with the states of AdamW, by number and by name."""
    if model is None:
        return {}
    return {
        "model": model.state_dict(),
        "by_number": optimizer.state_dict(),
        "by_name": get_optimizer_state_dict(model, optimizer),
    }


def whole_of(state: State) -> dict[str, torch.Tensor]:
    """The full tensors, put together by torch."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in tensors_in(state).items()
    }


def saved_and_loaded(state: State, folder: str) -> dict[str, torch.Tensor]:
    """The full tensors after a save, and a load into the same tensors of zeros."""
    checkpoint.save(state, folder, group=pool_group(4))
    with torch.no_grad():
        for tensor in tensors_in(state).values():
            tensor.zero_()
    checkpoint.load(folder, into=state, group=pool_group(4))
    return whole_of(state)


def serve(rank: int, kind: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Go live from ranks 0 to 3 to ranks 4 and 5; gives the full tensors that each of them has."""
    mine, theirs = state_of(*trainer(kind)), state_of(*server(kind))
    have, want = rs.exchange(rs.describe(mine), rs.describe(theirs), timeout=TIMEOUT)
    assert not any(isinstance(spec.layout, BoxLayout) for spec in have.values())
    rs.plan(have, want).run(mine, into=theirs, timeout=TIMEOUT)
    found = [whole_of(mine or theirs)]
    return [*found, saved_and_loaded(mine, folder)] if mine else found


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_and_its_optimizer(pool: Pool, tmp_path: Path, kind: str) -> None:
    told = pool.run(serve, kind, str(tmp_path / "saved"))
    expected = told[0][0]
    assert len(expected) == len(told[4][0]) > 60
    for rank, found in enumerate(told[:6]):
        for whole in found:
            assert whole.keys() == expected.keys()
            for name, tensor in whole.items():
                assert torch.equal(tensor, expected[name]), (rank, name)
