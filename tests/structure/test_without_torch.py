"""Without torch every public name and every command works, or says in one line how to get it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A finder that knows no torch: what a machine without it shows.
BLOCKED = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, NoTorch())
"""
NAMES = """
import importlib, json
import reshard as rs

answers = {}

def ask(name, how):
    try:
        how()
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
    else:
        answers[name] = "works"

for name in dir(rs):
    ask(f"reshard.{name}", lambda: getattr(rs, name))
for package in ("checkpoint", "rules", "nn", "sharded", "compat"):
    ask(f"reshard.{package}", lambda: importlib.import_module(f"reshard.{package}"))
    for name in getattr(sys.modules.get(f"reshard.{package}"), "__all__", ()):
        ask(f"reshard.{package}.{name}", lambda: getattr(sys.modules[f"reshard.{package}"], name))
plan = rs.plan("tp=2: tp", "tp=2: -", shape=(4,))
for name in ("run", "start"):
    ask(f"plan.{name}", lambda: getattr(plan, name)({}))
print(json.dumps(answers))
"""
COMMANDS = """
import contextlib, io, json
from reshard.cli import cli, run

answers = {}
for command in cli.commands:
    for arguments in ([command, "--help"], GIVEN.get(command)):
        if arguments is not None:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(arguments)
            answers[" ".join(arguments)] = [code, err.getvalue()]
print(json.dumps(answers))
"""
NEED_TORCH = {
    *(f"reshard.{name}" for name in ("backward", "check", "describe", "exchange", "layout_of")),
    *("reshard.move", "reshard.nn", "reshard.sharded", "reshard.compat", "plan.run", "plan.start"),
    *(f"reshard.checkpoint.{name}" for name in ("load", "save", "LoadReport", "SaveReport")),
}


def answers_of(code: str) -> dict[str, object]:
    words = [sys.executable, "-c", BLOCKED + code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_public_names() -> None:
    answers = answers_of(NAMES)
    works = {name for name, answer in answers.items() if answer == "works"}
    assert set(answers) - works == NEED_TORCH
    for name in NEED_TORCH:
        answer = str(answers[name])
        assert answer.startswith("ModuleNotFoundError: "), name
        assert answer.endswith(" needs torch: it is not installed; try pip install torch"), name
        assert "\n" not in answer


def test_commands(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    numpy = pytest.importorskip("safetensors.numpy")
    (tmp_path / "ckpt").mkdir()
    numpy.save_file({"w": np.ones((4, 6), "float32")}, tmp_path / "ckpt/model.safetensors")
    ckpt, out = str(tmp_path / "ckpt"), str(tmp_path / "out")
    given = {
        "show": ["show", "tp=2: tp -", "--shape", "4,6"],
        "plan": ["plan", "--shape", "4,6", "--from", "tp=2: tp -", "--to", "tp=2: - tp", "--check"],
        "inspect": ["inspect", ckpt],
        "convert": ["convert", ckpt, out, "--mesh", "tp=2", "--layout", "w=tp -"],
        "verify": ["verify", ckpt, out],
        "diff": ["diff", ckpt, out],
        "index": ["index", ckpt, "-o", str(tmp_path / "index")],
    }
    answers = answers_of(f"GIVEN = {given!r}\n" + COMMANDS)
    assert len(answers) >= len(given) + 9
    assert {name: answer for name, answer in answers.items() if answer != [0, ""]} == {}
