"""Specs, values and comparisons for the tests of sharded tensors on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)
from tests.ranks.rank import local_group, pool_group

FOUR = range(4)

_groups: dict[tuple[int, ...], Any] = {}


def group_of(*ranks: int) -> Any:
    """A process group of just these ranks, which alone call it; made once."""
    if ranks not in _groups:
        _groups[ranks] = local_group(*ranks)
    return _groups[ranks]


def places(ranks: Sequence[int]) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def chunk(dim: int, ranks: Sequence[int] = FOUR) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, places(ranks))


def box(offsets: Sequence[int], sizes: Sequence[int], rank: int) -> ShardMetadata:
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


def numbered(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=dtype).reshape(size)


def cut_out(full: torch.Tensor, shard: ShardMetadata) -> torch.Tensor:
    """The part of a tensor that a shard is."""
    ends = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return full[tuple(slice(at, at + size) for at, size in ends)]


def check_shards(tensor: ShardedTensor, full: torch.Tensor) -> None:
    """Every rank has its shards, and these are the values."""
    stated = tensor.metadata().shards_metadata
    mine = [shard for shard in stated if shard.rank == dist.get_rank()]
    assert [shard.metadata for shard in tensor.local_shards()] == mine
    assert sum(torch.Size(shard.shard_sizes).numel() for shard in stated) == full.numel()
    assert (tensor.shape, tensor.dtype) == (full.shape, full.dtype)
    for shard in tensor.local_shards():
        assert shard.tensor.dtype == full.dtype
        assert torch.equal(shard.tensor, cut_out(full, shard.metadata))


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The type of the error that a call raises at once, and what it says."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - began < 15
        return type(error).__name__, str(error)
    return "", "nothing was raised"


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the largest tensor that this rank gives to one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
            flat = torch.utils._pytree.tree_leaves(args)
            sizes = [leaf.nbytes for leaf in flat if isinstance(leaf, torch.Tensor)]
            self.most_bytes = max([self.most_bytes, *sizes])
        return func(*args, **(kwargs or {}))


def boxes(rows: int, columns: int) -> EnumerableShardingSpec:
    """Two parts on rank 3, one on rank 1, none on ranks 0 and 2: DTensor cannot express it."""
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
