"""The language of rules files: patterns of tensor names, and integer formulas.

Patterns: does ``*.layers.{i}.mlp.*`` match a name, and what is ``i``? ``*`` matches any text, dots
and nothing included. ``{i}`` matches one whole part of a dotted name that is an integer, and
captures it. Everything else stands for itself.

    >>> Pattern.parse("*layers.{i}.mlp.*").match("model.layers.7.mlp.up_proj.weight")
    {'i': 13}

The value is where in the name the integer starts.

Of several patterns that match a name the most specific one wins: the one with the longest literal
text, then the one with the fewest ``*``, then with the fewest ``{i}``. So whatever is put in the
place of a ``*`` makes a pattern more specific, never less.

Formulas: what is ``i * pp_size // num_layers`` for layer 7?

    formula = term { ("+" | "-") term }
    term    = factor { ("*" | "//" | "%") factor }
    factor  = int | name | "-" factor | "(" formula ")"
    places  = { axis "=" formula { "," formula } }

Formulas mean what they mean in Python. Text, nesting and values are bounded.

    >>> stage = Formula.parse("i * pp_size // num_layers")
    >>> stage.value({"i": 7, "pp_size": 4, "num_layers": 10}), sorted(stage.names)
    (2, ['i', 'num_layers', 'pp_size'])

In a layout, braces around a formula with a name stand for its value. Packed segments, which start
with a number and hold no formula, are left as they are, so both may be used together.

    >>> Template.parse("tp*{3*head_dim} -").fill({"head_dim": 128})
    'tp*384 -'
    >>> Template.parse("{4096 kv, {size} kv} -").fill({"size": 1024})
    '{4096 kv, 1024 kv} -'
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from typing import NoReturn, TypeAlias

from reshard.errors import RulesError, require_type
from reshard.text import quoted

MAX_PATTERN = 512
MAX_FORMULA = 256
MAX_DEPTH = 16
MAX_VALUE = 10**15
MAX_LAYOUT = 4096

INDEX = re.compile(r"\.([0-9]{1,9})(?![^.])", re.ASCII)
"""A part of a dotted name that is an integer; search in ``"." + name``."""

_WILD = re.compile(r"(\*|\{[^{}]*\})")
_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}\Z", re.ASCII)
_DIGITS = re.compile(r"(?<![^.*])[0-9]+(?![^.*])", re.ASCII)

_OPERAND = re.compile(r"[A-Za-z_0-9(]", re.ASCII)
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[0-9]+|//|\S)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]", re.ASCII)
_BRACES = re.compile(r"\{([^{}]*)\}")
_SEGMENTS = re.compile(r"[^,]*,|\s*[0-9]+\s*(?:-?\s*\Z|[A-Za-z_(])", re.ASCII)

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_BINDING = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}

Tree: TypeAlias = "int | str | tuple[str, Tree, Tree]"
"""A number, a name, or an operator with two operands."""


@dataclass(frozen=True, slots=True)
class Pattern:
    text: str
    captures: tuple[str, ...]  # the names of the captured integers, in order
    regex: re.Pattern[str] = field(compare=False, repr=False)
    rank: tuple[int, int, int] = field(compare=False, repr=False)  # how specific it is

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern, or say what is wrong with it."""
        if not text or len(text) > MAX_PATTERN:
            raise RulesError(f"a pattern has {len(text)} characters: 1 to {MAX_PATTERN} work")
        words = [word for word in _WILD.split(re.sub(r"\*+", "*", text)) if word]
        chunks, captures = [""], list[str]()
        for at, word in enumerate(words):
            if word == "*":
                chunks.append("")
            elif word[0] == "{":
                captures.append(_capture(text, words, at, captures))
                chunks[-1] += f"(?P<{captures[-1]}>[0-9]{{1,9}})"
            elif "{" in word or "}" in word:
                raise RulesError(f'pattern "{text}" has a brace alone: write {{i}} for an integer')
            else:
                chunks[-1] += re.escape(word)
        literal = sum(len(word) for word in words if not _WILD.match(word))
        rank = (literal, -words.count("*"), -len(captures))
        regex = re.compile(_regex(chunks), re.ASCII | re.DOTALL)
        return cls(text, tuple(captures), regex, rank)

    def match(self, name: str) -> dict[str, int] | None:
        """Where in the name each captured integer starts, or None if the pattern does not match."""
        match = self.regex.match(name)
        return {key: match.start(key) for key in self.captures} if match else None

    def digits(self) -> set[str]:
        """The integers that the pattern spells out: ``0`` in ``layers.0.w1.*``."""
        return set(_DIGITS.findall(_BRACES.sub("x", self.text)))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is a pattern's text, or matches it; for ``--layout``, ``dtype=``, ``drop=``.

    >>> matches("layers.{i}.*", "layers.0.mlp.weight"), matches("a[0]", "a[0]")
    (True, True)
    """
    if name == pattern:
        return True
    require_type(pattern, str, "a name or pattern", 'give a text, as "*.weight"')
    return _parsed(pattern).regex.match(name) is not None


_parsed = lru_cache(maxsize=1024)(Pattern.parse)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches; wildcards of the shell raise an error with our spelling."""
    names = list(names)
    chosen = [name for name in names if matches(pattern, name)]
    if not chosen and any(fnmatchcase(name, pattern) for name in names):
        raise RulesError(
            f"pattern {quoted(pattern)}: ? and [...] stand for themselves; write * for any text "
            "and {i} for an integer between dots"
        )
    return chosen


