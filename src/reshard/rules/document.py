"""Rules files: TOML text to a checked document.

Every wrong key, type or word is one line that names it.

>>> read('axes = ["tp"]\\n[tensors]\\n"*.weight" = "tp -"').axes
('tp',)
>>> read('axes = ["tp"]\\n[tensors]\\n"*.weight" = "pt -"')
Traceback (most recent call last):
reshard.errors.RulesError: [tensors] "*.weight": axis "pt" is not one of the axes tp: ...
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from reshard.errors import ReshardError, RulesError
from reshard.layout.mesh import RESERVED, Mesh
from reshard.layout.notation import parse
from reshard.rules.configs import NUMBERS
from reshard.rules.language import Pattern, Place, Template, parse_places
from reshard.text import quoted

__all__ = [
    "MAX_BYTES",
    "Document",
    "Factor",
    "Rule",
    "families",
    "located",
    "read",
    "read_family",
]

MAX_BYTES = 1 << 20
MAX_RULES = 10_000
_KEYS = ("extends", "mesh", "axes", "fsdp", "replicate", "model", "factor", "tensors", "names")
_FOLDER = resources.files("reshard.rules") / "families"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of ``[tensors]``."""

    pattern: Pattern
    layout: Template | None
    """How matching tensors are cut; None leaves that to other rules."""
    on: tuple[Place, ...] | None
    """Where matching tensors live; None leaves that to other rules, empty means everywhere."""


@dataclass(frozen=True, slots=True)
class Factor:
    """``tp = { into = ["kv", "rep"], at_most = "kv_heads" }``: how a large axis is read."""

    axis: str
    into: tuple[str, str]
    at_most: str
    read_by: str | None = None
    """The number of what reads these, such as q heads; if it is another one, the axis must divide
    ``at_most``, or a rank would lack what it reads."""


@dataclass(frozen=True, slots=True)
class Document:
    """A rules file, read and checked."""

    axes: tuple[str, ...] = ()
    """The axes its layouts may name."""
    mesh: Mesh | None = None
    """The mesh to use where the caller names none."""
    fsdp: tuple[str, ...] = ()
    """The axes that cut dim 0 of everything further."""
    replicate: tuple[str, ...] = ()
    """The axes along which tensors are replicated on purpose."""
    requested: tuple[str, ...] = ()
    """The axes that the caller, not the file, named as one of these two: a mesh must have them."""
    model: Mapping[str, int | None] = field(default_factory=dict)
    """Numbers of the model; None where one has to be given."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """Numbers that can be counted: one more than the largest index of that name."""
    factors: tuple[Factor, ...] = ()
    rules: tuple[Rule, ...] = ()
    """The most specific first."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """Tensors that have other names elsewhere, or are joined there; as written."""

    def extended(self, own: Document) -> Document:
        """This document with what another one adds or says differently."""
        rules = {rule.pattern.text: rule for rule in (*self.rules, *own.rules)}
        factors = {factor.axis: factor for factor in (*self.factors, *own.factors)}
        counts = {key: index for key, index in self.counts.items() if key not in own.model}
        return Document(
            axes=tuple(dict.fromkeys((*self.axes, *own.axes))),
            mesh=own.mesh or self.mesh,
            fsdp=own.fsdp or self.fsdp,
            replicate=own.replicate or self.replicate,
            model={**self.model, **own.model},
            counts={**counts, **own.counts},
            factors=tuple(factors.values()),
            rules=tuple(sorted(rules.values(), key=lambda rule: rule.pattern.rank, reverse=True)),
            names={**self.names, **own.names},
        )

    def with_numbers(self, numbers: Mapping[str, int]) -> Document:
        """This document with other numbers; a number it does not know is an error."""
        for name, value in numbers.items():
            if name not in self.model:
                known = ", ".join(self.model) or "none"
                raise RulesError(f"there is no number {quoted(name)}: the numbers are {known}")
            if not isinstance(value, int) or value < 0:
                raise RulesError(f"{name}={value!r} is not a whole number of at least 0")
        given = {name: int(value) for name, value in numbers.items()}
        return replace(self, model={**self.model, **given})

    def with_fsdp(self, axes: str) -> Document:
        """This document with dim 0 of everything cut further by these axes."""
        for axis in _text(axes, "fsdp=").split():
            if axis not in self.axes:
                known = ", ".join(self.axes) or "none"
                raise RulesError(
                    f"fsdp={quoted(axes)} names no axis of the rules: they are {known}"
                )
        named = tuple(axes.split())
        return replace(self, fsdp=named, requested=(*self.requested, *named))

    def with_replicate(self, axes: str) -> Document:
        """This document with replicas along these axes meant, whether its layouts know them or not.

        An axis cannot be asked to cut and to replicate at once.
        """
        named = tuple(_text(axes, "replicate=").split())
        twice = next((axis for axis in named if axis in self.fsdp), None)
        if twice is not None:
            raise RulesError(
                f"axis {quoted(twice)} is named by fsdp and by replicate: leave one out"
            )
        return replace(self, replicate=named, requested=(*self.requested, *named))

    def sizes(self, mesh: Mesh) -> dict[str, int]:
        """The sizes of all axes as formulas name them; 1 for axes the mesh lacks."""
        return {f"{axis}_size": mesh.axes.get(axis, 1) for axis in self.axes}


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors raised inside become one-line RulesErrors that begin, once, with where it was."""
    try:
        yield
    except ReshardError as error:
        text = str(error).removeprefix(f"{where}: ")
        raise RulesError(" ".join(f"{where}: {text}".split())) from None


