"""The page in a real browser: point, tap, search, dark, a phone, 18,867 tensors, hostile names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard as rs
from reshard import checkpoint
from reshard.cli import run
from reshard.cli.checkpoint_page import render_stored
from reshard.show.page import render
from tests.moves import model_plan
from tests.show.browser import Browser, Tab
from tests.show.test_cells_and_reports import report_of, save_tensors
from tests.show.test_plan_text import side
from tests.soak import within


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A tab; at the end the page has logged nothing and asked for nothing but itself."""
    tab = browser.tab()
    yield tab
    tab.close()
    assert not tab.errors
    assert all(url.startswith(("file:///", "data:,")) for url in tab.requests), tab.requests


def one_tensor() -> rs.Plan:
    return rs.plan(side("dp=2 tp=2", "(dp tp) -"), side("tp=2 @ 4-5", "- tp"), shape=(64, 32))


def relayed() -> rs.Plan:
    """A move in which destinations pass on what they get."""
    have, want = side("tp=2", "tp -"), side("dp=4 @ 2-5", "- -")
    return rs.plan(have, want, shape=(2048, 1024), memory="1GiB")


def piece(side: int, number: int, move: int = 0) -> str:
    return f".piece[data-move='{move}'][data-side='{side}'][data-number='{number}']"


LIT_PIECES = """[...document.querySelectorAll('.piece.lit')].map(
    (one) => [+one.dataset.side, +one.dataset.number]).sort()"""
ROWS = "const rows = document.querySelector('.rows')"
LIT_ENTRIES = "[...document.querySelectorAll('.entry.lit')].map((one) => +one.dataset.entry)"


def test_pointing_at_a_piece_lights_its_receivers_and_the_matrix(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path / "page.html", render(one_tensor()))
    tab.point(piece(0, 1))
    assert tab.run(LIT_PIECES) == [[0, 1], [1, 0], [1, 1]]
    assert tab.run(LIT_ENTRIES) == [2, 3]
    said = tab.run("document.querySelector('.move .info').textContent")
    said = said.replace("\u00a0\u2192\u00a0", " to ").replace("\u00b7", "and")
    assert said == "[16:32, 0:32] on rank 1; goes to ranks 4 and 5; travels 1 to 4, 1 to 5"
    tab.until(f'getComputedStyle(document.querySelector("{piece(0, 0)}")).opacity < 0.5')
    tab.point("h1")
    assert tab.run(LIT_PIECES) == []
    assert tab.run("document.querySelector('.rs').classList.contains('pointing')") is False


def test_pointing_at_a_destination_lights_its_senders(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path / "page.html", render(one_tensor()))
    tab.point(piece(1, 0))
    assert tab.run(LIT_PIECES) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]
    assert tab.run(LIT_ENTRIES) == [0, 2, 4, 6]
    assert "comes from ranks 0 \u00b7 1 \u00b7 2 \u00b7 3" in tab.run(
        "document.querySelector('.info').textContent"
    )


def test_pointing_at_the_matrix_lights_both_pictures(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path / "page.html", render(one_tensor()))
    tab.point(".entry[data-entry='5']")  # rank 2 to rank 5
    assert tab.run(LIT_PIECES) == [[0, 2], [1, 1]]
    said = tab.run("document.querySelector('.traffic .info').textContent")
    assert said.startswith("rank 2 to 5: ")


def test_arrow_keys_go_from_piece_to_piece(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path / "page.html", render(one_tensor()))
    tab.run("document.querySelector('svg.picture').focus()")
    for key, code, number in (("ArrowDown", 40, 0), ("ArrowDown", 40, 1), ("ArrowUp", 38, 0)):
        tab.press(key, code)
        assert tab.run(LIT_PIECES) == [[0, number], [1, 0], [1, 1]]
    tab.press("Escape", 27)
    assert tab.run(LIT_PIECES) == []


