"""All files of a tree as pages: of each file, of folders, an A to Z of all keywords with search."""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from reshard.errors import ArgumentError, PathError
from reshard.index.records import (
    DEFINED,
    MENTIONED,
    Definition,
    Record,
    lines_of,
    markdown_record,
    python_record,
)
from reshard.text import quoted

MAX_FILE = 16 << 20
LINKS = "<!-- links -->"
"""Where the links to other files of the tree go, which are known when all files are read."""

_TEST = re.compile(r"/tests/|/test_[^/]*\Z|_test\.py\Z")
_READERS = {".py": python_record, ".pyi": python_record, ".md": markdown_record}
_SECTIONS = {"Imports": "Dependencies", "Identifiers": "Source", "Code words": "Source"}
_ESCAPES = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#"} | {"\n": " "})


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
        return {"schema": "reshard.index/1", **asdict(self)}

    def __str__(self) -> str:
        counts = f"{self.files} files, {self.lines} lines and {self.keywords} keywords"
        skipped = (f"skipped {path}: {why}" for path, why in self.skipped)
        return "\n".join([f"indexed {counts}: see {self.out}/index.md", *skipped])


def build(source: str | Path, out: str | Path) -> IndexReport:
    """Write the pages and records of all Python and Markdown files under a folder.

    The same tree gives the same bytes. A folder that holds other things is not written to.
    """
    root, target = Path(source).resolve(), Path(out).resolve()
    if not root.is_dir():
        raise PathError(f"{quoted(str(source))} is not a folder: name the folder of a source tree")
    if target.is_dir() and any(target.iterdir()) and not (target / "index.json").is_file():
        raise ArgumentError(f"{quoted(str(out))} has files that are no index: name a new folder")
    records: list[Record] = []
    skipped: list[tuple[str, str]] = []
    keywords: dict[str, list[int]] = {}
    for path in _paths(root, target):
        try:
            record = _write_file(root, target, path)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            name = path.encode(errors="backslashreplace").decode()  # it may be no UTF-8
            skipped.append((name, " ".join(str(error).split())[:200] or type(error).__name__))
            continue
        for word, (kind, line, count) in record.identifiers.items():
            # Occurrences, files, and where it is defined or first mentioned.
            entry = keywords.setdefault(word, [0, 0, len(records), line, 0])
            entry[0] += count
            entry[1] += 1
            if kind == DEFINED and not entry[4]:
                entry[2:] = [len(records), line, 1]
        # Later pages need its path, summary and imports; the rest would fill memory.
        records.append(replace(record, functions=[], classes=[], headings=[], identifiers={}))
    _write_links(root, target, records)
    _write_folders(target, records, skipped)
    _write_letters(target, records, keywords)
    lines = sum(record.lines for record in records)
    report = IndexReport(str(out), len(records), lines, len(keywords), tuple(skipped))
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
    size = (root / path).stat().st_size
    if size > MAX_FILE:
        raise ValueError(f"{size} bytes, at most {MAX_FILE} are read")
    record, text = _READERS[posixpath.splitext(path)[1]](path, (root / path).read_bytes())
    data = json.dumps(record.to_dict(), ensure_ascii=False, separators=(",", ":"))
    _write(target / f"{path}.json", data + "\n")
    _write(target / f"{path}.md", _documentation_page(record, text))
    origin = Path(os.path.relpath(root, target)).as_posix()
    _write(target / f"{path}.keywords.md", _keyword_page(record, origin))
    return record


