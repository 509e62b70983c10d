"""Sharded tensors of shards that ranks already have: put together, or refused by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reshard.sharded import (
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    init_from_local_shards,
    shard_tensor,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    box,
    check_shards,
    chunk,
    group_of,
    numbered,
    refusal,
)


def shard_of(full: torch.Tensor, offsets: list[int], sizes: list[int], rank: int) -> Shard:
    """A shard of a rank with its part of these values."""
    place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return Shard(full[place].contiguous(), box(offsets, sizes, rank))


def test_B61_a_shard_is_checked_against_its_metadata() -> None:
    tensor = torch.ones(3, 4)
    shard = Shard.from_tensor_and_offsets(tensor, [6, 0], rank=2)
    assert shard.metadata == box([6, 0], [3, 4], 2)
    assert shard.tensor is tensor
    assert Shard(tensor, ShardMetadata([0, 0], [3, 4])).metadata.placement is None
    with pytest.raises(ValueError, match=r"size \[3, 4\], metadata.shard_lengths \[4, 3\]"):
        Shard(tensor, box([0, 0], [4, 3], 0))
    with pytest.raises(ValueError, match="Found cpu and cuda:1"):
        Shard(tensor, ShardMetadata([0, 0], [3, 4], "rank:0/cuda:1"))
    with pytest.raises(ValueError, match="same number of elements, found 1 and 2"):
        Shard.from_tensor_and_offsets(tensor, [0], rank=0)
    with pytest.raises(ValueError, match="shard_offsets should be >=0"):
        Shard.from_tensor_and_offsets(tensor, [0, -1], rank=0)


def put_together(rank: int) -> None:
    full, group = numbered(20, 10), pool_group(4)
    own = shard_of(full, [5 * rank, 0], [5, 10], rank)
    st = init_from_local_shards([own], 20, 10, process_group=group)
    check_shards(st, full)
    assert st.sharding_spec() == chunk(0)
    assert st.metadata() == chunk(0).build_metadata(full.shape, TensorProperties(torch.float64))
    assert st.local_shards()[0].tensor.data_ptr() == own.tensor.data_ptr()
    for size in ([20, 10], (20, 10), torch.Size([20, 10])):
        again = ShardedTensor._init_from_local_shards([own], size, process_group=group)
        assert torch.equal(again.full_tensor(), full)
    unplaced = Shard(own.tensor, ShardMetadata([5 * rank, 0], [5, 10]))
    check_shards(init_from_local_shards([unplaced], 20, 10, process_group=group), full)
    turned = Shard(own.tensor.t().contiguous().t(), own.metadata)
    check_shards(init_from_local_shards([turned], 20, 10, process_group=group), full)
    own.tensor.requires_grad_()
    assert init_from_local_shards([own], 20, 10, process_group=group).requires_grad


def any_boxes(rank: int) -> None:
    """Rank 0 has two boxes, rank 1 one and an empty one, rank 2 the rest, rank 3 none."""
    full = numbered(6, 6)
    boxes = {
        0: [([0, 0], [2, 4]), ([4, 4], [2, 2])],
        1: [([0, 4], [4, 2]), ([6, 0], [0, 6])],
        2: [([2, 0], [4, 4])],
    }
    mine = [shard_of(full, *one, rank) for one in boxes.get(rank, [])]
    st = init_from_local_shards(mine, 6, 6, process_group=pool_group(4))
    check_shards(st, full)
    assert isinstance(st.sharding_spec(), EnumerableShardingSpec)
    assert torch.equal(st.full_tensor(), full)
    check_shards(st.resharded(chunk(1)), full)


def scalars_and_nothing(rank: int) -> None:
    one = [Shard(torch.tensor(3.0), box([], [], rank))] if rank == 2 else []
    st = init_from_local_shards(one, [], process_group=pool_group(4))
    assert st.full_tensor().item() == 3
    none = Shard(torch.zeros(0, 4), box([0, 0], [0, 4], rank))
    check_shards(
        init_from_local_shards([none], 0, 4, process_group=pool_group(4)), torch.zeros(0, 4)
    )


def test_B62_metadata_of_all_ranks_is_gathered(pool: Pool) -> None:
    for function in (put_together, any_boxes, scalars_and_nothing):
        pool.run(function, ranks=FOUR)


def test_B62_one_process_needs_no_group() -> None:
    st = init_from_local_shards([shard_of(numbered(4, 2), [0, 0], [4, 2], 0)], 4, 2)
    assert torch.equal(st.local_tensor(), numbered(4, 2))


def kept_padding(rank: int) -> None:
    full = numbered(10, 4)
    st = shard_tensor(full, chunk(0), process_group=pool_group(4))
    for made in (
        st,
        st.resharded(chunk(1, [3, 2, 1, 0])),
        st.resharded(chunk(1)).resharded(chunk(0)),
    ):
        (part,) = made._content.parts
        assert part.untyped_storage().nbytes() == part.nbytes


def test_D30_shards_keep_no_padding(pool: Pool) -> None:
    pool.run(kept_padding, ranks=FOUR)


def sized(*sizes: int, **options: Any) -> Callable[[int], list[Shard]]:
    """One shard of this rank, beginning at row 5 x rank unless said otherwise."""
    at = options.pop("at", None)

    def made(rank: int) -> list[Shard]:
        offsets = at or [5 * rank, *(0 for _ in sizes[1:])]
        return [Shard(torch.zeros(*sizes, **options), box(offsets, sizes, rank))]

    return made


def sparse(rank: int) -> list[Any]:
    tensor = torch.zeros(5, 10).to_sparse()
    return [Shard(tensor, box([5 * rank, 0], [5, 10], rank))]


ODD: dict[str, dict[str, Any]] = {
    "dtype": {"shards": sized(5, 10, dtype=torch.int64)},
    "gradients": {"shards": sized(5, 10, requires_grad=True)},
    "ndim": {"shards": sized(5)},
    "global size": {"size": (20, 11)},
    "unknown size": {"size": (None,)},
    "no shard": {"shards": lambda rank: []},
    "overlap": {"shards": sized(5, 10, at=[9, 0])},
    "beyond": {"shards": sized(6, 10, at=[15, 0])},
    "a word as size": {"size": ("20", 10)},
    "no size": {"size": (-20, 10)},
    "tensors": {"shards": lambda rank: [torch.zeros(5, 10)]},
    "None": {"shards": lambda rank: None},
    "generator": {"shards": lambda rank: (shard for shard in sized(5, 10)(rank))},
    "mixed": {"shards": lambda rank: sized(5, 10)(rank) + sized(5, 10, dtype=torch.int64)(rank)},
    "foreign": {"shards": lambda rank: sized(5, 10, at=[10, 0])(3)},
    "worker": {"shards": lambda rank: [
        Shard(torch.zeros(5, 10), ShardMetadata([10, 0], [5, 10], "worker2/cpu"))
    ]},
    "sparse": {"shards": sparse},
    "rrefs": {"init_rrefs": True},
}  # fmt: skip
"""What rank 2 gives, where all others give five rows of a 20 x 10 tensor."""


def odd_one(rank: int, what: str) -> tuple[str, str]:
    given = {"shards": sized(5, 10), "size": (20, 10), "init_rrefs": False}
    given |= ODD[what] if rank == 2 else {}

    def call() -> None:
        init_from_local_shards(
            given["shards"](rank),  # type: ignore[operator]
            *given["size"],  # type: ignore[misc]
            process_group=pool_group(4),
            init_rrefs=given["init_rrefs"],  # type: ignore[arg-type]
        )

    kind, text = refusal(call)
    put_together(rank)
    return kind, text.removeprefix("on rank 2: ")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("dtype", "ValueError", "Found dtype=float32 on rank:0, and dtype=int64 on rank:2"),
        ("gradients", "ValueError", "Found requires_grad=False on rank:0, and"),
        ("ndim", "ValueError", "Found ndim=2 on rank:0, and ndim=1 on rank:2"),
        ("global size", "ValueError", "Found global_size=[20, 10] on rank:0, and"),
        ("unknown size", "ValueError", "global_size property does not match"),
        ("no shard", "ValueError", "does not match tensor volume 200"),
        ("overlap", "ValueError", "overlap in [9:10, 0:10]"),
        ("beyond", "ValueError", "overlap in"),
        ("a word as size", "TypeError", "should be whole numbers"),
        ("no size", "ValueError", "has a number below 0"),
        ("tensors", "TypeError", "a local shard is of type Tensor: give Shards"),
        ("None", "TypeError", "local_shards is of type NoneType: give a list"),
        ("generator", "TypeError", "local_shards is of type generator: give a list"),
        ("mixed", "ValueError", "the local shards of rank 2 differ in dtype"),
        ("foreign", "ValueError", "a local shard of rank 2 has placement rank:3/cpu"),
        ("worker", "ValueError", "a local shard of rank 2 has placement worker2/cpu"),
        ("sparse", "ValueError", "Only torch.strided layout"),
        ("rrefs", "RuntimeError", "RPC Framework needs to be initialized"),
    ],
)
def test_B63_B64_B65_T4_what_one_rank_gives_wrong_is_the_same_error_on_all(
    pool: Pool, what: str, kind: str, message: str
) -> None:
    ((found, text),) = set(pool.run(odd_one, what, ranks=FOUR))
    assert (found, message in text) == (CLASSES[kind], True), text


CLASSES = {
    "ValueError": "ArgumentError",
    "TypeError": "ArgumentTypeError",
    "RuntimeError": "StateError",
}
"""The class of our errors that is also each builtin."""


def differently_pinned(rank: int) -> tuple[str, str]:
    class Pinned(torch.Tensor):
        """This host may have no pinned memory."""

        def is_pinned(self) -> bool:  # type: ignore[override]
            return rank == 1

    tensor = torch.zeros(5, 10).as_subclass(Pinned)
    shard = Shard(tensor, box([5 * rank, 0], [5, 10], rank))
    return refusal(lambda: init_from_local_shards([shard], 20, 10, process_group=pool_group(4)))


def test_B63_pinned_on_one_rank_only(pool: Pool) -> None:
    ((kind, text),) = set(pool.run(differently_pinned, ranks=FOUR))
    assert kind == "ArgumentError"
    assert "Found pin_memory=False on rank:0, and pin_memory=True on rank:1" in text


def wrong_everywhere(rank: int) -> None:
    group = pool_group(4)
    with pytest.raises(ValueError, match="have no local shards on all ranks"):
        init_from_local_shards([], 20, 10, process_group=group)
    with pytest.raises(ValueError, match="have no local shards on all ranks"):
        init_from_local_shards([], None, process_group=group)
    overlapping = shard_of(numbered(20, 10), [4 * rank, 0], [5, 10], rank)
    with pytest.raises(ValueError, match="overlap"):
        init_from_local_shards([overlapping], 17, 10, process_group=group)
    apart = shard_of(numbered(24, 10), [6 * rank, 0], [5, 10], rank)
    with pytest.raises(ValueError, match="does not match tensor volume 240"):
        init_from_local_shards([apart], 24, 10, process_group=group)
    for size in ([19, 10], [21, 10], [20], [20, 10, 1]):
        with pytest.raises(ValueError, match="tensor"):
            init_from_local_shards(sized(5, 10)(rank), size, process_group=group)


def test_B62_B64_B65_B66_what_is_wrong_on_all_ranks(pool: Pool) -> None:
    pool.run(wrong_everywhere, ranks=FOUR)


def stacked(rank: int) -> None:
    """Rows one after the other, whatever the offsets say; rank 1 has none, rank 3 two shards."""
    full, group = numbered(12, 3), pool_group(4)
    starts = {0: [(0, 2)], 1: [(2, 0)], 2: [(2, 5)], 3: [(7, 1), (8, 4)]}[rank]
    for told in (0, 1, 5):
        mine = [
            Shard(full[at : at + rows].clone(), box([told * at, 0], [rows, 3], rank))
            for at, rows in starts
        ]
        st = init_from_local_shards(mine, None, process_group=group)
        check_shards(st, full)
        offsets = [shard.metadata.shard_offsets[0] for shard in st.local_shards()]
        assert offsets == [at for at, _ in starts]
    empty = Shard(torch.zeros(0, 3), box([0, 0], [0, 3], rank))
    assert init_from_local_shards([empty], None, process_group=group).shape == (0, 3)
    one_dim = Shard(torch.full((rank,), float(rank)), box([0], [rank], rank))
    whole = init_from_local_shards([one_dim], None, process_group=group).full_tensor()
    assert whole.tolist() == [1, 2, 2, 3, 3, 3]
    ragged = Shard(torch.zeros(2, 3 + rank), box([0, 0], [2, 3 + rank], rank))
    with pytest.raises(ValueError, match="tensor"):
        init_from_local_shards([ragged], None, process_group=group)


def test_B66_without_a_size_rows_are_stacked_in_the_order_of_ranks(pool: Pool) -> None:
    pool.run(stacked, ranks=FOUR)


def stated(*shards: ShardMetadata, size: list[int], **common: Any) -> ShardedTensorMetadata:
    """Metadata of all shards of a tensor."""
    properties = TensorProperties(common.pop("dtype", torch.float64), **common)
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def from_metadata(*given: Any, **options: Any) -> ShardedTensor:
    return ShardedTensor._init_from_local_shards_and_global_metadata(*given, **options)


def by_metadata(rank: int) -> None:
    full, group = numbered(20, 10), pool_group(4)
    rows = [box([5 * other, 0], [5, 10], other) for other in FOUR]
    view = Shard(full[5 * rank : 5 * rank + 5], rows[rank])
    st = from_metadata([view], stated(*rows, size=[20, 10]), process_group=group)
    check_shards(st, full)
    assert st.sharding_spec() == chunk(0)
    assert torch.equal(st.full_tensor(), full)
    listed = EnumerableShardingSpec(rows)
    again = from_metadata(
        [view], stated(*rows, size=[20, 10]), process_group=group, sharding_spec=listed
    )
    assert again.sharding_spec() is listed
    nothing = [box([0, 0], [0, 10], other) for other in FOUR]
    none = Shard(torch.zeros(0, 10, dtype=torch.float64), nothing[rank])
    check_shards(from_metadata([none], stated(*nothing, size=[0, 10]), group), numbered(0, 10))
    # Each rank may see its own shard as all there is; the others have nothing then.
    seen = [box([0, 0], [5, 10] if other == rank else [0, 10], other) for other in FOUR]
    own = Shard(view.tensor, seen[rank])
    assert torch.equal(
        from_metadata([own], stated(*seen, size=[5, 10]), group).local_tensor(), own.tensor
    )
    both = [box([0, 0], [5, 10], other) for other in FOUR]
    with pytest.raises(ValueError, match="overlap"):
        from_metadata([Shard(view.tensor, both[rank])], stated(*both, size=[5, 10]), group)


def test_B67_from_local_shards_and_global_metadata(pool: Pool) -> None:
    pool.run(by_metadata, ranks=FOUR)


HALF, REST = box([0, 0], [2, 4], 0), box([2, 0], [2, 4], 1)


def local(**options: Any) -> list[Shard]:
    return [Shard(torch.zeros(2, 4, **{"dtype": torch.float64, **options}), HALF)]


BAD: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], type[Exception], str]] = {
    "too few": (list, {}, RuntimeError, r"local shards \(0\) does not match .* \(1\) on rank"),
    "too many": (lambda: local() * 3, {}, RuntimeError, r"local shards \(3\) does not match"),
    "dtype": (
        lambda: local(dtype=torch.int32), {}, ValueError,
        r"dtype property .* torch.int32 .* torch.float64",
    ),
    "gradients": (
        lambda: local(requires_grad=True), {}, ValueError,
        r"requires_grad property .* True .* False",
    ),
    "pinned": (local, {"pin_memory": True}, ValueError, r"pin_memory property .* False .* True"),
    "layout": (local, {"layout": torch.sparse_coo}, ValueError, "Only torch.strided layout"),
    "sparse": (
        lambda: [Shard(torch.zeros(2, 4, dtype=torch.float64).to_sparse(), HALF)], {}, ValueError,
        r"layout property .* torch.sparse_coo .* torch.strided",
    ),
    "format": (
        local, {"memory_format": torch.channels_last}, ValueError, "Only torch.contiguous_format",
    ),
    "not contiguous": (
        lambda: [Shard(torch.zeros(4, 2, dtype=torch.float64).t(), HALF)], {}, ValueError,
        r"not contiguous.*call contiguous\(\)",
    ),
    "size": (
        lambda: [Shard(torch.zeros(2, 3), box([0, 0], [2, 3], 0))], {}, ValueError,
        r"\(2, 3\).* does not match with .*\(2, 4\)",
    ),
    "device": (
        lambda: [Shard(torch.zeros(2, 4, device="meta"), HALF.on(torch.device("meta")))],
        {}, ValueError, "rank:0/meta.* does not match with .*rank:0/cpu",
    ),
    "no shard": (lambda: [torch.zeros(2, 4)], {}, TypeError, "is of type Tensor: give Shards"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_B67_each_mistake_has_its_own_message(what: str) -> None:
    """Nobody communicates, so no process group is needed."""
    shards, common, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        from_metadata(shards(), stated(HALF, REST, size=[4, 4], **common))


def test_B67_metadata_that_is_no_tensor() -> None:
    st = from_metadata(local(), stated(HALF, REST, size=[4, 4]))
    assert torch.equal(st.local_tensor(), torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="does not match tensor volume 20"):
        from_metadata(local(), stated(HALF, REST, size=[5, 4]))
    with pytest.raises(ValueError, match="exceeds tensor dim 0"):
        from_metadata(local(), stated(HALF, REST, size=[3, 4]))
    with pytest.raises(ValueError, match="must not be empty"):
        from_metadata([], stated(size=[0]))
    with pytest.raises(RuntimeError, match=r"RPC Framework .* init_rrefs=True"):
        from_metadata(local(), stated(HALF, REST, size=[4, 4]), init_rrefs=True)


def test_B59_B60_local_tensors_that_cannot_be_a_shard() -> None:
    """More on this is in test_resharding.py."""
    make, spec = ShardedTensor._init_from_local_tensor, chunk(0, [0])
    with pytest.raises(TypeError, match="local_tensor is of type list: give a tensor"):
        make([1.0], spec, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Only torch.strided layout"):
        make(torch.zeros(2, 4).to_sparse(), spec, 2, 4)
    with pytest.raises(ValueError, match=r"not a contiguous Tensor. .* strides are \(1, 4\)"):
        make(torch.zeros(2, 4).t(), spec, 4, 2)
    with pytest.raises(ValueError, match=r"rank 0 has \[2, 4\] and the spec gives it \[\[3, 4\]\]"):
        make(torch.zeros(2, 4), spec, 3, 4)
    with pytest.raises(RuntimeError, match=r"RPC Framework .* init_rrefs=True"):
        make(torch.zeros(2, 4), spec, 2, 4, init_rrefs=True)


def in_a_sub_group(rank: int) -> None:
    """Placements name global ranks: 2 and 3, not 0 and 1."""
    group, full = group_of(2, 3), numbered(4, 4)
    at = 2 * (rank - 2)
    own = shard_of(full, [at, 0], [2, 4], rank)
    check_shards(init_from_local_shards([own], 4, 4, process_group=group), full)
    in_the_group = shard_of(full, [at, 0], [2, 4], rank - 2)
    with pytest.raises(ValueError, match=r"on rank 2: .* of rank 2 has placement rank:0/cpu"):
        init_from_local_shards([in_the_group], 4, 4, process_group=group)
    rows = [box([0, 0], [2, 4], 2), box([2, 0], [2, 4], 3)]
    check_shards(from_metadata([own], stated(*rows, size=[4, 4]), group), full)
    rows[3 - rank] = box([4 - at - 2, 0], [2, 4], 0)
    with pytest.raises(ValueError, match=r"Global rank 0 does not exist .* group: \[2, 3\]"):
        from_metadata([own], stated(*rows, size=[4, 4]), group)
    made = ShardedTensor._init_from_local_tensor(
        own.tensor, chunk(0, [2, 3]), 4, 4, process_group=group
    )
    check_shards(made, full)


def test_B68_sub_groups_count_in_global_ranks(pool: Pool) -> None:
    pool.run(in_a_sub_group, ranks=[2, 3])
