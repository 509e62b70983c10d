"""The command line: what it prints, what it refuses, and how it leaves."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import reshard as rs
from reshard.cli import demo, run
from reshard.show.plan_text import reasons
from tests.processes import hear_interrupts

ROOT = Path(__file__).parents[2]
EXAMPLE = [
    "plan",
    *("--shape", "8192,4096"),
    *("--from", "dp=2 tp=4: (dp tp) -"),
    *("--to", "tp=2 @ 8-9: - tp"),
]
MAX_CPU_SECONDS = 0.5

SHOWN = """\
(dp tp) - on mesh dp=2 tp=2, shape 8x4: 4 parts, each on 1 rank

    0                                                                      4
  0 +----------------------------------------------------------------------+
    |                                                                      |
    |                                  0                                   |
    |                                                                      |
  2 +----------------------------------------------------------------------+
"""
SHOWN_RANK = """\
rank 1 at cp=1 of mesh cp=2 holds 4 elements in 2 pieces, local shape 4

box    offset  strides
[2:4]       0  1
[4:6]       2  1
"""
PLANNED = """\
Plan of 1 tensor, 16.0 KiB of float32, from mesh dp=2 to mesh tp=2 @ 8-9

tensor  shape  from  to        size      wire  round
tensor  64x64  dp -  - tp  16.0 KiB  16.0 KiB      0

wire      16.0 KiB, the least possible
messages  4 in 1 round
staging   8.0 KiB at most on a rank, under a cap of 256.0 MiB
sources   2 send, the busiest 8.0 KiB, 1.00 x the mean

why
  Destinations want 16.0 KiB and hold none of it; each byte arrives once, so
      16.0 KiB travels.

bytes from rank (down) to rank (across)
          8     9  total
    0  4.0K  4.0K   8.0K
    1  4.0K  4.0K   8.0K
total  8.0K  8.0K  16.0K
"""
PLANNED_RANK = """\
rank 0 sends 8.0 KiB
  round  tensor  box            with    bytes
      0  tensor  [0:32, 0:32]   to 8  4.0 KiB
      0  tensor  [0:32, 32:64]  to 9  4.0 KiB
