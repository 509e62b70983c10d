"""What all commands share: JSON, -q and -v, 80 columns, files, the log, completion, pipes."""

from __future__ import annotations

import errno
import html
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.cli import cli, run
from reshard.cli.output import fitted, progress_text, working
from reshard.rules import models
from reshard.text import log

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODEL = ["--model", "llama-3-8b"]
SIDES = ["--from", "dp=2 tp=4", "--from-fsdp", "dp", "--to", "tp=2 @ 8-9"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "show": (["show", "dp=2 tp=4: (dp tp) -", "--shape", "8192,4096"], 0),
    "show.model": (["show", "--model", "deepseek-v3", "--mesh", "ep=8 tp=2"], 0),
    "plan": (["plan", *MODEL, *SIDES], 0),
    "inspect": (["inspect", "{files}/tp4"], 0),
    "convert": (["convert", "{files}/hf", "{files}/out", "--mesh", "tp=4", "--overwrite"], 0),
    "verify": (["verify", "{files}/hf", "{files}/tp4"], 0),
    "diff": (["diff", "{files}/hf", "{files}/other"], 1),
    "index": (["index", "{files}/hf", "-o", "{files}/index"], 0),
}
"""One call of every kind of report, and its exit code."""
OTHERS = {"bench", "demo", "explore"}
"""Starts other programs; takes its time; serves until it is ended. Their own tests look at JSON."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype("float16")
        for name, (shape, _) in models.tensors(CONFIG).items()
    }
    for name, added in (("hf", 0), ("other", 1)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
        changed = {key: value + (added if "norm" in key else 0) for key, value in tensors.items()}
        save_file(changed, folder / name / "model.safetensors")
    assert run(["convert", str(folder / "hf"), str(folder / "tp4"), "--mesh", "tp=4", "-q"]) == 0
    shutil.copytree(folder / "hf", folder / "damaged")
    weights = folder / "damaged/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def words_of(kind: str, files: Path) -> tuple[list[str], int]:
    arguments, code = COMMANDS[kind]
    return [word.replace("{files}", str(files)) for word in arguments], code


def opts_of(command: str) -> set[str]:
    return {option for one in cli.commands[command].params for option in one.opts}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_command_is_in_the_table() -> None:
    assert {kind.partition(".")[0] for kind in COMMANDS} | OTHERS == set(cli.commands)
    named = {command for command in cli.commands if "--json" in opts_of(command)}
    assert named == set(cli.commands) - {"bench"}  # which passes its arguments on


@pytest.mark.parametrize("kind", COMMANDS)
def test_json_has_a_schema_that_is_documented(
    kind: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, code = words_of(kind, files)
    assert run([*arguments, "--json", "-q"]) == code
    found = capsys.readouterr()
    assert found.err == ""
    data = json.loads(found.out)
    assert next(iter(data)) == "schema"
    assert data["schema"] == f"reshard.{kind}/1"
    (row,) = [
        line
        for line in (ROOT / "docs/json.md").read_text().splitlines()
        if f"| `reshard.{kind}/1` |" in line
    ]
    listed = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)|: for each .*", "", row.split("|")[3]))
    optional = {"proof", "rank"}
    assert set(listed) - optional <= set(data)


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("flag", ["-q", "-v"])
def test_quiet_and_verbose_stand_on_either_side(
    kind: str, flag: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, code = words_of(kind, files)
    said = []
    for words in ([flag, *arguments], [*arguments, flag]):
        assert run(words) == code
        said.append(capsys.readouterr())
    outputs = [re.sub(r"time .*", "", one.out) for one in said]
    assert outputs[0] == outputs[1]
    assert said[0].err == said[1].err
    assert said[0].err == "" or (flag, kind) == ("-v", "convert")
    assert log.level == logging.NOTSET


EXPERTS = ["plan", "--model", "qwen3-30b-a3b", "--from", "ep=8", "--to", "tp=4 @ 8-11"]
OUTPUTS: dict[str, tuple[list[str], int]] = {
    **COMMANDS,
    "show one rank": (["show", "dp=2 tp=4 @ 8-15: (dp tp) -", "--shape", "64,64", "--rank=9"], 0),
    "show zigzag": (["show", "a=2 b=2 c=2: a b~ c:3 -", "--shape", "64,64,64,64"], 0),
    "plan of experts": (EXPERTS, 0),
    "plan with notes": (["plan", *MODEL, "--from", "tp=16", "--to", "tp=4", "--check"], 0),
    "plan one rank": (["plan", *MODEL, *SIDES, "--rank", "3"], 0),
    "inspect whole": (["inspect", "{files}/hf"], 0),
    "inspect tree": (["inspect", "{files}/tp4", "--tree"], 0),
    "inspect damage": (["inspect", "{files}/damaged"], 1),
    "convert dry run": (["convert", "{files}/hf", "{files}/new", "--mesh", "tp=2", "--dry-run"], 0),
    "convert some": (["convert", "{files}/hf", "{files}/few", "--drop", "*norm*"], 0),
    "verify unequal": (["verify", "{files}/hf", "{files}/other"], 1),
    "diff other": (["diff", "{files}/hf", "{files}/tp4"], 0),
}  # fmt: skip
"""Calls whose output has long tables and long sentences, and their exit codes."""


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_fit_80_columns(
    kind: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code = OUTPUTS[kind]
    monkeypatch.chdir(files)
    assert run([word.replace("{files}/", "") for word in words]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines
    # A name or a path that has no line to fit into stays whole, and has a line of its own.
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_help_fits_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_long_sentences_keep_their_words(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped for a terminal, an output says the same as in a pipe."""
    monkeypatch.chdir(files)
    said = []
    for columns in ("80", ""):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(["diff", "hf", "other"]) == 1
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]
    assert said[0].split() == said[1].split()
    assert max(map(len, said[1].splitlines())) > 100


