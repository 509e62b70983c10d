"""Sharding specs as documented: which shards they give, which values they are, what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from dataclasses import FrozenInstanceError
from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reshard.sharded.specs import (
    DevicePlacementSpec,
    Placement,
    PlacementSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from reshard.sharded.splits import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    infer_sharding_spec,
)

PROPERTIES = TensorProperties(torch.float32)
Shape = tuple[int, ...]


def ranks(*numbers: int) -> list[str]:
    return [f"rank:{number}/cpu" for number in numbers]


def shards_of(spec: ShardingSpec, *size: int) -> tuple[ShardMetadata, ...]:
    metadata = spec.build_metadata(torch.Size(size), PROPERTIES)
    assert metadata.size == torch.Size(size)
    assert metadata.tensor_properties is PROPERTIES
    return metadata.shards_metadata


def drawn(spec: ShardingSpec, *size: int) -> list[str]:
    return [f"{shard.box} on {shard.rank}" for shard in shards_of(spec, *size)]


def listed(*boxes: tuple[Shape, Shape]) -> list[ShardMetadata]:
    """Shards of these offsets and sizes, on rank 0, 1, 2 ..."""
    return [ShardMetadata(*box, f"rank:{rank}/cpu") for rank, box in enumerate(boxes)]


def blocks(rows: int, columns: int) -> list[ShardMetadata]:
    return listed(*(((2 * row, 3 * col), (2, 3)) for row in range(rows) for col in range(columns)))


GRID_2X2 = listed(((0, 0), (2, 4)), ((0, 4), (4, 2)), ((2, 0), (4, 4)), ((4, 4), (2, 2)))
PINWHEEL = listed(
    ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 2)), ((1, 1), (1, 1))
)
"""Five boxes of a 3 x 3 tensor that no straight cut parts."""


def test_B25_chunks_are_those_of_torch_chunk() -> None:
    expected = ["[0:3, 0:2] on 0", "[3:6, 0:2] on 1", "[6:9, 0:2] on 2", "[9:10, 0:2] on 3"]
    assert drawn(ChunkShardingSpec(0, ranks(0, 1, 2, 3)), 10, 2) == expected
    assert drawn(ChunkShardingSpec(-2, ranks(0, 1, 2, 3)), 10, 2) == expected


def test_B15_the_last_chunk_may_be_empty() -> None:
    shards = shards_of(ChunkShardingSpec(0, ranks(0, 1, 2, 3)), 9, 12)
    assert [shard.shard_sizes for shard in shards] == [(3, 12), (3, 12), (3, 12), (0, 12)]
    assert shards[3].shard_offsets == (9, 0)


def test_B26_more_placements_than_rows() -> None:
    spec = ChunkShardingSpec(0, ranks(0, 1, 2, 3))
    expected = ["[0:1, 0:5] on 0", "[1:2, 0:5] on 1", "[2:2, 0:5] on 2", "[2:2, 0:5] on 3"]
    assert drawn(spec, 2, 5) == expected
    EnumerableShardingSpec(shards_of(spec, 2, 5)).build_metadata(torch.Size([2, 5]), PROPERTIES)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (5, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (6, [(0, 2), (2, 2), (4, 2), (6, 0)]),
        (1, [(0, 1), (1, 0), (1, 0), (1, 0)]),
        (0, [(0, 0), (0, 0), (0, 0), (0, 0)]),
    ],
)
def test_D8_no_chunk_begins_beyond_the_end(rows: int, expected: list[tuple[int, int]]) -> None:
    shards = shards_of(ChunkShardingSpec(0, ranks(0, 1, 2, 3)), rows, 3)
    assert [(shard.shard_offsets[0], shard.shard_sizes[0]) for shard in shards] == expected


def test_B39_named_dims_are_refused() -> None:
    with pytest.raises(NotImplementedError, match='does not support named dimension "rows"'):
        ChunkShardingSpec("rows", ranks(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [2, 3, 4, -3, -4, -5])
@pytest.mark.parametrize("make", [ChunkShardingSpec, lambda d, p: RaggedShardingSpec(d, [4], p)])
def test_B40_dim_out_of_range(dim: int, make) -> None:
    with pytest.raises(ValueError, match=rf"Invalid sharding dim {dim} .* 2 dims: .* -2 to 1"):
        shards_of(make(dim, ranks(0)), 4, 4)


def test_B40_a_scalar_has_no_dim_to_cut() -> None:
    with pytest.raises(ValueError, match=r"Invalid sharding dim 0 .* 0 dims: a scalar"):
        shards_of(ChunkShardingSpec(0, ranks(0)))


@pytest.mark.parametrize(
    ("text", "rank", "worker", "device"),
    [
        ("rank:0/cpu", 0, None, "cpu"),
        ("rank:3/cuda:1", 3, None, "cuda:1"),
        ("rank:2", 2, None, "cpu"),
        ("worker0/cpu", None, "worker0", "cpu"),
        ("cuda:1", None, None, "cuda:1"),
        (torch.device("cuda:1"), None, None, "cuda:1"),
        (Placement("rank:1/cpu"), 1, None, "cpu"),
    ],
)
def test_B77_placements(text, rank: int | None, worker: str | None, device: str) -> None:
    (found,) = ChunkShardingSpec(0, [text]).placements
    assert (found.rank(), found.worker_name()) == (rank, worker)
    assert found.device() == torch.device(device)
    assert DevicePlacementSpec(text).device == found
    assert isinstance(DevicePlacementSpec(text), PlacementSpec)
    assert hash(DevicePlacementSpec(text)) == hash(DevicePlacementSpec(found))


@pytest.mark.parametrize("text", ["rank:x/cpu", "a/b/c", "", "/cpu"])
def test_B77_texts_that_are_no_placement(text: str) -> None:
    for make in (DevicePlacementSpec, lambda text: ChunkShardingSpec(0, [text])):
        with pytest.raises(ValueError, match="Could not parse remote_device"):
            make(text)
    with pytest.raises(RuntimeError, match="device"):
        DevicePlacementSpec("rank:0/no_such_device")


@pytest.mark.parametrize("dim", [None, {}, 1.0, True, False, [0]])
def test_B78_dim_is_an_integer(dim: object) -> None:
    with pytest.raises(ValueError, match="needs to be an integer"):
        ChunkShardingSpec(dim, ranks(0))  # type: ignore[arg-type]


def test_B79_negative_dims_count_from_the_back() -> None:
    assert ChunkShardingSpec(-1, ranks(0)).dim == -1
    assert drawn(ChunkShardingSpec(-1, ranks(0, 1)), 2, 4) == ["[0:2, 0:2] on 0", "[0:2, 2:4] on 1"]


def test_D12_normalized_specs_compare_equal() -> None:
    negative, positive = ChunkShardingSpec(-1, ranks(0, 1)), ChunkShardingSpec(1, ranks(0, 1))
    assert negative != positive
    assert negative.normalized(2) == positive.normalized(2) == positive
    assert hash(negative.normalized(2)) == hash(positive)
    assert negative.normalized(3).dim == 2
    assert RaggedShardingSpec(-1, [2], ranks(0)).normalized(2).dim == 1
    assert ChunkShardingSpec(np.int64(1), ranks(0, 1)) == positive


@pytest.mark.parametrize(
    ("shards", "size"),
    [
        (listed(((0, 0), (5, 5)), ((5, 0), (5, 5))), (10, 5)),
        (listed(((0, 0), (3, 3)), ((0, 3), (3, 3)), ((3, 0), (3, 3)), ((3, 3), (3, 3))), (6, 6)),
        (GRID_2X2, (6, 6)),
        (PINWHEEL, (3, 3)),
        (listed(((), ())), ()),
        (listed(((0, 0), (0, 4)), ((0, 0), (0, 0))), (0, 4)),
    ],
)
def test_B80_listed_shards_that_make_up_a_tensor(shards: list[ShardMetadata], size: Shape) -> None:
    assert shards_of(EnumerableShardingSpec(shards), *size) == tuple(shards)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardMetadata([0], [1, 1]), "same number of elements"),
        (lambda: ShardMetadata([-1], [1]), "shard_offsets should be >=0"),
        (lambda: ShardMetadata([0], [-1]), "shard_sizes should be >= 0"),
        (lambda: EnumerableShardingSpec([]), "Empty shard list provided"),
        (
            lambda: EnumerableShardingSpec(listed(((0, 0), (1, 1)), ((1,), (1,)))),
            "has 1 dims and .* has 2",
        ),
        (
            lambda: EnumerableShardingSpec(listed(((0, 0), (3, 3)), ((2, 0), (3, 3)))),
            r"\[0:3, 0:3\] on rank:0/cpu and \[2:5, 0:3\] on rank:1/cpu overlap in \[2:3, 0:3\]",
        ),
    ],
)
def test_B81_shards_that_cannot_be(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((4,), r"Rank of tensor is 1, but shards rank is 2"),
        ((5, 6), r"exceeds tensor dim 0: it ends at 6 and the dim has 5"),
        ((6, 5), r"exceeds tensor dim 1: it ends at 6 and the dim has 5"),
        (
            (7, 6),
            r"36 elements, .* match tensor volume 42 .* entire tensor, .* \[6:7, 0:6\]$",
        ),
    ],
)
def test_B82_shards_that_do_not_fit_a_tensor(size: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        shards_of(EnumerableShardingSpec(GRID_2X2), *size)
    assert "\n" not in str(caught.value)


def test_B82_a_gap_inside_many_shards_is_named() -> None:
    shards = blocks(20, 20)
    missing = shards.pop(207)
    with pytest.raises(ValueError, match="add a shard for ") as caught:
        shards_of(EnumerableShardingSpec(shards), 40, 60)
    assert str(caught.value).endswith(str(missing.box))


def test_B83_split_sizes() -> None:
    assert [get_split_size(size, 4) for size in (0, 1, 4, 5, 8, 10)] == [0, 1, 1, 2, 2, 3]
    assert [get_chunked_dim_size(10, 3, idx) for idx in range(6)] == [3, 3, 3, 1, 0, 0]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_B84_chunks_follow_the_placements(order: tuple[int, ...]) -> None:
    spec = ChunkShardingSpec(0, ranks(*order))
    for rank in range(4):
        at = order.index(rank)
        assert get_chunk_sharding_params(10, 4, spec, rank) == (3 * at, 3 if at < 3 else 1)


def test_D9_chunks_of_some_ranks_only() -> None:
    spec = ChunkShardingSpec(0, ranks(3, 1, 3))
    assert drawn(spec, 7) == ["[0:3] on 3", "[3:6] on 1", "[6:7] on 3"]
    assert get_chunk_sharding_params(7, 4, spec, 1) == (3, 3)
    with pytest.raises(ValueError, match=r'rank 0 of 4 holds 0 chunks .* "rank:3/cpu, rank:1/cpu'):
        get_chunk_sharding_params(7, 4, spec, 0)
    with pytest.raises(ValueError, match="rank 3 of 4 holds 2 chunks"):
        get_chunk_sharding_params(7, 4, spec, 3)


@pytest.mark.parametrize("dim", range(5))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize("length", [4, 8, 10, 5])
def test_B85_chunk_specs_are_inferred(dim: int, order: tuple[int, ...], length: int) -> None:
    spec = ChunkShardingSpec(dim, ranks(*order))
    size = [3] * 5
    size[dim] = length
    shards = shards_of(spec, *size)
    assert infer_sharding_spec(shards) == spec
    by_rank = sorted(shards, key=lambda shard: shard.rank)
    assert infer_sharding_spec(by_rank) == spec


@pytest.mark.parametrize(
    "shards",
    [
        GRID_2X2,
        PINWHEEL,
        listed(((0,), (2,)), ((2,), (3,))),  # the longer part comes last
        listed(((0,), (3,)), ((3,), (1,)), ((4,), (3,))),
        listed(((0,), (2,)), ((4,), (2,))),  # a gap
        listed(((0, 0), (2, 4)), ((2, 0), (2, 3))),  # narrower
        listed(((1, 0), (2, 4)), ((3, 0), (2, 4))),  # begins late
        listed(((0,), (0,)), ((0,), (4,))),  # the empty one first
        [ShardMetadata([0], [2]), ShardMetadata([2], [2])],  # nowhere
        listed(((), ())),
    ],
)
def test_B85_other_shards_are_listed(shards: list[ShardMetadata]) -> None:
    assert infer_sharding_spec(shards) == EnumerableShardingSpec(shards)


@pytest.mark.parametrize("size", [(5, 3), (1, 3), (0, 3), (0, 0), (3, 0)])
@pytest.mark.parametrize("num", [1, 4])
def test_D33_clamped_and_empty_chunks_are_inferred(size: Shape, num: int) -> None:
    spec = ChunkShardingSpec(0, ranks(*range(num)))
    assert infer_sharding_spec(shards_of(spec, *size)) == spec


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_B86_overlap_in_every_dim(ndim: int) -> None:
    first = ((0,) * ndim, (4,) * ndim)
    for dim in range(ndim):
        touching = tuple(4 if d == dim else 0 for d in range(ndim))
        assert EnumerableShardingSpec(listed(first, (touching, (4,) * ndim)))
    with pytest.raises(ValueError, match="overlap in"):
        EnumerableShardingSpec(listed(first, ((3,) * ndim, (4,) * ndim)))
    with pytest.raises(ValueError, match="overlap in"):
        EnumerableShardingSpec(listed(first, ((1,) * ndim, (1,) * ndim)))


def test_B86_no_straight_cut_parts_them() -> None:
    wider = [ShardMetadata([0, 0], [2, 2]), *PINWHEEL[1:]]
    with pytest.raises(ValueError, match=r"overlap in \[1:2, [01]:[12]\]"):
        EnumerableShardingSpec(wider)
    # The long box overlaps the third in sorted order, and not the second.
    long = listed(((0, 0), (9, 1)), ((1, 5), (1, 1)), ((4, 0), (1, 1)))
    with pytest.raises(ValueError, match=r"overlap in \[4:5, 0:1\]"):
        EnumerableShardingSpec(long)
    with pytest.raises(ValueError, match=r"Shards \[\] .* and \[\] .* overlap in \[\]"):
        EnumerableShardingSpec(listed(((), ()), ((), ())))


@pytest.mark.parametrize(("rows", "columns", "seconds"), [(60, 60, 0.1), (142, 141, 0.5)])
def test_B86_many_shards_are_checked_fast(rows: int, columns: int, seconds: float) -> None:
    shards = blocks(rows, columns)
    twice = [*shards, ShardMetadata([3, 4], [1, 1])]

    def cpu_seconds() -> float:
        begin = time.process_time()
        EnumerableShardingSpec(shards)
        with pytest.raises(ValueError, match=r"overlap in \[3:4, 4:5\]"):
            EnumerableShardingSpec(twice)
        return (time.process_time() - begin) / 2

    assert min(cpu_seconds() for _ in range(3)) < seconds


class Diagonal(ShardingSpec):
    """A spec as users write them: 2 x 2 cells, and rank 0 holds the diagonal."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        rows, columns = (size // 2 for size in tensor_sizes)
        shards = [
            ShardMetadata([i * rows, j * columns], [rows, columns], f"rank:{abs(i - j)}/cpu")
            for i, j in product(range(2), repeat=2)
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def test_B87_a_spec_of_the_users() -> None:
    expected = ["[0:2, 0:3] on 0", "[0:2, 3:6] on 1", "[2:4, 0:3] on 1", "[2:4, 3:6] on 0"]
    assert drawn(Diagonal(), 4, 6) == expected
    with pytest.raises(TypeError, match="abstract"):
        ShardingSpec()  # type: ignore[abstract]


def test_B87_a_spec_derived_from_one_of_ours() -> None:
    class Named(ChunkShardingSpec):
        def __init__(self, name: str, num_ranks: int) -> None:
            super().__init__(0, ranks(*range(num_ranks)))
            self.name = name

    spec = Named("rows", 2)
    assert (spec.name, drawn(spec, 4)) == ("rows", ["[0:2] on 0", "[2:4] on 1"])
    with pytest.raises(ValueError, match="needs to be an integer"):
        spec.dim = None


def test_B16_a_spec_may_shard_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unfinished(Diagonal):
        def shard(self, tensor, src_rank=0, process_group=None):
            raise NotImplementedError("to be done")

    with pytest.raises(NotImplementedError, match="to be done"):
        Unfinished().shard(torch.zeros(4, 6))

    def shard_tensors(*given: object) -> dict[str, tuple[object, ...]]:
        return {"tensor": given}

    stand_in = SimpleNamespace(shard_tensors=shard_tensors)
    monkeypatch.setitem(sys.modules, "reshard.sharded.api", stand_in)
    spec, tensor = Diagonal(), torch.zeros(4, 6)
    assert spec.shard(tensor) == ({"tensor": tensor}, {"tensor": spec}, 0, None)
    assert spec.shard(tensor, src_rank=2) == ({"tensor": tensor}, {"tensor": spec}, 2, None)


VALUES = {
    "chunk": lambda: ChunkShardingSpec(0, ranks(0, 1)),
    "listed": lambda: EnumerableShardingSpec(GRID_2X2),
    "ragged": lambda: RaggedShardingSpec(0, [4, 1], ranks(0, 1)),
    "grid": lambda: GridShardingSpec([2, [1, 3]], ranks(0, 1, 2, 3)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_D33_specs_are_values(kind: str) -> None:
    make = VALUES[kind]
    spec = make()
    assert spec == make()
    assert {spec: 1}[make()] == 1
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises((FrozenInstanceError, ValueError)):
        spec.placements = ()
    assert spec == make()
    if not isinstance(spec, EnumerableShardingSpec):
        assert eval(repr(spec)) == spec


def test_D33_specs_keep_their_own_copy() -> None:
    placements, shards, sizes = ranks(0, 1), list(GRID_2X2), [2, 3]
    chunk = ChunkShardingSpec(0, placements)
    spec = EnumerableShardingSpec(shards)
    ragged = EnumerableShardingSpec.from_sizes(0, sizes, placements)
    grid = GridShardingSpec([sizes], placements)
    assert placements == ranks(0, 1)
    for given in (placements, shards, sizes):
        given.clear()
    assert (len(chunk.placements), len(spec.shards)) == (2, 4)
    assert drawn(ragged, 5) == drawn(grid, 5) == ["[0:2] on 0", "[2:5] on 1"]


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([], "placements is empty"),
        ("rank:0/cpu", r'the text "rank:0/cpu": give a list'),
        ([0, 1], "placement 0 is 0, of type int"),
        (["rank:0/cpu", None], "placement 1 is None"),
    ],
)
def test_D33_placements_that_cannot_be(placements, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkShardingSpec(0, placements)
    with pytest.raises(ValueError, match=message):
        GridShardingSpec([2], placements)


def test_D33_chunks_of_workers() -> None:
    shards = shards_of(ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"]), 4)
    assert [str(shard.placement) for shard in shards] == ["worker1/cpu", "worker0/cpu"]
    assert [shard.rank for shard in shards] == [None, None]


def test_D33_shards_without_elements_overlap_nothing() -> None:
    shards = listed(((0, 0), (4, 4)), ((2, 2), (0, 1)), ((1, 1), (2, 0)), ((4, 4), (0, 0)))
    assert shards_of(EnumerableShardingSpec(shards), 4, 4) == tuple(shards)


def test_parts_of_any_sizes() -> None:
    spec = EnumerableShardingSpec.from_sizes(-1, [1, 0, 4], ranks(2, 0, 1))
    assert isinstance(spec, RaggedShardingSpec)
    assert drawn(spec, 2, 5) == ["[0:2, 0:1] on 2", "[0:2, 1:1] on 0", "[0:2, 1:5] on 1"]
    with pytest.raises(ValueError, match=r"dim 1 have 5 indices and .* \[2, 6\] has 6 there"):
        shards_of(spec, 2, 6)
    with pytest.raises(ValueError, match="3 sizes of parts and 2 placements"):
        RaggedShardingSpec(0, [1, 2, 3], ranks(0, 1))
    with pytest.raises(ValueError, match=r"parts of dim 0 are .* give whole numbers >= 0"):
        RaggedShardingSpec(0, [1, -2], ranks(0, 1))


def test_cells_of_a_grid() -> None:
    spec = GridShardingSpec([2, [1, 3], 1], ranks(3, 2, 1, 0))
    assert drawn(spec, 5, 4, 2) == [
        "[0:3, 0:1, 0:2] on 3",
        "[0:3, 1:4, 0:2] on 2",
        "[3:5, 0:1, 0:2] on 1",
        "[3:5, 1:4, 0:2] on 0",
    ]
    assert drawn(GridShardingSpec([], ranks(7))) == ["[] on 7"]


@pytest.mark.parametrize(
    ("splits", "num_placements", "message"),
    [
        ([2, [1, 3]], 3, "a grid of 2 x 2 has 4 cells and there are 3 placements"),
        ([0], 1, "dim 0 is cut into 0 chunks: give 1 or more"),
        ([1, True], 1, "dim 1 is cut into True chunks"),
        ([[]], 1, "a grid of 0 has 0 cells and there are 1 placements"),
        ([[1.5, 2]], 2, "sizes of the parts of dim 0 are"),
    ],
)
def test_grids_that_cannot_be(splits, num_placements: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GridShardingSpec(splits, ranks(*range(num_placements)))


def test_grids_that_do_not_fit_a_tensor() -> None:
    spec = GridShardingSpec([2, [1, 3]], ranks(0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"cuts 2 dims and tensor size \[4\] has 1"):
        shards_of(spec, 4)
    with pytest.raises(ValueError, match=r"dim 1 have 4 indices and tensor size \[4, 5\] has 5"):
        shards_of(spec, 4, 5)
