"""State dicts as programs have them: FSDP2 over tensor parallelism, old shards, nested dicts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import reshard as rs
from tests.ranks.outcome import Raised
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.tensors.worlds import cut, numbered

TIMEOUT = 20.0
ROWS = 13


def block() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Two layers and a norm that count, and their whole parameters."""
    layers = (torch.nn.Linear(8, ROWS), torch.nn.Linear(ROWS, 8), torch.nn.LayerNorm(8))
    made = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(numbered(*parameter.shape) + 1000 * number)
    return made, {name: value.clone() for name, value in made.state_dict().items()}


def trainer() -> tuple[torch.nn.Module | None, dict[str, torch.Tensor], DeviceMesh]:
    """The block on six ranks, dp=3 over tp=2, its norm on dp alone; None on the others."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5]], mesh_dim_names=("dp", "tp"))
    made, whole = block()
    if mesh.get_coordinate() is None:
        return None, whole, mesh
    parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(made, mesh=mesh["dp"])
    return made, whole, mesh


def replicas_of(name: str) -> rs.Layout | None:
    """What a parameter of the norm does not know, on the dp mesh of its rank: all ranks with it."""
    return rs.Layout(rs.Mesh(dp=3, tp=2), "dp") if name.startswith("2.") else None


def move_parameters(rank: int) -> int:
    """Every parameter of a sharded model, to other placements of its mesh and to a layout."""
    model, whole, mesh = trainer()
    if model is None:
        return 0
    targets = [(Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(0)),
               (Replicate(), Shard(0)), (Shard(0), Shard(-1))]  # fmt: skip
    rows = rs.Layout(rs.Mesh(all=6), "all ...")
    tried = 0
    for name, parameter in model.named_parameters():
        full, have = whole[name], replicas_of(name)
        for placements in targets:
            moved = rs.move(parameter, have, to=(mesh, placements), timeout=TIMEOUT)
            assert isinstance(moved, DTensor)
            assert moved.requires_grad
            moved = moved.detach()
            wanted = cut(full, rs.layout_of(moved), rank)
            assert torch.equal(moved.to_local(), wanted), (name, placements)
            tried += 1
        local = rs.move(parameter.detach(), have, to=rows, timeout=TIMEOUT)
        assert torch.equal(local, cut(full, rows, rank)), name
    return tried


def test_parameters_of_fsdp_over_tensor_parallel(pool: Pool) -> None:
    assert pool.run(move_parameters) == [30] * 6 + [0] * 2


def gradients_of_fsdp(rank: int) -> int:
    """A loss of the gathered parameter gives the sharded one its part of the gradient."""
    model, whole, mesh = trainer()
    if model is None:
        return 0
    for name, parameter in model.named_parameters():
        to, have = (mesh, [Replicate(), Replicate()]), replicas_of(name)
        moved = rs.move(parameter, have, to=to, timeout=TIMEOUT)
        moved.backward(DTensor.from_local(whole[name], *to))
        found = rs.move(parameter.grad, have, to=to, timeout=TIMEOUT)
        assert torch.equal(found.to_local(), whole[name]), name
    return len([*model.named_parameters()])


def test_gradients_of_fsdp_over_tensor_parallel(pool: Pool) -> None:
    assert pool.run(gradients_of_fsdp) == [6] * 6 + [0] * 2


def only(state: dict[str, torch.Tensor], name: str = "2.weight") -> dict[str, torch.Tensor]:
    return {name: state[name]} if state else {}


def serve(rank: int) -> None:
    """From the sharded model on six ranks to tensor parallelism on two others, and back again."""
    model, whole, _ = trainer()
    servers = DeviceMesh("cpu", [6, 7])
    cuts = dict.fromkeys(whole, Replicate())
    cuts |= {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1)}
    mine, served = {}, {}
    if model is not None:
        mine = model.state_dict()
    if servers.get_coordinate() is not None:
        for name, full in whole.items():
            served[name] = zeros(*full.shape, device_mesh=servers, placements=[cuts[name]])
    have, want = rs.exchange(rs.describe(mine), rs.describe(served), timeout=TIMEOUT)
    assert have.keys() == want.keys() == whole.keys()
    # A spec by hand that says the same as ranks together do is as good.
    by_hand = rs.TensorSpec((8,), "float32", replicas_of("2.weight"))
    assert have["2.weight"] == by_hand
    plan = rs.plan(have | {"2.weight": by_hand}, want)
    found = plan.run(mine, into=served, timeout=TIMEOUT)
    assert found.keys() == served.keys()
    for name, tensor in served.items():
        assert found[name] is tensor
        assert torch.equal(tensor.to_local(), cut(whole[name], rs.layout_of(tensor), rank)), name
    for tensor in served.values():
        tensor.to_local().mul_(2)
    # Replicas that a plan does not have are not read: here those of the ranks 1, 3 and 5.
    first = rs.TensorSpec((8,), "float32", rs.Layout(rs.Mesh(dp=3, ranks=[0, 2, 4]), "dp"))
    norm = rs.plan({"2.weight": first}, {"2.weight": want["2.weight"]})
    found = norm.run(only(mine), into=only(served), timeout=TIMEOUT)
    for tensor in found.values():
        assert torch.equal(tensor.to_local(), whole["2.weight"])
        tensor.to_local().mul_(2)
    back = rs.plan(want, have).run(served, into=mine, timeout=TIMEOUT)
    for name, tensor in back.items():
        assert tensor is mine[name]
        expected = cut(2 * whole[name], have[name].layout, rank)
        assert torch.equal(tensor.to_local(), expected.reshape(tensor.to_local().shape)), name


def test_a_whole_state_dict(pool: Pool) -> None:
    pool.run(serve)


def serve_twice(rank: int) -> None:
    """HSDP over tensor parallelism on eight ranks, to two replicas of a tensor-parallel server."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("copy", "dp", "tp"))
    servers = DeviceMesh("cpu", [[0, 5], [3, 6]], mesh_dim_names=("copy", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model, whole = block()
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["copy", "dp"])
    mine, served = model.state_dict(), {}
    if servers.get_coordinate() is not None:
        server = parallelize_module(block()[0], servers["tp"], plan)
        served = server.state_dict()
        for tensor in served.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    have, want = rs.exchange(rs.describe(mine), rs.describe(served), timeout=TIMEOUT)
    for spec, text in [(have["2.weight"], "dp over copy=2 dp=2 tp=2"),
                       (want["1.weight"], "- tp over tp=2 replica=2 @ 0,3,5-6"),
                       (want["2.weight"], "... over rank=4 @ 0,3,5-6")]:  # fmt: skip
        assert f"{spec.layout} over {spec.layout.mesh}" == text
    rs.plan(have, want).run(mine, into=served, timeout=TIMEOUT)
    for name, tensor in served.items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, whole[name]), name


