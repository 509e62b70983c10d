"""What a newcomer does: the ten tasks of the first day, and wrong calls with their answers.

`TASKS` names the test of each; what documents show runs with the documents.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import reshard as rs
from tests.docs.snippets import FENCE
from tests.soak import within

ROOT = Path(__file__).parents[2]
DOCUMENT = "tests/docs/test_snippets.py::test_document[{}]"
ON_RANKS = "tests/docs/test_on_ranks.py::test_document_on_ranks[{}]"
BROWSER, HERE = "tests/show/test_page_in_browser.py", "tests/cli/test_newcomer.py"
WRONG = "tests/cli/test_wrong_input.py"
TASKS = {
    "show a layout": (DOCUMENT.format("docs/quickstart.md"), "$ reshard show"),
    "plan Llama-3-8B from FSDP over 16 to TP-8 x DP-2, open the page": (
        f"{BROWSER}::test_the_page_of_a_newcomers_plan",
        '"--from-fsdp", "dp", "--to", "dp=2 tp=8 @ 16-31"',
    ),
    "HF to TP-4 to DCP to HF, verify, diff": (
        DOCUMENT.format("docs/how-to/convert.md"),
        "$ reshard diff",
    ),
    "FSDP2 + TP live to a plain module": (
        ON_RANKS.format("docs/how-to/trainer-to-inference.md"),
        "fully_shard(trained",
    ),
    "port a _shard script": (ON_RANKS.format("docs/how-to/from-shard.md"), "from reshard.compat"),
    "input_reshard": (ON_RANKS.format("docs/how-to/activation-memory.md"), "input_reshard(block"),
    "HF folder into a sharded model": (ON_RANKS.format("README.md"), 'rs.checkpoint.load("hf"'),
    "wrong inputs": (f"{WRONG}::test_a_wrong_input_is_answered_with_what_to_type", "WRONG_INPUTS"),
    "completion in bash and zsh": (f"{HERE}::test_the_tab_key_completes_in_a_real_shell", "zsh"),
    "a new model family": (f"{HERE}::test_a_new_model_family_by_the_documents", "toy-7b"),
}
"""The test of each task, and a text that it must contain: in a block that it runs, or in itself."""


class Shard:
    """Stands for DTensor's placement, which is known by its name alone."""

    dim = 0


WRONG_CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: rs.Layout("dp=2: dp"), "Layout.parse("),  # type: ignore[arg-type]
    (lambda: rs.Layout("dp=2", "dp -"), "Layout.parse("),  # type: ignore[arg-type]
    (lambda: rs.Layout(rs.Mesh(tp=2), Shard()), 'it is "tp ..."'),  # type: ignore[arg-type]
    (lambda: rs.Layout(rs.Mesh(tp=2), "Shard(0)"), 'it is "tp ..."'),
    (lambda: rs.plan("tp=2: tp -", Shard(), shape=(4, 4)), '"axis0 ..."'),  # type: ignore[arg-type]
    (lambda: rs.Mesh("dp=2"), "Mesh.parse("),  # type: ignore[arg-type]
    (lambda: rs.Mesh(2, 4), "Mesh(dp=2, tp=4"),  # type: ignore[arg-type]
    (lambda: rs.plan("dp=2: dp -", "tp=2: - tp"), "give shape=(rows, columns)"),
    (lambda: rs.plan("tp=2: tp", "tp=2: -", shape=8), "give shape=("),  # type: ignore[arg-type]
    (lambda: rs.plan("dp -", "- tp", shape=(4, 4)), '"tp=2: - tp"'),
    (lambda: rs.plan({"w": "tp=2: tp"}, {"w": "tp=2: -"}), "rs.TensorSpec("),  # type: ignore[dict-item]
    (lambda: rs.Rules.load("lama"), 'try "llama"'),
    (lambda: rs.plann, "try plan"),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_test(task: str) -> None:
    """The test exists, and runs what the task names."""
    test, text = TASKS[task]
    file, _, name = test.partition("::")
    name, _, document = name.rstrip("]").partition("[")
    source = (ROOT / file).read_text()
    assert f"def {name}(" in source
    if document:
        notes = ("not run: on ",) if name.endswith("on_ranks") else ("exit:", "none")
        blocks = FENCE.finditer((ROOT / document).read_text())
        source = "".join(one["body"] for one in blocks if (one["note"] or "none").startswith(notes))
    assert text in source


