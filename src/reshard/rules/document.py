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
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError, RulesError
from reshard.layout.mesh import RESERVED, Mesh
from reshard.layout.notation import parse
from reshard.rules.configs import NUMBERS, numbers_of
from reshard.rules.factors import Factor
from reshard.rules.language import MAX_VALUE, Pattern, Place, Template, parse_places
from reshard.text import quoted

MAX_BYTES = 1 << 20
MAX_RULES = 10_000
MAX_NUMBERS = 1000
_KEYS = ("extends", "mesh", "axes", "fsdp", "replicate", "model", "factor", "tensors", "names")
_FOLDER = resources.files("reshard.rules") / "families"


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: Pattern
    layout: Template | None  # of matching tensors; None leaves that to other rules
    on: tuple[Place, ...] | None  # where they live; None: by other rules, empty: everywhere


@dataclass(frozen=True, slots=True)
class Document:
    axes: tuple[str, ...] = ()  # the axes its layouts may name
    mesh: Mesh | None = None  # the mesh to use where the caller names none
    fsdp: tuple[str, ...] = ()  # the axes that also shard dim 0 of everything
    replicate: tuple[str, ...] = ()  # the axes along which tensors are replicated on purpose
    requested: tuple[str, ...] = ()  # those that the caller named; a mesh must have them
    model: Mapping[str, int | None] = field(default_factory=dict)  # None: has to be given
    counts: Mapping[str, str] = field(default_factory=dict)  # one more than the largest index
    factors: tuple[Factor, ...] = ()
    rules: tuple[Rule, ...] = ()  # the most specific first
    names: Mapping[str, Any] = field(default_factory=dict)  # renamed or joined; as written

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

    def given(
        self,
        config: Mapping[str, Any],
        numbers: Mapping[str, int],
        fsdp: str | None,
        replicate: str | None,
    ) -> Document:
        """This document with these numbers, and those of a config that it does not know yet.

        The axes of ``fsdp`` also shard dim 0 of everything. Along those of ``replicate``, which
        layouts need not know, replicas are meant.
        """
        for name, value in numbers.items():
            if name not in self.model:
                known = ", ".join(self.model) or "none"
                raise RulesError(f"there is no number {quoted(name)}: the numbers are {known}")
            if not isinstance(value, int) or value < 0:
                raise RulesError(f"{name}={value!r} is not a whole number of at least 0")
        cutting = () if fsdp is None else tuple(_text(fsdp, "fsdp=").split())
        if not {*cutting} <= {*self.axes}:
            known = ", ".join(self.axes) or "none"
            raise RulesError(f"fsdp={quoted(fsdp)} names no axis of the rules: they are {known}")
        copying = () if replicate is None else tuple(_text(replicate, "replicate=").split())
        cut_by = self.fsdp if fsdp is None else cutting
        twice = next((axis for axis in copying if axis in cut_by), None)
        if twice is not None:
            raise RulesError(
                f"axis {quoted(twice)} is named by fsdp and by replicate: leave one out"
            )
        model = {**self.model, **{name: int(value) for name, value in numbers.items()}}
        unknown = [name for name, number in model.items() if number is None]
        return replace(
            self,
            model=model | numbers_of(config, unknown),
            fsdp=cut_by,
            replicate=self.replicate if replicate is None else copying,
            requested=(*self.requested, *cutting, *copying),
        )

    def factored(self, mesh: Mesh) -> Mesh:
        """The mesh with each axis that is larger than its number in two axes."""
        for factor in self.factors:
            mesh = factor.split(mesh, self.model)
        return mesh

    def rule_axes(self) -> set[str]:
        """The axes that could cut or place some tensor of some model."""
        named = set(self.fsdp)
        for rule in self.rules:
            named |= {place.axis for place in rule.on or ()}
            named.update(parse(rule.layout.sample()).axes if rule.layout else ())
        return named

    def check_axes(self, mesh: Mesh, named: set[str]) -> None:
        """Refuse an axis that is not named, and along which no replicas are asked for."""
        for axis in self.requested:
            if axis not in mesh.axes:
                option = "fsdp" if axis in self.fsdp else "replicate"
                raise RulesError(
                    f"{option} names axis {quoted(axis)} and mesh {mesh} has "
                    f"{' '.join(mesh.axes)}: use one of these"
                )
        factored = {factor.axis for factor in self.factors if named.intersection(factor.into)}
        for axis, size in mesh.axes.items():
            if size > 1 and axis not in named | factored | {*self.replicate}:
                near = difflib.get_close_matches(axis, self.axes, n=1)
                advice = f"write {near[0]}" if near else "correct the mesh"
                if axis in self.axes:
                    options = "--from-fsdp or --to-fsdp"
                    advice = f'cut dim 0 by it (--fsdp {axis}, in plan {options}, fsdp="{axis}")'
                raise RulesError(
                    f"axis {quoted(axis)} of mesh {mesh} cuts no tensor, so that each of its "
                    f"{size} ranks would hold a copy of everything; the rules know the axes "
                    f"{', '.join(self.axes) or '(none)'}: {advice}, or replicate on purpose "
                    f'(--replicate {axis}, replicate="{axis}")'
                )


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
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@cache
def _read_family(name: str) -> Document:
    with located(f"rules {quoted(name)}"):
        return read((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def read_file(source: str | Path) -> Document:
    """The document of a shipped family, or of a file."""
    if source in families():
        return _read_family(str(source))
    try:
        with Path(source).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise RulesError(f"{quoted(source)} is not UTF-8 text: is it a TOML file?") from None
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(str(source), families(), n=1)
        hint = f'try "{near[0]}"' if near else f"the families are {', '.join(families())}"
        reason = getattr(error, "strerror", None) or str(error)
        raise RulesError(
            f"{quoted(source)} is no family of rules and no file that can be read ({reason}): "
            f"{hint}"
        ) from None
    with located(str(source)):
        return read(text)


def read(text: str) -> Document:
    """The document a TOML text describes, with that of the family it extends underneath."""
    data = _load(text)
    base, mesh = Document(), None
    if data.get("extends") is not None:
        family = _text(data["extends"], 'key "extends"')
        if family not in families():
            raise RulesError(
                f'key "extends" names {quoted(family)}: the families are {", ".join(families())}'
            )
        base = _read_family(family)
    with located('key "mesh"'):
        if data.get("mesh") is not None:
            mesh = Mesh.parse(_text(data["mesh"], 'key "mesh"'))
    model, counts = _model(_table(data, "model", MAX_NUMBERS))
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
    used = {factor.at_most for factor in document.factors}
    for rule in document.rules:
        used |= rule.layout.names() if rule.layout else set()
        used |= {name for place in rule.on or () for name in place.names}
    known = {*base.model, *NUMBERS, *(used & document.model.keys())}
    for name in (name for name in own.model if name not in known):
        near = difflib.get_close_matches(name, known, n=1)
        if near:
            raise RulesError(f"[model] {quoted(name)} is used by no rule: write {near[0]}")
    return document


def _load(text: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise RulesError(f"{len(text)} characters are too many: a rules file has <= {MAX_BYTES}")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise RulesError("the TOML is nested too deep: use the keys of the docs") from None
    except ValueError as error:
        raise RulesError(f"this is not TOML: {' '.join(str(error)[:200].split())}") from None
    for key in data:
        if key not in _KEYS:
            raise RulesError(f"key {quoted(key)} is not known: the keys are {', '.join(_KEYS)}")
    return data


def _table(data: Mapping[str, Any], key: str, most: int = MAX_RULES) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise _wrong(f"key {quoted(key)}", value, f"a table: write [{key}]")
    if len(value) > most:
        raise RulesError(f"[{key}] has {len(value)} entries: at most {most} work")
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
            case int() if not isinstance(value, bool) and 0 <= value <= MAX_VALUE:
                numbers[name] = value
            case _ if value != "?":
                raise _wrong(f"[model] {quoted(name)}", value, 'a number, "?" or "count i"')
    return numbers, counts


def _factor(axis: str, value: Any) -> Factor:
    match value:
        case {"into": [str(first), str(second)], "at_most": str(number), **other}:
            read_by = other.pop("read_by", None)
            if not other and isinstance(read_by, str | None):
                return Factor(axis, (first, second), number, read_by)
    expected = '{ into = ["kv", "rep"], at_most = "kv_heads" }'
    raise _wrong(f"[factor] {quoted(axis)}", value, expected)


def _rule(key: str, value: Any) -> Rule:
    where = f"[tensors] {quoted(key)}"
    table = {"layout": value} if isinstance(value, str) else value
    is_rule = isinstance(table, dict) and table and set(table) <= {"layout", "on"}
    if not is_rule or not all(isinstance(text, str) for text in table.values()):
        raise _wrong(where, value, 'a layout, or { layout = "...", on = "pp = i // 20" }')
    with located(where):
        pattern, layout, on = Pattern.parse(key), table.get("layout"), table.get("on")
        template = None if layout is None else Template.parse(layout)
        return Rule(pattern, template, None if on is None else parse_places(on))


def _check(document: Document) -> None:
    """Every axis and every name that is used is declared; a misspelt one must not vanish."""
    axes = document.axes
    _known('key "fsdp": axis', document.fsdp, axes)
    for factor in document.factors:
        _known("[factor] axis", (factor.axis, *factor.into), axes)
        for number in filter(None, (factor.at_most, factor.read_by)):
            if number not in document.model:
                raise RulesError(f"[factor] {factor.axis}: [model] has no {quoted(number)}")
    numbers = {*document.model, *(f"{axis}_size" for axis in axes)}
    for rule in document.rules:
        with located(f"[tensors] {quoted(rule.pattern.text)}"):
            for capture in rule.pattern.captures:
                if capture in numbers:
                    raise RulesError(f"{{{capture}}} is also a number: give the index another name")
            if rule.layout:
                _check_numbers(rule.layout.names(), numbers)
                _known("axis", sorted(parse(rule.layout.sample()).axes), axes)
            for place in rule.on or ():
                _known("axis", [place.axis], axes)
                _check_numbers(place.names, numbers | set(rule.pattern.captures))


def _check_numbers(used: set[str], known: set[str]) -> None:
    for name in sorted(used - known):
        raise RulesError(
            f"{quoted(name)} is not a number: it knows {', '.join(sorted(known)) or 'none'}"
        )


def _known(what: str, used: Collection[str], axes: Collection[str]) -> None:
    for axis in used:
        if axis not in axes:
            raise RulesError(
                f"{what} {quoted(axis)} is not one of the axes "
                f"{', '.join(sorted(axes)) or '(none)'}: "
                'correct it, or add it to the list "axes" of the file'
            )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    return value


def _wrong(where: str, value: Any, expected: str) -> RulesError:
    if isinstance(value, int) and abs(value) > MAX_VALUE:
        what = "a number that is too large"
    elif isinstance(value, str | int):
        what = quoted(value)
    else:
        what = f"a {type(value).__name__}"
    return RulesError(f"{where} is {what}, expected {expected}")
