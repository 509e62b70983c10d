"""New sharded tensors: every rank fills its own shards and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reshard import Layout, Mesh
from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    LayoutShardingSpec,
    ShardedTensor,
    ShardingSpec,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    Collectives,
    box,
    check_shards,
    chunk,
    group_of,
    numbered,
    places,
    sharded,
)

Make = Callable[..., ShardedTensor]

UNEVEN_BOXES = [
    ([0, 0], [2, 4]), ([0, 4], [4, 2]), ([2, 0], [4, 4]), ([4, 4], [2, 2])
]  # fmt: skip
"""Four boxes of a 6 x 6 tensor."""


def boxes_on(*ranks: int) -> EnumerableShardingSpec:
    """The uneven boxes, each on one of these ranks."""
    pairs = zip(UNEVEN_BOXES, ranks, strict=True)
    return EnumerableShardingSpec([box(*one, rank) for one, rank in pairs])


def constants(rank: int) -> None:
    group = pool_group(4)
    with Collectives() as counted:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16):
            given: dict[str, Any] = {"dtype": dtype, "process_group": group}
            check_shards(ones(chunk(0), 10, 3, **given), torch.ones(10, 3, dtype=dtype))
            check_shards(zeros(chunk(0), [10, 3], **given), torch.zeros(10, 3, dtype=dtype))
            check_shards(full(chunk(0), (10, 3), 1, **given), torch.ones(10, 3, dtype=dtype))
            for made in (empty(chunk(0), 10, 3, **given), ShardedTensor(chunk(0), 10, 3, **given)):
                (shard,) = made.local_shards()
                assert shard.tensor.shape == (1 if rank == 3 else 3, 3)
                assert (shard.tensor.dtype, shard.tensor.device.type) == (dtype, "cpu")
    assert not counted.names


def dtypes_of_values(rank: int) -> None:
    for value in (2, 2.5, True, 1 + 2j):
        made = full(chunk(0), (4,), value, process_group=pool_group(4))
        check_shards(made, torch.full((4,), value))
    assert zeros(chunk(0), 4, process_group=pool_group(4)).dtype == torch.get_default_dtype()


def test_B30_constants_fill_the_local_shard(pool: Pool) -> None:
    pool.run(constants, ranks=FOUR)
    pool.run(dtypes_of_values, ranks=FOUR)


def random_numbers(rank: int) -> None:
    group, rows = pool_group(4), 1 if rank == 3 else 3
    pairs: list[tuple[Make, Callable[..., torch.Tensor]]] = [
        (rand, torch.rand),
        (randn, torch.randn),
    ]
    for make, plain in pairs:
        torch.manual_seed(100 + rank)
        drawn = [make(chunk(0), 10, 4, process_group=group) for _ in range(2)]
        torch.manual_seed(100 + rank)
        for one in drawn:
            assert torch.equal(one.local_tensor(), plain(rows, 4))
        torch.manual_seed(100 + rank)
        several = make(chunk(0, [0, 1, 0, 1]), 10, 4, process_group=group)
        torch.manual_seed(100 + rank)
        for shard in several.local_shards():
            assert torch.equal(shard.tensor, plain(*shard.metadata.shard_sizes))


def test_B31_random_numbers_come_from_the_seed_of_each_rank(pool: Pool) -> None:
    pool.run(random_numbers, ranks=FOUR)


def made_like(rank: int) -> None:
    specs: list[ShardingSpec] = [chunk(1), chunk(0, [1, 2]), boxes_on(1, 3, 1, 0)]
    for spec in specs:
        source = rand(spec, 6, 6, process_group=pool_group(4))
        check_shards(torch.zeros_like(source), torch.zeros(6, 6))
        check_shards(torch.ones_like(source), torch.ones(6, 6))
        check_shards(torch.full_like(source, 3), torch.full((6, 6), 3.0))
        for like in (torch.empty_like, torch.rand_like, torch.randn_like):
            torch.manual_seed(rank)
            made = like(source)
            assert made.metadata() == source.metadata()
            assert made.sharding_spec() == spec
            torch.manual_seed(rank)
            for shard in made.local_shards() if like is not torch.empty_like else ():
                assert torch.equal(shard.tensor, like(shard.tensor))


def test_B32_tensors_like_another(pool: Pool) -> None:
    pool.run(made_like, ranks=FOUR)


def on_some_ranks(rank: int) -> None:
    made = ones(chunk(0, [1, 3]), 5, 2, process_group=pool_group(4))
    check_shards(made, torch.ones(5, 2))
    assert len(made.local_shards()) == int(rank in (1, 3))
    assert torch.equal(made.full_tensor(), torch.ones(5, 2))
    assert made.device == torch.device("cpu")


def in_a_sub_group(rank: int) -> None:
    group = group_of(2, 3)
    for order, start in (([2, 3], 0 if rank == 2 else 3), ([3, 2], 0 if rank == 3 else 3)):
        made = ones(chunk(0, order), 5, 2, process_group=group)
        check_shards(made, torch.ones(5, 2))
        assert made.local_shards()[0].metadata.shard_offsets == (start, 0)
        assert torch.equal(made.full_tensor(), torch.ones(5, 2))
        assert made.process_group is group


def test_B33_some_ranks_and_sub_groups(pool: Pool) -> None:
    pool.run(on_some_ranks, ranks=FOUR)
    pool.run(in_a_sub_group, ranks=[2, 3])


def several_per_rank(rank: int) -> None:
    made = ones(chunk(0, [0, 1, 2, 3, 0, 1, 2, 3]), 16, 5, process_group=pool_group(4))
    check_shards(made, torch.ones(16, 5))
    offsets = [shard.metadata.shard_offsets[0] for shard in made.local_shards()]
    assert offsets == [2 * rank, 2 * rank + 8]
    uneven = ones(chunk(0, [0, 0, 1, 1]), 5, 2, process_group=pool_group(4))
    sizes = [shard.metadata.shard_sizes[0] for shard in uneven.local_shards()]
    assert sizes == {0: [2, 2], 1: [1, 0]}.get(rank, [])


def test_B34_several_shards_per_rank(pool: Pool) -> None:
    pool.run(several_per_rank, ranks=FOUR)


def along_columns(rank: int) -> None:
    for dim in (1, -1):
        made = ones(chunk(dim), 10, 9, process_group=pool_group(4))
        check_shards(made, torch.ones(10, 9))
        (shard,) = made.local_shards()
        assert shard.metadata == box([0, 3 * min(rank, 3)], [10, 0 if rank == 3 else 3], rank)


def test_B35_along_columns(pool: Pool) -> None:
    pool.run(along_columns, ranks=FOUR)


def not_in_the_group(rank: int) -> None:
    message = r"Global rank 5 does not exist in input process group: \[0, 1, 2, 3\]"
    specs: list[ShardingSpec] = [
        chunk(0, [0, 5]),
        EnumerableShardingSpec([box([0, 0], [6, 6], 5)]),
        GridShardingSpec([2, 2], places([0, 1, 2, 5])),
    ]
    for spec in specs:
        with pytest.raises(ValueError, match=message):
            zeros(spec, 6, 6, process_group=pool_group(4))
    with pytest.raises(ValueError, match="Global rank 99 does not exist"):
        zeros(chunk(0, [0, 99]), 6, 6)


def test_B41_a_rank_that_is_not_in_the_group(pool: Pool) -> None:
    pool.run(not_in_the_group, ranks=FOUR)


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn, ShardedTensor])
def test_B43_B44_other_layouts_and_formats_of_memory_are_refused(make: Make) -> None:
    spec = chunk(0, [0])
    for layout in (torch.sparse_coo, torch.sparse_csr):
        with pytest.raises(ValueError, match=rf"Only torch.strided layout .* found {layout}"):
            make(spec, 4, 4, layout=layout)
    with pytest.raises(ValueError, match=r"Only torch.contiguous_format .* torch.channels_last"):
        make(spec, 1, 2, 4, 4, memory_format=torch.channels_last)


WORKERS = [
    ChunkShardingSpec(0, ["worker0/cpu", "worker1/cpu"]),
    ChunkShardingSpec(0, ["rank:0/cpu", "worker1/cpu"]),
    ChunkShardingSpec(0, [torch.device("cpu")]),
]


@pytest.mark.parametrize("spec", WORKERS, ids=["workers", "one worker", "no rank"])
def test_B45_B46_placements_name_ranks(spec: ShardingSpec) -> None:
    """Workers are known to RPC only, which does not run here."""
    message = (
        r"(RPC framework needs to be initialized|names no rank).*placements such as rank:3/cpu"
    )
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=message):
            zeros(spec, 4)


def test_what_is_no_spec_is_refused() -> None:
    for spec in (None, "rank:0/cpu", ["rank:0/cpu"], chunk):
        with pytest.raises(TypeError, match=r"sharding_spec is of type .* give a ShardingSpec"):
            zeros(spec, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        zeros(chunk(0, [0]), 4, dtpye=torch.float32)


def listed_boxes(rank: int) -> None:
    group = pool_group(4)
    grid = [([3 * row, 2 * column], [3, 2]) for row in (0, 1) for column in (0, 1)]
    even = EnumerableShardingSpec([box(*one, number) for number, one in enumerate(grid)])
    check_shards(ones(even, 6, 4, process_group=group), torch.ones(6, 4))
    for ranks in ((0, 1, 2, 3), (3, 2, 0, 1), (0, 0, 1, 1), (2, 1, 2, 2)):
        made = ones(boxes_on(*ranks), 6, 6, process_group=group)
        check_shards(made, torch.ones(6, 6))
        assert len(made.local_shards()) == ranks.count(rank)
        assert torch.equal(made.full_tensor(), torch.ones(6, 6))
        assert made.sharding_spec() == boxes_on(*ranks)
    with pytest.raises(ValueError, match="does not match tensor volume 42"):
        ones(boxes_on(0, 1, 2, 3), 6, 7, process_group=group)


def boxes_in_a_sub_group(rank: int) -> None:
    made = ones(boxes_on(2, 3, 3, 2), 6, 6, process_group=group_of(2, 3))
    check_shards(made, torch.ones(6, 6))
    assert torch.equal(made.full_tensor(), torch.ones(6, 6))


def test_B55_listed_boxes_even_uneven_on_some_ranks_and_in_a_sub_group(pool: Pool) -> None:
    pool.run(listed_boxes, ranks=FOUR)
    pool.run(boxes_in_a_sub_group, ranks=[2, 3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_device_of_a_layout_spec_counts(pool: Pool, device: str) -> None:
    pool.run(device_of_a_layout, device, ranks=FOUR)


def device_of_a_layout(rank: int, device: str) -> None:
    from reshard.sharded import empty

    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "tp -"), device)
    assert empty(spec, 4, 4, process_group=pool_group(4)).device.type == device


def like_one_that_requires_gradients(rank: int) -> None:
    one = sharded(numbered(6, 5), chunk(0))
    made = torch.ones_like(one, requires_grad=True)
    assert made.requires_grad
    (made.full_tensor() * 3).sum().backward()
    assert made.grad is not None
    assert made.grad.cut == made.cut
    assert torch.equal(made.grad.full_tensor(), torch.full((6, 5), 3.0, dtype=torch.float64))


def test_a_tensor_like_another_may_require_gradients(pool: Pool) -> None:
    pool.run(like_one_that_requires_gradients, ranks=FOUR)
