"""Layouts as documented: who holds what, who owns a box, and when two layouts are the same."""

from __future__ import annotations

import pickle
import re
import time
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import reshard as rs
from tests import moves, oracle, strategies
from tests.cases import Side
from tests.checks import build
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(60, 100), derandomize=True, deadline=None)
Drawn = tuple[Side, tuple[int, ...]]


def boxes(layout: rs.Layout, rank: int, shape: tuple[int, ...]) -> list[str]:
    return [str(piece.box) for piece in layout.pieces(rank, shape)]


@pytest.mark.parametrize(
    ("mesh", "text", "shape", "rank", "expected"),
    [
        ("dp=2 tp=4", "- -", (8, 4), 5, ["[0:8, 0:4]"]),
        ("dp=2 tp=4", "(dp tp) -", (8192, 4096), 3, ["[3072:4096, 0:4096]"]),
        ("tp=4", "tp", (10,), 0, ["[0:3]"]),
        ("tp=4", "tp", (10,), 3, ["[9:10]"]),
        ("tp=4", "tp", (5,), 3, []),  # torch.chunk: 2 2 1 and nothing
        ("dp=3 tp=2", "(tp dp)", (13,), 4, ["[6:7]"]),  # FSDP over TP, uneven: 7 -> 3 3 1
        ("dp=3 tp=2", "(tp dp)", (13,), 5, ["[11:13]"]),  # the other half: 6 -> 2 2 2
        ("tp=4", "tp*128 -", (640, 2), 1, ["[256:512, 0:2]"]),  # 5 units: 2 2 1 0
        ("tp=4", "tp*128 -", (640, 2), 3, []),
        ("tp=4", "tp*128 -", (600, 2), 2, ["[512:600, 0:2]"]),  # the last unit is partial
        ("tp=2", "tp:3", (14,), 1, ["[3:6]", "[9:12]"]),
        ("tp=2", "tp:3", (14,), 0, ["[0:3]", "[6:9]", "[12:14]"]),
        ("tp=4", "tp[3,1,4,2]", (10,), 2, ["[4:8]"]),
        ("tp=3", "tp[3,0,4]", (7,), 1, []),
        ("tp=2", "tp{8,4,4}", (16,), 1, ["[4:8]", "[10:12]", "[14:16]"]),
        ("kv=2 rep=2", "{8 (kv rep), 4 kv, 4 kv}", (16,), 3, ["[6:8]", "[10:12]", "[14:16]"]),
        ("kv=2 rep=2", "{8 (kv rep), 4 kv, 4 kv}", (16,), 2, ["[4:6]", "[10:12]", "[14:16]"]),
        ("cp=2", "cp~ -", (8, 3), 0, ["[0:2, 0:3]", "[6:8, 0:3]"]),
        ("cp=3", "cp~", (7,), 2, ["[4:6]", "[6:7]"]),  # blocks of 2: 0 1 2 3(short) 4 5(empty)
        ("tp=2", "... tp", (2, 3, 4), 1, ["[0:2, 0:3, 2:4]"]),
        ("tp=2", "tp ...", (4,), 1, ["[2:4]"]),
        ("pp=4", "- | on pp=2", (4,), 2, ["[0:4]"]),
        ("pp=4", "- | on pp=2", (4,), 1, []),
        ("pp=4", "- | on pp=0,3", (4,), 3, ["[0:4]"]),
        ("dp=2 tp=2", "tp | sum dp", (4,), 3, ["[2:4]"]),
        ("dp=4", "... | flat dp", (3, 5), 1, ["[0:1, 4:5]", "[1:2, 0:3]"]),
        ("dp=4", "- - | flat dp[0,0,9,6]", (3, 5), 3, ["[1:2, 4:5]", "[2:3, 0:5]"]),
        ("dp=2 tp=2", "tp - | flat dp", (4, 3), 1, ["[2:3, 0:3]"]),
        ("tp=4", "tp | without 3", (8,), 3, []),
        ("tp=4", "tp | without 3", (8,), 2, ["[4:6]"]),
        ("tp=2 @ 8-9", "tp", (4,), 9, ["[2:4]"]),
        ("tp=2 @ 9,8", "tp", (4,), 9, ["[0:2]"]),
    ],
)
def test_documented_words(
    mesh: str, text: str, shape: tuple[int, ...], rank: int, expected: list[str]
) -> None:
    layout = rs.Layout(rs.Mesh.parse(mesh), text)
    assert boxes(layout, rank, shape) == expected