def test_there_are_ten_tasks() -> None:
    assert len(TASKS) == 10


@pytest.mark.parametrize(("call", "answer"), WRONG_CALLS, ids=range(len(WRONG_CALLS)))
def test_a_wrong_call_is_answered_with_what_to_type(
    call: Callable[[], object], answer: str
) -> None:
    with pytest.raises((rs.ReshardError, AttributeError)) as caught:
        call()
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `reshard` is a command."""
    program = tmp_path / "reshard"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m reshard "$@"\n')
    program.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
PREPARE = {
    "bash": "bind 'set enable-bracketed-paste off'",
    "zsh": "autoload -Uz compinit; compinit -u",
}
"""What a shell's own start-up files do for completion."""


class Shell:
    """An interactive shell in a terminal, in which a person types."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._screen, inner = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env | {"TERM": "dumb", "PS1": "$ ", "PROMPT": "$ "},
            start_new_session=True,
        )
        os.close(inner)

    def type(self, keys: str, until: str) -> str:
        """Press keys, and read the screen until a text is on it."""
        os.write(self._screen, keys.encode())
        seen, end = "", time.monotonic() + within(20)
        while until not in seen:
            ready, _, _ = select.select([self._screen], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{until!r} did not appear, but {seen!r}"
            seen += os.read(self._screen, 4096).decode(errors="replace")
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.mark.parametrize("name", SHELLS)
def test_the_tab_key_completes_in_a_real_shell(
    name: str, on_path: dict[str, str], tmp_path: Path
) -> None:
    """The line of the documents, then a command and a value with the Tab key."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    line = f'eval "$(_RESHARD_COMPLETE={name}_source reshard)"'
    assert line in (ROOT / "docs/cli.md").read_text()
    env = on_path | {"HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    shell = Shell(SHELLS[name], env)
    try:
        shell.type(f"{PREPARE[name]}; {line}; echo rea''dy\n", "ready")
        shell.type("reshard con\t", "convert")
        shell.type("\x15reshard plan --model llama-3-8\t", "llama-3-8b")
        said = shell.type("--from dp=2 --from-fsdp dp --to tp=2\n", "Plan of 291 tensors")
        assert "error" not in said
    finally:
        shell.close()


def test_a_new_model_family_by_the_documents(tmp_path: Path) -> None:
    """The steps of docs/architecture.md, in a copy of the source: two lines and a file."""
    steps = (ROOT / "docs/architecture.md").read_text().partition("### a model family")[2]
    for said in ("rules/families/NAME.toml", "extends", "_TYPES", "_PRESETS", "rules/configs.py"):
        assert said in steps
    shutil.copytree(ROOT / "src/reshard", tmp_path / "reshard")
    (tmp_path / "reshard/rules/families/toy.toml").write_text('extends = "llama"\n')
    configs = tmp_path / "reshard/rules/configs.py"
    text = configs.read_text()
    listed = '    "llama": _ModelType("llama"),\n'
    text = text.replace(listed, listed + listed.replace("llama", "toy"), 1)
    preset = re.search(r' +"mistral-7b": .*\n', text)
    assert preset is not None
    text = text.replace(
        preset[0],
        preset[0] + preset[0].replace("mistral-7b", "toy-7b").replace('"mistral"', '"toy"'),
    )
    configs.write_text(text)
    words = [
        sys.executable,
        "-m",
        "reshard",
        "show",
        "--model",
        "toy-7b",
        "--mesh",
        "tp=4",
        "--json",
    ]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = SimpleNamespace(**json.loads(done.stdout))
    assert shown.tensors["model.layers.3.self_attn.q_proj.weight"]["layout"] == "tp*128 -"