def _capture(text: str, words: Sequence[str], at: int, earlier: Sequence[str]) -> str:
    """The name in braces, which stands for a whole part of a dotted name."""
    name = _CAPTURE.match(words[at])
    before = words[at - 1][-1] if at else "."
    after = words[at + 1][0] if at + 1 < len(words) else "."
    if not name or (before, after) != (".", "."):
        raise RulesError(f'{words[at]} in pattern "{text}" must be a whole part: write .{{i}}.')
    if name[1] in earlier:
        raise RulesError(f'{words[at]} appears twice in pattern "{text}": give each its own name')
    return name[1]


def _regex(chunks: Sequence[str]) -> str:
    """A regular expression for what is between the ``*``; it never looks back, so that it is fast.

    Between two ``*`` the leftmost match is as good as any other (a capture cannot stretch), so it
    is never given up; only the text after the last ``*`` is tied to the end.
    """
    if len(chunks) == 1:
        return rf"{chunks[0]}\Z"
    middle = "".join(f"(?>.*?{chunk})" for chunk in chunks[1:-1])
    return rf"(?>{chunks[0]}){middle}.*{chunks[-1]}\Z"


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula over numbers of the model, captured indices and sizes of axes."""

    text: str
    names: frozenset[str]  # the names it uses
    tree: Tree = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, within: str | None = None) -> Formula:
        """Read one formula; errors quote the text that it is within."""
        tokens = _tokens(text)
        names = frozenset(token for token in tokens if _NAME.match(token))
        rest = deque(tokens)
        tree = _parse(within or text, rest)
        if rest:
            _fail(within or text, rest, "an operator")
        return cls(text, names, tree)

    def value(self, numbers: Mapping[str, int]) -> int:
        """The value for these numbers; division by zero and huge values are a RulesError."""
        return _value(self.tree, numbers)


@dataclass(frozen=True, slots=True)
class Place:
    """``pp = 0, pp_size - 1``: the coordinates on one axis that hold a tensor."""

    axis: str
    at: tuple[Formula, ...]

    @property
    def names(self) -> set[str]:
        return {name for formula in self.at for name in formula.names}


def parse_places(text: str) -> tuple[Place, ...]:
    """Read the value of ``on``; the empty text means everywhere.

    >>> [place.axis for place in parse_places("pp = i // 20 ep = e % 8")]
    ['pp', 'ep']
    """
    tokens = _tokens(text)
    begins = [at for at, token in enumerate(tokens[1:]) if token == "="]
    if tokens and begins[:1] != [0]:
        _fail(text, tokens[1:2] if _NAME.match(tokens[0]) else tokens, '"=" after an axis name')
    places: dict[str, Place] = {}
    for begin, end in pairwise([*begins, len(tokens)]):
        axis, formulas = tokens[begin], " ".join(tokens[begin + 2 : end]).split(",")
        if not _NAME.match(axis):
            _fail(text, [axis], "an axis name")
        if axis in places:
            raise RulesError(f'on = "{text}" places axis "{axis}" twice: join them with a comma')
        places[axis] = Place(axis, tuple(Formula.parse(part, text) for part in formulas))
    return tuple(places.values())


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_FORMULA:
        raise RulesError(f"a formula of {len(text)} characters: at most {MAX_FORMULA} work")
    return _TOKEN.findall(text)


def _parse(text: str, rest: deque[str], depth: int = 0, binding: int = 0) -> Tree:
    """Take a formula from the front of the tokens, up to an operator that binds no tighter."""
    signs = 0
    while rest and rest[0] == "-":
        rest.popleft()
        signs += 1
    if depth + signs > MAX_DEPTH:
        raise RulesError(f'"{text}" nests more than {MAX_DEPTH} deep: write it simpler')
    if not rest or not _OPERAND.match(rest[0]):
        _fail(text, rest, "a number, a name or (")
    tree: Tree
    token = rest.popleft()
    if token == "(":
        tree = _parse(text, rest, depth + 1)
        if not rest or rest[0] != ")":
            _fail(text, rest, '")"')
        rest.popleft()
    else:
        tree = _bounded(int(token)) if token.isdigit() else token
    if signs % 2:
        tree = "-", 0, tree
    while rest and _BINDING.get(rest[0], 0) > binding:
        sign = rest.popleft()
        tree = sign, tree, _parse(text, rest, depth, _BINDING[sign])
    return tree


def _fail(text: str, rest: Sequence[str], expected: str) -> NoReturn:
    token = f'"{rest[0]}"' if rest else "the end"
    raise RulesError(f'"{text}": found {token}, expected {expected}')


def _value(tree: Tree, numbers: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return _bounded(numbers[tree])
    sign, left, right = tree[0], _value(tree[1], numbers), _value(tree[2], numbers)
    if right == 0 and sign in ("//", "%"):
        raise RulesError(f"{left} {sign} 0 divides by zero: check the numbers of the model")
    return _bounded(_OPERATORS[sign](left, right))


def _bounded(value: int) -> int:
    if abs(value) > MAX_VALUE:
        raise RulesError(f"a formula reaches a number beyond {MAX_VALUE}: use smaller numbers")
    return value


@dataclass(frozen=True, slots=True)
class Template:
    """A layout text in which some numbers are formulas."""

    parts: tuple[str | Formula, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        if len(text) > MAX_LAYOUT:
            raise RulesError(f"a layout of {len(text)} characters: at most {MAX_LAYOUT} work")
        parts: list[str | Formula] = []
        at = 0
        for match in _BRACES.finditer(text):
            if not _SEGMENTS.match(match[1]):
                parts += [text[at : match.start()], Formula.parse(match[1])]
                at = match.end()
        return cls((*parts, text[at:]))

    def names(self) -> set[str]:
        return {name for part in self.parts if not isinstance(part, str) for name in part.names}

    def sample(self) -> str:
        """A layout text with the same axes, for any numbers."""
        return "".join(part if isinstance(part, str) else "1" for part in self.parts)

    def fill(self, numbers: Mapping[str, int]) -> str:
        return "".join(
            part if isinstance(part, str) else str(part.value(numbers)) for part in self.parts
        )