def test_where_a_piece_sits() -> None:
    layout = rs.Layout(rs.Mesh(tp=2), "- tp{4,2}")
    assert layout.local_shape(1, (3, 6)) == (3, 3)
    first, second = layout.pieces(1, (3, 6))
    assert (str(first.box), first.offset, first.strides) == ("[0:3, 2:4]", 0, (3, 1))
    assert (str(second.box), second.offset, second.strides) == ("[0:3, 5:6]", 2, (3, 1))


def test_ranks_outside_hold_nothing() -> None:
    layout = rs.Layout(rs.Mesh(tp=2), "tp -")
    assert layout.pieces(7, (4, 4)) == ()
    assert layout.holds(7) is None
    with pytest.raises(rs.LayoutError, match='rank 7 has no local tensor of layout "tp -": mesh t'):
        layout.local_shape(7, (4, 4))
    assert rs.Layout(rs.Mesh(tp=2), "- | on tp=0").local_shape(1, (4,)) == (0,)
    assert layout.holds(1) == {"tp": 1}


def test_zero_dims() -> None:
    layout = rs.Layout(rs.Mesh(tp=2), "...")
    (piece,) = layout.pieces(1, ())
    assert (piece.box, piece.offset, piece.strides) == (rs.Box((), ()), 0, ())
    assert layout.local_shape(1, ()) == ()
    (owners,) = layout.owners(rs.Box((), ()), ())
    assert owners.ranks == (0, 1)
    flat = rs.Layout(rs.Mesh(tp=2), "... | flat tp")
    assert [flat.local_shape(rank, ()) for rank in (0, 1)] == [(1,), (0,)]


