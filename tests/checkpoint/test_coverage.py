"""Holes and replicas of boxes, against counting every element."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import Box, Layout, Mesh
from reshard.checkpoint.coverage import doubled_in, grid_of, holes_of
from reshard.checkpoint.inspection.layouts import recovered
from tests.soak import cases, within

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    dims = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    boxes = draw(st.lists(st.tuples(*dims), max_size=8))
    return shape, [Box(tuple(d[0] for d in box), tuple(d[1] for d in box)) for box in boxes]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[tuple(map(slice, box.start, box.stop))] += 1
    return counts


def marked(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> np.ndarray:
    counts = counted(shape, list(boxes))
    assert (counts <= 1).all(), "the boxes overlap"
    assert all(box.size for box in boxes)
    return counts == 1


@settings(max_examples=cases(250, 10_000), deadline=None)
@given(boxes_in())
def test_every_element_is_counted(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    counts = counted(shape, boxes)
    assert (marked(shape, holes_of(shape, boxes)) == (counts == 0)).all()
    assert (marked(shape, doubled_in(shape, boxes)) == (counts > 1)).all()


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes of a grid of up to three dims, in any order, each so many times."""
    dims = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=3))
    edges = [np.cumsum([0, *sizes]).tolist() for sizes in dims]
    boxes = [Box((), ())]
    for dim in edges:
        boxes = [
            Box((*box.start, low), (*box.stop, high))
            for box in boxes
            for low, high in pairwise(dim)
        ]
    copies = draw(st.integers(1, 3))
    return tuple(dim[-1] for dim in edges), draw(st.permutations(boxes * copies))


@settings(max_examples=cases(200, 5000), deadline=None)
@given(grids())
def test_a_recovered_layout_has_these_boxes(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    text = recovered(shape, boxes)
    if text == "whole":
        assert boxes == [Box.whole(shape)]
        return
    mesh, _, words = text.partition(": ")
    layout = Layout(Mesh.parse(mesh), words)
    held = [piece.box for rank in layout.ranks for piece in layout.pieces(rank, shape)]
    assert Counter(held) == Counter(boxes)


def test_what_no_layout_gives() -> None:
    assert recovered((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (4, 2))]) == "2 boxes"
    assert recovered((4,), [Box((0,), (2,))]) == "1 boxes"
    assert recovered((4,), [Box((0,), (2,)), Box((2,), (4,)), Box((2,), (4,))]) == "3 boxes"
    assert recovered((4,), []) == "0 boxes"
    assert recovered((0, 3), [Box((0, 0), (0, 3))]) == "whole"
    assert recovered((), [Box((), ())]) == "whole"
    assert recovered((), [Box((), ())] * 4) == "rep=4: ..."


def test_many_boxes_take_no_time() -> None:
    """1024 boxes of a grid, with one missing, and cut another way on one side."""
    grid = [Box((8 * i, 4 * j), (8 * i + 8, 4 * j + 4)) for i in range(32) for j in range(32)]
    Random(0).shuffle(grid)
    began = time.process_time()
    for _ in range(20):
        assert holes_of((256, 128), grid) == ()
        assert len(grid_of(grid) or ()) == 2
    missing = [*grid[1:], Box((0, 0), (1, 1))]
    assert sum(hole.size for hole in holes_of((256, 128), missing)) >= 31
    rows = [Box((i, 0), (i + 1, 9)) for i in range(4096) if i != 77]
    assert holes_of((4096, 9), rows) == (Box((77, 0), (78, 9)),)
    assert time.process_time() - began < within(0.5)
