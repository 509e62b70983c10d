"""Tensors, specs and comparisons for the tests of what sharded tensors do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)
from tests.ranks.rank import pool_group

FOUR = range(4)


def places(ranks: Iterable[int]) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def chunk(dim: int, ranks: Sequence[int] = FOUR) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, places(ranks))


def boxes(rows: int, columns: int) -> EnumerableShardingSpec:
    """Two parts on rank 3, one on rank 1, none on ranks 0 and 2: DTensor cannot say it."""
    half, third = rows // 2, columns // 3
    return EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [half, columns], "rank:3/cpu"),
            ShardMetadata([half, 0], [rows - half, third], "rank:1/cpu"),
            ShardMetadata([half, third], [rows - half, columns - third], "rank:3/cpu"),
        ]
    )


def specs(rows: int, columns: int) -> dict[str, ShardingSpec]:
    """Chunks of both dims, chunks on some ranks only, and boxes."""
    return {
        "rows": chunk(0),
        "columns": chunk(1),
        "some ranks": chunk(0, [2, 1]),
        "boxes": boxes(rows, columns),
    }


def values(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same random numbers on every rank."""
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def sharded(full: torch.Tensor, spec: ShardingSpec) -> ShardedTensor:
    return shard_tensor(full, spec, process_group=pool_group(4), scatter=False)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def check_close(found: Any, wanted: Any) -> None:
    """The same values, shape and dtype; exactly for what is no tensor."""
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(whole(found), wanted, rtol=1e-12, atol=1e-12)
    else:
        assert found == wanted


def check_lies_like(found: Any, tensor: ShardedTensor) -> None:
    """The shards of both are in the same places."""
    assert isinstance(found, ShardedTensor)
    assert found.metadata().shards_metadata == tensor.metadata().shards_metadata
    assert [s.tensor.shape for s in found.local_shards()] == [
        s.tensor.shape for s in tensor.local_shards()
    ]
