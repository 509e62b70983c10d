"""What one file defines, imports and mentions; read from its text, without running it."""

from __future__ import annotations

import ast
import importlib.util
import keyword
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

DEFINED, MENTIONED, IN_TEXT = "defined", "mentioned", "in comments or docstrings"
_TOKEN = re.compile(
    r"(?:[rRbBuUfF]{0,2})(?P<text>\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''"
    r"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|(?P<comment>\#[^\n]*)|(?P<name>[^\W\d]\w*)",
    re.DOTALL,
)
_WORD = re.compile(r"[^\W\d]\w{2,}")
_HEADING = re.compile(r"^(#{1,6})[ \t]+(\S.*)$", re.MULTILINE)
_FENCED = re.compile(r"^ *(```|~~~)[^\n]*\n(.*?)^ *\1", re.DOTALL | re.MULTILINE)
_TICKED = re.compile(r"`([^`\n]+)`")
_SENTENCE = re.compile(r"(.+?(?:(?<!e\.g)(?<!i\.e)[.!?](?=\s|$)|:(?=\s*\n)))|(.+)", re.DOTALL)

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Named: TypeAlias = _Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, a class, or a heading."""

    name: str
    line: int
    signature: str = ""
    summary: str = ""
    calls: Sequence[str] = ()
    """Functions and classes of the same file that it calls."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file."""

    path: str
    language: str
    lines: int
    bytes: int
    summary: str
    functions: list[Definition] = field(default_factory=list)
    classes: list[Definition] = field(default_factory=list)
    headings: list[Definition] = field(default_factory=list)
    imports: list[tuple[str, int, list[str]]] = field(default_factory=list)
    """(module as it is written, line, names taken from it)."""
    identifiers: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """{word: (kind, line of its first definition or mention, count)}, sorted."""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "reshard.index.file/1", **asdict(self)}