def test_wide_names_get_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{layer}.self_attn.k_proj.weight and 63 more" for layer in (0, 1)]
    others = ["shape  from  to  size", "4x4    tp -  -   1 B", "4x4    tp -  -   2 B"]
    text = "\n".join(
        f"{name:55}{rest}" for name, rest in zip(["tensor", *names], others, strict=True)
    )
    monkeypatch.setenv("COLUMNS", "49")
    assert fitted(text).splitlines()[1:4] == [
        "    shape  from  to  size",
        "model.layers.0.self_attn.k_proj...ght and 63 more",
        "    4x4    tp -  -   1 B",
    ]
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, fitted(text).splitlines())) <= 70
    assert len(fitted(text).splitlines()) == 3
    monkeypatch.delenv("COLUMNS")
    assert fitted(text) == text  # a pipe gets whole names


def test_progress_is_in_the_units_of_the_report() -> None:
    assert progress_text(0, 5 << 30, 0.0) == "0 B of 5.0 GiB"
    assert progress_text(1 << 30, 5 << 30, 2.0) == "1.0 GiB of 5.0 GiB, 512.0 MiB/s"


def test_quiet_says_nothing_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["--shape", "8,8", "--from", "dp=2: dp -", "--to", "tp=2: - tp"]
    page = tmp_path / "x.html"
    assert run(["plan", *sides, "--html", str(page), "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert run(["plan", *sides, "--html", str(page), "--json"]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert said.err == f"wrote {page}\n"


def test_the_log_is_silent_until_it_has_a_handler(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments, _ = words_of("convert", files)
    assert run(arguments) == 0
    assert capsys.readouterr().err == ""
    with caplog.at_level(logging.INFO, logger="reshard"):
        assert run([*arguments, "-q"]) == 0
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"wrote 21 tensors to {files}/out"
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("knows_bytes", [False, True])
def test_a_long_step_gives_a_sign_of_life(
    knows_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for screen, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with working("proving") as progress:
            assert (progress is not None) == shown
            if progress is not None and knows_bytes:
                progress(1 << 20, 4 << 20)
        assert ("proving" in screen.getvalue()) == shown
        assert ("1.0 MiB of 4.0 MiB" in screen.getvalue()) == (shown and knows_bytes)


def complete(words: str, shell: str = "bash") -> list[str]:
    """What a shell would offer for the last of these words."""
    listed = words.split(" ")
    env = os.environ | {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(listed) - 1),
        "_RESHARD_COMPLETE": f"{shell}_complete",
    }
    command = [sys.executable, "-m", "reshard"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    return [line.partition(",")[2] for line in lines] if shell == "bash" else lines


def test_shells_complete_commands_options_and_values() -> None:
    assert complete("reshard ver") == ["verify"]
    assert complete("reshard con", "zsh")[:2] == ["plain", "convert"]
    assert "--memory" in complete("reshard plan --mem")
    assert complete("reshard plan --model gpt-oss") == ["gpt-oss-20b", "gpt-oss-120b"]
    assert complete("reshard convert --rules qwen3_") == ["qwen3_moe", "qwen3_next"]
    assert "qwen3_next" in complete("reshard inspect --rules qwen3_n", "zsh")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_script(shell: str) -> None:
    env = os.environ | {"_RESHARD_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "reshard"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert f"_RESHARD_COMPLETE={shell}_complete" in done.stdout


def test_show_takes_a_mesh_and_a_layout_in_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "dp=2 tp=2: (dp tp) -", "--shape", "8,4"]) == 0
    one = capsys.readouterr().out
    assert run(["show", "(dp tp) -", "--mesh", "dp=2 tp=2", "--shape", "8,4"]) == 0
    assert capsys.readouterr().out == one
    assert run(["show", "dp=2: dp", "--mesh", "dp=2", "--shape", "8"]) == 2
    assert "names a mesh, and so does --mesh: leave one out" in capsys.readouterr().err


def test_show_names_ranks_that_hold_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "tp=16: tp*128 -", "--shape", "1024,16"]) == 0
    assert "8 ranks hold nothing: 8-15" in capsys.readouterr().out
    assert run(["show", "tp=2: tp", "--shape", "1"]) == 0
    assert "1 rank holds nothing: 1" in capsys.readouterr().out
    assert run(["show", "tp=2: tp", "--shape", "2"]) == 0
    assert "nothing" not in capsys.readouterr().out


def test_show_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "--model", "llama-3-8b", "--mesh", "tp=4"]) == 0
    table = capsys.readouterr().out
    assert "model.layers.{i}.self_attn.k_proj.weight" in table
    assert max(map(len, table.splitlines())) <= 80
    name = "model.layers.0.self_attn.k_proj.weight"
    assert run(["show", "--model", "llama-3-8b", "--mesh", "tp=4", name]) == 0
    assert "tp*128 - on mesh tp=4, shape 1024x4096" in capsys.readouterr().out
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8,
              "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["show", "--model", str(tmp_path), "--mesh", "tp=2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "reshard.show.model/1"
    assert data["tensors"][name]["layout"] == "tp*8 -"


