"""Sharded tensors in moves, plans, exchanges and descriptions: they say themselves how they lie."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard as rs
from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardedTensor,
    ShardMetadata,
    shard_tensor,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

FOUR = range(4)
PLACES = [f"rank:{rank}/cpu" for rank in FOUR]
ROWS, COLUMNS = ChunkShardingSpec(0, PLACES), ChunkShardingSpec(1, PLACES)
BOXES = EnumerableShardingSpec(
    [
        ShardMetadata([0, 0], [4, 6], "rank:2/cpu"),
        ShardMetadata([4, 0], [6, 2], "rank:0/cpu"),
        ShardMetadata([4, 2], [6, 4], "rank:2/cpu"),
    ]
)
WHOLE = rs.Layout(rs.Mesh(rank=4), "- -")
FULL = torch.arange(60, dtype=torch.float64).reshape(10, 6)


def cut(spec: object, full: torch.Tensor = FULL) -> ShardedTensor:
    return shard_tensor(full, spec, process_group=pool_group(4), scatter=False)


def in_moves(rank: int) -> None:
    group, want = pool_group(4), rs.Layout(rs.Mesh(x=4), "- x")
    expected = torch.tensor_split(FULL, (2, 4, 6), dim=1)[rank]
    for spec in (ROWS, BOXES, LayoutShardingSpec(rs.Layout(rs.Mesh(a=2, b=2), "b a"))):
        source = cut(spec)
        assert rs.layout_of(source) == source.cut
        moved = rs.move(source, to=want, group=group)
        assert torch.equal(moved, expected)


def test_a_move_takes_a_sharded_tensor(pool: Pool) -> None:
    pool.run(in_moves, ranks=FOUR)


def gradients(rank: int) -> None:
    """Ranks with no shard, one and two, to ranks that get nothing, a part, or all."""
    group = pool_group(4)
    wants = [
        rs.Layout(rs.Mesh(x=4), "- x"),
        rs.Layout(rs.Mesh(x=2), "x -"),
        rs.Layout(rs.Mesh(x=2, ranks=[1, 3]), "- -"),
        rs.layout_of(cut(BOXES)),
        rs.layout_of(cut(ROWS)),
    ]
    weights = FULL.flip(0) + 1
    for spec, want, rule in product((ROWS, BOXES), wants, ("sum", "replicated")):
        what = f"{spec} to {want}, {rule}"
        leaf = cut(spec).requires_grad_()
        moved = rs.move(leaf, to=want, group=group, grad=rule, timeout=30)
        assert moved.requires_grad, what
        mine = rs.move(weights, WHOLE, want, shape=FULL.shape, group=group)
        loss = (moved**2 * (1 if mine is None else mine)).sum()
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        copies = 2 if want is wants[2] and rule == "sum" else 1
        assert isinstance(slope, ShardedTensor), what
        assert len(slope.local_shards()) == len(leaf.local_shards()), what
        assert torch.equal(slope.detach().full_tensor(), 2 * FULL * weights * copies), what
        slope.sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * weights * copies), what


def test_gradients_of_a_move_reach_any_number_of_shards(pool: Pool) -> None:
    pool.run(gradients, ranks=FOUR)


def to_dtensors(rank: int) -> None:
    mesh = DeviceMesh.from_group(pool_group(4), "cpu")
    for spec in (ROWS, BOXES):
        leaf = cut(spec).requires_grad_()
        moved = rs.move(leaf, to=(mesh, [Shard(1)]), group=pool_group(4), timeout=30)
        (moved * 3).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.full_like(FULL, 3.0))


def test_gradients_of_a_move_to_a_dtensor(pool: Pool) -> None:
    pool.run(to_dtensors, ranks=FOUR)


def in_plans(rank: int) -> None:
    group = pool_group(4)
    have = {"a": cut(ROWS), "b": cut(BOXES, FULL * 2)}
    into = {"a": cut(BOXES, FULL * 0), "b": cut(COLUMNS, FULL * 0)}
    plan = rs.plan(rs.describe(have), rs.describe(into))
    out = plan.run(have, into=into, group=group)
    assert out["a"] is into["a"]
    assert torch.equal(into["a"].full_tensor(), FULL)
    assert torch.equal(into["b"].full_tensor(), FULL * 2)
    with pytest.raises(rs.TensorError, match="the plan says"):
        plan.run({"a": cut(COLUMNS), "b": have["b"]}, into=into, group=group)


def test_plans_take_state_dicts_of_sharded_tensors(pool: Pool) -> None:
    pool.run(in_plans, ranks=FOUR)


def as_dtensors(rank: int) -> None:
    mesh = DeviceMesh.from_group(pool_group(4), "cpu")
    for spec, placement in ((ROWS, Shard(0)), (COLUMNS, Shard(1))):
        source = cut(spec).requires_grad_()
        tensor = source.to_dtensor(mesh)
        assert tensor.placements == (placement,)
        assert torch.equal(tensor.full_tensor(), FULL)
        (tensor * 2).sum().backward()
        assert torch.equal(source.grad.full_tensor(), torch.full_like(FULL, 2.0))
        back = ShardedTensor.from_dtensor(tensor.detach(), pool_group(4))
        assert torch.equal(back.local_tensor(), source.local_tensor())
    leaf = DTensor.from_local(FULL, mesh, [Replicate()], run_check=False).requires_grad_()
    made = ShardedTensor.from_dtensor(leaf, pool_group(4))
    made.resharded(ROWS).full_tensor().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.ones_like(FULL))
    with pytest.raises(rs.OperationError, match="reshard it first"):
        cut(BOXES).to_dtensor(mesh)


def test_to_and_from_dtensor_with_gradients(pool: Pool) -> None:
    pool.run(as_dtensors, ranks=FOUR)


def on_sub_meshes(rank: int) -> None:
    """All ranks make the groups of the meshes, and some of them use them."""
    line, square = DeviceMesh("cpu", [[0], [1]]), DeviceMesh("cpu", [[0, 1], [2, 3]])
    if rank < 2:
        tensor = DTensor.from_local(FULL, line, [Shard(0), Replicate()], run_check=False)
        assert torch.equal(ShardedTensor.from_dtensor(tensor).full_tensor(), torch.cat([FULL] * 2))
    if rank < 4:
        tensor = DTensor.from_local(FULL, square, [Shard(0), Replicate()], run_check=False)
        with pytest.raises(rs.errors.ArgumentError, match=r"some of the 8.*give process_group="):
            ShardedTensor.from_dtensor(tensor)
        made = ShardedTensor.from_dtensor(tensor, pool_group(4))
        assert torch.equal(made.full_tensor(), torch.cat([FULL] * 2))


def test_from_dtensors_on_meshes_of_some_ranks(pool: Pool) -> None:
    pool.run(on_sub_meshes)
