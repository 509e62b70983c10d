"""Colours, name patterns and links of a page: each means one thing, and what it says is true."""

from __future__ import annotations

import itertools
import re
import time
from operator import lt

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.rules.models import tensors
from reshard.show.name_patterns import name_patterns, named
from reshard.show.page.drawings import (
    FILLS,
    LOOKS,
    TEXTURES,
    Colours,
    Drawing,
    Rect,
    links_of,
    palette,
)
from reshard.show.page.plan_page import document_of, moves_of
from reshard.show.plan_text import stack_rows
from reshard.show.traffic import traffic_matrix
from tests import strategies
from tests.cases import Case
from tests.checks import plan_case
from tests.moves import model_plan
from tests.show.test_plan_text import side
from tests.soak import cases, within

INK = {False: "#16181b", True: "#f4f6f8"}
"""The colour of labels on a light and on a dark page, as page.css has it."""


def channels(colour: str) -> list[float]:
    """A colour in linear light."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, two: str) -> float:
    """The contrast of two colours as accessibility guidelines define it."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(
        sum(w * c for w, c in zip(weights, channels(colour), strict=True)) for colour in (one, two)
    )
    return (high + 0.05) / (low + 0.05)


def lab(colour: str) -> np.ndarray:
    """A colour in OKLab, where distances are what people see."""
    to_cones = np.array([[0.41222147, 0.53633254, 0.05144599], [0.21190350, 0.68069955, 0.10739696],
                         [0.08830246, 0.28171884, 0.62997870]])  # fmt: skip
    to_lab = np.array([[0.21045426, 0.79361779, -0.00407205], [1.97799850, -2.42859221, 0.45059371],
                       [0.02590404, 0.78277177, -0.80867577]])  # fmt: skip
    return to_lab @ np.cbrt(to_cones @ np.array(channels(colour)))


@pytest.mark.parametrize("dark", [False, True])
def test_fills_differ_and_labels_are_legible(dark: bool) -> None:
    fills = palette(dark)
    assert len(fills) == len(set(fills)) == FILLS
    for one, two in itertools.combinations(fills, 2):
        assert float(np.linalg.norm(lab(one) - lab(two))) > 0.035, (one, two)
    assert min(contrast(fill, INK[dark]) for fill in fills) > 4.5