def test_replicas_on_both_sides(pool: Pool) -> None:
    pool.run(serve_twice)


def exchange_wrongly(rank: int) -> list[str]:
    """What one rank gets wrong is the same error on all ranks, and the next exchange works."""
    mesh, said = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")), []
    if rank > 3:
        return said
    norm = distribute_tensor(torch.ones(6), mesh["dp"], [Shard(0)])
    specs = rs.describe({"norm": norm})
    matrix = rs.TensorSpec((6,), "float32", rs.Layout(rs.Mesh(dp=2, tp=2), "dp tp"))
    for wrong in ({"norm": norm}, [norm], rs.describe({"norm": torch.ones(6)}),
                  rs.describe({"norm": torch.ones(3)}), {"norm": matrix},
                  {0: specs["norm"]}):  # fmt: skip
        with pytest.raises(rs.LiveError) as error:
            rs.exchange(have=wrong if rank == 3 else specs, group=pool_group(4), timeout=TIMEOUT)
        said.append(str(error.value))
        have, _ = rs.exchange(have=specs, group=pool_group(4), timeout=TIMEOUT)
        assert have["norm"].layout == rs.Layout(rs.Mesh(dp=2, replica=2), "dp")
    return said


def test_an_exchange_that_one_rank_gets_wrong(pool: Pool) -> None:
    first, *others = pool.run(exchange_wrongly)[:4]
    assert others == [first] * 3
    tensor, sequence, whole, shard, misfit, number = first
    assert tensor == (
        'on rank 3: have["norm"] is a DTensor: '
        "give rs.describe(state_dict), or a dict of rs.TensorSpec"
    )
    assert sequence.startswith("on rank 3: have= is a list: give")
    assert 'is float32 (6,) "dp" over "dp=2 @ 1,3" according to rank 1' in whole
    assert "the first gives rank 3 [3:6], the second [0:6]; a plain tensor counts" in whole
    assert "float32 (3,) whole according to rank 3: shape and dtype" in shard
    assert misfit.startswith('on rank 3: have["norm"]: layout "dp tp"')
    assert number.startswith("on rank 3: the name 0 in have= is a int: give")


