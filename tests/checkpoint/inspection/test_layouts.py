"""Layouts that are recovered from the boxes of a tensor."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import Box, Layout, Mesh
from reshard.checkpoint.inspection import recovered
from tests.soak import cases


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


@settings(max_examples=cases(120, 5000), deadline=None)
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