rank 0 receives 0 B
rank 0 copies 0 B
"""


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def show(layout: str, mesh: str, shape: str = "8,8", *more: str) -> list[str]:
    return ["show", layout, "--mesh", mesh, "--shape", shape, *more]


def plan(have: str = "dp=2: dp -", want: str = "tp=2 @ 8-9: - tp", *more: str) -> list[str]:
    return ["plan", "--from", have, "--to", want, "--shape", "64,64", *more]


def model(*more: str, have: str = "tp=4", want: str = "tp=2 @ 8-9") -> list[str]:
    return ["plan", "--from", have, "--to", want, *more]


def printed(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 0) -> str:
    assert run(arguments) == code
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, show("(dp tp) -", "dp=2 tp=2", "8,4")).startswith(SHOWN)
    assert printed(capsys, show("cp~", "cp=2", "8", "--rank", "1")) == SHOWN_RANK


@pytest.mark.parametrize("layout", ["-", "- tp", "- -", "-  tp | on pp=0"])
def test_a_layout_may_begin_like_an_option(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "8" if layout == "-" else "8,8"
    assert "on mesh pp=2 tp=2" in printed(capsys, show(layout, "pp=2 tp=2", shape))


@pytest.mark.parametrize("shape", ["8192,4096", "8192x4096", "(8192, 4096)", " 8192 , 4096, "])
def test_spellings_of_a_shape(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "shape 8192x4096" in printed(capsys, show("tp -", "tp=2", shape))


@pytest.mark.parametrize(
    ("layout", "shape"), [("...", ""), ("tp", "0"), ("tp -", "0,5"), ("tp", "1"), ("- -", "3,0")]
)
def test_strange_shapes_are_no_errors(
    layout: str, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, show(layout, "tp=4", shape))
    side = f"tp=4: {layout}"
    text = printed(
        capsys, ["plan", "--from", side, "--to", f"tp=4 @ 4-7: {layout}", "--shape", shape]
    )
    assert text.startswith("Plan of 1 tensor")


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(printed(capsys, show("(dp tp) -", "dp=2 tp=2", "8,4", "--json")))
    assert list(data) == ["schema", "mesh", "layout", "shape", "ranks"]
    assert (data["schema"], data["shape"]) == ("reshard.show/1", [8, 4])
    layout = rs.Layout.from_dict({"mesh": data["mesh"], "layout": data["layout"]})
    for held in data["ranks"]:
        (piece,) = layout.pieces(held["rank"], (8, 4))
        assert held["coords"] == layout.mesh.coords(held["rank"])
        assert held["local_shape"] == [2, 4]
        assert held["pieces"] == [
            {
                "start": list(piece.box.start),
                "stop": list(piece.box.stop),
                "offset": 0,
                "strides": [4, 1],
            }
        ]
    one = json.loads(printed(capsys, show("dp -", "dp=4", "8,4", "--json", "--rank", "2")))
    assert [held["rank"] for held in one["ranks"]] == [2]


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, plan())
    assert re.sub(r"staging   \S+", "staging   8.0", text) == PLANNED
    assert printed(capsys, [*plan(), "--rank", "0"]) == PLANNED_RANK


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, [*plan(), "--json", "--rank", "8", "--check"])
    data = json.loads(text)
    same = rs.plan(
        rs.Layout(rs.Mesh(dp=2), "dp -"),
        rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "- tp"),
        shape=(64, 64),
    )
    assert data["schema"] == "reshard.plan/1"
    assert data["digest"] == same.digest
    assert data["summary"] == same.summary().to_dict()
    assert data["why"] == reasons(same)
    assert data["proof"] == {"holds": True, "error": None}
    assert data["traffic"]["between"] == "rank"
    assert data["traffic"]["bytes"] == [[4096, 4096], [4096, 4096]]
    assert data["have"] == {"tensor": [[64, 64], "float32", 0]}
    assert data["layouts"][0] == {"mesh": "dp=2", "layout": "dp -"}
    assert [step["source"] for step in data["rank"]["receives"]] == [0, 1]
    assert rs.Plan.from_json(text) == same


def test_options_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = tmp_path / "hosts.toml"
    topology.write_text('ranks_per_host = 8\n[between]\nbandwidth = "1GB"\nlatency = 0.0\n')
    text = printed(capsys, [*plan(), "--topology", str(topology), "--dtype", "bf16"])
    assert "8.0 KiB of bfloat16" in text
    assert "seconds        8.19e-06 predicted; the bottleneck is host" in text
    assert "bytes from host (down) to host (across)" in text
    text = printed(capsys, [*plan(), "--to-dtype", "float16", "--memory", "1KiB"])
    assert "float32 becomes float16 before it travels" in text
    assert "and the cap is 1.0 KiB" in text
    text = printed(capsys, plan("dp=2 tp=2: tp -", "x=1 @ 8: - -", "--without", "0,3"))
    assert "Lost ranks: 0,3; those that hold the same boxes send instead." in text
    assert "proven" in printed(capsys, [*plan(), "--check"])


def test_a_plan_that_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: rs.Plan) -> None:
        raise rs.ProofError("box [0:1] is written twice")

    monkeypatch.setattr(rs.Plan, "check", refuse)
    text = printed(capsys, [*plan(), "--check"], code=1)
    assert text.endswith("does not hold: box [0:1] is written twice\n")
    data = json.loads(printed(capsys, [*plan(), "--check", "--json"], code=1))
    assert data["proof"]["holds"] is False


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data, trace = (tmp_path / name for name in ("a.html", "b.json", "c.trace"))
    assert run([*plan(), "--html", str(page), "--save", str(data)]) == 0
    assert run([*plan(), "--save", str(trace)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"wrote {one}" for one in (page, data, trace)]
    assert page.read_text().startswith("<!doctype html>")
    assert rs.Plan.from_json(data.read_text()).num_rounds == 1
    assert json.loads(trace.read_text())["traceEvents"]


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3-8b", "--rules", "llama", "--from-fsdp", "dp")
    text = printed(capsys, model(*words, have="dp=2 tp=4"))
    assert text.startswith("Plan of 291 tensors, 15.0 GiB of bfloat16, from mesh dp=2 tp=4 to")
    assert "(tp*128 dp) -" in text
    assert "notes" not in text
    config = tmp_path / "config.json"
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config.write_text(json.dumps(small))
    words = ("--model", str(config), "--to-fsdp", "dp", "--replicate", "dp")
    text = printed(capsys, model(*words, have="dp=2 tp=4", want="dp=2 @ 8-9"))
    assert "Plan of 21 tensors" in text
    words = ("--model", str(tmp_path), *words[2:])  # the folder is as good as its config.json
    assert printed(capsys, model(*words, have="dp=2 tp=4", want="dp=2 @ 8-9")) == text
    rules = tmp_path / "own.toml"
    rules.write_text('axes = ["tp"]\n[tensors]\n"*" = "tp ..."\n')
    text = printed(capsys, model("--model", str(config), "--to-rules", str(rules)))
    assert "tp ..." in text
    data = json.loads(printed(capsys, model("--model", str(config), "--dtype", "int8", "--json")))
    assert {entry[1] for entry in data["want"].values()} == {"int8"}


@pytest.mark.parametrize("word", ["t\np=2", "\x1b[31mtp=2", "tp=\u00b2", "\udcff=2", "tp=2\x00"])
def test_wild_characters_stay_on_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(show("tp -", word)) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert "\x1b" not in found


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        text = printed(capsys, arguments)
        assert all(command in text for command in ("show", "plan", "demo", "bench"))
    assert "--from" in printed(capsys, ["plan", "--help"])
    assert printed(capsys, ["--version"]) == f"reshard {rs.__version__}\n"


DEMO = ["demo", "--model", "llama-3.2-1b"]


def test_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its processes, which tests/examples starts."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    text = printed(capsys, DEMO)
    assert "Proven in" in text
    assert text.count("all arrays equal the tensors sharded by the destination layout") == 2
    assert "Not run live: torch is not installed; try pip install torch" in text
    assert "NOT" not in text
    assert "before  ckpt-tp4: sharded-safetensors" in text
    assert "verified: same values" in text
    assert max(map(len, text.splitlines())) <= 80
    before, _, after = text.partition("mlp.gate_proj.weight after:")
    assert "(tp dp) - on mesh dp=2 tp=4" in before
    assert "tp - on mesh dp=2 tp=2 @ 8-11" in after
    *_, commands = text.partition("Try next:\n")
    monkeypatch.chdir(tmp_path)
    tried = [shlex.split(line) for line in commands.replace("\\\n", "").splitlines()]
    assert [words[:2] for words in tried] == [["reshard", n] for n in ("plan", "show", "convert")]
    assert [run(words[1:]) for words in tried[:2]] == [0, 0]
    assert (tmp_path / "plan.html").exists()
    assert run([*tried[2][1:], "--help"]) == 0
    capsys.readouterr()
    data = json.loads(printed(capsys, [*DEMO, "--no-live", "--json"]))
    assert data["schema"] == "reshard.demo/1"
    assert data["holds"] is True
    assert data["files"]["equal"] is True
    assert data["files"]["amplification"] < 1.001
    assert data["live"] is None
    for found in data["simulated"]:
        assert found["wire_bytes"] == found["stated_wire_bytes"]
        assert found["messages"] == found["stated_messages"]
        assert found["peak_bytes"] <= found["stated_peak_bytes"]


def test_the_files_of_the_demo_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo._convert_files().holds
    assert not any(tmp_path.iterdir())

    def interrupted(*_: object, **__: object) -> None:
        assert any(tmp_path.iterdir())
        raise KeyboardInterrupt

    module = importlib.import_module("reshard.checkpoint.soundness")
    monkeypatch.setattr(module, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo._convert_files()
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_of_the_demo_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("reshard.checkpoint.soundness")
    monkeypatch.setattr(module, "verify", lambda *_: SimpleNamespace(ok=False))
    part = demo._convert_files()
    assert not part.holds
    assert "VALUES DIFFER" in part.text


def test_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("reshard.cli.source")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a/b/c/d.py"))
    monkeypatch.chdir(tmp_path)
    assert run(["bench"]) == 2
    assert "where they are in benchmarks/" in capfd.readouterr().err
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "benchmarks").mkdir()
    script = "import sys; print('measured', sys.argv[1:]); sys.exit(len(sys.argv) - 2)"
    (tmp_path / "benchmarks/a.py").write_text(script)
    assert run(["bench", "--quick"]) == 0
    assert capfd.readouterr().out == "==> a.py\nmeasured ['--quick']\n"


def started(arguments: list[str], **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "reshard", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
        **more,  # type: ignore[call-overload]
    )


def test_a_reader_that_leaves_is_no_error() -> None:
    process = started([*model("--model", "qwen3-30b-a3b", have="ep=8"), "--json"])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_the_exit_code_is_the_answer_though_nobody_reads(tmp_path: Path) -> None:
    """As in ``reshard inspect damaged | head -1``, with a reader that is gone from the start."""
    (tmp_path / "model.safetensors").write_bytes(b"not what it should be")
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "reshard", "inspect", str(tmp_path)]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupt_leaves_quietly() -> None:
    process = started(["demo"])
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """The processor time of a fresh process, start and imports included."""
    before = os.times()
    process.communicate()
    assert process.returncode == 0
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def loading_numpy_and_click() -> subprocess.Popen[str]:
    """What starts with Python and is not ours to make faster."""
    return subprocess.Popen([sys.executable, "-c", "import numpy, click"], text=True)


def test_the_example_of_the_readme_is_instant() -> None:
    """Under 0.5 s where loading numpy and click takes 0.25 s; a busy machine makes both slower."""
    # In turns, so that both meet the same machine; the best of five counts on both sides.
    pairs = [
        (cpu_seconds(loading_numpy_and_click()), cpu_seconds(started(EXAMPLE))) for _ in range(5)
    ]
    loading, took = map(min, zip(*pairs, strict=True))
    assert took < MAX_CPU_SECONDS * max(loading / 0.25, 1.0)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from reshard.cli import run; run(['--help']); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "rich", "jinja2", "torch"} & set(done.stderr.split())


def on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What a person would see: the output of a process whose standard output is a terminal."""
    ours, theirs = pty.openpty()
    wanted = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONUTF8": "1"}
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *arguments],
        cwd=ROOT,
        stdout=theirs,
        env={**kept, **wanted, **environment},
    )
    os.close(theirs)
    parts = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_colours_on_a_terminal() -> None:
    text = on_a_terminal(show("dp tp", "dp=2 tp=2", "8,4"))
    assert "\x1b[" in text
    assert "48;2;" in text
    assert "\u250c\u2500" in text
    plain = on_a_terminal(show("dp tp", "dp=2 tp=2", "8,4"), NO_COLOR="1")
    assert "\x1b[" not in plain
    assert "\u250c\u2500" in plain
