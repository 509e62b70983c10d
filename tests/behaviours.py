"""Which test shows which behaviour? Makes docs/behaviours.md.

    python -m tests.behaviours            # runs the tests, and writes the page
    python -m tests.behaviours --names    # only the names; outcomes stay open

Ids are read from the names of tests: test_B1_B2_... shows B1 and B2.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["Table", "names_of", "page_of", "shown_by_id"]

ROOT = Path(__file__).parent.parent
FOLDERS = ("tests/sharded", "tests/nn")
PAGE = ROOT / "docs" / "behaviours.md"

Table = Mapping[str, Mapping[str, str]]

HEAD = """# What torch.distributed._shard did, and what we do

Made by `python -m tests.behaviours` from `tests/behaviours.toml` and the tests. Every behaviour
(B) of the original is shown by a test that carries its number, and so is every defect (D) that is
one no more.
"""


SUITES = """## PyTorch's own tests

`python -m tests.torch_suites FOLDER`, with `test/distributed` of PyTorch's source, runs tests of
`torch.distributed._shard` with `reshard.compat` in their imports, and its tests of DTensor with
`rs.move` in place of `redistribute`. Of what passes with torch on a CPU, these do not pass:
"""


def table() -> Table:
    """All behaviours and defects, in words."""
    found: Table = tomllib.loads((ROOT / "tests" / "behaviours.toml").read_text())
    return found


def names_of(folder: str) -> Iterator[tuple[str, str]]:
    """The file and name of every test in a folder."""
    for path in sorted((ROOT / folder).rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(ROOT).as_posix(), node.name


def shown_by_id() -> dict[str, list[tuple[str, str]]]:
    """The tests that show each id."""
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in FOLDERS:
        for file, name in names_of(folder):
            for number in re.findall(r"(?<![A-Za-z0-9])[BD]\d+(?![0-9])", name.replace("_", " ")):
                found.setdefault(number, []).append((file, name))
    return found


def page_of(outcomes: Mapping[str, str]) -> str:
    """The page; outcomes are by the name of a test."""
    known, tests = table(), shown_by_id()
    lines = [HEAD]
    for title, part in (("The same, or wider", "same"), ("No longer wrong", "better")):
        lines += [f"## {title}", "", "| | what | shown by | outcome |", "|---|---|---|---|"]
        for number, words in known[part].items():
            lines.append(row_of(number, words, tests.get(number, []), known["note"], outcomes))
        lines.append("")
    lines += [SUITES, "| test | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in known["suites"].items()]
    return "\n".join([*lines, ""])


def row_of(
    number: str,
    words: str,
    tests: list[tuple[str, str]],
    notes: Mapping[str, str],
    outcomes: Mapping[str, str],
) -> str:
    if not tests:
        return f"| {number} | {words} | | {notes[number]} |"
    shown = "<br>".join(f"`{file.removeprefix('tests/')}` {name}" for file, name in tests)
    told = sorted({outcomes.get(name, "not run") for _, name in tests})
    return f"| {number} | {words} | {shown} | {', '.join(told)} |"


def outcomes_of_a_run() -> dict[str, str]:
    """Run the tests; a test with parameters has passed if all of them have."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", f"--junit-xml={report}"]
        subprocess.run([*command, *FOLDERS], cwd=ROOT, check=False)
        found: dict[str, str] = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            name = str(case.get("name")).partition("[")[0]
            failed = case.find("failure") is not None or case.find("error") is not None
            skipped = case.find("skipped") is not None
            outcome = "failed" if failed else "skipped" if skipped else "passed"
            worse = {"passed": 0, "skipped": 1, "failed": 2}
            found[name] = max(found.get(name, "passed"), outcome, key=worse.__getitem__)
    return found


def main() -> None:
    outcomes = {} if "--names" in sys.argv else outcomes_of_a_run()
    PAGE.write_text(page_of(outcomes))
    print(f"{PAGE.relative_to(ROOT)}: {len(shown_by_id())} ids are shown by tests")


if __name__ == "__main__":
    main()
