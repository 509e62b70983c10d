"""What ``print(plan)`` says: the table, the figures, and the reasons."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, reject, settings

import reshard as rs
from reshard.show.page import render
from reshard.show.plan_text import describe, reasons, stack_rows
from tests import strategies
from tests.cases import Case
from tests.checks import plan_case
from tests.moves import model_plan
from tests.soak import cases

ONE_TENSOR = """\
Plan of 1 tensor, 64.0 MiB of bfloat16, from mesh dp=2 tp=4 to mesh tp=2 @ 8-9

tensor  shape      from       to        size      wire  round
tensor  8192x4096  (dp tp) -  - tp  64.0 MiB  64.0 MiB      0

wire      64.0 MiB, the least possible
messages  16 in 1 round
staging   32.0 MiB at most on a rank, under a cap of 256.0 MiB
sources   8 send, the busiest 8.0 MiB, 1.00 x the mean

why
  Destinations want 64.0 MiB and hold none of it; each byte arrives once, so 64.0 MiB travels."""

JOINED = """\
tensor   shape        dtype                from        to           size   wire  round
e <- q   8x4 -> 10x4  float32              tp=2: tp -  x=3: x -    128 B    0 B      0
qk <- q  8x4 -> 16x4  float32              tp=2: tp -  x=3: x -    128 B   32 B      0
qk <- k  8x4 -> 16x4  float32              tp=2: tp -  x=3: x -    128 B  128 B      0
w        8x4          float32 -> bfloat16  tp=2: tp -  tp=4: tp -   64 B   48 B      0"""


def side(mesh: str, layout: str) -> rs.Layout:
    return rs.Layout(rs.Mesh.parse(mesh), layout)


def spec(shape: tuple[int, ...], dtype: str, mesh: str, layout: str) -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, side(mesh, layout))


def test_one_tensor() -> None:
    have, want = side("dp=2 tp=4", "(dp tp) -"), side("tp=2 @ 8-9", "- tp")
    plan = rs.plan(have, want, shape=(8192, 4096), dtype="bfloat16")
    assert describe(plan) == str(plan) == ONE_TENSOR


def test_joins_pads_and_casts_have_a_line_each() -> None:
    have = {name: spec((8, 4), "float32", "tp=2", "tp -") for name in ("w", "q", "k")}
    want = {
        "w": spec((8, 4), "bfloat16", "tp=4", "tp -"),
        "qk": spec((16, 4), "float32", "x=3", "x -"),
        "e": spec((10, 4), "float32", "x=3", "x -"),
    }
    names = {"qk": rs.join("q", "k"), "e": rs.take("q", pad={0: 10})}
    text = describe(rs.plan(have, want, names=names))
    assert JOINED in text
    assert "float32 becomes bfloat16 before it travels" in text
    assert "The padding of e has no source and becomes zeros." in text


def test_a_model_has_a_line_per_kind_of_tensor() -> None:
    plan = model_plan("llama-3-8b", "dp=2 tp=4", "dp=2 tp=2 @ 8-11", fsdp="dp")
    rows = {row.name: row for row in stack_rows(plan)}
    assert len(rows) == 7
    row = rows["model.layers.{0-31}.mlp.{gate,up}_proj.weight"]
    assert (row.shape, row.dtype, row.num_bytes) == ("14336x4096", "bfloat16", 64 * 14336 * 8192)
    assert sum(row.num_bytes for row in rows.values()) == 2 * 8_030_261_248
    assert sum(row.wire_bytes for row in rows.values()) == plan.summary().wire_bytes
    assert rows["lm_head.weight, model.embed_tokens.weight"].first_round == 0
    assert max(row.last_round for row in rows.values()) == plan.num_rounds - 1
    norms = "model.layers.{0-31}.{input,post_attention}_layernorm.weight and 1 more pattern"
    assert rows[norms].num_bytes == 65 * 8192
    text = str(plan)
    assert text.startswith(
        "Plan of 291 tensors, 15.0 GiB of bfloat16, from mesh dp=2 tp=4 to mesh "
    )
    assert "A byte has 2 takers on average, and they share the receiving" in text
    assert "would stage" in text
    assert "the cap is 256.0 MiB" in text


def test_renamed_tensors_are_patterns_on_both_sides() -> None:
    have = {f"layers.{i}.{part}": spec((8, 4), "float32", "tp=2", "tp -") for i in range(12)
            for part in ("q", "k")}  # fmt: skip
    want = {f"h.{i}.qk": spec((16, 4), "float32", "tp=2", "tp -") for i in range(12)}
    names = {"h.{i}.qk": rs.join("layers.{i}.q", "layers.{i}.k")}
    rows = [row.name for row in stack_rows(rs.plan(have, want, names=names))]
    assert rows == ["h.{0-11}.qk <- layers.{0-11}.q", "h.{0-11}.qk <- layers.{0-11}.k"]


def test_eighteen_thousand_tensors_are_quick() -> None:
    plan = model_plan("qwen3-30b-a3b", "ep=8", "tp=4 @ 8-11")
    plan.summary()
    start = time.process_time()
    text = describe(plan)
    assert time.process_time() - start < 1.0
    assert text.startswith("Plan of 18,867 tensors, 56.9 GiB of bfloat16")
    assert len(text.splitlines()) < 60


def test_many_kinds_are_cut_short() -> None:
    have = {f"w{i}": spec((i + 1, 4), "float32", "tp=2", "tp -") for i in range(30)}
    want = {f"w{i}": spec((i + 1, 4), "float32", "tp=2", "- tp") for i in range(30)}
    lines = describe(rs.plan(have, want)).splitlines()
    assert "and 6 smaller groups of 6 tensors, 336 B" in lines
    assert sum(re.match(r"w\d+ ", line) is not None for line in lines) == 24


def reason(have: rs.Layout, want: rs.Layout, **more: object) -> str:
    shape = (4096, 8)
    plan = rs.plan(have, want, shape=shape, dtype="float32", **more)  # type: ignore[arg-type]
    return "\n".join(reasons(plan))


@pytest.mark.parametrize(
    ("have", "want", "more", "said"),
    [
        (side("x=4", "x -"), side("y=4", "y -"), {}, "hold all 128.0 KiB they want"),
        (side("x=4", "x -"), side("y=2", "- y"), {}, "hold 32.0 KiB of it already; each missing"),
        (side("x=4", "- - | sum x"), side("x=4", "x -"), {}, "A pending sum of 4 addends"),
        (side("x=2", "- -").without([1]), side("y=2 @ 8-9", "y -"), {}, "Lost ranks: 1;"),
        (side("x=2", "x -"), side("y=2 @ 8-9", "- -"), {}, "2 rounds: what a rank receives"),
        (side("x=4", "x -"), side("y=2 @ 8-9", "- y"), {"memory": 4096}, "the cap is 4.0 KiB"),
        (side("x=4", "x[4093,1,1,1] -"), side("y=1 @ 8", "- -"), {}, "Rank 0 sends 127.9 KiB"),
        (
            side("x=4", "x -"),
            side("y=4 @ 8-11", "- -"),
            {"topology": rs.Topology(ranks_per_host=4)},
            "128.0 KiB goes between hosts: each byte enters a host once. The bottleneck is",
        ),
    ],
)
def test_reasons(have: rs.Layout, want: rs.Layout, more: dict[str, object], said: str) -> None:
    assert said in reason(have, want, **more)


def test_nothing_at_all() -> None:
    assert describe(rs.plan({}, {})).startswith("Plan of 0 tensors, 0 B, nothing to do\n\nwire")
    empty = rs.plan(side("x=2", "x -"), side("y=2", "- y"), shape=(0, 4))
    assert "Nothing travels: there are no bytes." in describe(empty)


@pytest.mark.parametrize("shares", ["", "[16,16,16,16,16,16,16,4096]"])
def test_what_is_out_of_balance_is_marked(shares: str) -> None:
    """Rank 7 holds nearly all of it: the link of its host, and some relays, are busier than others.
    Where all ranks hold as much, nothing is marked."""
    have, want = side("x=8", f"x{shares} -"), side("y=2 z=8 @ 8-23", "z -")
    topology = rs.Topology(ranks_per_host=3 if shares else 8)
    plan = rs.plan(have, want, shape=(4208 if shares else 4096, 64), topology=topology)
    found, text, page = plan.summary(), describe(plan), render(plan)
    ratios = found.busiest_relay_bytes / found.mean_relay_bytes, found.bottleneck_over_mean
    marks = [f"OUT OF BALANCE: {ratio:.2f} x the mean" for ratio in ratios if ratio > 1.2]
    assert len(marks) == (2 if shares else 0)
    for shown in (text, page):
        assert shown.count("OUT OF BALANCE") == len(marks)
        assert all(mark in shown for mark in marks)
    assert page.count('class="note bad"') == len(marks)


def test_sums_between_hosts_have_no_least() -> None:
    sides = side("x=4", "- - | sum x"), side("x=4", "x -")
    plan = rs.plan(*sides, shape=(64, 64), topology=rs.Topology(ranks_per_host=2))
    assert plan.summary().between_hosts_lower_bound_bytes is None
    text = describe(plan)
    assert "between hosts  32.0 KiB\n" in text
    assert "32.0 KiB goes between hosts. The bottleneck is" in text
    assert "0 B at least" not in render(plan)


def test_seconds_and_hosts_need_a_topology() -> None:
    have, want = side("x=4", "x -"), side("y=4 @ 8-11", "- y")
    without = describe(rs.plan(have, want, shape=(64, 64)))
    assert "seconds" not in without
    assert "between hosts" not in without
    text = describe(rs.plan(have, want, shape=(64, 64), topology=rs.Topology(ranks_per_host=4)))
    assert "between hosts  16.0 KiB, the least possible" in text
    assert "predicted; the bottleneck is host" in text


@settings(max_examples=cases(35, 150), derandomize=True, deadline=None)
@given(strategies.cases())
def test_every_plan_prints(case: Case) -> None:
    try:
        plan = plan_case(case)
    except rs.PlanError:
        reject()
    text = describe(plan)
    assert text.isascii()
    assert "why\n  " in text
    assert f" in {plan.num_rounds:,} round" in text


def test_names_with_control_characters_are_printed_as_text() -> None:
    name = "w\x1b[31m\n.\u202e"
    have, want = ({name: spec((8,), "int8", "x=2", axis)} for axis in ("x", "-"))
    padded = {name: rs.TensorSpec((9,), "int8", want[name].layout)}
    plans = rs.plan(have, want), rs.plan(have, padded, names={name: rs.take(name, pad={0: 9})})
    for text in map(describe, plans):
        assert "\\x1b[31m\\n.\\u202e" in text
        assert all(line.isprintable() for line in text.splitlines())
