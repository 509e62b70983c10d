"""Boxes against sets of indices: what is common, what is left, what a flat range is made of."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.layout.box import flat_range, row_major
from reshard.layout.coverage import missing_boxes
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(60, 200), derandomize=True, deadline=None)


@st.composite
def boxes(draw, num_dims: int, most: int = 5) -> rs.Box:
    spans = [
        sorted((draw(st.integers(0, most)), draw(st.integers(0, most)))) for _ in range(num_dims)
    ]
    return rs.Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))


def several(count: int) -> st.SearchStrategy[tuple[rs.Box, ...]]:
    """Boxes of the same number of dims, 0 to 3."""
    return st.integers(0, 3).flatmap(lambda dims: st.tuples(*[boxes(dims)] * count))


def points(box: rs.Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.start, box.stop)))


def disjoint_union(parts) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    for part in parts:
        assert part.size, f"{part} is empty"
        assert not found & points(part), f"{part} overlaps another part"
        found |= points(part)
    return found


@EXAMPLES
@given(several(2))
def test_common_and_left(pair: tuple[rs.Box, rs.Box]) -> None:
    a, b = pair
    assert a.size == len(points(a)) == math.prod(a.shape)
    assert points(a & b) == points(b & a) == points(a) & points(b)
    assert (b in a) == (points(b) <= points(a))
    assert disjoint_union(a - b) == points(a) - points(b)


@EXAMPLES
@given(several(4))
def test_missing_boxes(four: tuple[rs.Box, ...]) -> None:
    box, *covers = four
    assert disjoint_union(missing_boxes(box, covers)) == points(box) - set().union(
        *map(points, covers)
    )
    assert missing_boxes(box, [box]) == ()


@EXAMPLES
@given(several(1), st.integers(0, 2), st.integers(-2, 8))
def test_split_and_shift(one: tuple[rs.Box], dim: int, at: int) -> None:
    (box,) = one
    if dim < len(box.start):
        before, after = box.split(dim, at)
        assert points(before) == {p for p in points(box) if p[dim] < at}
        assert points(after) == {p for p in points(box) if p[dim] >= at}
    by = tuple(range(1, len(box.start) + 1))
    back = tuple(-d for d in by)
    assert box.shift(by).shape == box.shape
    assert box.shift(by).shift(back) == box


@EXAMPLES
@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 300), st.integers(0, 300))
def test_flat_range(shape: list[int], one: int, other: int) -> None:
    size = math.prod(shape)
    start, stop = sorted((one % (size + 1), other % (size + 1)))
    everything = np.arange(size).reshape(shape)
    found = list(flat_range(shape, start, stop))
    elements = [
        everything[tuple(map(slice, box.start, box.stop))].reshape(-1).tolist() for box in found
    ]
    assert list(itertools.chain(*elements)) == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (3, 1, 2), (2, 0, 3)])
def test_row_major(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, dtype=np.uint8)
    if array.size:
        assert row_major(shape) == array.strides
    assert rs.Box.whole(shape).shape == shape
    assert rs.Box.whole(shape).size == array.size


@EXAMPLES
@given(several(2))
def test_text_and_copies(pair: tuple[rs.Box, rs.Box]) -> None:
    a, b = pair
    assert eval(repr(a), {"Box": rs.Box}) == a
    assert pickle.loads(pickle.dumps(a)) == a
    assert hash(rs.Box(a.start, a.stop)) == hash(a)
    assert (a == b) == (str(a) == str(b))
    assert sorted([b, a]) == sorted([a, b])


def test_numbers_become_python_ints() -> None:
    box = rs.Box(np.array([1, 2]), np.array([3, 4]))
    assert box == rs.Box((1, 2), (3, 4))
    assert all(type(i) is int for i in (*box.start, *box.stop))
    assert str(rs.Box((), ())) == "[]"
    assert rs.Box((), ()).size == 1


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: rs.Box((3,), (2,)), ("3", "2")),
        (lambda: rs.Box((0, -1), (2, 2)), ("-1", "2", "dim 1")),
        (lambda: rs.Box((0, 0), (1,)), ("2 dims", "1")),
        (lambda: rs.Box((0,), (1,)) & rs.Box((0, 0), (1, 1)), ("1 dims", "2")),
        (lambda: rs.Box((0,), (1,)) - rs.Box((), ()), ("1 dims", "0")),
        (lambda: rs.Box((0,), (5,)).shift((-1,)), ("-1", "4")),
    ],
)
def test_boxes_that_make_no_sense(make, numbers: tuple[str, ...]) -> None:
    with pytest.raises(rs.BoxError) as caught:
        make()
    assert all(number in str(caught.value) for number in numbers), caught.value
