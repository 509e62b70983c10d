"""What pyproject.toml declares is used, and what a source distribution's tests need is in it."""

import email
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

NOT_IMPORTED = {
    "aiohttp", "expecttest", "furo", "hatchling", "import-linter", "jedi", "mypy", "myst-parser",
    "pyright", "pytest-timeout", "ruff", "sphinx",
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


BUILD = "import sys; from hatchling.build import *; prepare_metadata_for_build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The long description that a wheel of this checkout has."""
    pytest.importorskip("hatchling", reason="hatchling, which builds wheels, is not installed")
    folder = tmp_path_factory.mktemp("metadata")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.dist-info/METADATA")
    metadata = email.message_from_bytes(made.read_bytes())
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload(decode=True).decode()  # type: ignore[union-attr]


def test_links_of_the_long_description_work_outside_of_a_checkout(description: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)|<(?:a|img)[^>]* (?:href|src)=\"([^\"]+)", description)
    assert [one for one in links if not "".join(one).startswith("https://")] == []
    assert "](docs/" in (ROOT / "README.md").read_text()


def test_paths_of_the_long_description_are_in_a_source_distribution(description: str) -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    paths = re.findall(r"\(((?:docs|benchmarks)/[^)\s#]+|CHANGELOG\.md)", description)
    assert len(paths) > 20
    assert [path for path in paths if path.partition("/")[0] not in included] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_long_description_is_the_readme(description: str) -> None:
    """Its words and its code, but for the links."""
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"^```.*?^```$", readme, re.DOTALL | re.MULTILINE)
    assert code == re.findall(r"^```.*?^```$", description, re.DOTALL | re.MULTILINE)
    assert [line for line in readme.splitlines() if line.startswith("#")] == [
        line for line in description.splitlines() if line.startswith("#")
    ]
