"""Drawings against the oracle, and what a page and a trace contain."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings

import reshard as rs
from reshard.show.holdings import Picture, holdings, picture_of
from reshard.show.page import render
from reshard.show.terminal import (
    Span,
    coloured,
    draw,
    frame,
    pieces_table,
    plain,
    wants_colour,
)
from reshard.show.traffic import draw as draw_matrix
from reshard.show.traffic import group, to_trace, traffic_matrix
from tests import strategies
from tests.cases import Case, Side
from tests.checks import build, plan_case
from tests.moves import model_plan
from tests.show.test_plan_text import side
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(50, 200), derandomize=True, deadline=None)
Drawn = tuple[Side, tuple[int, ...]]

GRID = """\
dp tp on mesh dp=2 tp=2, shape 8x6: 4 parts, each on 1 rank

    0                 3                 6
  0 +-----------------+-----------------+
    |                 |                 |
    |        0        |        1        |
    |                 |                 |
    |                 |                 |
  4 +-----------------+-----------------+
    |                 |                 |
    |        2        |        3        |
    |                 |                 |
    |                 |                 |
  8 +-----------------+-----------------+

ranks  at         local shape  holds
0      dp=0 tp=0  4x3          [0:4, 0:3]
1      dp=0 tp=1  4x3          [0:4, 3:6]
2      dp=1 tp=0  4x3          [4:8, 0:3]
3      dp=1 tp=1  4x3          [4:8, 3:6]"""

RAGGED = """\
    0                2        3        4
  0 +----------------------------------+
    |       0                          |
  1 |                +-----------------+
    |                |                 |
  2 +----------------+        +--------+
    |       1                 |   2    |
  3 +-------------------------+--------+"""


def drawn(mesh: str, layout: str, shape: tuple[int, ...], width: int = 42) -> str:
    return plain(draw(side(mesh, layout), shape, width=width))


def test_a_grid() -> None:
    assert drawn("dp=2 tp=2", "dp tp", (8, 6)) == GRID


def test_areas_that_are_no_rectangles() -> None:
    picture = picture_of(side("dp=3", "- - | flat dp[6,5,1]"), (3, 4), (8, 8))
    assert picture is not None
    assert plain(frame(picture, 40)) == RAGGED


def test_unicode_frames() -> None:
    picture = picture_of(side("x=2 y=2", "x y"), (2, 2), (8, 8))
    assert picture is not None
    lines = plain(frame(picture, 24, unicode=True)).splitlines()
    assert lines[1].strip(" 012") == "\u250c" + "\u2500" * 8 + "\u252c" + "\u2500" * 8 + "\u2510"
    assert lines[3].strip(" 012")[0] == "\u251c"


def test_widths_are_shares_of_the_tensor() -> None:
    lines = drawn("tp=4", "tp[30,10,40,20]", (100,), width=70).splitlines()
    walls = [at for at, letter in enumerate(lines[3]) if letter == "+"]
    widths = np.diff(walls) - 1
    assert widths[0] > 2 * widths[1]
    assert widths[2] > 3 * widths[1]
    assert all(len(line) <= 70 for line in lines[1:])


def test_many_ranks_are_merged_into_few_cells() -> None:
    text = drawn("fsdp=16384", "fsdp -", (65536, 64), width=80)
    assert text.startswith(
        "fsdp - on mesh fsdp=16384, shape 65536x64: 16,384 parts, each on 1 rank"
    )
    assert "15360..16383" in text
    assert "and 16,368 more parts" in text
    assert len(text.splitlines()) < 64


@pytest.mark.parametrize(
    ("mesh", "layout", "shape", "said"),
    [
        ("dp=2 tp=2", "dp tp -", (8, 4, 2), "3      dp=1 tp=1  4x2x2        [4:8, 2:4, 0:2]"),
        ("tp=4", "tp -", (0, 4), "no rank holds any element"),
        ("tp=4", "...", (), "1 part, on 4 ranks"),
        ("x=4 y=4", "x:1 y:1", (8192, 4096), "[0:1+4:5+...2,048 runs, 0:1+4:5+...1,024 runs]"),
        ("tp=2", "{8 -, 6 tp, 4 -, 2 tp}", (20,), "0      tp=0  16           [0:8+14:18] [8:11"),
        ("dp=2", "- | sum dp", (8,), "with a pending sum over dp"),
        ("dp=4 tp=2", "tp - | without 3,5,7", (8, 4), "0,2,4,6  tp=0       4x4"),
        ("pp=2 tp=2", "tp | on pp=1", (8,), "2      pp=1 tp=0  4            [0:4]"),
    ],
)
def test_tables(mesh: str, layout: str, shape: tuple[int, ...], said: str) -> None:
    assert said in drawn(mesh, layout, shape, width=120)


def test_a_hole_is_held_by_no_rank() -> None:
    layout = rs.Layout.from_boxes(
        (8, 4), {3: [rs.Box((0, 0), (4, 4))], 5: [rs.Box((6, 0), (8, 4))]}
    )
    text = plain(draw(layout, (8, 4), width=60))
    assert "none" in text
    assert text.startswith("2 boxes on ranks 3,5, shape 8x4: 2 parts, each on 1 rank")


def holders_of(held: dict[int, np.ndarray], shape: tuple[int, ...]) -> dict[int, set[int]]:
    """The ranks that hold each element, by the oracle."""
    found: dict[int, set[int]] = {i: set() for i in range(int(np.prod(shape)))}
    for rank, indices in held.items():
        for index in indices.reshape(-1).tolist():
            found[index].add(rank)
    return found


def check_picture(picture: Picture, held: dict[int, np.ndarray], shape: tuple[int, ...]) -> None:
    holders = holders_of(held, shape)
    numbers = np.arange(int(np.prod(shape))).reshape(shape if len(shape) == 2 else (1, -1))
    for i, row in enumerate(picture.cells):
        for j, cell in enumerate(row):
            lines = slice(picture.rows[i], picture.rows[i + 1])
            inside = numbers[lines, picture.columns[j] : picture.columns[j + 1]].reshape(-1)
            sets = [holders[number] for number in inside.tolist()]
            assert set(cell.ranks) == set().union(*sets)
            assert cell.whole == all(sets)
            if cell.num_parts == 1 and cell.whole:
                assert all(found == set(cell.ranks) for found in sets)


@EXAMPLES
@given(strategies.sides())
def test_pictures_agree_with_the_oracle(drawn: Drawn) -> None:
    one, shape = drawn
    assume(len(shape) in (1, 2) and np.prod(shape))
    for most in ((100, 100), (3, 2)):
        picture = picture_of(build(one, shape), shape, most)
        assert picture is not None
        assert len(picture.rows) <= max(most[0], 1) + 1
        assert len(picture.columns) <= most[1] + 1
        check_picture(picture, one.held(shape), shape)


@EXAMPLES
@given(strategies.sides())
def test_holdings_agree_with_the_oracle(drawn: Drawn) -> None:
    one, shape = drawn
    layout = build(one, shape)
    wanted = {rank: frozenset(at.reshape(-1).tolist()) for rank, at in one.held(shape).items()}
    found = holdings(layout, shape, most=100)
    for row in found.rows:
        assert len({wanted[rank] for rank in row.ranks}) == 1
    assert sorted(rank for row in found.rows for rank in row.ranks) == sorted(
        rank for rank, elements in wanted.items() if elements
    )
    if one.boxes is None:
        assert found.num_different == len({held for held in wanted.values() if held})


@EXAMPLES
@given(strategies.sides())
def test_every_layout_draws(drawn: Drawn) -> None:
    one, shape = drawn
    layout = build(one, shape)
    text = plain(draw(layout, shape, width=80))
    assert text.isascii()
    for rank in list(layout.ranks)[:2]:
        assert pieces_table(layout, rank, shape)[0].startswith(f"rank {rank} ")


def test_the_matrix_of_ranks() -> None:
    plan = rs.plan(side("dp=2", "dp -"), side("tp=3 @ 4-6", "- tp"), shape=(2048, 1536))
    assert plain(draw_matrix(traffic_matrix(plan))).splitlines() == [
        "bytes from rank (down) to rank (across)",
        "          4     5     6  total",
        "    0  2.0M  2.0M  2.0M   6.0M",
        "    1  2.0M  2.0M  2.0M   6.0M",
        "total  4.0M  4.0M  4.0M  12.0M",
    ]


def test_the_matrix_of_hosts_and_of_groups() -> None:
    have, want = side("dp=64", "dp -"), side("tp=64 @ 64-127", "- tp")
    plan = rs.plan(have, want, shape=(640, 640))
    matrix = traffic_matrix(plan, 16)
    assert matrix.sources[:2] == ("0-3", "4-7")
    assert matrix.destinations[-1] == "124-127"
    assert int(matrix.num_bytes.sum()) == plan.summary().wire_bytes
    hosts = traffic_matrix(rs.plan(have, want, shape=(640, 640), topology=rs.Topology()))
    assert (hosts.kind, hosts.sources) == ("host", tuple(map(str, range(8))))
    assert hosts.num_bytes.tolist() == [[640 * 640 * 4 // 64] * 8] * 8


def test_no_traffic_has_no_matrix() -> None:
    plan = rs.plan(side("x=2", "x -"), side("y=2", "y -"), shape=(4, 4))
    assert plain(draw_matrix(traffic_matrix(plan))) == "no traffic between ranks"


@pytest.mark.parametrize(
    ("count", "most", "num"), [(1, 16, 1), (5, 16, 5), (17, 16, 13), (999, 8, 6)]
)
def test_groups(count: int, most: int, num: int) -> None:
    groups = group(np.arange(count) * 3, most)
    assert len(groups.labels) == num
    assert groups.find(np.array([0, 3 * count - 3])).tolist() == [0, num - 1]


def test_colours_only_where_they_are_wanted() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})
    text = coloured([[Span("rank 0", "#94bfeb")]], Terminal(), 80)
    assert "rank 0" in text


def pages() -> dict[str, rs.Plan]:
    return {
        "one": rs.plan(side("dp=2 tp=4", "(dp tp) -"), side("tp=2 @ 8-9", "- tp"), shape=(64, 32)),
        "thousands": rs.plan(
            side("dp=256 tp=8", "(tp dp) -"),
            side("dp=32 tp=8 @ 2048-2303", "tp -"),
            shape=(8192, 64),
        ),
        "3-d": rs.plan(side("dp=4", "dp - -"), side("tp=4", "- tp -"), shape=(7, 10, 4)),
        "hosts": rs.plan(
            side("dp=16", "dp -"), side("tp=16", "- tp"), shape=(64, 64), topology=rs.Topology()
        ),
        "nothing": rs.plan({}, {}),
        "empty": rs.plan(side("dp=2", "dp"), side("tp=2", "tp"), shape=(0,)),
        "model": model_plan("llama-3-8b", "dp=2 tp=4", "dp=2 tp=2 @ 8-11", fsdp="dp"),
    }


@pytest.mark.parametrize("name", pages())
def test_pages_are_whole_and_contain_everything(name: str) -> None:
    plan = pages()[name]
    page = render(plan)
    assert page.startswith("<!doctype html>")
    assert page.count("<script") == 2  # the data and the script itself
    assert not re.search(r"src=|href=(?!\"data:,\")|url\((?!#)|@import|https?:", page)
    assert plan.digest in page
    assert len(page) < 600_000
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    for row in plan.stacks:
        for _, name in row.names:
            assert f'"{name}"' in page


def test_names_in_a_page_are_escaped() -> None:
    name = '<img src="x">&</script>'
    have = {name: rs.TensorSpec((8,), "int8", side("x=2", "x"))}
    want = {name: rs.TensorSpec((8,), "int8", side("y=4", "y"))}
    page = render(rs.plan(have, want))
    assert "<img" not in page
    assert "&lt;img" in page
    assert page.count("</script>") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["names"] == [[name]]


@settings(max_examples=cases(40, 60), derandomize=True, deadline=None)
@given(strategies.cases())
def test_every_plan_has_a_page_and_a_trace(case: Case) -> None:
    try:
        plan = plan_case(case)
    except rs.PlanError:
        return
    assert plan.digest in render(plan)
    trace = json.loads(to_trace(plan))
    sent = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    received = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    summary = plan.summary()
    for slices in (sent, received):
        assert sum(e["args"]["bytes"] for e in slices) == summary.wire_bytes
        assert sum(e["args"]["messages"] for e in slices) == summary.num_messages


def test_slices_of_a_track_do_not_overlap() -> None:
    plan = rs.plan(
        side("x=4", "x -"), side("y=4 @ 8-11", "- -"), shape=(64, 64),
        topology=rs.Topology(ranks_per_host=4), memory=4096,
    )  # fmt: skip
    events = [e for e in json.loads(to_trace(plan))["traceEvents"] if e["ph"] == "X"]
    tracks: dict[tuple[int, int], float] = {}
    for event in events:
        key = event["pid"], event["tid"]
        assert event["ts"] >= tracks.get(key, 0.0) - 0.01
        tracks[key] = event["ts"] + event["dur"]
    assert {e["args"]["round"] for e in events} == set(range(plan.num_rounds))


def test_many_ranks_share_tracks() -> None:
    plan = rs.plan(side("x=600", "x"), side("y=600 @ 600-1199", "y"), shape=(6000,))
    trace = json.loads(to_trace(plan))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert len(names) <= 256
    assert names[0] == "ranks 0-7"


def test_save(tmp_path: Path) -> None:
    plan = rs.plan(side("dp=2", "dp -"), side("tp=2", "- tp"), shape=(4, 4))
    for name in ("move.html", "move.json", "move.trace"):
        plan.save(tmp_path / name)
    assert (tmp_path / "move.html").read_text().startswith("<!doctype html>")
    assert rs.Plan.from_json((tmp_path / "move.json").read_text()) == plan
    assert "traceEvents" in json.loads((tmp_path / "move.trace").read_text())
    with pytest.raises(
        rs.FormatError, match=r'"move.pdf": the suffix must be \.html, \.json or \.trace'
    ):
        plan.save("move.pdf")
