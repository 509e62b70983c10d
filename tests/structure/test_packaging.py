"""What pyproject.toml declares is used, and what a source distribution's tests need is in it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

NOT_IMPORTED = {
    "aiohttp", "expecttest", "furo", "import-linter", "jedi", "mypy", "myst-parser", "pyright",
    "pytest-timeout", "ruff", "sphinx",
}  # fmt: skip
"""Tools that are started, and what others import."""
MODULES = {"pytest-xdist": "xdist"}


def python_text() -> str:
    folders = ("src", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in files)


def test_every_dependency_is_used() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [
        *PROJECT["project"]["dependencies"],
        *(one for extra in extras.values() for one in extra),
    ]
    names = {re.match(r"[\w-]+", one)[0] for one in declared}  # type: ignore[index]
    text = python_text()
    unused = {
        name
        for name in names - NOT_IMPORTED
        if not re.search(rf"^\s*(import|from) {MODULES.get(name, name)}\b", text, re.MULTILINE)
    }
    assert not unused


def test_a_source_distribution_has_what_its_tests_need() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"src", "tests", "docs", "examples", "benchmarks", "Makefile"} <= set(included)
    assert all((ROOT / name).exists() for name in included)


def test_the_makefile_names_files_that_exist() -> None:
    named = re.findall(r"\b(?:benchmarks|tests|docs)/\w+\.py\b", (ROOT / "Makefile").read_text())
    assert all((ROOT / name).exists() for name in named), named