def move_numbered_names(rank: int) -> None:
    """The state of an optimizer has numbers for names; a plan calls them "0" and "1"."""
    specs = [rs.TensorSpec((4, 4), "float32", rs.Layout(rs.Mesh(x=2), w)) for w in ("x -", "- x")]
    plan = rs.plan(*({"0": spec, "1": spec} for spec in specs))
    for _ in range(2):
        into = {1: torch.zeros(4, 2), 0: torch.zeros(4, 2)}
        out = plan.run({0: torch.ones(2, 4), 1: torch.ones(2, 4)}, into=into, timeout=TIMEOUT)
        assert sorted(out) == ["0", "1"]
        assert all(torch.equal(tensor, torch.ones(4, 2)) for tensor in into.values())


def test_numbers_are_names(pool: Pool) -> None:
    pool.run(move_numbered_names, ranks=range(2))


PLACES = {0: [((0, 0), (2, 3)), ((5, 0), (3, 3))], 1: [((2, 0), (3, 2)), ((2, 2), (3, 1))], 2: []}
"""Shards of an (8, 3) tensor by rank: offset and sizes, several on a rank, none on another."""
NUM_SHARDS = [2, 2, 0, 0, 0, 0, 0, 0]


def old(full: torch.Tensor, rank: int, group: object) -> ShardedTensor:
    """A ShardedTensor of the first three ranks, made of this rank's shards in reverse."""
    shards = [
        OldShard.from_tensor_and_offsets(
            full[at[0] : at[0] + size[0], at[1] : at[1] + size[1]].clone(), [*at], rank
        )
        for at, size in reversed(PLACES[rank])
    ]
    return init_from_local_shards(shards, *full.shape, process_group=group)


def old_shards(rank: int) -> int:
    """ShardedTensors to a layout, to a mesh, into one another and into DTensors."""
    group = dist.new_group([0, 1, 2])
    mesh = DeviceMesh("cpu", [2, 3])
    full = numbered(8, 3).double()
    columns = rs.Layout(rs.Mesh(x=2, ranks=[1, 2]), "x -")
    if rank > 3:
        return 0
    source = old(full, rank, group) if rank < 3 else None
    layout = share(rs.layout_of(source) if rank == 0 else None)
    about = {"shape": (8, 3), "dtype": "float64"}
    if source is not None:
        found = rs.move(source, to=columns, timeout=TIMEOUT)
        assert (found is None) == (rank == 0)
        assert found is None or torch.equal(found, cut(full, columns, rank))
    given = (source,) if source is not None else (None, layout)
    extra = {} if source is not None else about
    moved = rs.move(*given, to=(mesh, [Shard(0)]), timeout=TIMEOUT, **extra)
    if rank > 1:
        assert torch.equal(moved.to_local(), cut(full, rs.layout_of(moved), rank))
    target = old(torch.zeros_like(full), rank, group) if rank < 3 else None
    back = rs.move(moved, to=layout, into=target, timeout=TIMEOUT)
    if target is None:
        assert back is None
        return 0
    assert back is target
    return check_shards(target, full)


def check_shards(tensor: ShardedTensor, full: torch.Tensor) -> int:
    """Every shard has its values; returns how many there are."""
    for shard in tensor.local_shards():
        at, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        expected = full[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]
        assert torch.equal(shard.tensor, expected), shard.metadata
    return len(tensor.local_shards())


def share(layout: rs.Layout | None) -> rs.Layout:
    """Rank 0 tells ranks 1 to 3 its layout."""
    told = [None if layout is None else layout.to_json()]
    dist.broadcast_object_list(told, src=0, group=pool_group(4))
    return rs.Layout.from_json(told[0])


