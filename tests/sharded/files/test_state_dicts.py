"""torch.distributed.checkpoint.state_dict with models and optimizers of sharded parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from reshard import Layout, Mesh
from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import (
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardedTensor,
    ShardingSpec,
    pre_load_state_dict_hook,
    shard_tensor,
    state_dict_hook,
)
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, box, chunk, refusal, values


class Model(nn.Module):
    """Parameters and buffers of several shapes; nothing is computed with them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for at, (name, shape) in enumerate(SHAPES.items()):
            value = values(*shape, seed=seed + at, dtype=torch.float32)
            if name == "buffer":
                self.register_buffer(name, value)
            else:
                setattr(self, name, nn.Parameter(value))


SHAPES = {
    "rows": (9, 4),
    "boxes": (7, 10),
    "copies": (5,),
    "scale": (),
    "plain": (3,),
    "buffer": (6, 2),
}


def plan(num_ranks: int) -> dict[str, ShardingSpec]:
    last = num_ranks - 1
    whole = LayoutShardingSpec(Layout(Mesh(dp=num_ranks), "..."))
    return {
        "rows": chunk(0, range(num_ranks)),
        "boxes": EnumerableShardingSpec(
            [box([0, 0], [3, 10], last), box([3, 0], [4, 3], 0), box([3, 3], [4, 7], last)]
        ),
        "copies": whole,
        "scale": whole,
        "buffer": chunk(1, range(num_ranks)[::-1]),
    }


def sharded(seed: int, num_ranks: int) -> Model:
    model = Model(seed)
    shard_module(model, ShardingPlan(plan(num_ranks)), process_group=pool_group(num_ranks))
    return model


def trained(model: Model, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + step
        optimizer.step()
        optimizer.zero_grad()


def pair(seed: int, num_ranks: int, steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    """A sharded model and its optimizer, after some steps."""
    model = sharded(seed, num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer, steps)
    return model, optimizer


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """What is nested in dicts and lists, by where it stands; whole tensors for sharded ones."""
    if isinstance(value, Mapping):
        inside: Any = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    else:
        return {path: value.full_tensor() if isinstance(value, ShardedTensor) else value}
    below = (flat(inner, f"{path}/{name}") for name, inner in inside)
    return {key: one for found in below for key, one in found.items()}


def check_same(found: Any, wanted: Any, exact: bool = True) -> None:
    some, others = flat(found), flat(wanted)
    assert some.keys() == others.keys()
    for name, value in others.items():
        if isinstance(value, torch.Tensor):
            assert type(some[name]) is torch.Tensor, name
            close = partial(torch.testing.assert_close, rtol=0, atol=0)
            (close if exact else torch.testing.assert_close)(some[name], value)
        else:
            assert some[name] == value, name


def check_sharded(found: Any, model: Model) -> None:
    """Everything that is sharded in the model is sharded alike; nothing else is."""
    for name, value in found.items():
        own = model.get_parameter(name) if name != "buffer" else model.buffer
        assert isinstance(value, ShardedTensor) == isinstance(own, ShardedTensor), name
        if isinstance(value, ShardedTensor):
            assert value.metadata().shards_metadata == own.metadata().shards_metadata


def getting(rank: int) -> None:
    model, optimizer = pair(0, 4)
    reference = Model(0)
    beside = torch.optim.AdamW(reference.parameters(), lr=0.1)
    trained(reference, beside)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        full = get_model_state_dict(model, options=options)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        if offload and rank != 0:
            assert full == {}
            assert states == {}
        else:
            check_same(full, reference.state_dict(), exact=False)
            wanted = get_optimizer_state_dict(reference, beside)
            check_same(states, wanted, exact=False)
            full["copies"].zero_()  # memory of its own
        shards = get_model_state_dict(model, options=StateDictOptions(cpu_offload=offload))
        check_sharded(shards, model)
        check_same(shards, model.state_dict())
        states = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(cpu_offload=offload)
        )
        check_sharded({n: one["exp_avg"] for n, one in states["state"].items()}, model)


def test_full_and_sharded_state_dicts(pool: Pool) -> None:
    pool.run(getting, ranks=FOUR)


def setting(rank: int) -> list[tuple[str, str]]:
    """From whole tensors, on every rank or on rank 0 alone, and on: the next step is the same."""
    size, told = dist.get_world_size(), []
    model, optimizer = pair(0, size)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    whole = copy.deepcopy(whole)
    trained(model, optimizer)
    for from_one in (False, True):
        other, beside = pair(20, size, steps=int(from_one))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_one)
        given, states = copy.deepcopy(whole) if rank == 0 or not from_one else ({}, {})
        told += refused(other, beside, options, rank == 0 or not from_one)
        set_model_state_dict(other, given, options=options)
        set_optimizer_state_dict(other, beside, states, options=options)
        check_sharded(other.state_dict(), model)
        check_same(other.state_dict(), whole[0])
        check_sharded({n: beside.state[p]["exp_avg"] for n, p in other.named_parameters()}, other)
        trained(other, beside)
        check_same(other.state_dict(), model.state_dict())
    return told


