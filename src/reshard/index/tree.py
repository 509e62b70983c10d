"""All files of a tree: records, pages, folders, and an A to Z of all keywords with search."""

from __future__ import annotations

import json
import os
import posixpath
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from reshard.errors import ArgumentError, PathError
from reshard.index.pages import (
    LINKS,
    documentation_page,
    keyword_page,
    letter_of,
    link,
    listing,
    plain,
)  # fmt: skip
from reshard.index.records import DEFINED, Record, markdown_record, python_record
from reshard.text import quoted

__all__ = ["IndexReport", "build"]

MAX_FILE = 16 << 20
_READERS = {".py": python_record, ".pyi": python_record, ".md": markdown_record}


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What was indexed, and what was skipped because it does not parse."""

    out: str
    files: int
    lines: int
    keywords: int
    skipped: tuple[tuple[str, str], ...] = ()
    """(path, reason)."""

    def to_dict(self) -> dict[str, object]:
        """The report as plain data, for JSON."""
        return {"schema": "reshard.index/1", **asdict(self)}

    def __str__(self) -> str:
        counts = f"{self.files} files, {self.lines} lines and {self.keywords} keywords"
        skipped = (f"skipped {path}: {why}" for path, why in self.skipped)
        return "\n".join([f"indexed {counts}: see {self.out}/index.md", *skipped])


@dataclass(frozen=True, slots=True)
class _File:
    """What stays in memory of one file."""

    path: str
    module: str
    summary: str
    imports: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(module as it is written, its absolute name, names taken from it)."""


def build(source: str | Path, out: str | Path) -> IndexReport:
    """Write the pages and records of all Python and Markdown files under a folder.

    The same tree gives the same bytes. A folder that holds other things is not written to.
    """
    root, target = Path(source).resolve(), Path(out).resolve()
    if not root.is_dir():
        raise PathError(f"{quoted(str(source))} is not a folder: name the folder of a source tree")
    if target.is_dir() and any(target.iterdir()) and not (target / "index.json").is_file():
        raise ArgumentError(f"{quoted(str(out))} has files that are no index: name a new folder")
    files: list[_File] = []
    skipped: list[tuple[str, str]] = []
    words: dict[str, list[int]] = {}
    lines = 0
    for path in _paths(root, target):
        try:
            record = _write_file(root, target, path)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            name = path.encode(errors="backslashreplace").decode()  # it may be no UTF-8
            skipped.append((name, " ".join(str(error).split())[:200] or type(error).__name__))
            continue
        _count(record, len(files), words)
        files.append(_remembered(root, record))
        lines += record.lines
    _write_links(target, files)
    _write_folders(target, files, skipped)
    _write_letters(target, files, words)
    report = IndexReport(str(out), len(files), lines, len(words), tuple(skipped))
    _write(target / "index.json", json.dumps({**report.to_dict(), "out": "."}, indent=1) + "\n")
    return report


def _paths(root: Path, target: Path) -> Iterator[str]:
    """Files to index, in order; hidden folders, links and the output are left out."""
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        kept = [name for name in folders if name[0] != "." and name != "__pycache__"]
        folders[:] = sorted(name for name in kept if here / name != target)
        for path in sorted(here / name for name in names):
            if path.suffix in _READERS and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def _write_file(root: Path, target: Path, path: str) -> Record:
    """Write the record and the two pages of one file."""
    size = (root / path).stat().st_size
    if size > MAX_FILE:
        raise ValueError(f"{size} bytes, at most {MAX_FILE} are read")
    record, text = _READERS[posixpath.splitext(path)[1]](path, (root / path).read_bytes())
    data = json.dumps(record.to_dict(), ensure_ascii=False, separators=(",", ":"))
    _write(target / f"{path}.json", data + "\n")
    _write(target / f"{path}.md", documentation_page(record, text))
    origin = Path(os.path.relpath(root, target)).as_posix()
    _write(target / f"{path}.keywords.md", keyword_page(record, origin))
    return record


def _remembered(root: Path, record: Record) -> _File:
    path = (root / record.path).with_suffix("")
    names = [] if path.name == "__init__" else [path.name]
    while (path.parent / "__init__.py").is_file():  # up to the first folder that is no package
        path = path.parent
        names.insert(0, path.name)
    package = names if record.path.endswith("__init__.py") else names[:-1]
    imports = []
    for written, _, taken in record.imports:
        dots = len(written) - len(written.lstrip("."))
        base = package[: len(package) - dots + 1] if dots else []
        absolute = ".".join([*base, written.lstrip(".")]).strip(".")
        imports.append((written, absolute, tuple(taken)))
    return _File(record.path, ".".join(names), record.summary, tuple(imports))


def _count(record: Record, index: int, words: dict[str, list[int]]) -> None:
    """Add the keywords of a file: occurrences, files, and where each is defined or first found."""
    for word, (kind, line, count) in record.identifiers.items():
        seen = words.setdefault(word, [0, 0, index, line, 0])
        seen[0] += count
        seen[1] += 1
        if kind == DEFINED and not seen[4]:
            seen[2:] = [index, line, 1]