def test_exit_codes_survive_a_reader_that_leaves(tmp_path: Path) -> None:
    """A damaged checkpoint ends with 1 however little of the report is read."""
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      " + b"x")
    command = f"{sys.executable} -m reshard inspect {tmp_path}"
    plain = subprocess.run(command.split(), capture_output=True, timeout=60).returncode
    assert plain != 0
    for _ in range(5):
        piped = f"{command} 2>&1 | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
        assert subprocess.run(["bash", "-c", piped], timeout=60).returncode == plain


def test_a_full_disk_under_the_report_is_one_line_and_code_2() -> None:
    command = [sys.executable, "-m", "reshard", "plan", "--shape", "4,4"]
    command += ["--from", "tp=2: tp -", "--to", "tp=2: - tp"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "reshard: standard output: No space left on device\n"
    assert done.returncode == 2


def test_what_may_not_be_read_says_what_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is made up."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert run(["inspect", str(tmp_path)]) == 2
    said = f"reshard: {tmp_path} cannot be listed: Permission denied: check its permissions\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(Path, "write_text", refuse)
    sides = ["--from", "dp=2: dp -", "--to", "tp=2: - tp"]
    assert run(["plan", "--shape", "8,8", *sides, "--html", str(tmp_path / "x.html")]) == 2
    said = (
        f"reshard: {tmp_path}: Permission denied: check its permissions, or choose another place\n"
    )
    assert capsys.readouterr().err == said


def test_paths_that_are_no_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages name the command that made them, and conversions the path of their source."""
    folder, page = tmp_path / os.fsdecode(b"ckpt\xff"), tmp_path / "page.html"
    folder.mkdir()
    save_file({"w": np.ones((4, 4), "float32")}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(folder / "model.safetensors")
    assert run(["inspect", str(folder), "--html", str(page)]) == 0
    assert "ckpt\\udcff" in page.read_text(encoding="utf-8")
    assert run(["convert", str(folder), str(tmp_path / "out")]) == 0
    assert run(["verify", str(folder), str(tmp_path / "out")]) == 0
    assert "internal error" not in capsys.readouterr().err


def test_verbose_shows_the_code_behind_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESHARD_TRACEBACK", raising=False)
    assert run(["show", "tp", "--shape", "4"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("RESHARD_TRACEBACK", "")  # so that it is taken back after the test
    assert run(["-v", "show", "tp", "--shape", "4"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_page_names_the_command_as_it_was_typed(tmp_path: Path) -> None:
    """Spaces at the ends of a word are a part of it, as in the name of a folder."""
    page, side = tmp_path / "page.html", "tp=2: - tp"
    words = ["plan", "--from", side, "--to", "tp=2:  tp - ", "--shape", "4,4", "--html", str(page)]
    assert run([*words, "-q"]) == 0
    assert f"reshard plan --from '{side}' --to 'tp=2:  tp - ' --shape" in html.unescape(
        page.read_text()
    )
