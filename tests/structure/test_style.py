"""What ruff cannot see of the house style: short files, short functions, telling names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("src/reshard/**/*.py"))
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
ALL_PYTHON = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
NAMES_THAT_SAY_NOTHING = {"utils.py", "helpers.py"}


def complaints(text: str) -> Iterator[str]:
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {length} lines"


def not_ascii(text: str) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    return [f"line {number}: {line.strip()!a}" for number, line in lines if not line.isascii()]


def test_files_and_functions_are_short() -> None:
    found = [f"{p.relative_to(ROOT)}: {c}" for p in SOURCES for c in complaints(p.read_text())]
    assert not found, "\n".join(found)


def test_code_is_ascii() -> None:
    found = [f"{p.relative_to(ROOT)}: {c}" for p in ALL_PYTHON for c in not_ascii(p.read_text())]
    assert not found, "\n".join(found)


def test_file_names_say_something() -> None:
    assert not [p for p in ALL_PYTHON if p.name in NAMES_THAT_SAY_NOTHING]


@pytest.mark.parametrize("text", ["x = 1\n" * 451, "def f():\n" + "    x = 1\n" * 60])
def test_long_code_is_noticed(text: str) -> None:
    assert list(complaints(text))


def test_other_alphabets_are_noticed() -> None:
    assert not_ascii("x = '\N{GREEK SMALL LETTER MU}'")
    assert not not_ascii("x = 1")
