"""Text is accepted wherever a mesh or a layout is wanted; wrong values are answered in a line."""

from typing import Any

import pytest

import reshard as rs
from reshard.errors import LayoutError, MeshError, NotationError

LAYOUT = rs.Layout(rs.Mesh(dp=2, tp=4), "(dp tp) -")


def test_one_text_for_a_mesh_and_a_layout() -> None:
    assert rs.Layout.parse("dp=2 tp=4: (dp tp) -") == LAYOUT
    assert rs.Layout.parse(" tp=2 @ 8-9 :- tp ").mesh.ranks == range(8, 10)
    for text in ("tp=2", "", 3):
        with pytest.raises(NotationError, match='expected "MESH: LAYOUT", such as "tp=2: - tp"'):
            rs.Layout.parse(text)  # type: ignore[arg-type]


def test_plans_specs_and_rules_take_text() -> None:
    want = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "- tp")
    made = rs.plan("dp=2 tp=4: (dp tp) -", "tp=2 @ 8-9: - tp", shape=(16, 8))
    assert made == rs.plan(LAYOUT, want, shape=(16, 8))
    assert rs.TensorSpec((8, 4), "int8", "dp=2 tp=4: (dp tp) -").layout == LAYOUT  # type: ignore[arg-type]
    rules = rs.Rules.load("llama", head_dim=8, kv_heads=2, replicate="dp")
    shapes = {"lm_head.weight": (16, 8)}
    assert rules.layouts(shapes, "dp=2 tp=2") == rules.layouts(shapes, rs.Mesh(dp=2, tp=2))
    assert rules.mesh_for("tp=4") == rules.mesh_for(rs.Mesh(tp=4))
    assert str(rules.layout("lm_head.weight", "tp=2")) == "tp -"


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: rs.Mesh("dp=2 tp=4"), MeshError, r'Mesh\.parse\("dp=2 tp=4"\)'),  # type: ignore[arg-type]
        (lambda: rs.Layout("dp=2: dp", "dp"), LayoutError, "Layout.parse"),  # type: ignore[arg-type]
        (lambda: rs.plan("tp=2", "tp=2: tp"), NotationError, '"MESH: LAYOUT"'),
        (
            lambda: rs.plan(3, 4, shape=(4,)),
            LayoutError,
            "3 is no layout: give a Layout",
        ),  # type: ignore[arg-type]
        (lambda: rs.Rules.load("llama").mesh_for(4), rs.RulesError, "4 is no mesh: give a Mesh"),  # type: ignore[arg-type]
        (lambda: rs.TensorSpec((4,), "int8", None), LayoutError, "None is no layout"),  # type: ignore[arg-type]
        (lambda: rs.TensorSpec(3, "int8", LAYOUT), LayoutError, "3 is no shape: give sizes"),  # type: ignore[arg-type]
        (lambda: rs.plan("tp=2: tp", "tp=2: -", shape="16"), LayoutError, "no shape"),  # type: ignore[arg-type]
        (lambda: LAYOUT.local_shape(0, (2.5, 4)), LayoutError, r"\(2.5, 4\) is no shape"),  # type: ignore[arg-type]
        (lambda: LAYOUT.local_shape(0, 16), LayoutError, "16 is no shape"),  # type: ignore[arg-type]
        (lambda: rs.Rules.load(7), rs.RulesError, "name a family or a file"),  # type: ignore[arg-type]
        (lambda: rs.Rules.load("llama", fsdp=["dp"]), rs.RulesError, "fsdp= is "),  # type: ignore[arg-type]
        (
            lambda: rs.Rules.load("llama", replicate=3),
            rs.RulesError,
            "replicate= is .3., expected a text",
        ),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_answered_with_what_to_type(
    call: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_placements_of_dtensor_are_answered_in_the_notation() -> None:
    placements = pytest.importorskip("torch.distributed.tensor", reason="placements are torch's")
    shard, replicate, partial = placements.Shard, placements.Replicate, placements.Partial
    mesh = rs.Mesh(dp=2, tp=4)
    for given, text in (
        ([shard(0), shard(0)], '"(dp tp) ..."'),
        ([replicate(), shard(1)], '"- tp ..."'),
        ([partial(), shard(0)], '"tp ... [|] sum dp"'),
        (shard(0), '"dp ..."'),
    ):
        with pytest.raises(LayoutError, match=text.replace("(", r"\(").replace(")", r"\)")):
            rs.Layout(mesh, given)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r'it is "axis0 \.\.\."'):
        rs.plan([shard(0)], "tp=2: tp", shape=(4,))  # type: ignore[arg-type]


def test_a_layout_draws_itself() -> None:
    drawn = LAYOUT.draw((16, 8), width=60)
    assert drawn.startswith("(dp tp) - on mesh dp=2 tp=4, shape 16x8: 8 parts, each on 1 rank")
    assert "ranks" in drawn
    assert max(map(len, drawn.splitlines()[1:])) <= 60