def lines_of(text: str) -> list[str]:
    """Lines as Python numbers them: a form feed, which ``splitlines`` splits at, ends none."""
    return text.removesuffix("\n").split("\n") if text else []


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, on one line; a list that follows is not part of it.

    >>> first_sentence("Cut a tensor: once.  Then more.")
    'Cut a tensor: once.'
    """
    sentence = _SENTENCE.match((text or "").strip().partition("\n\n")[0])
    return " ".join(sentence[0].split())[:300] if sentence else ""


def python_record(path: str, data: bytes) -> tuple[Record, str]:
    """The record of a Python file, and its text; SyntaxError or ValueError if it does not parse."""
    text = importlib.util.decode_source(data)
    tree = ast.parse(text)
    walk = _Walk(tree)
    words = {}
    for word, (in_code, code_line, in_text, text_line) in sorted(_words(text, walk).items()):
        kind = DEFINED if word in walk.defined else MENTIONED if in_code else IN_TEXT
        line = walk.defined.get(word) or code_line or text_line
        words[word] = kind, line, in_code + in_text
    functions, classes = (
        sorted(some, key=lambda one: one.line) for some in (walk.functions, walk.classes)
    )
    size, summary = (len(lines_of(text)), len(data)), first_sentence(ast.get_docstring(tree, False))
    return Record(path, "python", *size, summary, functions, classes, [], walk.imports, words), text


def _words(text: str, walk: _Walk) -> dict[str, list[int]]:
    """For each word: how often and where first, in code, and in comments and docstrings."""
    line_of = _line_finder(text)
    words: dict[str, list[int]] = {}
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "name":
            entry = words.get(token[0])
            if entry is not None and entry[0]:
                entry[0] += 1
            elif not keyword.iskeyword(token[0]):
                words.setdefault(token[0], [0, 0, 0, 0])[:2] = [1, line_of(token.start())]
        elif token.lastgroup == "comment" or line_of(token.start()) in walk.docstrings:
            for word in _WORD.finditer(text, *token.span()):
                entry = words.setdefault(word[0], [0, 0, 0, 0])
                entry[2] += 1
                entry[3] = entry[3] or line_of(word.start())
    return words


def _line_finder(text: str) -> Callable[[int], int]:
    """Finds the number of the line that a position is in."""
    starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
    return lambda at: bisect_right(starts, at)


class _Walk:
    """One pass over a syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions: list[Definition] = []
        self.classes: list[Definition] = []
        self.imports: list[tuple[str, int, list[str]]] = []
        self.defined: dict[str, int] = {}
        self.docstrings: set[int] = set()
        self._own = set(_callable_names(tree.body))
        self._visit(tree, "", "")

    def _visit(self, scope: ast.Module | _Named, prefix: str, owner: str) -> set[str]:
        """Walk one scope; the functions and classes of this file that it calls."""
        match scope.body:
            case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                self.docstrings.add(docstring.lineno)
        calls: set[str] = set()
        stack = list(ast.iter_child_nodes(scope))[::-1]
        while stack:
            match stack.pop():
                case ast.Constant():
                    continue
                case ast.Name(name, context) as node:
                    if isinstance(context, ast.Store):
                        self.defined.setdefault(name, node.lineno)
                    continue
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() as node:
                    self._define(node, prefix, owner)
                    continue
                case ast.Import() | ast.ImportFrom() as node:
                    self._import(node)
                    continue
                case ast.Call(function) as node:
                    calls |= {name for name in [_called(function, owner)] if name in self._own}
                case ast.arg(name) as node:
                    self.defined.setdefault(name, node.lineno)
                case node:
                    pass
            stack.extend(ast.iter_child_nodes(node))
        return calls

    def _define(self, node: _Named, prefix: str, owner: str) -> None:
        name = f"{prefix}{node.name}"
        self.defined[node.name] = min(node.lineno, self.defined.get(node.name, node.lineno))
        is_class = isinstance(node, ast.ClassDef)
        calls = sorted(self._visit(node, f"{name}.", name if is_class else owner))
        summary = first_sentence(ast.get_docstring(node, clean=False))
        definition = Definition(name, node.lineno, _signature(node), summary, calls)
        (self.classes if is_class else self.functions).append(definition)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = [alias.name for alias in node.names]
        for alias in node.names:
            self.defined.setdefault(alias.asname or alias.name.partition(".")[0], node.lineno)
        if isinstance(node, ast.Import):
            self.imports += [(name, node.lineno, []) for name in names]
        else:
            self.imports.append(("." * node.level + (node.module or ""), node.lineno, names))


def _callable_names(nodes: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Functions, classes and methods, under dotted names."""
    for node in nodes:
        if isinstance(node, _Named):
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef) and not prefix:
            yield from _callable_names(node.body, f"{node.name}.")


def _called(function: ast.expr, owner: str) -> str:
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name("self" | "cls"), name):
            return f"{owner}.{name}"
        case ast.Attribute(ast.Name(instance), name):
            return f"{instance}.{name}"
    return ""


def _signature(node: _Named) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
        text = f"class {node.name}({bases})" if bases else f"class {node.name}"
    else:
        word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        text = f"{word} {node.name}({ast.unparse(node.args)}){returns}"
    return text if len(text) <= 500 else f"{text[:500]}..."


def markdown_record(path: str, data: bytes) -> tuple[Record, str]:
    """The record of a Markdown file: its headings, and the words of its code."""
    text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    line_of = _line_finder(text)
    code = [block.span(2) for block in _FENCED.finditer(text)]
    prose = _FENCED.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    code += [ticked.span(1) for ticked in _TICKED.finditer(prose)]
    headings = [
        Definition(heading[2].rstrip("# \t"), line_of(heading.start()), heading[1])
        for heading in _HEADING.finditer(prose)
    ]
    words: dict[str, tuple[str, int, int]] = {}
    for start, stop in sorted(code):
        for word in _WORD.finditer(text, start, stop):
            kind, line, count = words.get(word[0], (MENTIONED, line_of(word.start()), 0))
            words[word[0]] = kind, line, count + 1
    summary, listed = headings[0].name if headings else "", dict(sorted(words.items()))
    size = len(lines_of(text)), len(data)
    return Record(path, "markdown", *size, summary, [], [], headings, [], listed), text
