"""The layout notation: text such as ``(tp dp) - | on pp=2`` to words, and back.

A layout text is one word per tensor dim, then suffixes. The parser has one method per line of the
grammar and knows neither meshes nor shapes; `Layout` gives the words their meaning.

    layout   = dims { "|" suffix }               suffixes in this order, each at most once:
    suffix   = "on" at { at }                      at = axis "=" ints
             | op axis { axis }                    op = "sum" | "avg" | "max" | "min" | "prod"
             | "flat" cuts
             | "without" ranks                     ranks = range { "," range }
    dims     = word { word }
    word     = "-" | "..." | cuts
    cuts     = cut | "(" cut { cut } ")"
    cut      = axis [ "*" int | ":" int | "[" ints "]" | "~" ]
             | cuts "{" ints "}"
             | "{" segment { "," segment } "}"
    segment  = int [ "-" | cuts ]
    ints     = int { "," int }
    axis     = letter { letter | digit | "_" }

    >>> words = parse("(tp*128 dp) - | on pp=2")
    >>> words.dims[0]
    (Chunk(axis='tp', unit=128), Chunk(axis='dp', unit=1))
    >>> str(words)
    '(tp*128 dp) - | on pp=2'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn, TypeVar

from reshard.errors import NotationError
from reshard.layout.mesh import MAX_TEXT, RESERVED, parse_ranks
from reshard.layout.words import (
    OPS,
    Chunk,
    Cut,
    Cuts,
    Cyclic,
    Packed,
    Ragged,
    Segment,
    Words,
    ZigZag,
)
from reshard.text import quoted

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_][A-Za-z0-9_]*|\d+|\S)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]", re.ASCII)
_ORDER = ("on", "reduce", "flat", "without")
MAX_DEPTH = 16
MAX_ANSWERED = 200  # characters of a text in another notation that is answered in ours
_T = TypeVar("_T")


def parse(text: str, axes: Iterable[str] = ()) -> Words:
    """Read a layout text, or say which word is wrong and what was expected.

    Placements of DTensor, and specs of JAX, are answered in the notation.
    """
    try:
        words = _Parser(text).layout()
        if "None" in axes or not re.search(r"\bNone\b", text):
            return words
        problem = f'layout {quoted(text)} names axis "None"'
    except NotationError as error:
        answer = from_placements(axes, text)
        if answer is not None:
            raise NotationError(answer) from None
        problem = str(error)
    raise NotationError(f"{problem}{_advice(text)}")


def _advice(text: str) -> str:
    """What to write for a text with commas, quotes or None, such as ``P("tp", None)``; else ""."""
    if len(text) > MAX_ANSWERED:
        return ""
    meant = re.sub(r"\A\s*\w*[(\[](.*)[)\]]\s*\Z", r"\1", text)
    meant = " ".join(re.sub(r"[,'\"]", " ", re.sub(r"\bNone\b", "-", meant)).split())
    try:
        _Parser(meant).layout()
    except NotationError:
        return ""
    return f'; words are separated by spaces, and "-" is a whole dim: write "{meant}"'


class _Parser:
    """Reads one layout text, a token at a time."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise NotationError(f"a layout text of {len(text)} characters: at most {MAX_TEXT} work")
        self.text = text
        self.tokens = [(match[1], match.start(1)) for match in _TOKEN.finditer(text)]
        self.tokens.append(("", len(text)))
        self.at = 0
        self.depth = 0

    def layout(self) -> Words:
        """``dims { "|" suffix }``"""
        dims, rest = self._dims()
        suffixes: dict[str, Any] = {}
        while self._take("|"):
            self._suffix(suffixes)
        if self._peek():
            self._wrong('a word for one tensor dim or "|"')
        words = Words(dims, rest, **suffixes)
        self._axes_once(words)
        return words

    def _dims(self) -> tuple[tuple[Cuts, ...], int | None]:
        dims: list[Cuts] = []
        rest: int | None = None
        while self._peek() not in ("", "|"):
            if self._take("..."):
                if rest is not None:
                    self._fail('"..." appears twice', "use it once")
                rest = len(dims)
            else:
                dims.append(() if self._take("-") else self._cuts())
        if not dims and rest is None:
            self._fail("there is no word for any dim", 'write one word per tensor dim, or "..."')
        return tuple(dims), rest

    def _cuts(self) -> Cuts:
        """``cut | "(" cut { cut } ")"``, each with an optional ``{ints}`` after it."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(f"words are nested more than {MAX_DEPTH} deep", "write a simpler word")
        cuts = self._group() if self._take("(") else (self._cut(),)
        if self._touching() and self._take("{"):
            if any(isinstance(cut, Packed) for cut in cuts):
                self._fail("segments are cut into segments", "give one list of segments")
            sizes = self._list(self._int, "}")
            cuts = (Packed(tuple(Segment(size, cuts) for size in sizes)),)
        self.depth -= 1
        return cuts

    def _group(self) -> Cuts:
        cuts: list[Cut] = []
        while not self._take(")"):
            cuts += self._cuts()
        if not cuts:
            self._fail('"()" names no axis', 'write "-" for a dim that is whole')
        return tuple(cuts)

    def _cut(self) -> Cut:
        if self._take("{"):
            return Packed(self._list(self._segment, "}"))
        axis = self._axis()
        if self._take("*"):
            return Chunk(axis, self._positive())
        if self._take(":"):
            return Cyclic(axis, self._positive())
        if self._take("["):
            return Ragged(axis, self._list(self._int, "]"))
        return ZigZag(axis) if self._take("~") else Chunk(axis)

    def _segment(self) -> Segment:
        size = self._int()
        whole = self._take("-") or self._peek() in (",", "}")
        return Segment(size, () if whole else self._cuts())

    def _suffix(self, suffixes: dict[str, Any]) -> None:
        word = self._peek()
        key = "reduce" if word in OPS else word
        if key not in _ORDER:
            self._wrong("one of on, sum, avg, max, min, prod, flat, without")
        if any(_ORDER.index(key) <= _ORDER.index(earlier) for earlier in suffixes):
            self._fail(
                f'suffix "{word}" is out of order or repeated', "write on, sum, flat, without"
            )
        self.at += 1
        match key:
            case "on":
                suffixes[key] = self._items(self._place, "axis=coordinates, such as pp=2")
            case "reduce":
                suffixes[key] = word, self._items(self._axis, "the axes that hold addends")
            case "flat":
                suffixes[key] = self._cuts()
            case "without":
                ranks = parse_ranks(self.text[self.tokens[self.at][1] :], self.text)
                suffixes[key] = tuple(sorted(set(ranks)))
                self.at = len(self.tokens) - 1

    def _place(self) -> tuple[str, tuple[int, ...]]:
        axis = self._axis()
        self._expect("=", '"=" and coordinates')
        return axis, tuple(sorted(set(self._list(self._int))))

    def _items(self, item: Callable[[], _T], expected: str) -> tuple[_T, ...]:
        """One item or more, up to the end of a suffix."""
        items: list[_T] = []
        while self._peek() not in ("", "|"):
            items.append(item())
        if not items:
            self._wrong(expected)
        return tuple(items)

    def _axes_once(self, words: Words) -> None:
        """Each axis has one job: a dim, ``flat``, ``on`` or a pending reduction."""
        seen: set[str] = set()
        for axis in words.axes:
            if axis in seen:
                self._fail(
                    f"axis {quoted(axis)} appears twice", "an axis has one place in a layout"
                )
            seen.add(axis)
        for cut in chain(*words.dims, words.flat):
            for segment in cut.segments if isinstance(cut, Packed) else ():
                self._axes_once(Words((segment.cuts,)))

    def _axis(self) -> str:
        token = self._peek()
        if not _NAME.match(token) or token in RESERVED:
            self._wrong("an axis name")
        self.at += 1
        return token

    def _int(self) -> int:
        token = self._peek()
        if not (token.isascii() and token.isdigit()):
            self._wrong("a number")
        if len(token) > 18:
            self._wrong("a number of at most 18 digits")
        self.at += 1
        return int(token)

    def _positive(self) -> int:
        number = self._int()
        if number < 1:
            self.at -= 1
            self._wrong("a number of at least 1")
        return number

    def _list(self, item: Callable[[], _T], close: str = "") -> tuple[_T, ...]:
        """Items with commas between them, up to a closing token if there is one."""
        items = [item()]
        while self._take(","):
            items.append(item())
        if close:
            self._expect(close, f'"," or "{close}"')
        return tuple(items)

    def _peek(self) -> str:
        return self.tokens[self.at][0]

    def _touching(self) -> bool:
        """Whether the next token follows the one before without a space."""
        before, start = self.tokens[self.at - 1]
        return self.tokens[self.at][1] == start + len(before)

    def _take(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self.at += 1
        return True

    def _expect(self, token: str, expected: str) -> None:
        if not self._take(token):
            self._wrong(expected)

    def _wrong(self, expected: str) -> NoReturn:
        token, at = self.tokens[self.at]
        shown = quoted(token) if token else "the end"
        raise NotationError(
            f"layout {quoted(self.text)}: found {shown} at character {at + 1}, expected {expected}"
        )

    def _fail(self, what: str, hint: str) -> NoReturn:
        raise NotationError(f"layout {quoted(self.text)}: {what}: {hint}")


_PLACEMENT = re.compile(
    r"(_StridedShard|Shard|Replicate|Partial)\((?:dim=)?(\d{0,2})[^)]*\)", re.ASCII
)


def from_placements(axes: Iterable[str], placements: object) -> str | None:
    """What DTensor's placements are in the notation, for who types them as a layout; else None."""
    if isinstance(placements, str):
        matches = _PLACEMENT.finditer(placements if len(placements) <= MAX_ANSWERED else "")
        listed = [(match[1], int(match[2] or 0)) for match in matches]
    else:
        several = placements if isinstance(placements, list | tuple) else (placements,)
        listed = [(type(one).__name__, getattr(one, "dim", 0)) for one in several]
    kinds = [kind for kind, _ in listed]
    if not kinds or not set(kinds) <= {"Shard", "_StridedShard", "Replicate", "Partial"}:
        return None
    names = [*axes]
    names += [f"axis{number}" for number in range(len(names), len(listed))]
    cuts: dict[int, list[str]] = {}
    for axis, (kind, dim) in zip(names, listed, strict=False):
        if "Shard" in kind:
            cuts.setdefault(dim, []).append(axis)
    words = [" ".join(cuts.get(dim, "-")) for dim in range(max(cuts, default=-1) + 1)]
    text = " ".join([*(f"({word})" if " " in word else word for word in words), "..."])
    pending = [axis for axis, kind in zip(names, kinds, strict=False) if kind == "Partial"]
    text += f" | sum {' '.join(pending)}" if pending else ""
    return (
        f"{placements!s:.80} is how DTensor writes it: in the notation of layouts, which names "
        f'axes of the mesh, it is "{text}"'
    )