def test_what_is_passed_on_is_lit_as_well(tab: Tab, tmp_path: Path) -> None:
    plan = relayed()
    assert plan.summary().busiest_relay_bytes
    tab.show(tmp_path / "page.html", render(plan))
    tab.point(piece(0, 0))
    labels = tab.run("JSON.parse(document.getElementById('data').textContent).matrix")
    lit = {
        (labels["sources"][at // 4], labels["destinations"][at % 4]) for at in tab.run(LIT_ENTRIES)
    }
    assert any(source != "0" for source, _ in lit)
    assert {to for _, to in lit} == {"2", "3", "4", "5"}


def test_a_tap_stays_until_the_next_one(tab: Tab, tmp_path: Path) -> None:
    tab.resize(390, 844, touch=True)
    tab.show(tmp_path / "page.html", render(one_tensor()))
    tab.tap(piece(0, 3))
    tab.until("document.querySelectorAll('.piece.lit').length")
    assert tab.run(LIT_PIECES) == [[0, 3], [1, 0], [1, 1]]
    tab.run("document.querySelector('.traffic').scrollIntoView()")
    assert tab.run(LIT_ENTRIES) == [6, 7]
    tab.tap(piece(1, 1))
    tab.until("document.querySelector('.piece.here').dataset.side === '1'")
    tab.tap("h1")
    tab.until("document.querySelectorAll('.piece.lit').length === 0")


def test_the_page_of_a_newcomers_plan(tab: Tab, tmp_path: Path) -> None:
    """Llama-3-8B from FSDP over 16 ranks to two replicas of TP-8, from the command to the page."""
    path = tmp_path / "plan.html"
    sides = ["--from", "dp=16", "--from-fsdp", "dp", "--to", "dp=2 tp=8 @ 16-31"]
    words = ["plan", "--model", "llama-3-8b", *sides, "--replicate", "dp", "--html", str(path)]
    assert run(words) == 0
    tab.open(path.as_uri())
    assert "291 tensors" in tab.run("document.querySelector('h1').textContent")
    heading = tab.run("document.querySelector('#move-0 h3 code').textContent")
    assert heading == "model.layers.{0-31}.mlp.{gate,up}_proj.weight"
    tab.point(piece(0, 0))
    assert len(tab.run(LIT_PIECES)) > 1
    assert "reshard plan --model llama-3-8b" in tab.run(
        "document.querySelector('footer').textContent"
    )


def seconds_until_searched(tab: Tab, path: Path) -> float:
    """How long it takes to open a page of 18,867 tensors and find one of them."""
    tab.open("about:blank")
    began = time.monotonic()
    tab.open(path.as_uri())
    tab.type(".search", "layers.47. experts.127. down")
    tab.until("document.querySelector('.count').textContent === '1 of 18,867 tensors'")
    return time.monotonic() - began


def test_18867_tensors_are_interactive_in_two_seconds(tab: Tab, tmp_path: Path) -> None:
    text = render(model_plan("qwen3-30b-a3b", "ep=8", "tp=4 @ 8-11"))
    path = tmp_path / "page.html"
    path.write_text(text)
    assert len(text) < 1_500_000
    # It takes a quarter of that: the best of some attempts holds beside other tests as well.
    assert any(seconds_until_searched(tab, path) < 2.0 for _ in range(3))
    assert tab.run("document.querySelector('.row .name').textContent") == (
        "model.layers.47.mlp.experts.127.down_proj.weight"
    )
    began = time.monotonic()
    tab.type(".search", "")
    tab.until("document.querySelector('.count').textContent === '18,867 tensors'")
    assert time.monotonic() - began < within(0.5)
    seen = set()
    for part in (0, 0.3, 0.6, 1):
        tab.run(f"(() => {{ {ROWS}; rows.scrollTop = {part} * rows.scrollHeight; }})()")
        tab.until("(async () => { await new Promise(requestAnimationFrame); return true; })()")
        rows = tab.run("[...document.querySelectorAll('.row .name')].map((one) => one.title)")
        assert 5 < len(rows) < 60
        seen |= set(rows)
    assert len(seen) > 40
    assert tab.run(
        "(() => { const r = document.querySelector('.rows').getBoundingClientRect();"
        "return Math.max(...[...document.querySelectorAll('.row')].map("
        "(one) => one.getBoundingClientRect().bottom)) >= r.bottom - 4; })()"
    )


def test_a_tensor_on_other_ranks_is_not_shown_as_the_drawn_one(tab: Tab, tmp_path: Path) -> None:
    tab.show(tmp_path / "page.html", render(model_plan("qwen3-30b-a3b", "ep=8", "tp=4 @ 8-11")))
    tab.type(".search", "layers.0.mlp.experts.127.up_proj")
    tab.click(".row")
    heading = tab.run("document.querySelector('#move-0 h3 code').textContent")
    assert heading == "model.layers.{0-47}.mlp.experts.{0-15}.{gate,up}_proj.weight"
    said = tab.run("document.querySelector('#move-0 .kin').textContent")
    assert said.startswith("model.layers.0.mlp.experts.127.up_proj.weight is like this")
    assert "- - | on ep=7" in said


def test_search_sort_and_choice(tab: Tab, tmp_path: Path) -> None:
    tab.show(
        tmp_path / "page.html", render(model_plan("llama-3-8b", "fsdp=4", "tp=4", fsdp="fsdp"))
    )
    groups = tab.run("[...document.querySelectorAll('.row .name')].map((one) => one.textContent)")
    assert groups[0] == "model.layers.{0-31}.mlp.{gate,up}_proj.weight"
    tab.type(".search", "up_proj bfloat16")
    assert tab.run("document.querySelector('.count').textContent") == "32 of 291 tensors"
    assert tab.run("document.querySelector('.row mark').textContent") == "up_proj"
    tab.type(".search", "no such tensor")
    assert tab.run("document.querySelector('.count').textContent") == "0 of 291 tensors"
    tab.type(".search", "")
    tab.click("[data-sort='name']")
    assert tab.run("document.querySelector('.row .name').title") == "lm_head.weight"
    tab.type(".search", "layers.7.self_attn.q_proj")
    tab.click(".row")
    said = tab.run("[...document.querySelectorAll('.kin')].map((one) => one.textContent)")
    assert said == ["model.layers.7.self_attn.q_proj.weight is drawn here"]


DARK_CONTRAST = """[...document.querySelectorAll('.piece')].map((one) => [
    getComputedStyle(one.querySelector('.face')).fill,
    getComputedStyle(one.querySelector('text') || one).fill])"""


def luminance(colour: str) -> float:
    values = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(tab: Tab, tmp_path: Path, dark: bool) -> None:
    tab.resize(1280, 900, dark=dark)
    tab.show(tmp_path / "page.html", render(one_tensor()))
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    ink = tab.run("getComputedStyle(document.body).color")
    assert (luminance(ground) < 0.05) == dark
    assert (luminance(ink) > 0.5) == dark
    cells = tab.run(DARK_CONTRAST)
    assert len({fill for fill, _ in cells}) == 6
    for fill, text in cells:
        low, high = sorted((luminance(fill), luminance(text)))
        assert (high + 0.05) / (low + 0.05) > 4.5


PHONE = 375
OUTSIDE = """[...document.querySelectorAll(`h1, .card, .piece .face, .entry .ground, .track i,
    .lane-name, .search, .row .name, footer p`)].filter((one) => {
    const box = one.getBoundingClientRect();
    const hidden = one.closest('details:not([open])');
    return box.width && (box.left < -0.5 || box.right > 375.5) && !hidden; }).length"""
WIDTHS = """[...document.querySelectorAll('.lane .track i')].map(
    (one) => one.getBoundingClientRect().width)"""
FONTS = """[...document.querySelectorAll('.lane-name, .lane-note, .row .name, .info, .note')].map(
    (one) => parseFloat(getComputedStyle(one).fontSize))"""


def test_a_phone_shows_everything_without_scrolling_sideways(tab: Tab, tmp_path: Path) -> None:
    tab.resize(PHONE, 700, touch=True)
    plan = model_plan("llama-3-8b", "fsdp=16", "dp=2 tp=8", fsdp="fsdp")
    tab.show(tmp_path / "page.html", render(plan))
    assert tab.run("document.documentElement.scrollWidth") == PHONE
    assert tab.run(OUTSIDE) == 0
    rounds = tab.run(WIDTHS)
    assert len(rounds) >= 5
    assert all(2 <= width <= PHONE for width in rounds)
    assert min(tab.run(FONTS)) >= 11.5


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "a\u202ereversed",
    "'\"`${window.hacked=1}`",
    "&lt;b&gt;\u2028\x00",
    "x" * 5000,
    "{0-3}.{a,b}",
]


def test_hostile_names_are_text(tab: Tab, tmp_path: Path) -> None:
    specs = [
        {name: rs.TensorSpec((8,), "int8", side(mesh, axis)) for name in HOSTILE}
        for mesh, axis in (("x=2", "x"), ("y=4", "y"))
    ]
    tab.show(tmp_path / "page.html", render(rs.plan(*specs)))
    tab.click("[data-view='tensors']")
    names = tab.run("[...document.querySelectorAll('.row .name')].map((one) => one.textContent)")
    assert len(names) == len(HOSTILE)
    assert HOSTILE[0] in names
    assert "a\\u202ereversed" in names
    assert max(map(len, names)) < 1000
    tab.type(".search", "<img")
    assert tab.run("document.querySelector('.row mark').textContent") == "<img"
    tab.click(".row")
    assert tab.run("window.hacked") is None
    assert tab.run("document.querySelectorAll('img, .row b').length") == 0


def test_the_policy_stops_other_scripts(tab: Tab, tmp_path: Path) -> None:
    page = render(one_tensor()).replace("</body>", "<script>window.hacked = 1</script></body>")
    tab.show(tmp_path / "page.html", page)
    assert tab.run("window.hacked") is None
    assert tab.run("document.body.dataset.ready") == "yes"
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


def test_experts_of_three_dims_light_up(tab: Tab, tmp_path: Path) -> None:
    plan = rs.plan(side("ep=4", "ep - -"), side("tp=2 @ 4-5", "- - tp"), shape=(8, 6, 4))
    tab.show(tmp_path / "page.html", render(plan))
    tab.point(piece(0, 2))
    assert tab.run(LIT_PIECES) == [[0, 2], [1, 0], [1, 1]]
    said = tab.run("document.querySelector('.move .info').textContent")
    assert said.startswith("[4:6, :, 0:4] on rank 2; goes to ranks 4 ")


def test_the_page_of_a_checkpoint(tab: Tab, tmp_path: Path) -> None:
    save_tensors(tmp_path)
    tab.show(tmp_path / "page.html", render_stored(checkpoint.inspect(tmp_path / "a")))
    rows = "[...document.querySelectorAll('.row .name')].map((one) => one.textContent)"
    assert tab.run(rows) == ["model.layers.{0-3}.{gate,up}_proj.weight", "<b>norm</b>"]
    tab.type(".search", "up_proj float32")
    assert tab.run("document.querySelector('.count').textContent") == "4 of 9 tensors"
    tab.resize(PHONE, 700, touch=True)
    assert tab.run("document.documentElement.scrollWidth") == PHONE


def test_measured_times_on_a_phone(tab: Tab, tmp_path: Path) -> None:
    plan = one_tensor()
    tab.resize(PHONE, 700, touch=True)
    tab.show(tmp_path / "page.html", render(plan, reports=[report_of(plan)]))
    assert tab.run("document.documentElement.scrollWidth") == PHONE
    assert tab.run("document.querySelectorAll('.short .track i').length") == 6
    assert tab.run(OUTSIDE) == 0


def test_cells_of_a_notebook_need_no_script(tab: Tab, tmp_path: Path) -> None:
    cells = [one_tensor()._repr_html_(), side("tp=2", "tp -")._repr_html_()]
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.resize(1000, 700, dark=True)
    tab.show(tmp_path / "page.html", "<!doctype html>" + "<hr>".join(cells))
    fills = tab.run(
        "[...document.querySelectorAll('.piece .face')].map((one) => getComputedStyle(one).fill)"
    )
    assert len(fills) == 8
    assert max(map(luminance, fills)) < 0.3
    sizes = "[...document.querySelectorAll('svg.picture')].map((one) => one.clientWidth)"
    assert min(tab.run(sizes)) > 100
