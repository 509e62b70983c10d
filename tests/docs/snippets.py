"""Runs what a document shows: python blocks, doctest sessions and reshard commands.

The blocks of one file run in order, in one namespace and one folder. A comment on the line before
a fence changes that: `<!-- not run: needs two GPUs -->`, or `<!-- exit: 2 -->` for its commands.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

from reshard.cli import run

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if "_build" not in path.relative_to(ROOT).parts
]
DOCUMENTS = [ROOT / "README.md", *PAGES]
SHELL = re.compile(r"[|;<>&$`]")
FENCE = re.compile(
    r"(?:^ *<!-- (?P<note>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<lang>python|console|sh)\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_file(path: Path, folder: Path) -> None:
    text = path.read_text()
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for found in FENCE.finditer(text):
        note, body = found["note"] or "", textwrap.dedent(found["body"])
        line = text.count("\n", 0, found.start("body"))
        if note.startswith("not run:"):
            continue
        if found["lang"] != "python":
            exit_code = int(note.removeprefix("exit:")) if note.startswith("exit:") else 0
            run_commands(body, f"{path.name}:{line}", folder, exit_code)
        elif body.lstrip().startswith(">>>"):
            run_session(body, path.name, line, namespace)
        else:
            exec(compile("\n" * line + body, str(path), "exec"), namespace)


def run_session(body: str, name: str, line: int, namespace: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(body, namespace, name, name, line)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        test, out=report.append, clear_globs=False
    )
    namespace.update(test.globs)
    assert result.failed == 0, "".join(report)


def commands(body: str) -> list[tuple[str, str]]:
    """(command, expected output) pairs; without `$ ` prompts every line is a command."""
    if not re.search(r"^\$ ", body, re.MULTILINE):
        return [(line, "") for line in body.replace("\\\n", " ").splitlines() if line.strip()]
    parts = re.split(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n?", body, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def run_commands(body: str, where: str, folder: Path, exit_code: int) -> None:
    pairs = commands(body)
    if not pairs or pairs[0][0].split()[0] != "reshard":
        return
    for command, want in pairs:
        code, output = run_command(command, folder)
        shown = f"{where}: $ {command}\n{output}"
        assert code == exit_code, f"{shown}exit {code}, not {exit_code}"
        texts = (_trim(want), _trim(output))
        if want.strip() and not doctest.OutputChecker().check_output(*texts, doctest.ELLIPSIS):
            raise AssertionError(f"{shown}\nis not what the document shows:\n{want}")


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """The exit code and the output of a command; in this process unless it needs a shell."""
    settings = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    if not SHELL.search(command):
        words = shlex.split(command.replace("\\\n", " "))[1:]
        both = io.StringIO()
        with (
            mock.patch.dict(os.environ, settings),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(both),
            contextlib.redirect_stderr(both),
        ):
            return run(words), both.getvalue()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    bash = ["bash", "-c", f"exec 2>&1; {command}"]
    env = os.environ | settings | {"PATH": path}
    done = subprocess.run(bash, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def _trim(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.strip().splitlines()) + "\n"
