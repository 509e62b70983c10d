"""Specs against definitions: torch.chunk, sets of indices, and each other, on random cuts."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reshard.layout import coverage
from reshard.sharded.specs import ShardMetadata, TensorProperties
from reshard.sharded.splits import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    infer_sharding_spec,
)
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(50, 200), derandomize=True, deadline=None)
PROPERTIES = TensorProperties(torch.float32)
PLACEMENTS = st.lists(st.integers(0, 5).map("rank:{}/cpu".format), min_size=1, max_size=6)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
Size = tuple[int, ...]
Point = tuple[int, ...]


def points(shard: ShardMetadata) -> set[Point]:
    return set(itertools.product(*map(range, shard.box.start, shard.box.stop)))


def ranks(num: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(num)]


@st.composite
def chunked(draw: st.DrawFn) -> tuple[ChunkShardingSpec, Size]:
    size = draw(SIZES)
    dim = draw(st.integers(-len(size), len(size) - 1))
    return ChunkShardingSpec(dim, draw(PLACEMENTS)), size


@st.composite
def parts(draw: st.DrawFn) -> tuple[Size, list[ShardMetadata]]:
    """A tensor cut by straight cuts in random places and dims, into at most 64 parts."""
    size = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    found = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 6))):
        dim = draw(st.integers(0, len(size) - 1))
        cuts = [draw(st.integers(lo[dim], hi[dim])) for lo, hi in found]
        for (lo, hi), at in zip(tuple(found), cuts, strict=True):
            found.remove((lo, hi))
            found.append((lo, (*hi[:dim], at, *hi[dim + 1 :])))
            found.append(((*lo[:dim], at, *lo[dim + 1 :]), hi))
    shards = [ShardMetadata(lo, [b - a for a, b in zip(lo, hi, strict=True)]) for lo, hi in found]
    return size, draw(st.permutations(shards))


@st.composite
def boxes(draw: st.DrawFn) -> list[ShardMetadata]:
    """Any few boxes of 0 to 3 dims, or parts of a tensor and perhaps one box more."""
    ndim = draw(st.integers(0, 3))
    shards = []
    if ndim and draw(st.booleans()):
        size, shards = draw(parts())
        ndim = len(size)
    numbers = st.lists(st.integers(0, 6), min_size=ndim, max_size=ndim)
    more = st.lists(st.builds(ShardMetadata, numbers, numbers), max_size=1 if shards else 5)
    return draw(st.permutations(shards + draw(more)))


@st.composite
def splits(draw: st.DrawFn, size: Size) -> list[int | list[int]]:
    """A way to cut each dim: a number of chunks, or sizes that add up."""

    def split(length: int) -> int | list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
        lengths = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
        return draw(st.sampled_from([len(lengths), lengths]))

    return [split(length) for length in size]


@EXAMPLES
@given(chunked())
def test_B25_chunks_hold_what_torch_chunk_gives(case: tuple[ChunkShardingSpec, Size]) -> None:
    spec, size = case
    whole = torch.arange(math.prod(size)).reshape(size)
    expected = list(whole.chunk(len(spec.placements), spec.dim))
    nothing = whole.narrow(spec.dim, 0, 0)
    expected += [nothing] * (len(spec.placements) - len(expected))
    metadata = spec.build_metadata(torch.Size(size), PROPERTIES)
    for shard, placement, chunk in zip(
        metadata.shards_metadata, spec.placements, expected, strict=True
    ):
        found = whole
        for dim, (offset, length) in enumerate(
            zip(shard.shard_offsets, shard.shard_sizes, strict=True)
        ):
            found = found.narrow(dim, offset, length)
        assert torch.equal(found, chunk)
        assert shard.placement == placement


@EXAMPLES
@given(chunked())
def test_D12_normalized_specs_give_the_same_shards(case: tuple[ChunkShardingSpec, Size]) -> None:
    spec, size = case
    same = spec.normalized(len(size))
    assert same.dim >= 0
    assert same.normalized(len(size)) is same
    assert same.build_metadata(torch.Size(size), PROPERTIES) == spec.build_metadata(
        torch.Size(size), PROPERTIES
    )


@EXAMPLES
@given(chunked(), st.randoms(use_true_random=False))
def test_B85_inferred_specs_give_the_shards_they_come_from(
    case: tuple[ChunkShardingSpec, Size], rng
) -> None:
    spec, size = case
    metadata = spec.build_metadata(torch.Size(size), PROPERTIES)
    found = infer_sharding_spec(metadata.shards_metadata)
    assert isinstance(found, ChunkShardingSpec)
    assert found.build_metadata(torch.Size(size), PROPERTIES) == metadata
    if len(spec.placements) > 1 and size[spec.dim] > 0:  # otherwise another dim is as good
        assert found == spec.normalized(len(size))
    shuffled = rng.sample(metadata.shards_metadata, len(metadata.shards_metadata))
    again = infer_sharding_spec(shuffled).build_metadata(torch.Size(size), PROPERTIES)
    assert set(again.shards_metadata) == set(metadata.shards_metadata)


@EXAMPLES
@given(parts())
def test_B85_any_parts_are_inferred(case: tuple[Size, list[ShardMetadata]]) -> None:
    size, bare = case
    shards = [
        ShardMetadata(shard.shard_offsets, shard.shard_sizes, place)
        for shard, place in zip(bare, ranks(len(bare)), strict=True)
    ]
    found = infer_sharding_spec(shards).build_metadata(torch.Size(size), PROPERTIES)
    assert sorted(found.shards_metadata, key=lambda shard: shard.rank) == shards


@pytest.mark.parametrize(("rounds", "pairs"), [(32, 1 << 20), (0, 1), (1, 3)])
@EXAMPLES
@given(shards=boxes())
def test_B86_overlap_is_that_of_sets_of_indices(
    rounds: int, pairs: int, shards: list[ShardMetadata]
) -> None:
    assume(shards)
    overlap = any(points(a) & points(b) for a, b in itertools.combinations(shards, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "MAX_CUT_ROUNDS", rounds)
        patch.setattr(coverage, "PAIRS_AT_ONCE", pairs)
        if not overlap:
            assert EnumerableShardingSpec(shards).shards == tuple(shards)
            return
        with pytest.raises(ValueError, match="overlap in") as caught:
            EnumerableShardingSpec(shards)
    first, second, common = re.findall(r"\[[^]]*\]", str(caught.value))
    pairs_named = [
        (a, b)
        for a, b in itertools.permutations(shards, 2)
        if (str(a.box), str(b.box)) == (first, second)
    ]
    assert pairs_named
    assert all(points(a) & points(b) for a, b in pairs_named)
    assert all(str(a.box & b.box) == common for a, b in pairs_named)


@pytest.mark.parametrize("few", [32, 1])
@EXAMPLES
@given(case=parts(), dropped=st.sets(st.integers(0, 63), max_size=3))
def test_B82_gaps_are_those_of_sets_of_indices(
    few: int, case: tuple[Size, list[ShardMetadata]], dropped: set[int]
) -> None:
    size, shards = case
    kept = [shard for at, shard in enumerate(shards) if at not in dropped]
    whole = points(ShardMetadata([0] * len(size), size))
    missing = whole - set().union(*map(points, kept))
    assume(kept)
    spec = EnumerableShardingSpec(kept)
    if not missing:
        assert spec.build_metadata(torch.Size(size), PROPERTIES).shards_metadata == tuple(kept)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "FEW_BOXES", few)
        with pytest.raises(ValueError, match="do not cover the entire tensor") as caught:
            spec.build_metadata(torch.Size(size), PROPERTIES)
    spans = [span.split(":") for span in str(caught.value).split("[")[-1].rstrip("]").split(", ")]
    named = set(itertools.product(*(range(int(low), int(high)) for low, high in spans)))
    assert named
    assert named <= missing


@EXAMPLES
@given(SIZES.flatmap(lambda size: st.tuples(st.just(size), splits(size))))
def test_a_grid_is_what_listing_its_cells_gives(case: tuple[Size, list[int | list[int]]]) -> None:
    size, cuts = case
    counts = [cut if isinstance(cut, int) else len(cut) for cut in cuts]
    spec = GridShardingSpec(cuts, ranks(math.prod(counts)))
    metadata = spec.build_metadata(torch.Size(size), PROPERTIES)
    listed = EnumerableShardingSpec(metadata.shards_metadata)
    assert listed.build_metadata(torch.Size(size), PROPERTIES) == metadata
    whole = torch.arange(math.prod(size)).reshape(size)
    cells = [whole]
    for dim, cut in enumerate(cuts):
        lengths = cut if isinstance(cut, list) else None
        step = -(-size[dim] // len(lengths or range(cut)))
        lengths = lengths or [min(step, max(size[dim] - step * i, 0)) for i in range(cut)]
        cells = [part for cell in cells for part in cell.split(lengths, dim)]
    for shard, cell in zip(metadata.shards_metadata, cells, strict=True):
        assert shard.shard_sizes == tuple(cell.shape)
        assert torch.equal(whole[tuple(map(slice, shard.box.start, shard.box.stop))], cell)


@EXAMPLES
@given(SIZES, st.data())
def test_parts_are_a_grid_that_cuts_one_dim(size: Size, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(size) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, size[dim]), max_size=3)))
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, size[dim]])]
    places = ranks(len(lengths))
    grid = GridShardingSpec([lengths if d == dim else 1 for d in range(len(size))], places)
    ragged = RaggedShardingSpec(dim - len(size), lengths, places)
    expected = grid.build_metadata(torch.Size(size), PROPERTIES)
    assert ragged.build_metadata(torch.Size(size), PROPERTIES) == expected