def _write_links(target: Path, files: list[_File]) -> None:
    """Add to each page who imports the file, what it depends on, and which tests mention it."""
    modules = {file.module: file.path for file in files if file.module}
    tops = {module.partition(".")[0] for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for _, module, names in file.imports:
            for name in (module, *(f"{module}.{name}" for name in names)):
                if name in modules and modules[name] != file.path:
                    importers[modules[name]].add(file.path)
    for file in files:
        here = f"{file.path}.md"
        kinds: dict[str, set[str]] = {"Standard library": set(), "Third party": set(), "Own": set()}
        for written, module, names in file.imports:
            top = module.partition(".")[0]
            own = module in modules or written.startswith(".") or top in tops
            kind = "Own" if own else "Standard library" if top in _STANDARD else "Third party"
            path = modules.get(module)
            kinds[kind].add(link(written, f"{path}.md", here) if path else plain(written))
            dotted = written if written.endswith(".") else f"{written}."
            for name in names:
                path = modules.get(f"{module}.{name}")
                kinds[kind] |= {link(f"{dotted}{name}", f"{path}.md", here)} if path else set()
        users = sorted(importers[file.path])
        parts = listing("Imported by", (link(user, f"{user}.md", here) for user in users))
        parts += ["## Dependencies\n"]
        for kind, found in kinds.items():
            parts += listing(kind, sorted(found))
        tests = [link(user, f"{user}.md", here) for user in users if _is_test(user)]
        parts += ["## Tests\n", *listing("Tests that mention it", tests)]
        page = (target / here).read_text(encoding="utf-8", errors="surrogateescape")
        _write(target / here, page.replace(LINKS, "\n".join(parts), 1))


_STANDARD = sys.stdlib_module_names


def _is_test(path: str) -> bool:
    name = posixpath.basename(path)
    return name.startswith("test_") or name.endswith("_test.py") or "/tests/" in f"/{path}"


def _write_folders(target: Path, files: list[_File], skipped: list[tuple[str, str]]) -> None:
    held: dict[str, list[_File]] = defaultdict(list)
    inner: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folder = posixpath.dirname(file.path)
        held[folder].append(file)
        while folder:
            inner[posixpath.dirname(folder)].add(folder)
            folder = posixpath.dirname(folder)
    for folder in {"", *held, *inner}:
        here = posixpath.join(folder, "index.md")
        up = posixpath.join(posixpath.dirname(folder), "index.md")
        parts = [f"# {plain(folder or '.')}\n", *([link("up", up, here), ""] if folder else [])]
        names = sorted(inner[folder])
        parts += listing("Folders", (link(f"{name}/", f"{name}/index.md", here) for name in names))
        parts += listing("Files", (
            f"{link(posixpath.basename(one.path), f'{one.path}.md', here)} "
            f"({link('keywords', f'{one.path}.keywords.md', here)}) {plain(one.summary)}".rstrip()
            for one in held[folder]
        ))  # fmt: skip
        if not folder:
            parts += listing("All keywords", ["[A to Z](A-Z.md)", "[search](search.html)"])
            parts += listing("Skipped", (f"{plain(path)}: {plain(why)}" for path, why in skipped))
        _write(target / here, "\n".join(parts))


def _write_letters(target: Path, files: list[_File], words: dict[str, list[int]]) -> None:
    """The A to Z of the whole tree, one page per letter, and a page that searches definitions."""
    letters: dict[str, list[str]] = defaultdict(list)
    for word in sorted(words, key=lambda word: (word.lower(), word)):
        count, num_files, index, line, defined = words[word]
        letter = letter_of(word)
        where = link(word, f"{files[index].path}.md", f"A-Z/{letter}.md", line)
        letters[letter].append(f"{where} {'defined, ' * defined}{count} in {num_files} files")
    for letter, lines in letters.items():
        _write(target / f"A-Z/{letter}.md", "\n".join(listing(letter, lines)))
    names = [f"[{letter}](A-Z/{letter}.md) {len(letters[letter])}" for letter in sorted(letters)]
    _write(target / "A-Z.md", "\n".join(listing("A to Z", names)))
    found = [[word, files[seen[2]].path, seen[3]] for word, seen in words.items() if seen[4]]
    data = json.dumps(sorted(found), ensure_ascii=False, separators=(",", ":"))
    _write(target / "search.html", _SEARCH.replace("DATA", data.replace("<", "\\u003c")))


_SEARCH = """<!doctype html><meta charset="utf-8"><title>Search</title>
<input id="q" placeholder="a function, class or name" autofocus><ul id="found"></ul><script>
const words = DATA, q = document.getElementById("q"), found = document.getElementById("found");
const item = ([word, path, line]) => {
  const a = document.createElement("a"), li = document.createElement("li");
  a.href = path.split("/").map(encodeURIComponent).join("/") + ".md#L" + line;
  a.textContent = `${word}  ${path}:${line}`; li.append(a); return li };
q.oninput = () => { const text = q.value.toLowerCase();
  const hits = text ? words.filter(w => w[0].toLowerCase().includes(text)).slice(0, 200) : [];
  found.replaceChildren(...hits.map(item)) };
</script>
"""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="\n")
