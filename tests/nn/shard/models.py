"""Small modules to shard on four ranks, and what to compare afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.nn import ShardingPlan, shard_module
from reshard.sharded.splits import ChunkShardingSpec
from reshard.sharded.tensor import ShardedTensor
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