def test_old_shards(pool: Pool) -> None:
    assert pool.run(old_shards) == NUM_SHARDS


def plan_with_old_shards(rank: int) -> int:
    """A nested state dict with old shards, DTensors and local tensors, into the same kinds."""
    group, mesh = dist.new_group([0, 1, 2]), DeviceMesh("cpu", [0, 1, 2])
    if rank > 2:
        return 0
    full, small = numbered(8, 3).float(), numbered(5).float()
    mine = {
        "model": {"old": old(full, rank, group), "new": distribute_tensor(full, mesh, [Shard(0)])},
        "optim": [{"step": 3, "name": "adam", "sum": small.clone()}],
    }
    theirs = {
        "model": {"old": zeros(8, 3, device_mesh=mesh, placements=[Shard(1)]),
                  "new": old(torch.zeros_like(full), rank, group)},
        "optim": [{"step": 4, "sum": torch.zeros(5)}],
    }  # fmt: skip
    sides = (rs.describe(mine), rs.describe(theirs))
    plan = rs.plan(*rs.exchange(*sides, group=group, timeout=TIMEOUT))
    for atomic in (False, True):
        found = plan.run(mine, into=theirs, group=group, timeout=TIMEOUT, atomic=atomic)
        assert [*found] == ["model.old", "model.new", "optim.0.sum"]
        moved = theirs["model"]["old"]
        assert found["model.old"] is moved
        assert torch.equal(moved.to_local(), cut(full, rs.layout_of(moved), rank))
        shards = check_shards(theirs["model"]["new"], full)
        assert torch.equal(theirs["optim"][0]["sum"], small)
        moved.to_local().zero_()
    handle = plan.start(mine, into=theirs, group=group, timeout=TIMEOUT)
    assert handle.wait() == handle.wait()
    assert torch.equal(moved.to_local(), cut(full, rs.layout_of(moved), rank))
    fresh = plan.run(mine, group=group, timeout=TIMEOUT)
    assert torch.equal(fresh["model.old"], moved.to_local())
    plan.release()
    return shards


def test_nested_dicts_of_all_kinds(pool: Pool) -> None:
    assert pool.run(plan_with_old_shards) == NUM_SHARDS


def lying_otherwise(rank: int, side: str) -> None:
    """On one rank a DTensor is cut by another dim than the plan says; its shape would fit."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    if rank > 3:
        return
    full = numbered(8, 8).float()
    rows, columns = (distribute_tensor(full, mesh, [Shard(dim)]) for dim in (0, 1))
    whole = distribute_tensor(full, mesh, [Replicate()])
    have, want = (rows, whole) if side == "have" else (whole, rows)
    plan = rs.plan(rs.describe({"w": have}), rs.describe({"w": want}))
    odd = columns if rank == 2 else rows
    have, want = (odd, whole) if side == "have" else (whole, odd)
    plan.run({"w": have}, into={"w": want}, timeout=TIMEOUT)


@pytest.mark.parametrize("side", ["have", "want"])
def test_a_tensor_that_lies_otherwise(pool: Pool, side: str) -> None:
    outcomes = pool.outcomes(lying_otherwise, side)
    # Where every rank has the whole there is no message, and nobody else to tell.
    ranks = range(4) if side == "have" else [2]
    for rank in ranks:
        told = outcomes[rank]
        assert isinstance(told, Raised), told
        assert told.kind == "TensorError"
        assert told.seconds < 5
        assert '"d0 -"' in told.message, told.message
        assert '"- d0"' in told.message, told.message


def moved_otherwise(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    if rank > 3:
        return
    rows, columns = (distribute_tensor(numbered(8, 8), mesh, [Shard(dim)]) for dim in (0, 1))
    rs.move(rows, to=(mesh, [Replicate()]), into=columns, timeout=TIMEOUT)


def test_into_a_tensor_that_lies_otherwise(pool: Pool) -> None:
    for told in pool.outcomes(moved_otherwise)[:4]:
        assert isinstance(told, Raised), told
        assert told.kind == "TensorError"
        assert '"- d0"' in told.message
        assert '"- -"' in told.message
