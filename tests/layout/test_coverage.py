"""Overlaps, gaps and repeated parts of boxes, against counting every element."""

from __future__ import annotations

import time
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import Box
from reshard.errors import CoverageError
from reshard.layout import coverage
from reshard.layout.coverage import (
    MAX_REPEATED,
    box_columns,
    first_overlap,
    grid_edges,
    missing_boxes,
    overlapping_pairs,
    repeated_boxes,
)
from tests.soak import cases, within


@st.composite
def boxes_in(draw: st.DrawFn, most: int = 8) -> tuple[Box, list[Box]]:
    """A region of a tensor, and boxes in or beside it, some of them empty."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dims = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    boxes = draw(st.lists(st.tuples(*dims), min_size=1, max_size=most))
    made = [Box(tuple(d[0] for d in box), tuple(d[1] for d in box)) for box in boxes]
    return draw(st.sampled_from([Box.whole(shape), made[0]])), made


def counted(region: Box, boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(region.stop, dtype=int)
    for box in boxes:
        counts[tuple(map(slice, *((box & region).start, (box & region).stop)))] += 1
    return counts[tuple(map(slice, region.start, region.stop))]


def marked(region: Box, boxes: tuple[Box, ...]) -> np.ndarray:
    counts = counted(region, list(boxes))
    assert (counts <= 1).all(), "the boxes overlap"
    assert all(box.size and box in region for box in boxes)
    return counts == 1


@settings(max_examples=cases(70, 10_000), deadline=None)
@given(boxes_in())
def test_every_element_is_counted(drawn: tuple[Box, list[Box]]) -> None:
    region, boxes = drawn
    counts = counted(region, boxes)
    assert (marked(region, missing_boxes(region, boxes)) == (counts == 0)).all()
    assert (marked(region, repeated_boxes(region, boxes)) == (counts > 1)).all()


@settings(max_examples=cases(70, 10_000), deadline=None)
@given(boxes_in(14), st.sampled_from([1, coverage.PAIRS_AT_ONCE]), st.sampled_from([0, 8]))
def test_an_overlap_is_found_where_one_is(
    drawn: tuple[Box, list[Box]], pairs_at_once: int, few: int
) -> None:
    _, boxes = drawn
    overlapping = {(i, j) for (i, a), (j, b) in combinations(enumerate(boxes), 2) if (a & b).size}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "PAIRS_AT_ONCE", pairs_at_once)
        patch.setattr(coverage, "FEW_BOXES", few)
        found = first_overlap(boxes)
    assert found in overlapping if overlapping else found is None
    full = [box for box in boxes if box.size]
    columns = box_columns(full, len(boxes[0].start))
    pairs = {*zip(*map(np.ndarray.tolist, overlapping_pairs(*columns, *columns)), strict=True)}
    assert pairs == {(i, j) for i, a in enumerate(full) for j, b in enumerate(full) if (a & b).size}


def split_at_random(whole: Box, number: int, seed: int) -> list[Box]:
    rng = np.random.default_rng(seed)
    boxes = [whole]
    while len(boxes) < number:
        box = boxes.pop(int(rng.integers(len(boxes))))
        dim = int(rng.integers(len(box.start)))
        middle = (box.start[dim] + box.stop[dim]) // 2
        boxes += [part for part in box.split(dim, middle) if part.size]
    return boxes


@pytest.mark.parametrize("seed", range(4))
def test_of_disjoint_boxes_a_missing_one_is_found(seed: int) -> None:
    whole = Box.whole((1 << 12, 1 << 10, 64))
    boxes = split_at_random(whole, 300, seed)
    Random(seed).shuffle(boxes)
    missing = boxes.pop()
    assert first_overlap(boxes) is None
    gaps = missing_boxes(whole, boxes)
    assert all(gap in missing for gap in gaps)
    assert sum(gap.size for gap in gaps) == missing.size
    assert len(gaps) < 20
    assert missing_boxes(whole, [*boxes, missing]) == repeated_boxes(whole, boxes) == ()
    twice = [*boxes, Box(missing.start, tuple(np.add(missing.start, 1)))]
    assert first_overlap([*boxes, boxes[7]]) == (7, len(boxes))
    assert first_overlap(twice) is None


def test_many_boxes_take_no_time() -> None:
    grid = [Box((8 * i, 4 * j), (8 * i + 8, 4 * j + 4)) for i in range(120) for j in range(120)]
    Random(0).shuffle(grid)
    whole = Box.whole((960, 480))
    rows = [Box((i, 0), (i + 1, 9)) for i in range(4096) if i != 77]
    began = time.process_time()
    assert first_overlap(grid) is None
    assert first_overlap([*grid, Box((9, 9), (10, 10))]) == (
        next(i for i, box in enumerate(grid) if box.start == (8, 8)),
        len(grid),
    )
    assert missing_boxes(whole, grid) == ()
    assert len(grid_edges(grid) or ()) == 2
    missing, *rest = grid
    assert missing_boxes(whole, rest) == (missing,)
    assert missing_boxes(Box.whole((4096, 9)), rows) == (Box((77, 0), (78, 9)),)
    assert time.process_time() - began < within(2.0)


def test_boxes_without_any_order_are_refused() -> None:
    """Whether arbitrary overlapping boxes cover a tensor is NP-hard in the number of dims."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1000, (1000, 5))
    stop = start + 1 + rng.integers(0, 1000 - start)
    boxes = [Box(tuple(a), tuple(b)) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
    whole = Box.whole((1000,) * 5)
    began = time.process_time()
    with pytest.raises(CoverageError, match=r"1000 boxes .* overlap so irregularly"):
        missing_boxes(whole, boxes)
    assert MAX_REPEATED // 2 < len(repeated_boxes(whole, boxes)) <= MAX_REPEATED
    assert missing_boxes(whole, [*boxes, whole]) == ()
    assert time.process_time() - began < within(5.0)