@cache
def families() -> tuple[str, ...]:
    """The names of the shipped rules."""
    found = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


@cache
def read_family(name: str) -> Document:
    """The shipped rules of a family."""
    with located(f"rules {quoted(name)}"):
        return read((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def read(text: str) -> Document:
    """The document a TOML text describes, with that of the family it extends underneath."""
    data = _load(text)
    for key in data:
        if key not in _KEYS:
            raise RulesError(f"key {quoted(key)} is not known: the keys are {', '.join(_KEYS)}")
    base, mesh = Document(), None
    if data.get("extends") is not None:
        family = _text(data["extends"], 'key "extends"')
        if family not in families():
            raise RulesError(
                f'key "extends" names {quoted(family)}: the families are {", ".join(families())}'
            )
        base = read_family(family)
    with located('key "mesh"'):
        if data.get("mesh") is not None:
            mesh = Mesh.parse(_text(data["mesh"], 'key "mesh"'))
    model, counts = _model(_table(data, "model"))
    own = Document(
        axes=tuple(dict.fromkeys((*_axes(data.get("axes", [])), *(mesh.axes if mesh else ())))),
        mesh=mesh,
        fsdp=tuple(_text(data.get("fsdp", ""), 'key "fsdp"').split()),
        replicate=tuple(_text(data.get("replicate", ""), 'key "replicate"').split()),
        model=model,
        counts=counts,
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
            raise RulesError(f"[model] {quoted(name)} is used by no rule: write {near[0]}")
    return document


def _used_numbers(document: Document) -> set[str]:
    """The numbers that some layout, place or factor of a document needs."""
    used = {factor.at_most for factor in document.factors}
    for rule in document.rules:
        used |= rule.layout.names() if rule.layout else set()
        used |= {name for place in rule.on or () for name in place.names}
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


def _table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(f"key {quoted(key)}", value, f"a table: write [{key}]")
    if len(value) > MAX_RULES:
        raise RulesError(f"[{key}] has {len(value)} entries: at most {MAX_RULES} work")
    return value


def _axes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _wrong('key "axes"', value, 'a list of names, such as ["dp", "tp"]')
    for axis in value:
        if _text(axis, 'key "axes"') in RESERVED or not axis.isascii() or not axis.isidentifier():
            raise RulesError(f'key "axes": {quoted(axis)} cannot name an axis: use a plain word')
    return tuple(value)


def _model(table: Mapping[str, Any]) -> tuple[dict[str, int | None], dict[str, str]]:
    """The numbers of a model, None where one has to be given, and the index that counts each."""
    numbers: dict[str, int | None] = {}
    counts: dict[str, str] = {}
    for name, value in table.items():
        if not name.isascii() or not name.isidentifier():
            raise RulesError(f"[model] {quoted(name)}: use letters, digits and _ in a name")
        numbers[name] = None
        match value:
            case str() if len(value.split()) == 2 and value.split()[0] == "count":
                counts[name] = value.split()[1]
            case int() if not isinstance(value, bool) and value >= 0:
                numbers[name] = value
            case _ if value != "?":
                raise _wrong(f"[model] {quoted(name)}", value, 'a number, "?" or "count i"')
    return numbers, counts


def _factor(axis: str, value: Any) -> Factor:
    match value:
        case {"into": [str(first), str(second)], "at_most": str(number), **other}:
            readers = other.pop("read_by", None)
            if not other and isinstance(readers, str | None):
                return Factor(axis, (first, second), number, readers)
    raise _wrong(
        f"[factor] {quoted(axis)}", value, '{ into = ["kv", "rep"], at_most = "kv_heads" }'
    )


def _rule(key: str, value: Any) -> Rule:
    where = f"[tensors] {quoted(key)}"
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
        for number in filter(None, (factor.at_most, factor.read_by)):
            if number not in document.model:
                raise RulesError(f"[factor] {factor.axis}: [model] has no {quoted(number)}")
    for rule in document.rules:
        with located(f"[tensors] {quoted(rule.pattern.text)}"):
            _check_rule(rule, document)


def _check_rule(rule: Rule, document: Document) -> None:
    axes = document.axes
    numbers = {*document.model, *(f"{axis}_size" for axis in axes)}
    for capture in rule.pattern.captures:
        if capture in numbers:
            raise RulesError(f"{{{capture}}} is also a number: give the index another name")
    if rule.layout:
        _names(rule.layout.names(), numbers)
        _known("axis", sorted(parse(rule.layout.sample()).axes), axes)
    for place in rule.on or ():
        _known("axis", [place.axis], axes)
        _names(place.names, numbers | set(rule.pattern.captures))


def _names(used: set[str], known: set[str]) -> None:
    for name in sorted(used - known):
        raise RulesError(
            f"{quoted(name)} is not a number: it knows {', '.join(sorted(known)) or 'none'}"
        )


def _known(what: str, used: Collection[str], axes: Collection[str]) -> None:
    names = ", ".join(sorted(axes)) or "(none)"
    for axis in used:
        if axis not in axes:
            raise RulesError(
                f"{what} {quoted(axis)} is not one of the axes {names}: "
                'correct it, or add it to the list "axes" of the file'
            )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    return value


def _wrong(where: str, value: Any, expected: str) -> RulesError:
    plain = isinstance(value, str | int)
    found = quoted(str(value)) if plain else f"a {type(value).__name__}"
    return RulesError(f"{where} is {found}, expected {expected}")