def refused(
    model: Model, optimizer: torch.optim.Optimizer, options: StateDictOptions, has: bool
) -> list[tuple[str, str]]:
    """What is said of whole tensors of another shape, which change nothing."""
    whole = StateDictOptions(full_state_dict=True)
    before = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    given, states = copy.deepcopy(before)
    given["boxes"] = states["state"]["boxes"]["exp_avg"] = torch.zeros(7, 9)
    if not has:
        given, states = {}, {}
    told = [
        refusal(lambda: set_model_state_dict(model, given, options=options)),
        refusal(lambda: set_optimizer_state_dict(model, optimizer, states, options=options)),
    ]
    check_same(get_state_dict(model, optimizer, options=whole), before)
    return told


def test_whole_tensors_are_spread_over_the_shards(pool: Pool) -> None:
    told = pool.run(setting)
    assert all(one == told[0] for one in told)
    for kind, text in told[0]:
        assert kind == "TensorError"
        assert all(part in text for part in ("[7, 9]", "[7, 10]", "boxes"))


def one_rank_only(rank: int) -> tuple[str, str]:
    """Rank 0 has the state dict and does not say so, or another rank lacks a tensor."""
    model, full = sharded(0, 4), Model(5).state_dict()
    if rank == 2:
        del full["rows"]
    options = StateDictOptions(full_state_dict=True, strict=False)
    found = refusal(lambda: set_model_state_dict(model, full, options=options))
    check_same(model.state_dict(), Model(0).state_dict())
    return found


def test_ranks_that_load_different_tensors(pool: Pool) -> None:
    for kind, text in pool.run(one_rank_only, ranks=FOUR):
        assert kind == "DisagreementError"
        assert all(part in text for part in ("rank 0 has", '"rows"', "rank 2", "broadcast"))


def on_meta(rank: int) -> None:
    model, full = sharded(0, 4).to("meta"), Model(5).state_dict()
    assert all(value.is_meta for value in model.state_dict().values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a function that it calls itself
        set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
    check_sharded(model.state_dict(), sharded(0, 4))
    check_same(model.state_dict(), full)


def test_a_model_on_the_meta_device_stays_sharded(pool: Pool) -> None:
    pool.run(on_meta, ranks=FOUR)


def save_training(rank: int, path: Path) -> dict[str, Any]:
    model, optimizer = pair(0, 4)
    states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": states[0], "optimizer": states[1]},
        checkpoint_id=path,
        process_group=pool_group(4),
    )
    trained(model, optimizer)
    return flat(model.state_dict())


def go_on(rank: int, path: Path) -> dict[str, Any]:
    model, optimizer = pair(20, 2, steps=0)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path, process_group=pool_group(2))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    check_sharded(model.state_dict(), sharded(0, 2))
    trained(model, optimizer)
    return flat(model.state_dict())


def test_training_goes_on_on_fewer_ranks(pool: Pool, tmp_path: Path) -> None:
    (wanted, *_) = pool.run(save_training, tmp_path / "saved", ranks=FOUR)
    for found in pool.run(go_on, tmp_path / "saved", ranks=range(2)):
        check_same(found, wanted, exact=False)


def left_alone(rank: int) -> None:
    """Plain models and DTensors: as torch does it without sharded tensors of ours."""
    chunk_tensor = shard_tensor(torch.ones(4), chunk(0), process_group=pool_group(4))
    mesh, model = mesh_of(4), Model(0)
    for name, cut in (("rows", Cut(0)), ("boxes", Replicate())):
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh, [cut])))
    model.extra = chunk_tensor
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    check_same(full, Model(0).state_dict())
    given = Model(7).state_dict()
    set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True))
    assert isinstance(model.rows, DTensor)
    check_same(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), given)


def test_other_models_are_left_alone(pool: Pool) -> None:
    pool.run(left_alone, ranks=FOUR)


class Attributes(nn.Module):
    """Sharded tensors that are mere attributes, one of them inside another module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.linear = nn.Module(), nn.Linear(2, 2)
        group = pool_group(4)
        full = values(8, 3, seed=seed)
        self.own = shard_tensor(full, chunk(0), process_group=group, scatter=False)
        self.inner.own = shard_tensor(full + 1, chunk(1), process_group=group, scatter=False)
        self._register_state_dict_hook(state_dict_hook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)


def hooked(rank: int) -> None:
    for wrapped in (False, True):
        one, other = (
            nn.Sequential(Attributes(seed)) if wrapped else Attributes(seed) for seed in (0, 9)
        )
        state, prefix = one.state_dict(), "0." if wrapped else ""
        names = {name for name, value in state.items() if isinstance(value, ShardedTensor)}
        assert names == {f"{prefix}own", f"{prefix}inner.own"}
        missing, unexpected = other.load_state_dict(state, strict=False)
        assert not missing
        assert set(unexpected) == names  # they are no parameters; torch's hooks leave it at that
        inside = other[0] if wrapped else other
        assert inside.own is state[f"{prefix}own"]
        assert inside.inner.own is state[f"{prefix}inner.own"]
        assert torch.equal(inside.inner.own.full_tensor(), values(8, 3) + 1)
    prefixed = Attributes(0).state_dict(prefix="model_")  # as torch, which adds no dot
    names = {name for name, value in prefixed.items() if isinstance(value, ShardedTensor)}
    assert names == {"model_own", "model_inner.own"}


def test_hooks_for_sharded_attributes(pool: Pool) -> None:
    pool.run(hooked, ranks=FOUR)
