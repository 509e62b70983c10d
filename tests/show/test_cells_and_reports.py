"""Cells of notebooks, the page of a checkpoint, and what run reports add to a page."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

import reshard as rs
from reshard import checkpoint
from reshard.cli import run
from reshard.cli.checkpoint_page import render_stored
from reshard.show.page import render
from reshard.show.page.notebook import sample_shape
from reshard.show.run_report import RoundReport, RunReport
from tests import strategies
from tests.cases import Side
from tests.checks import build
from tests.moves import model_plan
from tests.show.test_plan_text import side


class Tags(HTMLParser):
    """Which elements are open when others close: nothing is closed that was not opened."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_cell(html: str) -> str:
    """A cell is whole, has no script, and loads nothing."""
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not tags.seen & {"script", "iframe", "img", "link", "object"}
    assert not re.search(r"src=|href=|url\((?!#)|@import|https?:", html)
    for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(drawing)
    return html


def report_of(plan: rs.Plan, rank: int = 0, seconds: float = 0.5) -> RunReport:
    rounds = [
        RoundReport(n, 4096, 2048, seconds=seconds / 4, packing=seconds / 16, waiting=seconds / 8,
                    started=1.0 + n)
        for n in range(2)
    ]  # fmt: skip
    return RunReport(rank, 3, plan.digest, {1: "peer memory"}, rounds, seconds, 0.125, started=0.5)


def one() -> rs.Plan:
    return rs.plan(side("dp=2 tp=2", "(dp tp) -"), side("tp=2 @ 4-5", "- tp"), shape=(64, 32))


def test_cells_of_plans() -> None:
    html = check_cell(one()._repr_html_())
    assert "Plan of 1 tensor, 8.0 KiB of float32" in html
    assert html.count('class="piece') == 6
    assert "traffic matrix" in html
    assert "model.layers.{0-31}.mlp.{gate,up}_proj.weight" in check_cell(
        model_plan("llama-3-8b", "fsdp=4", "tp=4", fsdp="fsdp")._repr_html_()
    )
    check_cell(rs.plan({}, {})._repr_html_())


def test_names_in_cells_are_text() -> None:
    specs = [
        {"<script>alert(1)</script>": rs.TensorSpec((8,), "int8", side(mesh, axis))}
        for mesh, axis in (("x=2", "x"), ("y=4", "y"))
    ]
    assert "&lt;script&gt;" in check_cell(rs.plan(*specs)._repr_html_())


@pytest.mark.parametrize(
    ("mesh", "layout", "shape"),
    [
        ("dp=2 tp=4", "(dp tp) -", (8, 8)),
        ("tp=2", "tp*128", (256,)),
        ("tp=4", "tp[3,1,4,2]", (10,)),
        ("tp=2", "tp{8,4,4} -", (16, 8)),
        ("cp=4", "cp~", (8,)),
        ("dp=2", "...", (8,)),
        ("x=2 y=2 z=2", "x y z", (2, 2, 2)),
    ],
)
def test_cells_of_layouts(mesh: str, layout: str, shape: tuple[int, ...]) -> None:
    one = side(mesh, layout)
    assert sample_shape(one) == shape
    html = check_cell(one._repr_html_())
    assert f"drawn for shape {'x'.join(map(str, shape))}" in html


@settings(max_examples=80, derandomize=True, deadline=None)
@given(strategies.sides())
def test_every_layout_has_a_cell(drawn: tuple[Side, tuple[int, ...]]) -> None:
    check_cell(build(*drawn)._repr_html_())


def test_a_layout_that_fits_no_even_shape_is_text() -> None:
    one = side("tp=2 pp=1", "(tp~{0,1,0} pp*2) | without 0-1")
    assert one.dims((1,))
    assert "drawn for shape" not in check_cell(one._repr_html_())


def test_cells_of_reports(tmp_path: Path) -> None:
    html = check_cell(report_of(one())._repr_html_())
    assert "round 1" in html
    assert "500 ms" in html
    check_cell(RunReport(0, 1, "ab")._repr_html_())
    save_tensors(tmp_path)
    for report in (
        checkpoint.inspect(tmp_path / "a"),
        checkpoint.verify(tmp_path / "a"),
        checkpoint.diff(tmp_path / "a", tmp_path / "a"),
        checkpoint.convert(tmp_path / "a", tmp_path / "b"),
    ):
        assert "<pre>" in check_cell(report._repr_html_())  # type: ignore[attr-defined]


def test_cells_of_loading_and_saving(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="these reports are about tensors in a job")
    saved = checkpoint.save({"w": torch.ones(4, 4)}, tmp_path / "a")
    loaded = checkpoint.load(tmp_path / "a", {"w": torch.zeros(4, 4)})
    for report in (saved, loaded):
        assert "<pre>" in check_cell(report._repr_html_())


def save_tensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    (folder / "a").mkdir()
    tensors = {
        f"model.layers.{i}.{part}_proj.weight": np.zeros((8, 4), np.float32)
        for i in range(4)
        for part in ("up", "gate")
    }
    save_file({**tensors, "<b>norm</b>": np.ones(4, np.float32)}, folder / "a/model.safetensors")


