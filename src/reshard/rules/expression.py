"""Integer formulas of rules files: what is ``i * pp_size // num_layers`` for layer 7?

    formula = term { ("+" | "-") term }
    term    = factor { ("*" | "//" | "%") factor }
    factor  = int | name | "-" factor | "(" formula ")"
    places  = { axis "=" formula { "," formula } }

They mean what they mean in Python. Text, nesting and values are bounded, and nothing is ever
handed to ``eval``.

    >>> stage = parse_formula("i * pp_size // num_layers")
    >>> evaluate(stage, {"i": 7, "pp_size": 4, "num_layers": 10})
    2
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from reshard.errors import RulesError

__all__ = [
    "Binary",
    "Formula",
    "Name",
    "Negative",
    "Number",
    "Place",
    "evaluate",
    "names_of",
    "parse_formula",
    "parse_places",
]

MAX_TEXT = 256
MAX_DEPTH = 16
MAX_VALUE = 10**15

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[0-9]+|//|\S)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Number:
    """``20``"""

    value: int


@dataclass(frozen=True, slots=True)
class Name:
    """``num_layers``: a number of the model, a captured index or the size of an axis."""

    name: str


@dataclass(frozen=True, slots=True)
class Negative:
    """``-i``"""

    operand: Formula


@dataclass(frozen=True, slots=True)
class Binary:
    """``i // 20``"""

    sign: str
    left: Formula
    right: Formula


Formula: TypeAlias = Number | Name | Negative | Binary


@dataclass(frozen=True, slots=True)
class Place:
    """``pp = 0, pp_size - 1``: the coordinates on one axis that hold a tensor."""

    axis: str
    at: tuple[Formula, ...]


def parse_formula(text: str) -> Formula:
    """Read one formula.

    >>> parse_formula("i // 20")
    Binary(sign='//', left=Name(name='i'), right=Number(value=20))
    """
    parser = _Parser(text)
    formula = parser.formula()
    return formula if not parser.peek() else parser.wrong("an operator")


def parse_places(text: str) -> tuple[Place, ...]:
    """Read what ``on`` says; the empty text means everywhere.

    >>> [place.axis for place in parse_places("pp = i // 20 ep = e % 8")]
    ['pp', 'ep']
    """
    parser = _Parser(text)
    places = []
    while parser.peek():
        places.append(parser.place())
    axes = [place.axis for place in places]
    for axis in axes:
        if axes.count(axis) > 1:
            raise RulesError(f'on = "{text}" places axis "{axis}" twice: join them with a comma')
    return tuple(places)


def names_of(formula: Formula) -> Iterator[str]:
    """The names a formula uses.

    >>> sorted(set(names_of(parse_formula("i * pp_size // (num_layers + i)"))))
    ['i', 'num_layers', 'pp_size']
    """
    match formula:
        case Name(name):
            yield name
        case Negative(operand):
            yield from names_of(operand)
        case Binary(_, left, right):
            yield from names_of(left)
            yield from names_of(right)


def evaluate(formula: Formula, numbers: Mapping[str, int]) -> int:
    """The value of a formula; division by zero and huge values are a RulesError."""
    match formula:
        case Number(value):
            return value
        case Name(name):
            return _bounded(numbers[name])
        case Negative(operand):
            return -evaluate(operand, numbers)
        case Binary(sign, left, right):
            return _combine(sign, evaluate(left, numbers), evaluate(right, numbers))


_SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
}


def _combine(sign: str, left: int, right: int) -> int:
    if right == 0 and sign in ("//", "%"):
        raise RulesError(f"{left} {sign} 0 divides by zero: check the numbers of the model")
    return _bounded(_SIGNS[sign](left, right))


def _bounded(value: int) -> int:
    if abs(value) > MAX_VALUE:
        raise RulesError(f"a formula reaches a number beyond {MAX_VALUE}: use smaller numbers")
    return value


class _Parser:
    """Reads formulas, a token at a time."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise RulesError(f"a formula of {len(text)} characters: at most {MAX_TEXT} work")
        self.text = text
        self.tokens = _TOKEN.findall(text)
        self.at = 0
        self.depth = 0

    def place(self) -> Place:
        axis = self.take(_NAME, "an axis name")
        self.take(re.compile("="), '"="')
        at = [self.formula()]
        while self.peek() == ",":
            self.at += 1
            at.append(self.formula())
        return Place(axis, tuple(at))

    def formula(self) -> Formula:
        return self.chain(self.term, ("+", "-"))

    def term(self) -> Formula:
        return self.chain(self.factor, ("*", "//", "%"))

    def chain(self, operand: Callable[[], Formula], signs: tuple[str, ...]) -> Formula:
        left = operand()
        while self.peek() in signs:
            sign = self.peek()
            self.at += 1
            left = Binary(sign, left, operand())
        return left

    def factor(self) -> Formula:
        token = self.take(re.compile(r"[A-Za-z_0-9(-]", re.ASCII), "a number, a name or (")
        if token == "-":
            return self.nested(lambda: Negative(self.factor()))
        if token == "(":
            inside = self.nested(self.formula)
            self.take(re.compile(r"\)"), '")"')
            return inside
        return Number(_bounded(int(token))) if token.isdigit() else Name(token)

    def nested(self, read: Callable[[], Formula]) -> Formula:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RulesError(f'"{self.text}" nests more than {MAX_DEPTH} deep: write it simpler')
        inside = read()
        self.depth -= 1
        return inside

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, kind: re.Pattern[str], expected: str) -> str:
        token = self.peek()
        if not kind.match(token):
            self.wrong(expected)
        self.at += 1
        return token

    def wrong(self, expected: str) -> NoReturn:
        found = f'"{self.peek()}"' if self.peek() else "the end"
        raise RulesError(f'"{self.text}": found {found}, expected {expected}')