@pytest.mark.parametrize("text", ["tp -", "- tp", "tp*4 -", "tp:2 -", "tp~ -", "- - | flat tp"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_zero_sizes(text: str, shape: tuple[int, int]) -> None:
    layout = rs.Layout(rs.Mesh(tp=3), text)
    for rank, local in moves.held(layout, shape).items():
        assert layout.local_shape(rank, shape) == local.shape
        assert layout.pieces(rank, shape) == ()
    assert layout.owners(rs.Box.whole(shape), shape) == ()


@pytest.mark.parametrize("text", ["tp", "tp*4", "tp:2", "tp[5]", "tp{3,2}", "tp~", "- | flat tp"])
def test_one_rank_holds_everything(text: str) -> None:
    layout = rs.Layout(rs.Mesh(tp=1, ranks=[6]), text)
    assert layout.local_shape(6, (5,)) == (5,)
    assert layout.same_as(rs.Layout(rs.Mesh(x=1, ranks=[6]), "-"), (5,))


def test_more_ranks_than_elements() -> None:
    layout = rs.Layout(rs.Mesh(dp=8), "dp -")
    assert [layout.local_shape(rank, (3, 2))[0] for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [owners.ranks for owners in layout.owners(rs.Box.whole((3, 2)), (3, 2))] == [
        (0,), (1,), (2,),
    ]  # fmt: skip


def test_boxes_on_ranks() -> None:
    layout = rs.Layout.from_boxes(
        (4, 4),
        {
            5: [rs.Box((0, 0), (2, 4))],
            2: [rs.Box((2, 2), (4, 4)), rs.Box((2, 0), (3, 2))],
            7: [],
            0: [rs.Box((1, 1), (1, 3))],
        },
    )
    assert list(layout.ranks) == [0, 2, 5, 7]
    assert {rank: layout.local_shape(rank, (4, 4)) for rank in (0, 2, 5, 7, 9)} == {
        0: (0, 2), 2: (6,), 5: (2, 4), 7: (0,), 9: (0,),
    }  # fmt: skip
    assert [(str(p.box), p.offset) for p in layout.pieces(2, (4, 4))] == [
        ("[2:4, 2:4]", 0), ("[2:3, 0:2]", 4),
    ]  # fmt: skip
    holes = [str(o.box) for o in layout.owners(rs.Box.whole((4, 4)), (4, 4))]
    assert holes == ["[0:2, 0:4]", "[2:3, 0:2]", "[2:4, 2:4]"]
    assert list(layout.without([5]).ranks) == [0, 2, 7]


@EXAMPLES
@given(strategies.sides())
def test_copies_are_equal(drawn: Drawn) -> None:
    side, shape = drawn
    layout = build(side, shape)
    names = {"Layout": rs.Layout, "Mesh": rs.Mesh, "Box": rs.Box}
    for again in (
        pickle.loads(pickle.dumps(layout)),
        rs.Layout.from_json(layout.to_json()),
        eval(repr(layout), names),
    ):
        assert again == layout
        assert hash(again) == hash(layout)
        assert str(again) == str(layout)
        assert again.same_as(layout, shape)
    assert layout != str(layout)


SAME = [
    ("tp=2", "tp -", "x=2", "x[4,4] -", (8, 4)),
    ("tp=2", "tp -", "tp=2", "tp ...", (8, 4)),
    ("dp=2 tp=2", "(dp tp) -", "x=4", "x -", (8, 4)),
    ("dp=2 tp=2", "(dp tp)", "tp=2 dp=2 @ 0,2,1,3", "(dp tp)", (8,)),
    ("tp=2 @ 1,0", "tp", "tp=2", "tp[4,4]", (8,)),  # the halves change places
    ("tp=2", "tp*4", "tp=2", "tp:4", (8,)),
    ("tp=2", "tp{8}", "tp=2", "tp", (8,)),
    ("tp=2", "- | flat tp", "tp=2", "tp", (8,)),
    ("tp=4", "tp | without 3", "tp=3", "tp[2,2,2]", (6,)),
    ("pp=2 tp=2", "tp | on pp=1", "tp=2 @ 2-3", "tp", (6,)),
    ("dp=2 tp=2", "tp | sum dp", "a=2 b=2", "b | sum a", (6,)),
]


@pytest.mark.parametrize(("mesh", "text", "other_mesh", "other", "shape"), SAME)
def test_same_as(mesh: str, text: str, other_mesh: str, other: str, shape: tuple) -> None:
    """Equality is of what ranks hold, as the oracle sees it, and never of words."""
    one = rs.Layout(rs.Mesh.parse(mesh), text)
    two = rs.Layout(rs.Mesh.parse(other_mesh), other)
    alike = _contents(one, shape) == _contents(two, shape)
    assert one.same_as(two, shape) == two.same_as(one, shape) == alike
    spec = rs.TensorSpec(shape, "float32", one)
    assert (spec == rs.TensorSpec(shape, "float32", two)) == alike
    if alike:
        assert hash(spec) == hash(rs.TensorSpec(shape, "float32", two))
    assert spec != rs.TensorSpec(shape, "int32", two)


def _contents(layout: rs.Layout, shape: tuple[int, ...]) -> dict:
    """Elements in order, per rank that has any, and its addend."""
    _, addend = oracle.addends(str(layout.mesh), str(layout))
    return {
        rank: (local.reshape(-1).tolist(), addend[rank])
        for rank, local in moves.held(layout, shape).items()
        if local.size
    }


DIFFERENT = [
    ("tp=2", "tp -", "tp=2", "- tp", (4, 4)),
    ("tp=2", "tp", "tp=2 @ 1,0", "tp", (4,)),
    ("tp=2", "tp", "tp=2 @ 2-3", "tp", (4,)),
    ("tp=2", "tp", "tp=2", "tp:1", (4,)),
    ("tp=2", "tp", "tp=2", "-", (4,)),
    ("dp=2 tp=2", "tp", "dp=2 tp=2", "tp | sum dp", (4,)),
    ("dp=2 tp=2", "tp | sum dp", "dp=2 tp=2", "tp | max dp", (4,)),
    ("dp=2 tp=2", "tp | sum dp", "dp=2 tp=2 @ 2-3,0-1", "tp | sum dp", (4,)),
    ("tp=4", "tp", "tp=4", "tp | without 2", (4,)),
]


@pytest.mark.parametrize(("mesh", "text", "other_mesh", "other", "shape"), DIFFERENT)
def test_not_same_as(mesh: str, text: str, other_mesh: str, other: str, shape: tuple) -> None:
    one = rs.Layout(rs.Mesh.parse(mesh), text)
    two = rs.Layout(rs.Mesh.parse(other_mesh), other)
    assert not one.same_as(two, shape)
    assert not two.same_as(one, shape)
    assert rs.TensorSpec(shape, "int8", one) != rs.TensorSpec(shape, "int8", two)


def test_boxes_are_the_same_as_words() -> None:
    words = rs.Layout(rs.Mesh(tp=2), "tp -")
    listed = {0: [rs.Box((0, 0), (2, 3))], 1: [rs.Box((2, 0), (4, 3))]}
    assert rs.Layout.from_boxes((4, 3), listed).same_as(words, (4, 3))
    assert words.same_as(rs.Layout.from_boxes((4, 3), {**listed, 4: []}), (4, 3))
    assert not words.same_as(rs.Layout.from_boxes((4, 3), {0: listed[0]}), (4, 3))


@EXAMPLES
@given(strategies.sides())
def test_names_of_axes_do_not_matter(drawn: Drawn) -> None:
    side, shape = drawn
    if side.boxes is None:
        axes = re.compile(r"\b(dp|tp|pp|cp|ep|x)(?=\b|_)")
        renamed = Side(axes.sub(r"my_\1", side.mesh), axes.sub(r"my_\1", side.layout))
        assert build(side, shape).same_as(build(renamed, shape), shape)


@EXAMPLES
@given(strategies.sides())
def test_one_box_per_rank_is_the_same_as_words(drawn: Drawn) -> None:
    side, shape = drawn
    layout = build(side, shape)
    pieces = {rank: layout.pieces(rank, shape) for rank in layout.ranks}
    blocks = all(
        len(mine) == 1 and mine[0].box.shape == layout.local_shape(rank, shape)
        for rank, mine in pieces.items()
        if mine
    )
    if blocks and layout.reduce is None and not layout.words.flat:
        listed = {rank: [piece.box for piece in mine] for rank, mine in pieces.items()}
        assert rs.Layout.from_boxes(shape, listed).same_as(layout, shape)


@EXAMPLES
@given(strategies.sides(), strategies.sides())
def test_same_as_is_sound(one: Drawn, two: Drawn) -> None:
    """Layouts are not called the same unless every rank holds the same in the same order."""
    (side, shape), (other, _) = one, two
    first = build(side, shape)
    try:
        second = build(other, shape)
        second.pieces(next(iter(second.ranks), 0), shape)
        alike = first.same_as(second, shape)
    except rs.ReshardError:
        return
    if alike:
        flat = {r: a.reshape(-1).tolist() for r, a in side.held(shape).items() if a.size}
        assert flat == {r: a.reshape(-1).tolist() for r, a in other.held(shape).items() if a.size}


@EXAMPLES
@given(strategies.sides())
def test_without(drawn: Drawn) -> None:
    side, shape = drawn
    layout = build(side, shape)
    ranks = sorted(layout.ranks)
    lost = set(ranks[::2])
    less = layout.without(lost)
    for rank in ranks:
        expected = () if rank in lost else layout.pieces(rank, shape)
        assert less.pieces(rank, shape) == expected
    assert less.without(lost) == less
    assert layout.without([]) == layout


def test_sizes_of_numpy_leave_no_trace_in_digests() -> None:
    """The fingerprint of a layout is kept by its shape, and numpy's 6 equals 6."""
    layout, other = rs.Layout.parse("tp=3: tp -"), rs.Layout.parse("x=3: x[2,2,2] ...")
    assert layout.same_as(other, np.array([6, 5]))
    spec = rs.TensorSpec((6, 5), "int8", layout)
    fresh = rs.TensorSpec((6, 5), "int8", rs.Layout.parse("y=3: y -"))
    assert hash(spec) == hash(fresh)
    assert spec == fresh


@pytest.mark.parametrize("layout", ["tp=2: tp", rs.Layout.from_boxes((2,), {})])
def test_lost_ranks_are_a_list(layout: str | rs.Layout) -> None:
    with pytest.raises(rs.ArgumentTypeError, match=r"without\(\) got 3: give the lost ranks"):
        rs.Layout.of(layout).without(3)  # type: ignore[arg-type]


def test_sixteen_thousand_ranks_answer_at_once() -> None:
    layout = rs.Layout(rs.Mesh(dp=2048, tp=8), "(tp dp) -")
    shape = (1 << 20, 8192)
    layout.owners(rs.Box((0, 0), (1, 1)), (8, 8))  # loads what loads late
    start = time.process_time()
    (piece,) = layout.pieces(16383, shape)
    assert piece.box.stop == shape
    (owners,) = layout.owners(rs.Box((7, 0), (8, 5)), shape)
    assert owners.ranks == (0,)
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "3", '{"mesh": "tp=2"}', '{"mesh": 1, "layout": "tp"}',
     '{"shape": [2], "boxes": {"x": []}}', '{"shape": [2.5], "boxes": {}}',
     '{"shape": [2], "boxes": {"0": [[0, 1]]}}', '{"shape": [2], "boxes": {"0": [[[0], [9]]]}}',
     '{"shape": [-2], "boxes": {}}', '{"shape": [2], "boxes": [1]}', "[" * 100_000,
     '{"mesh": "tp=2", "layout": "ep"}', '{"shape": [true], "boxes": {}}',
     f'{{"shape": [2], "boxes": {{"{"9" * 5000}": []}}}}',
     f'{{"shape": [2], "boxes": {{"0": ["{"x" * 5000}"]}}}}',
     f'{{"shape": ["{"x" * 5000}"], "boxes": {{}}}}'],
    ids=range(19),
)  # fmt: skip
def test_json_that_is_no_layout(text: str) -> None:
    with pytest.raises(rs.ReshardError) as caught:
        rs.Layout.from_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("shape", [5, None, "ab", (2.0,)])
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    empty = rs.Layout.from_boxes((2,), {})
    for layout in (empty, rs.Layout.parse("tp=2: ...")):
        with pytest.raises(rs.LayoutError, match="is no shape: give sizes"):
            layout.pieces(0, shape)
    with pytest.raises(rs.LayoutError, match="is no shape: give sizes"):
        rs.Layout.from_boxes(shape, {})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1 << 40, 1 << 9), "has 562949953421312 elements: at most 281474976710656 work"),
        ((0, 1 << 60), "has 0 elements: at most"),
        ((1,) * 33, "a shape of 33 dims: at most 32 work"),
        ((4, -1), r"shape \(4, -1\) has size -1 in dim 1: sizes are >= 0"),
    ],
)
def test_shapes_that_cannot_be_counted_are_refused(shape: tuple[int, ...], message: str) -> None:
    layout = rs.Layout.parse("tp=2: ...")
    for call in (
        lambda: layout.pieces(0, shape),
        lambda: layout.same_as("tp=2: ...", shape),
        lambda: rs.Layout.from_boxes(shape, {}),
    ):
        with pytest.raises(rs.LayoutError, match=message):
            call()


def test_a_bucket_is_padded_to_both_numbers() -> None:
    """Megatron pads to the least common multiple of ``pad_to`` and the ranks along the axis."""
    for num, pad_to, share in ((6, 128, 192), (8, 128, 128), (6, 1, 167), (7, 2, 144)):
        found = rs.flat_bucket({"w": (1000,)}, rs.Mesh(dp=num), "dp", pad_to=pad_to)["w"]
        held = [prod(found.local_shape(rank, (1000,))) for rank in range(num)]
        assert share * num % pad_to == 0
        assert held == [max(min(1000 - rank * share, share), 0) for rank in range(num)]