def test_a_look_means_one_set_of_ranks() -> None:
    colours = Colours()
    looks = [colours.of((rank,)) for rank in range(LOOKS + 10)]
    given = [(look % FILLS, look // FILLS) for look in looks if look is not None]
    assert len(given) == len(set(given)) == LOOKS == FILLS * len(TEXTURES)
    assert looks[LOOKS:] == [None] * 10
    assert colours.num_left_out == 10
    assert [colours.of((rank,)) for rank in range(LOOKS + 10)] == looks


def rects_of(plan: rs.Plan) -> list[Rect]:
    document = document_of(plan)
    drawings = [s.drawing for move in document.moves for s in (move.have, move.want) if s]
    return [rect for drawing in drawings if drawing for rect in drawing.rects]


@pytest.mark.parametrize(
    "plan",
    [
        rs.plan(side("fsdp=32", "fsdp -"), side("dp=4 tp=8", "- tp"), shape=(64, 64)),
        rs.plan(side("a=24", "a"), side("b=8 c=3", "c"), shape=(96,)),
        rs.plan(side("x=12 y=12", "x y"), side("z=144", "z -"), shape=(144, 144)),
        model_plan("llama-3-8b", "fsdp=16", "dp=2 tp=8", fsdp="fsdp"),
    ],
)
def test_the_same_look_is_the_same_ranks_on_the_whole_page(plan: rs.Plan) -> None:
    rects = [rect for rect in rects_of(plan) if rect.ranks]
    by_look = {rect.look: rect.ranks for rect in rects if rect.look is not None}
    assert all(rect.look is None or by_look[rect.look] == rect.ranks for rect in rects)
    by_ranks = {rect.ranks: rect.look for rect in rects}
    assert all(by_ranks[rect.ranks] == rect.look for rect in rects)
    without = {rect.ranks for rect in rects if rect.look is None}
    assert bool(without) == (len(by_ranks) > LOOKS)
    if without:
        assert f"Grey cells are {len(without)} more sets of ranks" in document_of(plan).legend


def expand(pattern: str) -> set[str]:
    """All names that a pattern stands for."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [[text] if at % 2 == 0 else words_of(text) for at, text in enumerate(parts)]
    return {"".join(one) for one in itertools.product(*choices)}


def words_of(text: str) -> list[str]:
    found: list[str] = []
    for word in text.split(","):
        run = re.fullmatch(r"(\d+)-(\d+)", word)
        found += [str(n) for n in range(int(run[1]), int(run[2]) + 1)] if run else [word]
    return found


WORDS = st.sampled_from(["w", "b", "q_proj", "k_proj", "gate_up", "0", "1", "2", "3", "07", "norm"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


@settings(max_examples=cases(70, 300))
@given(st.sets(NAMES, max_size=40))
def test_patterns_stand_for_exactly_the_names(names: set[str]) -> None:
    found = [name for pattern in name_patterns(sorted(names)) for name in expand(pattern)]
    assert sorted(found) == sorted(names)


def test_patterns_of_models() -> None:
    assert name_patterns(tensors("llama-3-8b")) == [
        "model.{embed_tokens,norm}.weight",
        "model.layers.{0-31}.self_attn.{k,o,q,v}_proj.weight",
        "model.layers.{0-31}.mlp.{down,gate,up}_proj.weight",
        "model.layers.{0-31}.{input,post_attention}_layernorm.weight",
        "lm_head.weight",
    ]
    page = document_of(model_plan("llama-3-8b", "dp=2 tp=4", "dp=2 tp=2 @ 8-11", fsdp="dp"))
    names = {group[0] for group in page.data["groups"]}
    assert "model.layers.{0-31}.mlp.{gate,up}_proj.weight" in names
    assert not any(" more" in name for name in names)


def test_names_of_many_parts_take_no_time() -> None:
    long = [f"a.{'b.' * 200_000}{number}" for number in range(3)]
    start = time.process_time()
    assert name_patterns([*long, "w.0", "w.1"]) == [*long, "w.{0-1}"]
    assert len(named(long, width=64)) < 100
    assert time.process_time() - start < within(1.0)


def test_names_that_look_like_patterns_stay_as_they_are() -> None:
    assert name_patterns(["a.{0-3}", "a.b,c", "a.1", "a.2"]) == ["a.{0-3}", "a.b,c", "a.{1-2}"]
    assert named([f"n{i}" for i in range(40)]).count("n") < 20


def test_names_that_are_not_looked_at_are_counted() -> None:
    assert named([f"h.{i}.w" for i in range(50_002)]) == "h.{0-49999}.w and 2 more names"


def touched(drawing: Drawing, box: rs.Box) -> list[int]:
    """The rectangles of a drawing that overlap with a box, in the dims that are drawn."""
    start = [box.start[dim] for dim in drawing.dims]
    stop = [box.stop[dim] for dim in drawing.dims]
    first = 2 - len(drawing.dims)
    return [
        at
        for at, rect in enumerate(drawing.rects)
        if all(map(lt, map(max, rect.low[first:], start), map(min, rect.high[first:], stop)))
    ]


def check_links(plan: rs.Plan) -> int:
    """Compare the links of a plan with its steps; how many steps there were to compare with."""
    matrix, checked = traffic_matrix(plan, 64), 0
    rows = stack_rows(plan)
    for row, move in zip(rows, moves_of(rows, Colours()), strict=True):
        assert move.want is not None
        if move.have.drawing is None or move.want.drawing is None:
            continue
        have, want = move.have.drawing, move.want.drawing
        links = {
            (link.have, link.want): link for link in links_of(plan, row.stack, have, want, matrix)
        }
        steps = [
            step
            for rank in plan.ranks
            for step in plan.for_rank(rank).sends
            if (step.have_name, step.name) in row.stack.names
        ]
        wide = matrix.num_bytes.shape[1] if matrix.num_bytes.size else 1
        needed: dict[tuple[int, int], set[int]] = {pair: set() for pair in links}
        for step in steps:
            source, to = (plan.ranks.index(rank) for rank in (step.source, step.destination))
            entry = int(matrix.row_of[source]) * wide + int(matrix.column_of[to])
            for h, w in itertools.product(touched(have, step.have_box), touched(want, step.box)):
                if (h, w) in links:
                    needed[h, w].add(entry)
                    checked += 1
        for pair, entries in needed.items():
            assert entries <= set(links[pair].entries)
        # Nothing is lit that carries none of the tensor.
        lit = {entry for link in links.values() for entry in link.entries}
        assert lit <= {entry for entries in needed.values() for entry in entries}
    return checked


def test_links_of_a_simple_move() -> None:
    plan = rs.plan(side("dp=4", "dp -"), side("tp=2 @ 4-5", "- tp"), shape=(8, 8))
    [row] = stack_rows(plan)
    [move] = moves_of([row], Colours())
    assert move.want is not None
    assert move.have.drawing is not None
    assert move.want.drawing is not None
    drawings = move.have.drawing, move.want.drawing
    links = links_of(plan, row.stack, *drawings, traffic_matrix(plan, 16))
    assert [(link.have, link.want, link.entries) for link in links] == [
        (i, j, (2 * i + j,)) for i in range(4) for j in range(2)
    ]
    assert check_links(plan) > 0


@settings(max_examples=cases(25, 80), derandomize=True, deadline=None)
@given(strategies.cases())
def test_links_agree_with_the_steps_of_plans(case: Case) -> None:
    try:
        plan = plan_case(case)
    except rs.PlanError:
        reject()
    check_links(plan)


@pytest.mark.parametrize(
    ("have", "want", "dims"),
    [
        (("ep=4", "ep - -"), ("tp=4", "- - tp"), (0, 2)),
        (("ep=2 tp=2", "ep tp -"), ("ep=4 @ 4-7", "ep - -"), (0, 1)),
        (("ep=4", "ep - -"), ("ep=2", "ep - -"), (0, 2)),
        (("ep=2 tp=2", "ep tp -"), ("tp=4", "- - tp"), None),
    ],
)
def test_tensors_with_more_dims_are_drawn_where_two_are_sharded(
    have: tuple[str, str], want: tuple[str, str], dims: tuple[int, int] | None
) -> None:
    plan = rs.plan(side(*have), side(*want), shape=(8, 6, 4))
    [move] = document_of(plan).moves
    assert move.want is not None
    if dims is None:
        assert move.have.drawing is None
        assert move.have.lines
        return
    assert move.have.drawing is not None
    assert move.have.drawing.dims == dims
    assert ":, " in move.have.drawing.rects[0].title or ", :]" in move.have.drawing.rects[0].title
    assert check_links(plan) > 0


def test_links_of_thousands_of_ranks_do_not_list_every_row() -> None:
    have, want = side("dp=256 tp=8", "(tp dp) -"), side("dp=32 tp=8 @ 2048-2303", "tp -")
    page = document_of(rs.plan(have, want, shape=(8192, 64)))
    [move] = page.data["moves"]
    assert 0 < len(move["links"]) < 1000
    assert all(entries for _, _, entries in move["links"])
