"""Column- and row-parallel layers of sharded parameters: values, gradients, and what is sent."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from reshard.nn import ShardingPlan, shard_module, shard_parameter
from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardedTensor,
    ShardMetadata,
)
from reshard.tensors.tensor_move import TensorMove
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

FOUR = range(4)
PLACES = [f"rank:{rank}/cpu" for rank in FOUR]
COLUMNS, ROWS = ChunkShardingSpec(1, PLACES), ChunkShardingSpec(0, PLACES)


def mlp(hidden: int, bias: bool) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, 5, bias=bias)
    ).double()


def train_side_by_side(rank: int, hidden: int, bias: bool) -> list[int]:
    """A column-parallel layer and a row-parallel one; gives how many moves each step made."""
    whole = mlp(hidden, bias)
    model = copy.deepcopy(whole)
    model[2].weight.requires_grad_(False)
    whole[2].weight.requires_grad_(False)
    plan = {"0.weight": ROWS, "2.weight": COLUMNS} | ({"0.bias": ROWS} if bias else {})
    shard_module(model, ShardingPlan(plan), process_group=pool_group(4))
    assert not model[2].weight.requires_grad
    moves = []
    for step in range(3):
        x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one in (whole, model):
            one.zero_grad()
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected = whole(inputs[0])
        expected.square().sum().backward()
        with (
            CommDebugMode() as comms,
            mock.patch.object(
                TensorMove, "call", autospec=True, side_effect=TensorMove.call
            ) as moved,
        ):
            found = model(inputs[1])
            forward = moved.call_count
            found.square().sum().backward()
            moves += [forward, moved.call_count - forward]
        # Ranks compare hashes of the plain input once: it might be each rank's own.
        assert comms.get_total_counts() == 1
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-12)
        assert type(inputs[1].grad) is torch.Tensor
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-12)
        for name, parameter in model.named_parameters():
            gradient, right = parameter.grad, whole.get_parameter(name).grad
            if isinstance(gradient, ShardedTensor):
                gradient = gradient.full_tensor()
            torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)
    return moves


@pytest.mark.parametrize(("hidden", "bias"), [(8, True), (8, False), (16, True)])
def test_B121_column_and_row_parallel_layers(pool: Pool, hidden: int, bias: bool) -> None:
    for moves in pool.run(train_side_by_side, hidden, bias, ranks=FOUR):
        # Forward: the sum of the row-parallel layer. Backward: that of the gradient of the input.
        assert moves == [1, 1] * 3


def uneven(rank: int) -> None:
    whole = mlp(10, True)
    model = copy.deepcopy(whole)
    plan = ShardingPlan({"0.weight": ROWS, "0.bias": ROWS, "2.weight": COLUMNS})
    shard_module(model, plan, process_group=pool_group(4))
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole(x).sum().backward()
    found = model(x)
    torch.testing.assert_close(found.full_tensor(), whole(x), rtol=0, atol=1e-12)
    found.sum().backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, ShardedTensor):
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=0, atol=1e-12)


def test_B121_uneven_layers(pool: Pool) -> None:
    pool.run(uneven, ranks=FOUR)


def boxes(rank: int) -> None:
    module = nn.Linear(6, 8).double()
    full = module.weight.detach().clone()
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [3, 6], "rank:2/cpu"),
            ShardMetadata([3, 0], [5, 2], "rank:0/cpu"),
            ShardMetadata([3, 2], [5, 4], "rank:2/cpu"),
        ]
    )
    torch.distributed.broadcast(full, 0, group=pool_group(4))
    module.weight.data.copy_(full)
    shard_parameter(module, "weight", spec, process_group=pool_group(4))
    assert isinstance(module.weight, ShardedTensor)
    assert len(module.weight.local_shards()) == {0: 1, 2: 2}.get(rank, 0)
    assert torch.equal(module.weight.full_tensor(), full)
    # DTensor cannot express these boxes; linear, elementwise operations and optimizers can do
    # without it.
    with pytest.raises(RuntimeError, match="reshard"):
        torch.mm(module.weight, torch.ones(6, 1, dtype=torch.float64))
    found = module(torch.ones(1, 6, dtype=torch.float64)).full_tensor()
    assert torch.allclose(found, full.sum(1) + module.bias)
    optimizer = torch.optim.SGD([module.weight], lr=0.5)
    (module.weight * 2).full_tensor().sum().backward()
    optimizer.step()
    assert torch.equal(module.weight.full_tensor(), full - 1)


def test_B13_a_parameter_in_boxes(pool: Pool) -> None:
    pool.run(boxes, ranks=FOUR)


def grids(rank: int) -> None:
    module = nn.Linear(6, 8, bias=False).double()
    torch.distributed.broadcast(module.weight.data, 0, group=pool_group(4))
    full = module.weight.detach().clone()
    shard_parameter(module, "weight", GridShardingSpec([2, 2], PLACES), process_group=pool_group(4))
    module.weight = nn.Parameter(module.weight.detach().resharded(ROWS))
    x = torch.ones(2, 6, dtype=torch.float64)
    torch.testing.assert_close(module(x).full_tensor(), x @ full.t(), rtol=0, atol=1e-12)


def test_the_reshard_that_an_error_names_allows_the_operation(pool: Pool) -> None:
    pool.run(grids, ranks=FOUR)
