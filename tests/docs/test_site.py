"""The site without Sphinx: order, links, names, pictures and what the pages say of the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import textwrap
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt
from pygments.lexers import get_lexer_by_name

from tests.docs.snippets import DOCUMENTS, FENCE, PAGES, ROOT, name_of

LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
PUBLIC = ("reshard", "reshard.checkpoint", "reshard.nn", "reshard.sharded")


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def anchors(path: Path) -> set[str]:
    """The headings of a page as links name them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", CODE.sub(_kept, path.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(words.replace(" ", "-"))
    return found


def _kept(found: re.Match[str]) -> str:
    return "" if "```" in found[0] else found[0]


def test_the_contents_are_in_order_and_complete() -> None:
    text = (ROOT / "docs/index.md").read_text()
    listed = [
        name
        for block in re.findall(r"```{toctree}\n(.*?)```", text, re.DOTALL)
        for name in block.split("\n\n", 1)[1].split()
    ]
    pages = [str(path.relative_to(ROOT / "docs").with_suffix("")) for path in PAGES]
    assert sorted(listed) == sorted(set(pages) - {"index"})
    assert listed[0] == "quickstart"
    assert listed.index("how-to/convert") < listed.index("notation") < listed.index("cli")


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for link in LINK.findall(CODE.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        if ":" in name:
            continue
        target = path if not name else (path.parent / name).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    page = (ROOT / f"docs/api/{name.rpartition('.')[2]}.md").read_text()
    shown = set(re.findall(r"\w+", page))
    missing = set(importlib.import_module(name).__all__) - shown
    assert not missing


def test_guarantees_name_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/guarantees.md").read_text())
    assert len(named) > 20
    missing = [
        (file, test)
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert not missing


def test_pictures_are_what_the_library_draws() -> None:
    pictures = module_at(ROOT / "docs/pictures.py")
    for name, make in pictures.PICTURES.items():
        shown = (ROOT / "docs/pictures" / name).read_text()
        assert shown == make(), f"{name} is out of date: run python docs/pictures.py"


def test_the_generated_parts_can_be_made() -> None:
    text = generated().commands()
    assert "## reshard plan" in text
    assert "--from-fsdp" in text
    source = ["[a](../benchmarks/reports/move.md)\n\n<!-- made of: reports -->\n"]
    generated().fill(None, "page", source)
    assert source[0].startswith("[a](#report-move)")
    assert "(report-move)=\n## Live moves" in source[0]
    for path in PAGES:
        for kind, words in generated().MARKER.findall(path.read_text()):
            assert kind in generated().MAKERS, (path, words)


class Source:
    """A page as Sphinx gets it: with its generated parts, read by the parser that MyST uses."""

    def __init__(self, path: Path) -> None:
        found = [path.read_text()]
        generated().fill(None, path.stem, found)
        self.path, self.targets = path, set(re.findall(r"^\(([\w-]+)\)=$", found[0], re.MULTILINE))
        self.links, self.languages = [], set()
        self.levels, self.slugs = [], set()
        tokens = MarkdownIt("commonmark").enable("table").parse(found[0])
        for token, after in zip(tokens, [*tokens[1:], None], strict=True):
            if token.type == "fence":
                self.languages.add(token.info)
            if token.type == "heading_open":
                self.levels.append(int(token.tag[1:]))
                self.slugs |= self._slugs(after.content) if self.levels[-1] <= ANCHORS else set()
            for one in token.children or ():
                link = one.attrs.get("href") or one.attrs.get("src")
                if link and not re.match(r"[a-z]+:", link):
                    self.links.append(link)

    @staticmethod
    def _slugs(heading: str) -> set[str]:
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")}


ANCHORS = 4
"""Levels of headings that links can name, as docs/conf.py says."""


@cache
def generated() -> ModuleType:
    return module_at(ROOT / "docs/generated.py")


@cache
def sources() -> dict[Path, Source]:
    return {path: Source(path) for path in PAGES}


def test_links_of_the_site_lead_somewhere() -> None:
    """Also those of generated parts: reports, changes, commands. Sphinx is not needed for that."""
    assert f"myst_heading_anchors = {ANCHORS}\n" in (ROOT / "docs/conf.py").read_text()
    targets = set().union(*(page.targets for page in sources().values()))
    wrong, num_links = [], 0
    for path, page in sources().items():
        num_links += len(page.links)
        for link in page.links:
            name, _, anchor = link.partition("#")
            target = path if not name else (path.parent / name).resolve()
            if target.suffix == ".md":
                known = target in sources() and sources()[target].slugs | (
                    set() if name else targets
                )
                good = bool(known) and (not anchor or anchor in known)
            else:
                good = target.is_file() and target.is_relative_to(ROOT)
            wrong += [] if good else [f"{name_of(path)}: {link}"]
    assert num_links > 80
    assert wrong == []


def test_targets_of_the_site_are_unique() -> None:
    named = [target for page in sources().values() for target in page.targets]
    assert sorted(named) == sorted(set(named))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_headings_and_code_of_a_page_are_what_sphinx_takes(path: Path) -> None:
    """One title, no level left out, and only languages that can be coloured."""
    page = sources()[path]
    assert page.levels[0] == 1
    assert page.levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(page.levels))
    unknown = {one for one in page.languages if one and not one.startswith("{")} - {"text"}
    for language in unknown:
        get_lexer_by_name(language)
    assert {one for one in page.languages if one.startswith("{")} <= {"{eval-rst}", "{toctree}"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_page_says_how_to_install_what_its_code_imports(path: Path) -> None:
    """What `pip install '.[torch]'` does not bring is named in the first block that needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    brought = {re.match(r"[\w-]+", one)[0] for one in wanted} | {
        "reshard",
        *sys.stdlib_module_names,
    }  # type: ignore[index]
    for found in FENCE.finditer(path.read_text()):
        if found["lang"] == "python" and ">>>" not in found["body"]:
            nodes = list(ast.walk(ast.parse(textwrap.dedent(found["body"]))))
            modules = {
                alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names
            }
            modules |= {one.module or "" for one in nodes if isinstance(one, ast.ImportFrom)}
            for module in {one.partition(".")[0] for one in modules} - brought:
                assert f"pip install {module}" in found["body"], f"{path.name}: {module}"
                brought |= {module}


def test_figures_of_the_readme_are_in_the_reports() -> None:
    """Every number of a row of the comparison is in the report that the row links, rounded."""
    table = (ROOT / "README.md").read_text().partition("## Why not")[2].partition("\nPlanning")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == 7
    for row in rows:
        measured = row.rstrip(" |").rpartition(" | ")[2]
        report = (ROOT / re.findall(r"\((benchmarks/reports/\w+\.md)\)", row)[0]).read_text()
        known = [float(number) for number in re.findall(r"\d+\.?\d*", report)]
        figures = re.findall(r"([\d,]+\.?\d*) (?:ms|s|MiB)\b", re.sub(r"\[.*?\]", "", measured))
        assert figures
        for figure in figures:
            digits = len(figure.partition(".")[2])
            value = float(figure.replace(",", ""))
            assert any(round(number, digits) == value for number in known), (row, figure)


def test_broken_links_of_a_site_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = module_at(ROOT / "docs/links.py")
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="b.html#y">b</a><a href="#x">x</a>')
    (tmp_path / "b.html").write_text('<a id="y" href="a.html?v=1">a</a><a href="https://c">c</a>')
    assert links.main(tmp_path) == 0
    assert "3 links inside 2 pages, 0 broken" in capsys.readouterr().out
    (tmp_path / "b.html").write_text('<a href="a.html#z">a</a><a href="none.html">n</a>')
    assert links.main(tmp_path) == 1
    assert capsys.readouterr().err.count("broken link in") == 3
