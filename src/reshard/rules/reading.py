"""TOML text to a document: every wrong key, type or word is one line that names it.

>>> read('axes = ["tp"]\\n[tensors]\\n"*.weight" = "tp -"').axes
('tp',)
>>> read('axes = ["tp"]\\n[tensors]\\n"*.weight" = "pt -"')
Traceback (most recent call last):
reshard.errors.RulesError: [tensors] "*.weight": axis "pt" is not one of the axes tp: ...
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any

from reshard.errors import RulesError
from reshard.layout.mesh import RESERVED, Mesh
from reshard.layout.notation import parse
from reshard.rules.document import Document, Factor, Rule, located, quote
from reshard.rules.expression import names_of, parse_places
from reshard.rules.models import NUMBERS
from reshard.rules.pattern import Pattern
from reshard.rules.template import Template
from reshard.rules.wording import all_axes

__all__ = ["MAX_BYTES", "families", "read", "read_family"]

MAX_BYTES = 1 << 20
MAX_RULES = 10_000
_KEYS = ("extends", "mesh", "axes", "fsdp", "replicate", "model", "factor", "tensors", "names")
_FOLDER = resources.files("reshard.rules") / "families"


@cache
def families() -> tuple[str, ...]:
    """The names of the shipped rules."""
    found = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def read_family(name: str) -> Document:
    """The shipped rules of a family."""
    with located(f"rules {quote(name)}"):
        return read((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def read(text: str) -> Document:
    """The document a TOML text describes, with that of the family it extends underneath."""
    data = _load(text)
    for key in data:
        if key not in _KEYS:
            raise RulesError(f"key {quote(key)} is not known: the keys are {', '.join(_KEYS)}")
    base = _base(data.get("extends"))
    mesh = _mesh(data.get("mesh"))
    own = Document(
        axes=tuple(dict.fromkeys((*_axes(data.get("axes", [])), *(mesh.axes if mesh else ())))),
        mesh=mesh,
        fsdp=tuple(_text(data.get("fsdp", ""), 'key "fsdp"').split()),
        replicate=tuple(_text(data.get("replicate", ""), 'key "replicate"').split()),
        model=_model(_table(data, "model")),
        counts=_counts(_table(data, "model")),
        factors=tuple(_factor(*item) for item in _table(data, "factor").items()),
        rules=tuple(_rule(*item) for item in _table(data, "tensors").items()),
        names=_table(data, "names"),
    )
    document = base.extended(own)
    _check(document)
    known = {*base.model, *NUMBERS, *_used_numbers(document)}
    for name in own.model:
        near = difflib.get_close_matches(name, known, n=1)
        if name not in known and near:
            raise RulesError(f"[model] {quote(name)} is used by no rule: write {near[0]}")
    return document


def _used_numbers(document: Document) -> set[str]:
    """The numbers that some layout, place or factor of a document needs."""
    used = {factor.at_most for factor in document.factors}
    for rule in document.rules:
        used |= rule.layout.names() if rule.layout else set()
        used |= {name for place in rule.on or () for at in place.at for name in names_of(at)}
    return used & document.model.keys()


def _load(text: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise RulesError(f"{len(text)} characters are too many: a rules file has <= {MAX_BYTES}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RulesError("the TOML is nested too deep: use the keys of the docs") from None
    except ValueError as error:
        raise RulesError(f"this is not TOML: {' '.join(str(error)[:200].split())}") from None


def _base(name: Any) -> Document:
    if name is None:
        return Document()
    if _text(name, 'key "extends"') not in families():
        raise RulesError(
            f'key "extends" names {quote(name)}: the families are {", ".join(families())}'
        )
    return read_family(name)


def _table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(f"key {quote(key)}", value, f"a table: write [{key}]")
    if len(value) > MAX_RULES:
        raise RulesError(f"[{key}] has {len(value)} entries: at most {MAX_RULES} work")
    return value


def _axes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _wrong('key "axes"', value, 'a list of names, such as ["dp", "tp"]')
    for axis in value:
        if _text(axis, 'key "axes"') in RESERVED or not axis.isascii() or not axis.isidentifier():
            raise RulesError(f'key "axes": {quote(axis)} cannot name an axis: use a plain word')
    return tuple(value)


def _mesh(value: Any) -> Mesh | None:
    with located('key "mesh"'):
        return None if value is None else Mesh.parse(_text(value, 'key "mesh"'))


def _model(table: Mapping[str, Any]) -> dict[str, int | None]:
    numbers: dict[str, int | None] = {}
    for name, value in table.items():
        if not name.isascii() or not name.isidentifier():
            raise RulesError(f"[model] {quote(name)}: use letters, digits and _ in a name")
        counted = isinstance(value, str) and _counted(value) is not None
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (number or counted or value == "?"):
            raise _wrong(f"[model] {quote(name)}", value, 'a number, "?" or "count i"')
        numbers[name] = value if number else None
    return numbers


def _counts(table: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: value for name, value in table.items() if isinstance(value, str)}
    found = {name: _counted(text) for name, text in texts.items()}
    return {name: index for name, index in found.items() if index is not None}


def _counted(text: str) -> str | None:
    """The index that ``count i`` names; None for another text."""
    match text.split():
        case ["count", index]:
            return index
    return None


def _factor(axis: str, value: Any) -> Factor:
    match value:
        case {"into": [str(first), str(second)], "at_most": str(number), **other} if not other:
            return Factor(axis, (first, second), number)
    raise _wrong(f"[factor] {quote(axis)}", value, '{ into = ["kv", "rep"], at_most = "kv_heads" }')


def _rule(key: str, value: Any) -> Rule:
    where = f"[tensors] {quote(key)}"
    with located(where):
        pattern = Pattern.parse(key)
        match value:
            case str(layout):
                return Rule(pattern, Template.parse(layout), None)
            case {"layout": str(layout), "on": str(on), **other} if not other:
                return Rule(pattern, Template.parse(layout), parse_places(on))
            case {"layout": str(layout), **other} if not other:
                return Rule(pattern, Template.parse(layout), None)
            case {"on": str(on), **other} if not other:
                return Rule(pattern, None, parse_places(on))
    raise _wrong(where, value, 'a layout, or { layout = "...", on = "pp = i // 20" }')


def _check(document: Document) -> None:
    """Every axis and every name that is used is declared; a misspelt one must not vanish."""
    _known('key "fsdp": axis', document.fsdp, document.axes)
    for factor in document.factors:
        _known("[factor] axis", (factor.axis, *factor.into), document.axes)
        if factor.at_most not in document.model:
            raise RulesError(f"[factor] {factor.axis}: [model] has no {quote(factor.at_most)}")
    for rule in document.rules:
        with located(f"[tensors] {quote(rule.pattern.text)}"):
            _check_rule(rule, document)


def _check_rule(rule: Rule, document: Document) -> None:
    axes = document.axes
    numbers = {*document.model, *(f"{axis}_size" for axis in axes)}
    for capture in rule.pattern.captures:
        if capture in numbers:
            raise RulesError(f"{{{capture}}} is also a number: give the index another name")
    if rule.layout:
        _names(rule.layout.names(), numbers)
        _known("axis", sorted(all_axes(parse(rule.layout.sample()))), axes)
    for place in rule.on or ():
        _known("axis", [place.axis], axes)
        for formula in place.at:
            _names(set(names_of(formula)), numbers | set(rule.pattern.captures))


def _names(used: set[str], known: set[str]) -> None:
    for name in sorted(used - known):
        raise RulesError(
            f"{quote(name)} is not a number: it knows {', '.join(sorted(known)) or 'none'}"
        )


def _known(what: str, used: Collection[str], axes: Collection[str]) -> None:
    names = ", ".join(sorted(axes)) or "(none)"
    for axis in used:
        if axis not in axes:
            raise RulesError(
                f"{what} {quote(axis)} is not one of the axes {names}: "
                'correct it, or add it to the list "axes" of the file'
            )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    return value


def _wrong(where: str, value: Any, expected: str) -> RulesError:
    return RulesError(f"{where} is {_brief(value)}, expected {expected}")


def _brief(value: Any) -> str:
    return quote(str(value)) if isinstance(value, str | int) else f"a {type(value).__name__}"
