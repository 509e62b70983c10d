"""Integer formulas of rules files: what is ``i * pp_size // num_layers`` for layer 7?

    formula = term { ("+" | "-") term }
    term    = factor { ("*" | "//" | "%") factor }
    factor  = int | name | "-" factor | "(" formula ")"
    places  = { axis "=" formula { "," formula } }

They mean what they mean in Python, which parses them; tokens are checked first and nothing is
executed. Text, nesting and values are bounded.

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

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from reshard.errors import RulesError

__all__ = ["Formula", "Place", "Template", "parse_places"]

MAX_TEXT = 256
MAX_DEPTH = 16
MAX_VALUE = 10**15
MAX_LAYOUT = 4096

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[0-9]+|//|\S)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]", re.ASCII)
_OPERAND = re.compile(r"[A-Za-z_0-9]", re.ASCII)
_BRACES = re.compile(r"\{([^{}]*)\}")
_SEGMENTS = re.compile(r"[^,]*,|\s*[0-9]+\s*(?:-?\s*\Z|[A-Za-z_(])", re.ASCII)

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_SIGNS = {sign for sign, _ in _OPERATORS.values()}


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula over numbers of the model, captured indices and sizes of axes."""

    text: str
    names: frozenset[str]
    """The names it uses."""
    tree: ast.expr = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Read one formula."""
        return cls._of(text, _tokens(text))

    @classmethod
    def _of(cls, text: str, tokens: Sequence[str]) -> Formula:
        _check(text, tokens)
        names = frozenset(token for token in tokens if _NAME.match(token))
        # A prefix keeps names apart from Python's keywords; int() drops leading zeros.
        python = (f"_{t}" if t in names else str(int(t)) if t.isdigit() else t for t in tokens)
        return cls(text, names, ast.parse(" ".join(python), mode="eval").body)

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
        """The names its formulas use."""
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
        places[axis] = Place(axis, tuple(Formula._of(text, _tokens(part)) for part in formulas))
    return tuple(places.values())


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_TEXT:
        raise RulesError(f"a formula of {len(text)} characters: at most {MAX_TEXT} work")
    return _TOKEN.findall(text)


def _check(text: str, tokens: Sequence[str]) -> None:
    """Refuse tokens that are no formula: operands and operators take turns, parentheses match."""
    depth = signs = 0
    wants_operand = True
    for at, token in enumerate(tokens):
        rest = tokens[at:]
        if not wants_operand and token not in (_SIGNS if depth == 0 else {*_SIGNS, ")"}):
            _fail(text, rest, "an operator" if depth == 0 else '")"')
        if wants_operand and token not in "(-" and not _OPERAND.match(token):
            _fail(text, rest, "a number, a name or (")
        depth += (token == "(") - (token == ")")
        signs = signs + 1 if wants_operand and token == "-" else 0
        if depth + signs > MAX_DEPTH:
            raise RulesError(f'"{text}" nests more than {MAX_DEPTH} deep: write it simpler')
        if token.isdigit():
            _bounded(int(token))
        wants_operand = token == "(" or token in _SIGNS
    if wants_operand or depth:
        _fail(text, [], "a number, a name or (" if wants_operand else '")"')


def _fail(text: str, rest: Sequence[str], expected: str) -> NoReturn:
    found = f'"{rest[0]}"' if rest else "the end"
    raise RulesError(f'"{text}": found {found}, expected {expected}')


def _value(node: ast.expr, numbers: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.Name(name):
            return _bounded(numbers[name[1:]])
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, numbers)
        case ast.BinOp(left_node, op, right_node) if type(op) in _OPERATORS:
            left, right = _value(left_node, numbers), _value(right_node, numbers)
            sign, combine = _OPERATORS[type(op)]
            if right == 0 and sign in ("//", "%"):
                raise RulesError(f"{left} {sign} 0 divides by zero: check the numbers of the model")
            return _bounded(combine(left, right))
    raise AssertionError(f"{ast.dump(node)} is no part of a formula")


def _bounded(value: int) -> int:
    if abs(value) > MAX_VALUE:
        raise RulesError(f"a formula reaches a number beyond {MAX_VALUE}: use smaller numbers")
    return value


@dataclass(frozen=True, slots=True)
class Template:
    """A layout text in which some numbers are formulas."""

    text: str
    parts: tuple[str | Formula, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Find the formulas of a layout text."""
        if len(text) > MAX_LAYOUT:
            raise RulesError(f"a layout of {len(text)} characters: at most {MAX_LAYOUT} work")
        parts: list[str | Formula] = []
        at = 0
        for found in _BRACES.finditer(text):
            if not _SEGMENTS.match(found[1]):
                parts += [text[at : found.start()], Formula.parse(found[1])]
                at = found.end()
        return cls(text, (*parts, text[at:]))

    def names(self) -> set[str]:
        """The names its formulas use."""
        return {name for part in self.parts if not isinstance(part, str) for name in part.names}

    def sample(self) -> str:
        """A layout text with the same axes, for any numbers."""
        return "".join(part if isinstance(part, str) else "1" for part in self.parts)

    def fill(self, numbers: Mapping[str, int]) -> str:
        """The layout text for these numbers."""
        return "".join(
            part if isinstance(part, str) else str(part.value(numbers)) for part in self.parts
        )
