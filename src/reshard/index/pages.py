"""The documentation page and the keyword page of one file, as Markdown."""

from __future__ import annotations

import html
import posixpath
from collections.abc import Iterable, Sequence
from itertools import groupby
from urllib.parse import quote

from reshard.index.records import MENTIONED, Definition, Record, lines_of

__all__ = ["LINKS", "documentation_page", "keyword_page", "letter_of", "link", "listing", "plain"]

LINKS = "<!-- links -->"
"""Where the links to other files of the tree go, which are known when all files are read."""

_SECTIONS = {"Imports": "Dependencies", "Identifiers": "Source", "Code words": "Source"}
_ESCAPES = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#"} | {"\n": " "})


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.translate(_ESCAPES)


def link(words: str, target: str, here: str, line: int = 0) -> str:
    """A relative link from one page to another, perhaps to a line."""
    away = posixpath.relpath(target, posixpath.dirname(here) or ".")
    return f"[{plain(words)}]({quote(away)}{f'#L{line}' if line else ''})"


def listing(title: str, lines: Iterable[str]) -> list[str]:
    """A heading and a list, which says so if it is empty."""
    return [f"### {title}\n", *([f"- {line}" for line in lines] or ["- (none)"]), ""]


def letter_of(word: str) -> str:
    """The part of an A to Z that a word is in."""
    first = word.lstrip("_")[:1].upper()
    return first if first.isascii() and first.isalpha() else "other"


def documentation_page(record: Record, text: str) -> str:
    """What a file is: metadata, overview, definitions, structure, dependencies, tests, source."""
    here = f"{record.path}.md"
    parts = [
        f"# {plain(record.path)}\n\n## File\n",
        f"- path: {plain(record.path)}",
        f"- lines: {record.lines}",
        f"- bytes: {record.bytes}",
        f"- summary: {plain(record.summary) or '(none)'}",
        f"- keywords: {link('keyword page', f'{record.path}.keywords.md', here)}",
        f"- record: {link('JSON', f'{record.path}.json', here)}\n",
        f"## Overview\n\n{_overview(record)}\n",
        *_definitions("Headings", record.headings),
        *_definitions("Classes", record.classes),
        *_definitions("Functions", record.functions),
        "## Structure\n",
        *listing("Calls inside the file", (
            f"[{plain(one.name)}](#L{one.line}) -> {', '.join(map(plain, one.calls))}"
            for one in (*record.classes, *record.functions) if one.calls
        )),
        f"{LINKS}\n## Source\n\n<pre>",
    ]  # fmt: skip
    lines = enumerate(lines_of(html.escape(text, quote=False)), 1)
    return "\n".join([*parts, *(f'<a id="L{at}"></a>{line}' for at, line in lines), "</pre>\n"])


def _overview(record: Record) -> str:
    counted = {
        "class": (len(record.classes), "classes"),
        "function": (len(record.functions), "functions"),
        "heading": (len(record.headings), "headings"),
        "imported module": (len({one[0] for one in record.imports}), "imported modules"),
    }
    parts = [f"{n} {one if n == 1 else more}" for one, (n, more) in counted.items() if n]
    return f"{plain(record.summary)} {', '.join(parts) or 'no definitions'}.".strip()


def _definitions(title: str, listed: Sequence[Definition]) -> list[str]:
    lines = [f"## {title}\n"] if listed else []
    for one in listed:
        words = " ".join(one.signature.split()).replace("`", "\u02cb")  # it would end the code
        signature = f" `{words}`" if words else ""
        lines += [f"- [{plain(one.name)}](#L{one.line}){signature} {plain(one.summary)}".rstrip()]
    return [*lines, ""] if listed else []


def keyword_page(record: Record, origin: str) -> str:
    """The words of a file: by kind, from A to Z, and where in the documentation page they are.

    `origin` is the way from the folder of the index to the tree.
    """
    here = f"{record.path}.keywords.md"
    name, folder = posixpath.basename(record.path), posixpath.dirname(record.path)
    page, kinds = quote(f"{name}.md"), _kinds(record)
    original = "../" * record.path.count("/") + quote(posixpath.join(origin, record.path))
    parts = [
        f"# Keywords of {plain(record.path)}\n\n## File Information\n",
        f"- original file: [{plain(name)}]({original})",
        f"- documentation page: {link('documentation', f'{record.path}.md', here)}",
        f"- folder: {link(folder or '.', posixpath.join(folder, 'index.md'), here)}\n",
        "## Keywords Extracted\n",
    ]
    for kind, words in kinds.items():
        parts += listing(f"{kind} ({len(words)})", (
            f"[{plain(word)}]({page}#L{line}) {count}{note}" for word, line, count, note in words
        ))  # fmt: skip
    every = {word for words in kinds.values() for word, *_ in words}
    ordered = sorted(every, key=lambda word: (letter_of(word), *_order(word)))
    parts += ["## A to Z\n"]
    for letter, group in groupby(ordered, letter_of):
        parts += [f"**{letter}**: {', '.join(map(plain, group))}\n"]
    parts += ["## Keyword -> Section\n", "| keyword | section |", "|---|---|"]
    for kind, words in kinds.items():
        section = _SECTIONS.get(kind, kind)
        where = f"[{section}]({page}#{section.lower()})"
        parts += [f"| {plain(word)} | {where} |" for word, *_ in words]
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
    found: dict[str, list[tuple[str, int, int, str]]] = {}
    for kind, listed in pairs.items():
        first = dict(reversed(listed))
        counts = {word: record.identifiers.get(word, ("", 0, 1))[2] for word in first}
        found[kind] = [(word, first[word], counts[word], "") for word in sorted(first, key=_order)]
    code = "Identifiers" if record.language == "python" else "Code words"
    listed_words = {word for words in found.values() for word, *_ in words}
    found[code] = [
        (word, line, count, "" if kind == MENTIONED else f" ({kind})")
        for word in sorted(record.identifiers.keys() - listed_words, key=_order)
        for kind, line, count in [record.identifiers[word]]
    ]
    return {kind: words for kind, words in found.items() if words}


def _order(word: str) -> tuple[str, str]:
    return word.lower(), word
