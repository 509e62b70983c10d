"""The index of a source tree: what its pages say, that links lead somewhere, that it is stable."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import time
import tokenize
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

import reshard.index
from reshard.cli import run
from reshard.errors import ArgumentError, PathError
from reshard.index import build
from reshard.index.records import first_sentence
from tests.soak import within

MODULE = '''"""Cuts tensors. More words."""

from __future__ import annotations

import os.path
from collections import abc as kinds, deque
from . import other
from .deep.inner import helper as assistant

LIMIT = 3  # largest Gr\u00f6\u00dfe of a cut


class Cutter(dict):
    """Cuts one tensor."""

    def cut(self, size: int, *, sharp: bool = True) -> int:
        """Cut here. And there."""
        return self.measure(size) + helper_function(LIMIT)

    def measure(self, size):
        return size


async def helper_function(x=1):
    "mentions LIMIT"
    text = "no_keyword_in_a_string"
    return Cutter()
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pkg/__init__.py": "",
        "pkg/main.py": MODULE,
        "pkg/other.py": "import pkg.main\nx = 1\n",
        "pkg/deep/__init__.py": "",
        "pkg/deep/inner.py": "from ..main import Cutter\n\ndef helper():\n    return Cutter()\n",
        "tests/test_main.py": "from pkg.main import Cutter\n",
        "README.md": "# Title\n\nUse `pkg.main` so:\n\n```python\n# no heading\ncutter = 1\n```\n",
        "broken.py": "def (:\n",
        "latin.py": "x = '\u00e9'\n",
        ".hidden/secret.py": "x = 1\n",
    }
    root = tmp_path / "tree"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("latin-1" if name == "latin.py" else "utf-8"))
    (root / "link.py").symlink_to("/etc/passwd")
    return root


def section(page: str, title: str) -> str:
    found = re.search(
        rf"^##+ {re.escape(title)}.*?\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert found, f"no section {title}"
    return found[1].replace("\\", "")


def test_a_documentation_page(tree: Path, tmp_path: Path) -> None:
    build(tree, tmp_path / "out")
    page = (tmp_path / "out/pkg/main.py.md").read_text()
    assert f"bytes: {len(MODULE.encode())}" in section(page, "File")
    assert "summary: Cuts tensors.\n" in section(page, "File")
    functions = section(page, "Functions")
    assert (
        "[Cutter.cut](#L16) `def cut(self, size: int, *, sharp: bool=True) -> int` Cut here."
        in (functions)
    )
    assert "[helper_function](#L24) `async def helper_function(x=1)`" in functions
    assert "[Cutter](#L13) `class Cutter(dict)` Cuts one tensor." in section(page, "Classes")
    calls = section(page, "Calls inside the file")
    assert "[Cutter.cut](#L16) -> Cutter.measure, helper_function" in calls
    assert "[helper_function](#L24) -> Cutter" in calls
    assert section(page, "Standard library").split() == [
        *("-", "__future__", "-", "collections", "-", "os.path"),
    ]
    own = section(page, "Own")
    assert "[.](__init__.py.md)" in own
    assert "[.other](other.py.md)" in own
    assert "[.deep.inner](deep/inner.py.md)" in own
    users = section(page, "Imported by")
    assert all(name in users for name in ("deep/inner.py", "other.py", "tests/test_main.py"))
    assert "test_main.py" in section(page, "Tests that mention it")
    source = html.unescape(re.sub(r'<a id="L\d+"></a>', "", page.split("<pre>\n")[1]))
    assert source == MODULE + "</pre>\n"
    assert '<a id="L16"></a>    def cut(' in page


def test_a_keyword_page(tree: Path, tmp_path: Path) -> None:
    build(tree, tmp_path / "out")
    page = (tmp_path / "out/pkg/main.py.keywords.md").read_text()
    information = section(page, "File Information")
    assert "(../../tree/pkg/main.py)" in information
    assert "(main.py.md)" in information
    assert "(index.md)" in information
    imports = section(page, "Imports")
    for name in ("os.path", "collections", "abc", "deque", ".", "other", ".deep.inner", "helper"):
        assert f"[{name}](main.py.md#L" in imports
    words = section(page, "Identifiers")
    assert "[LIMIT](main.py.md#L10) 3 (defined)" in words
    assert "[Gr\u00f6\u00dfe](main.py.md#L10) 1 (in comments or docstrings)" in words
    assert "[assistant]" in words
    assert "no_keyword_in_a_string" not in page.replace("\\", "")
    assert re.search(r"^\*\*L\*\*: largest, LIMIT$", page, re.MULTILINE)
    table = page.replace("\\", "")
    assert "| Cutter | [Classes](main.py.md#classes) |" in table
    assert "| deque | [Dependencies](main.py.md#dependencies) |" in table
    names = re.findall(r"^- \[(.+?)\]", section(page, "Functions"), re.MULTILINE)
    for title in ("Classes", "Imports", "Identifiers"):
        listed = re.findall(r"^- \[(.+?)\]", section(page, title), re.MULTILINE)
        assert listed == sorted(listed, key=lambda word: (word.lower(), word))
        names += listed
    assert len(names) == len(set(names)) > 20  # each keyword once, whatever its kind


def test_markdown_files_have_headings_and_code_words(tree: Path, tmp_path: Path) -> None:
    build(tree, tmp_path / "out")
    record = json.loads((tmp_path / "out/README.md.json").read_text())
    assert [heading["name"] for heading in record["headings"]] == ["Title"]
    assert set(record["identifiers"]) == {"pkg", "main", "heading", "cutter"}


def test_links_lead_to_pages_and_lines(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(tree, out)
    checked = 0
    for page in out.rglob("*.md"):
        text = page.read_text().partition("<pre>")[0]
        for target, anchor in re.findall(r"(?<!\\)\]\(([^)#]*)(?:#(\w+))?\)", text):
            where = (page.parent / unquote(target)).resolve() if target else page
            assert where.exists(), (page, target)
            if anchor.startswith("L"):
                assert f'id="{anchor}"' in where.read_text()
            checked += 1
    assert checked > 100


def test_what_does_not_parse_is_named_and_skipped(tree: Path, tmp_path: Path) -> None:
    report = build(tree, tmp_path / "out")
    assert [path for path, _ in report.skipped] == ["broken.py", "latin.py"]
    assert "broken.py" in section((tmp_path / "out/index.md").read_text(), "Skipped")
    assert "skipped broken.py: " in str(report)
    assert not (tmp_path / "out/link.py.md").exists()
    assert not (tmp_path / "out/.hidden").exists()


def test_odd_trees_take_no_time_and_put_no_html_into_pages(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    os.mkfifo(root / "pipe.py")  # reading it would wait for a writer
    (root / "spaces.md").write_text(f"# a{' ' * 200_000}b #\n" + "#" * 200_000)
    (root / "many.md").write_text("# h\n```\nword\n```\n`tick`\n" * 20_000)
    (root / "hostile.py").write_text('def f(x="`<img src=x>`"):\n    """<b>[y](z)`."""\n')
    (root / "long.py").write_text(f"x = 1  # {'a b ' * 200_000}\n")
    os.close(os.open(os.fsencode(root) + b"/\xff.py", os.O_CREAT, 0o600))
    began = time.process_time()
    report = build(root, tmp_path / "out")
    assert time.process_time() - began < within(10.0)
    assert report.files == 4
    assert [path for path, _ in report.skipped] == ["\\udcff.py"]
    assert str(report).isascii()  # it can be printed
    many = json.loads((tmp_path / "out/many.md.json").read_text())
    assert many["identifiers"] == {
        "tick": ["mentioned", 5, 20_000],
        "word": ["mentioned", 3, 20_000],
    }
    page = (tmp_path / "out/hostile.py.md").read_text().partition("## Source")[0]
    rendered = MarkdownIt("commonmark", {"html": True}).render(page)
    assert "<img" not in rendered
    assert "<b>" not in rendered


def test_two_runs_give_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "a", tree / "index"):  # inside the tree its pages are no part of it
        runs = []
        for _ in range(2):
            build(tree, out)
            runs.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*.*")})
        assert runs[0] == runs[1]
        assert len(runs[0]) > 20


def test_lines_are_numbered_as_python_does(tmp_path: Path) -> None:
    """Form feeds and line separators end no line; a byte order mark and CRLF are no text."""
    (tmp_path / "tree").mkdir()
    code = 'def a():\n    pass\n\f\ndef b():\n    """One\u2028two."""\n'
    (tmp_path / "tree/a.py").write_text(code, encoding="utf-8")
    words = "\ufeff# Title\r\n\r\n```\r\nfirst\r\nsecond\r\n```\r\n"
    (tmp_path / "tree/b.md").write_bytes(words.encode())
    build(tmp_path / "tree", tmp_path / "out")
    page = (tmp_path / "out/a.py.md").read_text()
    assert "- lines: 5\n" in page
    assert '<a id="L4"></a>def b():' in page
    record = json.loads((tmp_path / "out/b.md.json").read_text())
    assert record["summary"] == "Title"
    assert record["identifiers"] == {"first": ["mentioned", 4, 1], "second": ["mentioned", 5, 1]}


def test_first_sentences() -> None:
    assert first_sentence("Cuts a tensor: once.\nAnd more.") == "Cuts a tensor: once."
    assert first_sentence("Cuts, e.g. rows,\n  at once. More") == "Cuts, e.g. rows, at once."
    assert first_sentence("Takes one of:\n  - rows\n  - columns") == "Takes one of:"
    assert first_sentence("No stop\n\nMore.") == "No stop"
    assert first_sentence(None) == ""


def test_all_keywords_and_search(tree: Path, tmp_path: Path) -> None:
    report = build(tree, tmp_path / "out")
    letters = {path.stem: path.read_text() for path in (tmp_path / "out/A-Z").iterdir()}
    assert sum(text.count("\n- [") for text in letters.values()) == report.keywords
    assert "- [Cutter](../pkg/main.py.md#L13) defined, " in letters["C"]
    data = re.search(r"const words = (\[.*?\]), q =", (tmp_path / "out/search.html").read_text())
    assert data
    assert ["helper", "pkg/deep/inner.py", 3] in json.loads(data[1])


def test_the_command(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["index", str(tree), "-o", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["files"]) == ("reshard.index/1", 7)
    assert run(["index", str(tree / "nowhere"), "-o", str(tmp_path / "x")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_other_folders_are_left_alone(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="has files that are no index: name a new folder"):
        build(tree, tree / "pkg")
    with pytest.raises(PathError, match="is not a folder"):
        build(tree / "broken.py", tmp_path / "out")


SEEDS = (
    "distributed/_shard/sharded_tensor/reshard.py",
    "distributed/_shard/api.py",
    "distributed/tensor/parallel/input_reshard.py",
)


def test_the_three_files_of_pytorch(tmp_path: Path) -> None:
    """Every function and import that Python's own parser finds is on both pages."""
    torch = pytest.importorskip("torch", reason="its sources are what is indexed")
    root = Path(torch.__file__).parent
    for name in SEEDS:
        place = tmp_path / "torch" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((root / name).read_bytes())
    build(tmp_path / "torch", tmp_path / "out")
    for name in SEEDS:
        page = (tmp_path / f"out/{name}.md").read_text().partition("## Source")[0]
        words = (tmp_path / f"out/{name}.keywords.md").read_text().replace("\\", "")
        for node in ast.walk(ast.parse((root / name).read_text())):
            match node:
                case ast.FunctionDef(function):
                    assert f"{function}](#L{node.lineno})" in page.replace("\\", "")
                    assert f"- [{function}](" in section(words, "Functions")
                case ast.Import(names):
                    assert all(f"- [{one.name}](" in section(words, "Imports") for one in names)
                case ast.ImportFrom(module, names, level):
                    taken = ["." * level + (module or ""), *(one.name for one in names)]
                    assert all(f"- [{one}](" in section(words, "Imports") for one in taken)
                    assert taken[0] in section(page, "Dependencies") + page.replace("\\", "")


def test_it_stays_small_and_needs_nothing_else() -> None:
    lines, imported = set(), set()
    for path in Path(reshard.index.__file__).parent.glob("*.py"):
        with tokenize.open(path) as file:
            tokens = [*tokenize.generate_tokens(file.readline)]
        dropped = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        for before, token in zip([None, *tokens], tokens, strict=False):
            own_line = before is None or before.type in dropped
            if token.type not in dropped and not (token.type == tokenize.STRING and own_line):
                lines |= {(path.name, at) for at in range(token.start[0], token.end[0] + 1)}
        tree = ast.parse(path.read_text())
        imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert len(lines) <= 500
    assert {name.partition(".")[0] for name in imported} - {"reshard"} <= {
        *("__future__", "bisect", "collections", "dataclasses", "itertools", "pathlib", "typing"),
        "urllib",
    }