def test_the_page_of_a_checkpoint(tmp_path: Path) -> None:
    save_tensors(tmp_path)
    page = render_stored(checkpoint.inspect(tmp_path / "a"))
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert found["groups"][0][0] == "model.layers.{0-3}.{gate,up}_proj.weight"
    assert sum(map(len, found["names"])) == 9
    assert "9 tensors of 1.0 KiB, complete" in page
    assert "<b>norm" not in page


def stored(name: str, shape: tuple[int, ...], layout: str) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, shape=shape, dtype="float32", num_bytes=4 * math.prod(shape), num_pieces=2,
        layout=layout,
    )  # fmt: skip


def test_layouts_of_a_checkpoint_are_drawn() -> None:
    report = SimpleNamespace(
        path="ckpt", format="ranks", files=[SimpleNamespace(path="a", size=9)], others=[],
        objects={"step": 8}, damage=['"b" is damaged\n<b>'], unsupported=[], notes=[],
        metadata={"k": "v" * 1000},
        tensors=[
            stored("h.0.w", (8, 4), "tp=2: tp -"), stored("h.1.w", (8, 4), "tp=2: tp -"),
            stored("experts", (4, 2, 2), "ep=4: ep - -"), stored("ragged", (8,), "3 boxes"),
            stored("fine", (1 << 20,), "tp=2: tp:1"), stored("bad", (8,), "tp=0: tp"),
        ],
    )  # fmt: skip
    page = render_stored(report)
    assert page.count('class="piece ') == 2 + 4
    assert "damaged" in page
    assert "&lt;b&gt;" in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    groups = {group[0]: group for group in json.loads(data[1])["groups"]}
    assert groups["h.{0-1}.w"][10] >= 0
    assert groups["ragged"][10] == groups["fine"][10] == groups["bad"][10] == -1


def test_inspect_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tensors(tmp_path)
    page = tmp_path / "page.html"
    assert run(["inspect", str(tmp_path / "a"), "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    assert "Made with <code>reshard inspect " in page.read_text()


def test_reports_add_what_was_measured(tmp_path: Path) -> None:
    plan = one()
    page = render(plan, reports=[report_of(plan), report_of(plan, 1, 0.75)])
    assert "on rank 1, the slowest of 2" in page
    assert "188 ms on rank 1, 4.0 KiB" in page
    assert page.count('class="packing"') == 2
    assert "Measured" not in render(plan)
    plan.save(tmp_path / "page.html", reports=[report_of(plan)])
    assert "Measured" in (tmp_path / "page.html").read_text()
    with pytest.raises(rs.FormatError, match=r"only an \.html page shows them"):
        plan.save(tmp_path / "plan.json", reports=[report_of(plan)])


def test_reports_of_another_plan_are_refused() -> None:
    other = rs.plan(side("a=2", "a"), side("b=2", "b"), shape=(4,))
    with pytest.raises(rs.FormatError, match=rf"is of plan {other.digest} and this plan is"):
        render(one(), reports=[report_of(other)])


COMMAND = [
    *("plan", "--shape", "64,32", "--from", "dp=2 tp=2: (dp tp) -"),
    *("--to", "tp=2 @ 4-5: - tp"),
]


def test_the_command_line_takes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page = tmp_path / "run.json", tmp_path / "page.html"
    report_of(one()).save(report)
    command = [*COMMAND, "--html", str(page)]
    assert run([*command, "--report", str(report)]) == 0
    text = page.read_text()
    assert "Reports of rank 0." in text
    assert "Made with <code>reshard plan --shape 64,32 " in text
    assert "reshard explore --from" in text
    assert run([*COMMAND, "--report", str(report)]) == 2
    assert "--report is for --html" in capsys.readouterr().err
    report.write_text("{}")
    assert run([*command, "--report", str(report)]) == 2
    assert f'"{report}" is no run report' in capsys.readouterr().err


def test_reports_survive_json() -> None:
    report = report_of(one())
    again = RunReport.from_json(report.to_json())
    assert (again.rank, again.call, again.digest) == (report.rank, report.call, report.digest)
    assert again.seconds == report.seconds
    assert again.bytes_sent == report.bytes_sent
    assert again.handshake == pytest.approx(report.handshake)
    assert again.transports == report.transports


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "reshard.run/1"}, {"rank": "0"}, {"rank": True}, {"seconds": None},
        {"seconds": 1e300}, {"rounds": 3}, {"rounds": [{"round": 0, "evil": 1}]},
        {"rounds": [{"round": 0, "events": 5}]}, {"rounds": [{"round": 0, "started": 5}]},
        {"transports": []}, {"rounds": [[]]}, {"setup": float("nan")},
    ],
)  # fmt: skip
def test_reports_that_are_none(change: dict[str, object]) -> None:
    data = {**report_of(one()).to_dict(), **change}
    with pytest.raises(rs.FormatError, match="this is no run report"):
        RunReport.from_json(json.dumps(data))


def test_files_without_an_end_are_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that the system states for a device is 0."""
    monkeypatch.setattr("reshard.show.run_report.MAX_FILE", 1000)
    with pytest.raises(rs.FormatError, match=r'"/dev/zero" is larger than 1000 bytes'):
        RunReport.load("/dev/zero")
