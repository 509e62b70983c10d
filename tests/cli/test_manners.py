"""How the command line behaves towards people: completion, show, pipes, quiet, words of errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.cli import run

PLAN = ["plan", "--shape", "4096,4096", "--from", "dp=2: dp -", "--to", "tp=2: - tp"]


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


def test_html_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "x.html"
    sides = ["--from", "dp=2: dp -", "--to", "tp=2: - tp"]
    assert run(["plan", "--shape", "8,8", *sides, "--html", str(page), "--json"]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert said.err == f"wrote {page}\n"


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
