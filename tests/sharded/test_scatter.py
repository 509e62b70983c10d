"""Cut plain tensors: what each rank gets, what it costs, and what happens if ranks disagree."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMismatchError,
    TensorProperties,
    reshard_local_shard,
    reshuffle_local_shard,
    shard_tensor,
    shard_tensors,
)
from reshard.sharded import api as scatter
from reshard.tensors.agreement import Agreement
from tests.ranks.pool import Pool
from tests.ranks.rank import local_group, pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    Collectives,
    box,
    check_shards,
    chunk,
    group_of,
    numbered,
    places,
    refusal,
)


def like_narrow(rank: int) -> None:
    full = numbered(12, 12)
    st = shard_tensor(full if rank == 0 else -full, chunk(0), process_group=pool_group(4))
    assert torch.equal(st.local_tensor(), full.narrow(0, 3 * rank, 3))
    full.zero_()
    assert torch.equal(st.local_tensor(), numbered(12, 12).narrow(0, 3 * rank, 3))


def test_B14_sharding_narrows_the_tensor_of_rank_0(pool: Pool) -> None:
    pool.run(like_narrow, ranks=FOUR)


def with_an_empty_tail(rank: int) -> None:
    full = numbered(9, 12)
    st = shard_tensor(full, chunk(0), process_group=pool_group(4))
    check_shards(st, full)
    stated = st.metadata().shards_metadata
    assert [shard.shard_sizes[0] for shard in stated] == [3, 3, 3, 0]
    assert all(shard.box.stop[0] <= 9 for shard in stated)
    assert st.local_tensor().shape == ((0 if rank == 3 else 3), 12)


def test_B15_the_last_shard_may_be_empty(pool: Pool) -> None:
    pool.run(with_an_empty_tail, ranks=FOUR)


def any_spec(rank: int) -> None:
    boxes = [box([0, 0], [2, 7], 3), box([2, 0], [3, 4], 1), box([2, 4], [3, 3], 3)]
    specs: list[ShardingSpec] = [
        chunk(0),
        chunk(-1, [2, 0]),
        chunk(0, [1]),
        chunk(1, [0, 3, 0, 1, 3]),
        EnumerableShardingSpec(boxes),
        GridShardingSpec([2, [3, 4]], places([3, 0, 1, 2])),
        RaggedShardingSpec(0, [0, 4, 1], places([0, 2, 3])),
    ]
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16):
        full = numbered(5, 7, dtype=torch.int64).to(dtype)
        mine = full if rank == 2 else torch.zeros_like(full)
        for spec in specs:
            check_shards(shard_tensor(mine, spec, 2, pool_group(4)), full)


def test_B13_every_spec_shards_every_dtype(pool: Pool) -> None:
    pool.run(any_spec, ranks=FOUR)


def odd_tensors(rank: int) -> None:
    group = pool_group(4)
    full = numbered(6, 10)
    check_shards(shard_tensor(full.t(), chunk(0), process_group=group), full.t())
    check_shards(shard_tensor(full[::2, 1:], chunk(1), process_group=group), full[::2, 1:])
    check_shards(shard_tensor(full[:, :0], chunk(0), process_group=group), full[:, :0])
    scalar = EnumerableShardingSpec([box([], [], 2)])
    check_shards(shard_tensor(full[1, 1], scalar, process_group=group), full[1, 1])
    lazy = torch.view_as_complex(full.reshape(6, 5, 2)).conj()
    check_shards(shard_tensor(lazy, chunk(0), process_group=group), lazy.resolve_conj())
    st = shard_tensor(full.requires_grad_(), chunk(0), process_group=group)
    assert st.requires_grad
    assert st.is_leaf


def test_B11_views_scalars_and_empty_tensors_are_accepted(pool: Pool) -> None:
    pool.run(odd_tensors, ranks=FOUR)


def own_values(rank: int) -> list[str]:
    full = numbered(9, 4)
    with Collectives() as counted:
        check_shards(shard_tensor(full, chunk(0), None, pool_group(4)), full)
        check_shards(shard_tensor(full, chunk(1), 0, pool_group(4), scatter=False), full)
    return counted.names


def test_B123_no_source_rank_means_no_communication(pool: Pool) -> None:
    """Each rank is alone when it calls: none of the others does."""
    for rank in (1, 3):
        assert pool.run(own_values, ranks=[rank]) == [[]]


class Halves(ShardingSpec):
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        half = tensor_sizes[0] // 2
        shards = (box([0], [half], 1), box([half], [tensor_sizes[0] - half], 0))
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


class Gap(ShardingSpec):
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return ShardedTensorMetadata((box([1], [2], 0),), tensor_sizes, tensor_properties)


class Unfinished(Halves):
    def shard(self, tensor, src_rank=0, process_group=None):
        raise NotImplementedError("to be done")


def users_specs(rank: int) -> None:
    group = pool_group(4)
    check_shards(shard_tensor(numbered(7), Halves(), process_group=group), numbered(7))
    with pytest.raises(NotImplementedError, match="to be done"):
        shard_tensor(numbered(7), Unfinished(), process_group=group)
    with pytest.raises(ValueError, match="does not match tensor volume 7"):
        shard_tensor(numbered(7), Gap(), process_group=group)


def test_B16_specs_of_the_users_are_called_and_checked(pool: Pool) -> None:
    pool.run(users_specs, ranks=FOUR)


class CountedAgreement(Agreement):
    """Counts the bytes of what this rank gives to each exchange."""

    sizes: ClassVar[list[int]] = []

    def gather(self, value: Any) -> dict[int, Any]:
        self.sizes.append(len(json.dumps(value)))
        return super().gather(value)


def counted(rank: int, num_tensors: int) -> tuple[list[str], list[int]]:
    tensors = {f"w{number}": numbered(8 + number, 6) for number in range(num_tensors)}
    specs = {name: chunk(number % 2) for number, name in enumerate(tensors)}
    CountedAgreement.sizes.clear()
    with Collectives() as found, patch.object(scatter, "Agreement", CountedAgreement):
        made = shard_tensors(tensors, specs, process_group=pool_group(4))
    for name, tensor in tensors.items():
        check_shards(made[name], tensor)
        (part,) = made[name]._content.parts
        assert part.untyped_storage().nbytes() == part.nbytes
    return found.names, CountedAgreement.sizes


@pytest.mark.parametrize("num_tensors", [1, 50])
def test_D30_D31_sharding_makes_one_small_exchange(pool: Pool, num_tensors: int) -> None:
    for collectives, (size,) in pool.run(counted, num_tensors, ranks=FOUR):
        assert collectives == []
        assert size <= 128


def given(rank: int, what: str) -> dict[str, Any]:
    """What a rank is given to shard: on rank 2 something else than on the others."""
    usual: dict[str, Any] = {
        "tensor": numbered(8, 8),
        "sharding_spec": chunk(0),
        "src_rank": 0,
        "process_group": pool_group(4),
    }
    odd: dict[str, Callable[[], dict[str, Any]]] = {
        "source": lambda: {"src_rank": 1},
        "no such source": lambda: {"src_rank": 7},
        "a word as source": lambda: {"src_rank": "0"},
        "a huge source": lambda: {"src_rank": 2**80},
        "order": lambda: {"sharding_spec": chunk(0, [0, 1, 3, 2])},
        "dim": lambda: {"sharding_spec": chunk(1)},
        "another dim": lambda: {"sharding_spec": chunk(5)},
        "no spec": lambda: {"sharding_spec": None},
        "foreign rank": lambda: {"sharding_spec": chunk(0, [0, 1, 2, 7])},
        "gap": lambda: {"sharding_spec": EnumerableShardingSpec([box([0, 0], [8, 7], 0)])},
        "size": lambda: {"tensor": numbered(4, 16)},
        "more": lambda: {"tensor": numbered(9, 8)},
        "dtype": lambda: {"tensor": numbered(8, 8, dtype=torch.float32)},
        "gradients": lambda: {"tensor": numbered(8, 8).requires_grad_()},
        "no tensor": lambda: {"tensor": [1.0, 2.0]},
        "sparse": lambda: {"tensor": numbered(8, 8).to_sparse()},
        "sharded": lambda: {"tensor": shard_tensor(numbered(8, 8), chunk(0), None, pool_group(4))},
    }
    return usual | (odd[what]() if rank == 2 else {})


def disagreeing(rank: int, what: str) -> tuple[str, str]:
    found = refusal(lambda: shard_tensor(**given(rank, what)))
    # The ranks are as good as before.
    check_shards(shard_tensor(numbered(5), chunk(0), process_group=pool_group(4)), numbered(5))
    return found


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("source", "ranks [2] were given does not match with src_rank of the other ranks"),
        (
            "no such source",
            "does not match with src_rank of the other ranks: they are [0, 0, 7",
        ),
        ("a word as source", "does not match with src_rank"),
        ("a huge source", "does not match with src_rank"),
        ("order", "ranks [2] were given does not match with sharding_spec of the other ranks"),
        ("dim", "does not match with sharding_spec"),
        ("another dim", "rank 2 because: Invalid sharding dim 5"),
        ("no spec", "rank 2 because: sharding_spec is of type NoneType"),
        ("foreign rank", "rank 2 because: Global rank 7 does not exist"),
        ("gap", "rank 2 because: the 1 shards have 56 elements"),
        ("size", "ranks [2] were given does not match with the names, sizes"),
        ("more", "does not match with the names, sizes"),
        ("dtype", "does not match with the names, sizes, dtypes"),
        ("gradients", "requires_grad"),
        ("no tensor", 'rank 2 because: "tensor" is of type list'),
        ("sparse", "rank 2 because: Only torch.strided layout"),
        ("sharded", 'rank 2 because: "tensor" is a ShardedTensor, which is sharded already'),
    ],
)
def test_B8_B12_D14_T4_a_mismatch_is_the_same_error_on_all_ranks(
    pool: Pool, what: str, message: str
) -> None:
    ((kind, text),) = set(pool.run(disagreeing, what, ranks=FOUR))
    assert kind == ShardMismatchError.__name__
    assert issubclass(ShardMismatchError, ValueError)
    assert message in text


def alike_and_wrong(rank: int) -> None:
    group, full = pool_group(4), numbered(8, 8)
    for src_rank in (4, -1, "0"):
        with pytest.raises(ValueError, match=rf"src_rank='?{src_rank}'? is no rank .* of 4"):
            shard_tensor(full, chunk(0), src_rank, group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sharding_spec is of type str"):
        shard_tensor(full, "rank:0/cpu", process_group=group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='"tensor" is of type int'):
        shard_tensor(3, chunk(0), process_group=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='check="full" is no way to compare ranks'):
        shard_tensor(full, chunk(0), process_group=group, check="full")  # type: ignore[arg-type]
    check_shards(shard_tensor(full, chunk(0), process_group=group, check="none"), full)
    with pytest.raises(KeyError, match="w"):
        shard_tensors({"w": full}, {}, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(TypeError, match="is a DTensor, which is sharded already"):
        shard_tensor(distribute_tensor(full, mesh, src_data_rank=None), chunk(0), 0, group)
    worker = ChunkShardingSpec(0, ["worker0/cpu"])
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=r"RPC framework needs .* worker0/cpu"):
            shard_tensor(full, worker, process_group=group)


def test_what_is_wrong_on_all_ranks_keeps_its_own_error(pool: Pool) -> None:
    pool.run(alike_and_wrong, ranks=FOUR)


def on_ranks_2_and_3(rank: int) -> None:
    group, full = group_of(2, 3), numbered(5, 6)
    mine = full if rank == 3 else full * 0
    st = shard_tensor(mine, chunk(0, [3, 2]), 1, group)
    check_shards(st, full)
    for want in (chunk(1, [2, 3]), chunk(0, [2, 3])):
        check_shards(st.resharded(want), full)
        for function, name in (
            (reshard_local_shard, "local_tensor"),
            (reshuffle_local_shard, "local_shard"),
        ):
            options = {name: st.local_tensor(), "st_size": [5, 6], "pg": group}
            have = chunk(0, [3, 2])
            (shard,), _ = function(**options, sharding_spec=have, resharding_spec=want)
            assert torch.equal(shard.tensor, st.resharded(want).local_tensor())
    found = st.gather(dst=1)
    assert (found is None) == (rank == 2)
    assert found is None or torch.equal(found, full)
    with pytest.raises(ValueError, match=r"Global rank 0 does not exist .* group: \[2, 3\]"):
        shard_tensor(full, chunk(0, [0, 1]), 1, group)
    with pytest.raises(ValueError, match="src_rank=2 is no rank of a group of 2"):
        shard_tensor(full, chunk(0, [2, 3]), 2, group)


def test_D10_a_group_of_ranks_2_and_3(pool: Pool) -> None:
    pool.run(on_ranks_2_and_3, ranks=[2, 3])


def outside(rank: int) -> None:
    with pytest.raises(ValueError, match="rank 5 is not in the process group"):
        shard_tensor(numbered(4), chunk(0), process_group=pool_group(4))


def test_ranks_outside_the_group_are_told(pool: Pool) -> None:
    pool.run(outside, ranks=[5])


def test_one_process_needs_no_group() -> None:
    st = shard_tensor(numbered(4, 3), chunk(0, [0]))
    assert torch.equal(st.local_tensor(), numbered(4, 3))


def forgotten_groups(rank: int) -> None:
    group = local_group(0, 1, 2, 3)
    gone = weakref.ref(group)
    one = shard_tensor(numbered(8, 4), chunk(0), process_group=group)
    one.resharded(chunk(1))
    torch.distributed.destroy_process_group(group)
    del one, group
    gc.collect()
    assert gone() is None


def test_a_group_that_was_resharded_on_can_go(pool: Pool) -> None:
    pool.run(forgotten_groups, ranks=FOUR)