def _write_links(root: Path, target: Path, records: Sequence[Record]) -> None:
    """Add to each page who imports the file, what it depends on, and which tests mention it."""
    packages: dict[str, list[str]] = {}
    modules: dict[str, str] = {}
    for record in records:
        file = (root / record.path).with_suffix("")
        names = [file.name]
        while (file.parent / "__init__.py").is_file():  # up to the first folder that is no package
            file = file.parent
            names.insert(0, file.name)
        packages[record.path] = names[:-1]
        modules[".".join(names).removesuffix(".__init__")] = record.path
    imports = {one.path: [*_imported(one, packages[one.path])] for one in records}
    tops = {module.partition(".")[0] for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, imported in imports.items():
        for _, module, _ in imported:
            if modules.get(module, path) != path:
                importers[modules[module]].add(path)
    for path, imported in imports.items():
        here = f"{path}.md"
        kinds: dict[str, set[str]] = {"Standard library": set(), "Third party": set(), "Own": set()}
        for written, module, is_module in imported:
            if module in modules:
                kinds["Own"].add(_link(written, f"{modules[module]}.md", here))
            elif is_module:
                top = module.partition(".")[0]
                own = written.startswith(".") or top in tops
                kind = "Standard library" if top in sys.stdlib_module_names else "Third party"
                kinds["Own" if own else kind].add(_plain(written))
        users = {user: _link(user, f"{user}.md", here) for user in sorted(importers[path])}
        parts = [*_listing("Imported by", users.values()), "## Dependencies\n"]
        for kind, links in kinds.items():
            parts += _listing(kind, sorted(links))
        tests = (link for user, link in users.items() if _TEST.search(f"/{user}"))
        parts += ["## Tests\n", *_listing("Tests that mention it", tests)]
        page = (target / here).read_text(encoding="utf-8", errors="surrogateescape")
        _write(target / here, page.replace(LINKS, "\n".join(parts), 1))


def _imported(record: Record, package: list[str]) -> Iterator[tuple[str, str, bool]]:
    """(as written, absolute name, whether it must be a module) of imports and imported names."""
    for written, _, names in record.imports:
        name = written.lstrip(".")
        level = len(written) - len(name)
        base = package[: len(package) - level + 1] if level else []
        module = ".".join([*base, name]).strip(".")
        yield written, module, True
        dotted = written if written.endswith(".") else f"{written}."
        yield from ((f"{dotted}{name}", f"{module}.{name}", False) for name in names)


def _write_folders(
    target: Path, records: Sequence[Record], skipped: Sequence[tuple[str, str]]
) -> None:
    files: dict[str, list[Record]] = defaultdict(list)
    folders: dict[str, set[str]] = defaultdict(set)
    for record in records:
        folder = posixpath.dirname(record.path)
        files[folder].append(record)
        while folder:
            folders[posixpath.dirname(folder)].add(folder)
            folder = posixpath.dirname(folder)
    for folder in {"", *files, *folders}:
        here = posixpath.join(folder, "index.md")
        up = posixpath.join(posixpath.dirname(folder), "index.md")
        parts = [f"# {_plain(folder or '.')}\n", *([_link("up", up, here), ""] if folder else [])]
        links = (_link(f"{name}/", f"{name}/index.md", here) for name in sorted(folders[folder]))
        lines = (
            f"{_link(posixpath.basename(one.path), f'{one.path}.md', here)} "
            f"({_link('keywords', f'{one.path}.keywords.md', here)}) {_plain(one.summary)}".rstrip()
            for one in files[folder]
        )
        parts += [*_listing("Folders", links), *_listing("Files", lines)]
        if not folder:
            parts += _listing("All keywords", ["[A to Z](A-Z.md)", "[search](search.html)"])
            lines = (f"{_plain(path)}: {_plain(why)}" for path, why in skipped)
            parts += _listing("Skipped", lines)
        _write(target / here, "\n".join(parts))


def _write_letters(
    target: Path, records: Sequence[Record], keywords: Mapping[str, Sequence[int]]
) -> None:
    """The A to Z of the whole tree, one page per letter, and a page that searches definitions."""
    letters: dict[str, list[str]] = defaultdict(list)
    definitions = []
    for word in sorted(keywords, key=_order):
        count, num_files, index, line, defined = keywords[word]
        path, letter = records[index].path, _letter_of(word)
        where = _link(word, f"{path}.md", f"A-Z/{letter}.md", line)
        letters[letter].append(f"{where} {'defined, ' * defined}{count} in {num_files} files")
        definitions += [[word, path, line]] * defined
    for letter, lines in letters.items():
        _write(target / f"A-Z/{letter}.md", "\n".join(_listing(letter, lines)))
    pages = [f"[{letter}](A-Z/{letter}.md) {len(letters[letter])}" for letter in sorted(letters)]
    _write(target / "A-Z.md", "\n".join(_listing("A to Z", pages)))
    data = json.dumps(sorted(definitions), ensure_ascii=False, separators=(",", ":"))
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


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.translate(_ESCAPES)


def _link(words: str, target: str, here: str, line: int = 0) -> str:
    """A relative link from one page to another, perhaps to a line."""
    away = posixpath.relpath(target, posixpath.dirname(here) or ".")
    return f"[{_plain(words)}]({quote(away)}{f'#L{line}' if line else ''})"


def _listing(title: str, lines: Iterable[str]) -> list[str]:
    """A heading and a list, which says so if it is empty."""
    return [f"### {title}\n", *([f"- {line}" for line in lines] or ["- (none)"]), ""]


def _letter_of(word: str) -> str:
    """The part of an A to Z that a word is in."""
    first = word.lstrip("_")[:1].upper()
    return first if first.isascii() and first.isalpha() else "other"


def _documentation_page(record: Record, text: str) -> str:
    """What a file is: metadata, overview, definitions, structure, dependencies, tests, source."""
    here = f"{record.path}.md"
    counted = {
        ("class", "classes"): len(record.classes),
        ("function", "functions"): len(record.functions),
        ("heading", "headings"): len(record.headings),
        ("imported module", "imported modules"): len({one[0] for one in record.imports}),
    }
    overview = ", ".join(f"{n} {words[n != 1]}" for words, n in counted.items() if n)
    sentences = f"{_plain(record.summary)} {overview or 'no definitions'}.".lstrip()
    parts = [
        f"# {_plain(record.path)}\n\n## File\n",
        f"- path: {_plain(record.path)}",
        f"- lines: {record.lines}",
        f"- bytes: {record.bytes}",
        f"- summary: {_plain(record.summary) or '(none)'}",
        f"- keywords: {_link('keyword page', f'{record.path}.keywords.md', here)}",
        f"- record: {_link('JSON', f'{record.path}.json', here)}\n",
        f"## Overview\n\n{sentences}\n",
        *_definitions("Headings", record.headings),
        *_definitions("Classes", record.classes),
        *_definitions("Functions", record.functions),
        "## Structure\n",
        *_listing("Calls inside the file", (
            f"[{_plain(one.name)}](#L{one.line}) -> {', '.join(map(_plain, one.calls))}"
            for one in (*record.classes, *record.functions) if one.calls
        )),
        f"{LINKS}\n## Source\n\n<pre>",
    ]  # fmt: skip
    lines = enumerate(lines_of(html.escape(text, quote=False)), 1)
    return "\n".join([*parts, *(f'<a id="L{at}"></a>{line}' for at, line in lines), "</pre>\n"])


def _definitions(title: str, listed: Sequence[Definition]) -> list[str]:
    lines = [f"## {title}\n"] if listed else []
    for one in listed:
        words = " ".join(one.signature.split()).replace("`", "\u02cb")  # it would end the code
        signature = f" `{words}`" if words else ""
        lines += [f"- [{_plain(one.name)}](#L{one.line}){signature} {_plain(one.summary)}".rstrip()]
    return [*lines, ""] if listed else []


def _keyword_page(record: Record, origin: str) -> str:
    """The words of a file: by kind, from A to Z, and where in the documentation page they are.

    `origin` is the way from the folder of the index to the tree.
    """
    here = f"{record.path}.keywords.md"
    name, folder = posixpath.basename(record.path), posixpath.dirname(record.path)
    page, kinds = quote(f"{name}.md"), _kinds(record)
    original = "../" * record.path.count("/") + quote(posixpath.join(origin, record.path))
    parts = [
        f"# Keywords of {_plain(record.path)}\n\n## File Information\n",
        f"- original file: [{_plain(name)}]({original})",
        f"- documentation page: {_link('documentation', f'{record.path}.md', here)}",
        f"- folder: {_link(folder or '.', posixpath.join(folder, 'index.md'), here)}\n",
        "## Keywords Extracted\n",
    ]
    for kind, words in kinds.items():
        parts += _listing(f"{kind} ({len(words)})", (
            f"[{_plain(word)}]({page}#L{line}) {count}{note}" for word, line, count, note in words
        ))  # fmt: skip
    every = {word for words in kinds.values() for word, *_ in words}
    ordered = sorted(every, key=lambda word: (_letter_of(word), *_order(word)))
    parts += ["## A to Z\n"]
    for letter, group in groupby(ordered, _letter_of):
        parts += [f"**{letter}**: {', '.join(map(_plain, group))}\n"]
    parts += ["## Keyword -> Section\n", "| keyword | section |", "|---|---|"]
    for kind, words in kinds.items():
        section = _SECTIONS.get(kind, kind)
        where = f"[{section}]({page}#{section.lower()})"
        parts += [f"| {_plain(word)} | {where} |" for word, *_ in words]
    return "\n".join([*parts, ""])


def _kinds(record: Record) -> dict[str, list[tuple[str, int, int, str]]]:
    """(word, first line, count, note) by kind, sorted; identifiers are what no other kind has."""
    imports = [(module, line) for module, line, _ in record.imports]
    imports += [(name, line) for _, line, names in record.imports for name in names]
    pairs = {
        "Headings": [(one.name, one.line) for one in record.headings],
        "Functions": [(one.name.rpartition(".")[2], one.line) for one in record.functions],
        "Classes": [(one.name.rpartition(".")[2], one.line) for one in record.classes],
        "Imports": imports,
    }
    rest = dict(record.identifiers)
    kinds: dict[str, list[tuple[str, int, int, str]]] = {}
    for kind, listed in pairs.items():
        first = dict(reversed(listed))
        counts = {word: record.identifiers.get(word, ("", 0, 1))[2] for word in first}
        kinds[kind] = [(word, first[word], counts[word], "") for word in sorted(first, key=_order)]
        rest = {word: entry for word, entry in rest.items() if word not in first}
    kinds["Identifiers" if record.language == "python" else "Code words"] = [
        (word, line, count, "" if kind == MENTIONED else f" ({kind})")
        for word, (kind, line, count) in sorted(rest.items(), key=lambda item: _order(item[0]))
    ]
    return {kind: words for kind, words in kinds.items() if words}


def _order(word: str) -> tuple[str, str]:
    return word.lower(), word
