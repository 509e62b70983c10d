"""What ranks say of one state dict: one spec for each tensor, or an error that says who differs."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

import reshard as rs
from reshard.layout.layout import BoxLayout
from reshard.layout.spec import agrees, is_part_of
from reshard.tensors.exchanging import merge_specs, specs_from_texts, specs_to_text
from reshard.tensors.local import whole_on
from tests import generate
from tests.cases import Side
from tests.checks import build
from tests.soak import cases, within
from tests.strategies import drawn_by

ROWS = rs.TensorSpec((8, 4), "float32", rs.Layout(rs.Mesh(tp=4), "tp -"))
Said = dict[int, dict[str, rs.TensorSpec]]


def plain(rank: int, shape: tuple[int, ...] = (8, 4), dtype: str = "float32") -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, whole_on((rank,)))


def boxes(*rows: tuple[int, int, int]) -> rs.TensorSpec:
    held = {rank: [rs.Box((low, 0), (high, 4))] for rank, low, high in rows}
    return rs.TensorSpec((8, 4), "float32", rs.Layout.from_boxes((8, 4), held))


def on(mesh: str, words: str, shape: tuple[int, ...] = (8, 4)) -> rs.TensorSpec:
    return rs.TensorSpec(shape, "float32", rs.Layout(rs.Mesh.parse(mesh), words))


def says(*specs: rs.TensorSpec, **others: rs.TensorSpec) -> Said:
    """Each rank describes "w" by the first spec that speaks of it, and all ranks the others."""
    ranks = sorted({rank for spec in (*specs, *others.values()) for rank in spec.layout.ranks})
    said: Said = {rank: dict(others) for rank in ranks}
    for spec in reversed(specs):
        for rank in spec.layout.ranks:
            said[rank]["w"] = spec
    return said


def merged_text(said: Said) -> str:
    layout = merge_specs(said)["w"].layout
    return f"{layout} over {layout.mesh}"


def test_ranks_that_agree() -> None:
    other_words = replace(ROWS, layout=rs.Layout(rs.Mesh(x=4), "x[2,2,2,2] ..."))
    specs = {0: {"w": ROWS, "b": plain(0)}, 1: {"w": other_words}, 7: {"b": plain(7)}, 9: {}}
    merged = merge_specs(specs)
    assert merged["w"] is ROWS
    assert merged["b"] == rs.TensorSpec((8, 4), "float32", whole_on((0, 7)))
    assert list(merged) == ["w", "b"]
    assert merge_specs({}) == {}
    assert merge_specs({3: {"b": plain(3)}})["b"].layout == whole_on((3,))


SUB_MESHES = {
    "FSDP2 beside TP": (["dp=2 @ 0,2", "dp=2 @ 1,3"], "dp -", "dp=2 tp=2", "dp - over dp=2 tp=2"),
    "dp=1": (["dp=1 @ 0", "dp=1 @ 1"], "dp -", "dp=1 tp=2", "dp - over dp=1 tp=2"),
    "HSDP": (
        ["r=2 s=2 @ 0,2,4,6", "r=2 s=2 @ 1,3,5,7"], "s -", "r=2 s=2 tp=2", "s - over r=2 s=2 tp=2",
    ),
    "one axis of three": (
        ["s=2 @ 0-1", "s=2 @ 2-3", "s=2 @ 4-5", "s=2 @ 6-7"], "- s", "a=2 b=2 s=2",
        "- s over a=2 b=2 s=2",
    ),
    "turned around": (
        ["tp=2 dp=2 @ 0,1,4,5", "tp=2 dp=2 @ 2,3,6,7"], "(dp tp) -", "tp=2 pp=2 dp=2",
        "(dp tp) - over tp=2 pp=2 dp=2",
    ),
    "TP in each of two replicas": (["tp=2 @ 0-1", "tp=2 @ 2-3"], "tp -", "",
                                   "tp - over replica=2 tp=2"),
    "a mesh of its own": (["ep=2 @ 0,2", "ep=2 @ 1,3"], "ep -", "dp=2 tp=2",
                          "ep - over ep=2 replica=2"),
    "other slices": (["dp=2 @ 0,3", "dp=2 @ 1,2"], "dp -", "dp=2 tp=2",
                     "dp - over replica=2 dp=2 @ 0,3,1-2"),
    "a name that is taken": (["replica=2 @ 0-1", "replica=2 @ 2-3"], "replica -", "",
                             "replica - over replica_=2 replica=2"),
    "interleaved": (["dp=2 @ 0,2", "dp=2 @ 1,3"], "dp:1 -", "", "dp:1 - over dp=2 replica=2"),
    "pending sums": (["dp=2 @ 0,2", "dp=2 @ 1,3"], "- - | sum dp", "dp=2 tp=2",
                     "- - | sum dp over dp=2 tp=2"),
    "uneven": (["dp=3 @ 0,2,4", "dp=3 @ 1,3,5"], "dp -", "dp=3 tp=2", "dp - over dp=3 tp=2"),
}  # fmt: skip


@pytest.mark.parametrize("what", SUB_MESHES)
def test_sub_meshes_are_replicas(what: str) -> None:
    meshes, words, other, expected = SUB_MESHES[what]
    specs = [on(mesh, words) for mesh in meshes]
    others = {"other": on(other, "...")} if other else {}
    assert merged_text(says(*specs, **others)) == expected


def test_plain_tensors_are_on_the_mesh_of_the_others() -> None:
    said = says(*map(plain, range(4)), other=on("dp=2 tp=2", "dp tp"))
    assert merged_text(said) == "... over dp=2 tp=2"
    # One rank less: no mesh has these ranks.
    assert merged_text({rank: said[rank] for rank in (0, 1, 3)}) == "... over rank=3 @ 0-1,3"


def test_replicas_of_different_layouts_are_boxes() -> None:
    """Three ranks hold rows, two hold columns, one all of it."""
    merged = merge_specs(says(on("dp=3", "dp -"), on("tp=2 @ 3-4", "- tp"), plain(5)))["w"]
    assert isinstance(merged.layout, BoxLayout)
    held = {rank: [str(box) for box in mine] for rank, mine in merged.layout.boxes.items()}
    assert held == {
        0: ["[0:3, 0:4]"], 1: ["[3:6, 0:4]"], 2: ["[6:8, 0:4]"], 3: ["[0:8, 0:2]"],
        4: ["[0:8, 2:4]"], 5: ["[0:8, 0:4]"],
    }  # fmt: skip


def test_each_rank_may_speak_of_itself_alone() -> None:
    said = {rank: {"w": boxes((rank, 2 * rank, 2 * rank + 2))} for rank in range(4)}
    assert merge_specs(said)["w"] == ROWS
    # What nobody holds is found out by planning, which knows what is wanted.
    del said[2]
    with pytest.raises(rs.CoverageError, match=r"wants box \[4:6, 0:4\].* no source rank"):
        rs.plan(merge_specs(said), {"w": plain(9)})


def test_a_rank_that_describes_all_and_ranks_that_describe_their_sub_mesh() -> None:
    """A spec by hand over the whole mesh agrees with what the other ranks see."""
    by_hand = on("dp=2 tp=2", "dp -")
    said = says(on("dp=2 @ 0,2", "dp -"), on("dp=2 @ 1,3", "dp -")) | {0: {"w": by_hand}}
    assert merge_specs(said)["w"].layout is by_hand.layout
    assert is_part_of(rs.Layout(rs.Mesh.parse("dp=2 @ 1,3"), "dp -"), by_hand.layout, (8, 4))
    assert not is_part_of(rs.Layout(rs.Mesh.parse("dp=2 @ 1,2"), "- dp"), by_hand.layout, (8, 4))
    assert not is_part_of(by_hand.layout, rs.Layout(rs.Mesh.parse("dp=2 @ 1,3"), "dp -"), (8, 4))


def test_a_layout_does_not_speak_of_ranks_that_it_is_without() -> None:
    """Survivors give tensors whose layout still has the lost rank."""
    rows = rs.Layout(rs.Mesh(replica=2, dp=2), "dp -")
    survivors, columns = rows.without([3]), rs.Layout(rows.mesh, "- dp")
    assert agrees(rows, survivors, (8, 4))
    assert agrees(survivors, rows, (8, 4))
    assert is_part_of(rows, survivors, (8, 4))
    assert not agrees(columns, survivors, (8, 4))


def test_the_answer_does_not_depend_on_the_order() -> None:
    specs = {rank: {"b": plain(rank), "w": ROWS} for rank in (5, 2, 9)}
    backwards = dict(reversed(specs.items()))
    assert merge_specs(specs) == merge_specs(backwards)
    assert merge_specs(specs)["b"].layout == whole_on((2, 5, 9))


PLAIN = (
    "; a plain tensor counts as the whole tensor: describe a shard as "
    "rs.TensorSpec(whole_shape, dtype, rs.Layout(mesh, words)), or give a DTensor"
)
ALIKE = "; describe it the same way on all ranks, or rename it if these are different tensors"
SAME = "shape and dtype of a tensor must be the same"


@pytest.mark.parametrize(
    ("odd", "said", "why"),
    [
        (replace(ROWS, shape=(8, 6)), 'float32 (8, 6) "tp -" over "tp=4"', SAME + ALIKE),
        (replace(ROWS, dtype="bfloat16"), 'bfloat16 (8, 4) "tp -" over "tp=4"', SAME + ALIKE),
        (plain(3, (2, 4)), "float32 (2, 4) whole", SAME + PLAIN),
        (plain(3), "float32 (8, 4) whole",
         "the first gives rank 3 [6:8, 0:4], the second [0:8, 0:4]" + PLAIN),
        (on("tp=4", "- tp"), 'float32 (8, 4) "- tp" over "tp=4"',
         "the first gives rank 0 [0:2, 0:4], the second [0:8, 0:1]" + ALIKE),
        (on("dp=2 @ 3,4", "dp:1 -"), 'float32 (8, 4) "dp:1 -" over "dp=2 @ 3-4"',
         "the first gives rank 3 [6:8, 0:4], the second [0:1, 0:4], [2:3, 0:4] and 2 more boxes"
         + ALIKE),
        (on("tp=4", "tp - | without 3"), 'float32 (8, 4) "tp - | without 3" over "tp=4"',
         "the first gives rank 3 [6:8, 0:4], the second nothing" + ALIKE),
    ],
)  # fmt: skip
def test_ranks_that_differ(odd: rs.TensorSpec, said: str, why: str) -> None:
    specs = {rank: {"w": ROWS, "v": ROWS} for rank in range(3)} | {3: {"w": odd, "v": ROWS}}
    with pytest.raises(rs.DisagreementError) as caught:
        merge_specs(specs)
    assert str(caught.value) == (
        f'"w" is float32 (8, 4) "tp -" over "tp=4" according to ranks 0-2 and {said} according to '
        f"rank 3: {why}"
    )


def test_plain_tensors_that_differ() -> None:
    specs = {rank: {"w": plain(rank)} for rank in range(3)} | {3: {"w": plain(3, (8, 6))}}
    with pytest.raises(rs.DisagreementError, match=r"whole according to ranks 0-2 and .*\(8, 6\)"):
        merge_specs(specs)


def test_the_error_is_about_the_ranks_that_differ() -> None:
    """Three sub-meshes, of which the first has nothing to do with it."""
    said = says(on("dp=2 @ 0-1", "dp -"), on("dp=2 @ 2-3", "dp -"), on("dp=2 @ 4-5", "dp -"))
    said[3] = {"w": on("dp=2 @ 2-3", "- dp")}
    with pytest.raises(rs.DisagreementError) as caught:
        merge_specs(said)
    assert str(caught.value).startswith(
        '"w" is float32 (8, 4) "dp -" over "dp=2 @ 2-3" according to rank 2 and float32 (8, 4) '
        '"- dp" over "dp=2 @ 2-3" according to rank 3: the first gives rank 2 [0:4, 0:4],'
    )


def test_what_boxes_cannot_say_is_not_joined() -> None:
    sums = on("dp=2 @ 0-1", "- - | sum dp"), on("tp=3 @ 2-4", "- - | sum tp")
    blocks = on("dp=2 @ 0-1", "dp:1 -"), on("tp=2 @ 2-3", "- tp")
    for specs in (sums, blocks):
        with pytest.raises(rs.DisagreementError, match="same axes and words to be replicas"):
            merge_specs(says(*specs))


def test_boxes_that_differ_and_many_tensors() -> None:
    one, other = boxes((0, 0, 4), (1, 4, 8)), boxes((0, 0, 5), (1, 5, 8))
    names = [f"w{i}" for i in range(9)]
    with pytest.raises(rs.DisagreementError) as caught:
        merge_specs({0: dict.fromkeys(names, one), 1: dict.fromkeys(names, other)})
    said = str(caught.value)
    assert "Box((0, 0), (4, 4))" in said
    assert "Box((0, 0), (5, 4))" in said
    assert '(and 8 more tensors, such as "w1", "w2", "w3", "w4")' in said
    assert "\n" not in said


def replicas(rng: Random) -> tuple[list[Side], tuple[int, ...]]:
    """One tensor on up to four sets of ranks: the same words on sub-meshes, or any layouts."""
    shape, first = generate.shape(rng), generate.mesh(rng)
    count, alike = rng.randint(2, 4), generate.chance(rng, 60)
    words, sides, left = generate.layout(rng, first, shape), [], list(range(60))
    for _ in range(count):
        mesh = first if alike else generate.mesh(rng)
        ranks = rng.sample(left, len(mesh.ranks))
        left = [rank for rank in left if rank not in ranks]
        mesh = replace(mesh, ranks=tuple(sorted(ranks) if generate.chance(rng, 50) else ranks))
        sides.append(Side(str(mesh), words if alike else generate.layout(rng, mesh, shape)))
    return sides, shape


@settings(max_examples=cases(50, 2000), deadline=None)
@given(drawn_by(replicas))
def test_every_rank_holds_what_it_said(drawn: tuple[list[Side], tuple[int, ...]]) -> None:
    sides, shape = drawn
    specs = [rs.TensorSpec(shape, "float32", build(side, shape)) for side in sides]
    if len({(side.layout, side.mesh.partition("@")[0]) for side in sides}) > 1:
        with suppress(rs.DisagreementError):  # what boxes cannot express: see above
            check_merged(sides, shape, merge_specs(says(*specs))["w"].layout)
    else:
        check_merged(sides, shape, merge_specs(says(*specs))["w"].layout)


def check_merged(sides: list[Side], shape: tuple[int, ...], layout: rs.Layout) -> None:
    found = as_side(layout).held(shape)
    expected = {rank: held for side in sides for rank, held in side.held(shape).items()}
    assert {rank for rank in found if found[rank].size} == {
        rank for rank in expected if expected[rank].size
    }
    for rank, held in expected.items():
        assert not held.size or np.array_equal(found[rank], held), rank


def as_side(layout: rs.Layout) -> Side:
    """The layout as the oracle reads it."""
    if not isinstance(layout, BoxLayout):
        return Side(str(layout.mesh), str(layout))
    return Side(
        boxes={rank: [(b.start, b.stop) for b in mine] for rank, mine in layout.boxes.items()}
    )


def state_dict(rank: int, dp: int, tp: int, count: int) -> dict[str, rs.TensorSpec]:
    """What FSDP2 with tensor parallelism says on a rank: weights, norms and plain counters."""
    mesh = rs.Mesh(dp=dp, tp=tp)
    sub = rs.Layout(rs.Mesh(dp=dp, ranks=range(rank % tp, dp * tp, tp)), "dp")
    kinds = [
        rs.TensorSpec((4096, 512), "bfloat16", rs.Layout(mesh, "(tp dp) -")),
        rs.TensorSpec((4096,), "bfloat16", sub),
        plain(rank, ()),
    ]
    names = ("weight", "norm", "step")
    return {f"layers.{i // 3}.{names[i % 3]}": kinds[i % 3] for i in range(count)}


@pytest.mark.parametrize(("dp", "tp", "count"), [(4, 2, 20_000), (32, 8, 400)])
def test_many_tensors_or_many_ranks_are_merged_quickly(dp: int, tp: int, count: int) -> None:
    texts = [specs_to_text(state_dict(rank, dp, tp, count)) for rank in range(dp * tp)]
    started = time.process_time()
    merged = merge_specs(specs_from_texts(dict(enumerate(texts))))
    seconds = time.process_time() - started
    mesh = rs.Mesh(dp=dp, tp=tp)
    assert len(merged) == count
    assert merged["layers.1.norm"].layout == rs.Layout(mesh, "dp")
    assert merged["layers.2.step"].layout == rs.Layout(mesh, "...")
    assert max(map(len, texts)) < 40 * count
    assert seconds < within(1.0)
