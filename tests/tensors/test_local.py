"""ShardedTensors of torch: any boxes on any ranks, numbered as torch numbers them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

import reshard as rs
from reshard.tensors.local import layout_of, local_of, parts_of, spec_of
from tests.tensors.worlds import cut, numbered, playing, ranks_of

Rows = list[tuple[list[int], list[int], int]]
"""Offsets, sizes and rank of each shard."""


def made_of(rows: Rows, full: torch.Tensor, rank: int, local_order: int = 1) -> ShardedTensor:
    """A ShardedTensor with the values of a full tensor and exactly these shards."""
    metadata = [ShardMetadata(at, size, f"rank:{owner}/cpu") for at, size, owner in rows]
    mine = [one for one, (*_, owner) in zip(metadata, rows, strict=True) if owner == rank]
    shards = [Shard(values(full, one), one) for one in mine][::local_order]
    properties = TensorProperties(dtype=full.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, full.size(), properties)
    )


def values(full: torch.Tensor, shard: ShardMetadata) -> torch.Tensor:
    ends = [at + size for at, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)]
    return full[tuple(map(slice, shard.shard_offsets, ends))].contiguous()


@pytest.mark.parametrize("shape", [(10, 4), (9, 12), (5, 3), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunks(shape: tuple[int, int], dim: int) -> None:
    """Shards as torch.chunk has them; empty ones, which torch lets begin past the end, included."""
    for rank in ranks_of(4):
        order = (2, 0, 3, 1)
        spec = ChunkShardingSpec(dim, [f"rank:{at}/cpu" for at in order])
        tensor = sharded_tensor.empty(spec, *shape)
        layout = layout_of(tensor)
        words = "tp -" if dim == 0 else "- tp"
        expected = rs.Layout(rs.Mesh(tp=4, ranks=order), words)
        assert layout.same_as(expected, shape)
        assert local_of(tensor).shape == layout.local_shape(rank, shape)
        assert spec_of(tensor) == rs.TensorSpec(shape, "float32", expected)


GRID: Rows = [
    ([0, 0], [2, 4], 0),
    ([0, 4], [2, 2], 1),
    ([2, 0], [4, 4], 3),
    ([2, 4], [4, 2], 3),
]


@pytest.mark.parametrize("local_order", [1, -1])
def test_several_shards_on_a_rank_and_none_on_another(local_order: int) -> None:
    full = numbered(6, 6)
    for rank in ranks_of(4):
        tensor = made_of(GRID, full, rank, local_order)
        layout = layout_of(tensor)
        assert list(layout.ranks) == [0, 1, 3]
        local = local_of(tensor)
        if rank == 2:
            assert local is None
            assert parts_of(tensor) == ()
            continue
        assert torch.equal(local, cut(full, layout, rank))
        assert [tuple(part.shape) for part in parts_of(tensor)] == [
            box.shape for box in layout.boxes[rank]
        ]


def test_parts_share_memory_and_a_joined_local_does_not() -> None:
    with playing(3, 4):
        tensor = made_of(GRID, numbered(6, 6), 3)
        parts_of(tensor)[0].fill_(7)
        assert (tensor.local_shards()[0].tensor == 7).all()
        local_of(tensor).fill_(8)
        assert (tensor.local_shards()[0].tensor == 7).all()
    with playing(0, 4):
        tensor = made_of(GRID, numbered(6, 6), 0)
        assert local_of(tensor) is tensor.local_shards()[0].tensor


def test_the_order_of_the_metadata_does_not_matter() -> None:
    with playing(3, 4):
        one = made_of(GRID, numbered(6, 6), 3)
        other = made_of(GRID[::-1], numbered(6, 6), 3)
        assert layout_of(one) == layout_of(other)
        assert torch.equal(local_of(one), local_of(other))


def test_sub_groups_have_global_ranks() -> None:
    for rank in ranks_of(4):
        group = dist.new_group([2, 3])
        if rank < 2:
            continue
        spec = ChunkShardingSpec(0, ["rank:2/cpu", "rank:3/cpu"])
        tensor = sharded_tensor.empty(spec, 5, 2, process_group=group)
        assert layout_of(tensor).same_as(rs.Layout(rs.Mesh(tp=2, ranks=[2, 3]), "tp -"), (5, 2))
        assert local_of(tensor).shape == ((3, 2) if rank == 2 else (2, 2))


def test_an_enumerated_spec() -> None:
    for rank in ranks_of(4):
        rows = [ShardMetadata(at, size, f"rank:{owner}/cpu") for at, size, owner in GRID]
        tensor = sharded_tensor.empty(EnumerableShardingSpec(rows), 6, 6)
        shape = layout_of(tensor).local_shape(rank, (6, 6))
        held = local_of(tensor)
        assert (held.shape if held is not None else (0,)) == shape


def test_shards_that_are_not_those_of_the_metadata() -> None:
    with playing(0, 4):
        tensor = made_of(GRID, numbered(6, 6), 0)
        tensor._local_shards = made_of(GRID, numbered(6, 6), 1).local_shards()
        with pytest.raises(rs.LayoutError, match=r"shards \[0:2, 4:6\] .* \[0:2, 0:4\]"):
            layout_of(tensor)
        tensor._local_shards = []
        with pytest.raises(rs.LayoutError, match="rank 0 holds shards none"):
            layout_of(tensor)


def test_placements_without_a_rank() -> None:
    with playing(0, 4):
        tensor = made_of(GRID, numbered(6, 6), 0)
        for placement in ("trainer0/cpu", None):
            rows = [ShardMetadata([0, 0], [6, 6], placement)]
            tensor._metadata = ShardedTensorMetadata(rows, torch.Size((6, 6)), TensorProperties())
            with pytest.raises(rs.LayoutError, match=r"names no rank: .*rank:3/cpu"):
                layout_of(tensor)


def test_plain_tensors_are_whole_and_here() -> None:
    assert layout_of(torch.zeros(3)) == rs.Layout(rs.Mesh(rank=1, ranks=[0]), "...")
    for rank in ranks_of(4):
        plain = torch.nn.Parameter(torch.zeros(3, 2))
        assert layout_of(plain) == rs.Layout(rs.Mesh(rank=1, ranks=[rank]), "...")
        assert local_of(plain) is plain
    with pytest.raises(rs.TensorError, match="a list is not a tensor"):
        layout_of([1.0])  # type: ignore[arg-type]
