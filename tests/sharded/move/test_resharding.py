"""Cut a sharded tensor in another way: every pair of specs, with values, metadata and gradients."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    build_reshard_metadata,
    get_idx_from_placements,
    plan_reshard,
    reshard_local_shard,
    reshuffle_local_shard,
    shard_tensor,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, chunk, numbered, places, sharded
from tests.soak import cases, soaking

SIZES = [(13, 21), (5, 7), (1, 9), (0, 6)]
MORE = [(14, 23), (15, 26), (12, 24), (4, 4)]
"""As well, where tests may take long."""


def is_sampled(size: tuple[int, int]) -> bool:
    """Whether some of the orders of ranks do: the first size has all of them, a soak has all."""
    return size != SIZES[0] and not soaking()


def spelled(spec: ShardingSpec, full: torch.Tensor) -> ShardingSpec:
    """With dims counted from the front."""
    return spec.normalized(full.ndim) if isinstance(spec, ChunkShardingSpec) else spec


def check_same(found: ShardedTensor, full: torch.Tensor, spec: ShardingSpec) -> None:
    direct = spec.build_metadata(full.shape, found.metadata().tensor_properties)
    assert found.metadata() == direct
    assert spelled(found.sharding_spec(), full) == spelled(spec, full)
    mine = [shard for shard in direct.shards_metadata if shard.rank == torch.distributed.get_rank()]
    assert [shard.metadata for shard in found.local_shards()] == mine
    for shard in found.local_shards():
        place = tuple(
            slice(at, at + size)
            for at, size in zip(
                shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
            )
        )
        assert torch.equal(shard.tensor, full[place])


def every_pair_of_dims(rank: int, size: tuple[int, int]) -> None:
    full = numbered(*size)
    orders = ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0])[: 2 if is_sampled(size) else 3]
    for dim in (0, 1):
        for other in (0, 1, -1, -2):
            # Dims counted from the end are the same dims.
            for before in orders if other >= 0 or soaking() else orders[:1]:
                for after in orders:
                    have, want = chunk(dim, before), chunk(other, after)
                    source = sharded(full, have)
                    found = source.resharded(want)
                    check_same(found, full, want)
                    assert len(found.local_shards()) == 1
                    check_same(source, full, have)


@pytest.mark.parametrize("size", SIZES + MORE * soaking(), ids=str)
def test_B1_B2_B3_every_pair_of_dims_and_orders(pool: Pool, size: tuple[int, int]) -> None:
    pool.run(every_pair_of_dims, size, ranks=FOUR)


def all_permutations(rank: int, size: tuple[int, int]) -> None:
    full = numbered(*size)
    source = sharded(full, chunk(0)).requires_grad_()
    weight = numbered(*size) + 1
    for dim in (0, 1):
        every = 5 if is_sampled(size) or (dim and not soaking()) else 1
        for order in [*permutations(range(4))][::every]:
            want = chunk(dim, order)
            found = source.resharded(want)
            check_same(found.detach(), full, want)
            (gradient,) = torch.autograd.grad(found, source, sharded(weight, want))
            assert isinstance(gradient, ShardedTensor)
            check_same(gradient, weight, chunk(0))


EVERY = [(13, 21), (5, 6), (1, 4), (0, 4)]


@pytest.mark.parametrize("size", EVERY + [(8, 8), *MORE] * soaking(), ids=str)
def test_D6_D7_D8_all_24_permutations_with_gradients(pool: Pool, size: tuple[int, int]) -> None:
    pool.run(all_permutations, size, ranks=FOUR)


def specs_of(size: tuple[int, int]) -> list[ShardingSpec]:
    """Chunks, boxes, grids, ragged parts; several per rank, none on some, in any order."""
    rows, columns = size
    half, third = rows // 2, columns // 3
    boxes = [
        ShardMetadata([0, 0], [half, columns], "rank:3/cpu"),
        ShardMetadata([half, 0], [rows - half, third], "rank:1/cpu"),
        ShardMetadata([half, third], [rows - half, columns - third], "rank:3/cpu"),
    ]
    return [
        chunk(0),
        chunk(1, [3, 1]),
        chunk(0, [2]),
        chunk(1, [0, 1, 0, 2, 3, 1]),
        chunk(-1, [2, 3, 0, 1]),
        EnumerableShardingSpec(boxes),
        GridShardingSpec([[half, rows - half], 2], places([1, 0, 3, 2])),
        GridShardingSpec([2, 3], places([0, 0, 1, 2, 1, 3])),
        RaggedShardingSpec(0, [1, rows - 1, 0, 0], places(FOUR)),
        EnumerableShardingSpec.from_sizes(1, [2, columns - 3, 1], places([3, 0, 1])),
    ]


def any_to_any(rank: int, size: tuple[int, int]) -> None:
    full, weight = numbered(*size), numbered(*size) * 3
    for have in specs_of(size):
        source = sharded(full, have).requires_grad_()
        for want in specs_of(size):
            found = source.resharded(want)
            check_same(found.detach(), full, want)
            (gradient,) = torch.autograd.grad(found, source, sharded(weight, want))
            check_same(gradient, weight, have)
            if soaking():  # else what comes back comes as another pair
                check_same(found.detach().resharded(have), full, have)


@pytest.mark.parametrize("size", [(6, 9), (13, 7)][: cases(1, 2)], ids=str)
def test_B4_B5_D9_D11_any_spec_to_any_other(pool: Pool, size: tuple[int, int]) -> None:
    pool.run(any_to_any, size, ranks=FOUR)


def nothing_to_do(rank: int) -> None:
    full = numbered(8, 6)
    source = sharded(full, chunk(0))
    assert source.resharded(chunk(0)) is source
    assert source.resharded(chunk(-2)) is source
    assert source.resharded(chunk(1)) is not source


def test_B6_D12_the_same_spec_gives_the_same_tensor(pool: Pool) -> None:
    pool.run(nothing_to_do, ranks=FOUR)


def in_place(rank: int) -> None:
    full = numbered(9, 6)
    source = sharded(full, chunk(0))
    kept = source.resharded(chunk(1))
    check_same(source, full, chunk(0))
    assert source.reshard(chunk(1, [1, 0, 3, 2])) is source
    check_same(source, full, chunk(1, [1, 0, 3, 2]))
    check_same(kept, full, chunk(1))
    leaf = sharded(full, chunk(0)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"use resharded\(\)"):
        leaf.reshard(chunk(1))
    check_same(leaf.detach(), full, chunk(0))
    result = leaf * 2
    assert result.reshard(chunk(1)) is result
    check_same(result.detach(), full * 2, chunk(1))
    (result * 3).sum().backward()
    check_same(leaf.grad, torch.full_like(full, 6.0), chunk(0))
    moved = leaf.resharded(chunk(1))
    assert leaf.is_leaf
    assert not moved.is_leaf


def test_D19_resharded_leaves_its_tensor_alone_and_reshard_changes_it(pool: Pool) -> None:
    pool.run(in_place, ranks=FOUR)


def disagree(rank: int) -> str:
    source = sharded(numbered(8, 8), chunk(0))
    try:
        source.resharded(chunk(1, [0, 1, 3, 2]) if rank == 2 else chunk(1))
    except ValueError as error:
        check_same(source, numbered(8, 8), chunk(0))
        return str(error)
    return "moved"


def test_D13_specs_that_differ_between_ranks_are_an_error_on_all(pool: Pool) -> None:
    told = {text.partition(" (on rank")[0] for text in pool.run(disagree, ranks=FOUR)}
    (message,) = told
    assert "ranks 0-1,3 have" in message
    assert "rank 2 has" in message


def every_dtype(rank: int) -> None:
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint8):
        full = numbered(7, 6, dtype=torch.int64).to(dtype)
        check_same(
            sharded(full, chunk(0)).resharded(chunk(1, [3, 0, 2, 1])), full, chunk(1, [3, 0, 2, 1])
        )


def test_reshard_of_every_dtype(pool: Pool) -> None:
    pool.run(every_dtype, ranks=FOUR)


def on_a_sub_group(rank: int) -> None:
    if rank in (0, 1):
        group, full = pool_group(2), numbered(5, 4)
        have, want = chunk(0, [1, 0]), chunk(1, [0, 1])
        source = shard_tensor(full, have, process_group=group)
        check_same(source.resharded(want), full, want)


def test_reshard_on_a_sub_group(pool: Pool) -> None:
    pool.run(on_a_sub_group, ranks=FOUR)


def local_shards_alone(rank: int) -> None:
    full = numbered(10, 6)
    for want in (chunk(0, [2, 0, 3, 1]), chunk(1, [1, 3, 0, 2])):
        local = sharded(full, chunk(0)).local_tensor().clone().requires_grad_()
        for function in (reshard_local_shard, reshuffle_local_shard):
            shards, stated = function(local, full.shape, chunk(0), want, pool_group(4))
            (shard,) = shards
            direct = sharded(full, want)
            assert torch.equal(shard.tensor, direct.local_tensor())
            assert tuple(stated) == direct.metadata().shards_metadata
            (gradient,) = torch.autograd.grad(shard.tensor.sum(), local)
            assert torch.equal(gradient, torch.ones_like(local))


def test_local_shards_go_by_the_same_plan_with_gradients(pool: Pool) -> None:
    pool.run(local_shards_alone, ranks=FOUR)


def test_build_reshard_metadata_is_in_the_order_of_ranks() -> None:
    shards, ranks = build_reshard_metadata([10, 4], chunk(0, [2, 0, 3, 1]), 4)
    assert ranks == (0, 1, 2, 3)
    assert [shard.shard_offsets[0] for shard in shards] == [3, 9, 0, 6]
    with pytest.raises(ValueError, match="rank 3 of the spec"):
        build_reshard_metadata([10, 4], chunk(0), 3)


def test_get_idx_from_placements_names_the_rank() -> None:
    assert get_idx_from_placements(places([3, 1, 2, 1]), 1) == 1
    assert get_idx_from_placements(places([3, 1, 2, 1]), 1, all=True) == (1, 3)
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="rank 0 is not among"):
            get_idx_from_placements(places([3, 1]), 0)


def test_a_reshard_can_be_planned_without_ranks() -> None:
    plan = plan_reshard(chunk(0), chunk(1), [8, 8])
    assert plan.summary().wire_bytes == 8 * 8 * 4 * 3 // 4
    assert plan.summary().wire_bytes == plan.summary().lower_bound_bytes


def from_a_local_tensor(rank: int, size: tuple[int, ...]) -> None:
    full = numbered(*size)
    for dim in range(len(size)):
        spec = chunk(dim, [2, 0, 3, 1])
        local = sharded(full, spec).local_tensor().clone()
        made = ShardedTensor._init_from_local_tensor(local, spec, size, process_group=pool_group(4))
        check_same(made, full, spec)
    with pytest.raises(ValueError, match="do not cover the entire tensor"):
        ShardedTensor._init_from_local_tensor(
            local[..., :0].contiguous(), spec, size, process_group=pool_group(4)
        )
    with pytest.raises(ValueError, match="not a contiguous"):
        ShardedTensor._init_from_local_tensor(
            numbered(4, 6).t(), spec, size, process_group=pool_group(4)
        )


@pytest.mark.parametrize("size", [(20, 10), (21, 11), (23, 16), (44, 16, 8)], ids=str)
def test_B58_B59_B60_from_a_local_tensor(pool: Pool, size: tuple[int, ...]) -> None:
    pool.run(from_a_local_tensor, size, ranks=FOUR)


class Turned(ChunkShardingSpec):
    """Equal to others of its kind, which cut otherwise."""

    def __init__(self, turn: int) -> None:
        super().__init__(0, places(FOUR))
        object.__setattr__(self, "turn", turn)

    def build_metadata(self, tensor_sizes, tensor_properties):  # type: ignore[no-untyped-def]
        ranks = [(rank + self.turn) % 4 for rank in FOUR]
        return chunk(0, ranks).build_metadata(tensor_sizes, tensor_properties)


def specs_of_the_users(rank: int) -> None:
    full = numbered(8, 2)
    for turn in range(3):
        (shard,) = sharded(full, Turned(turn)).local_shards()
        assert shard.metadata.shard_offsets[0] == 2 * ((rank - turn) % 4)


def test_equal_specs_of_the_users_may_cut_otherwise(pool: Pool) -> None:
    pool.run(specs_of_the_users, ranks=FOUR)


class InAList(ShardingSpec):
    """A user's spec with a list, which may be changed in place."""

    def __init__(self, dims: list[int]) -> None:
        self.dims = dims

    def build_metadata(self, tensor_sizes, tensor_properties):  # type: ignore[no-untyped-def]
        return chunk(self.dims[0]).build_metadata(tensor_sizes, tensor_properties)


def changed_in_place(rank: int) -> None:
    spec, tensor = InAList([0]), sharded(numbered(8, 12), chunk(0, [3, 2, 1, 0]))
    assert tensor.resharded(spec).local_tensor().shape == (2, 12)
    spec.dims[0] = 1
    assert tensor.resharded(spec).local_tensor().shape == (8, 3)


def test_a_users_spec_that_is_changed_in_place(pool: Pool) -> None:
    pool.run(changed_in_place, ranks=FOUR)
