"""What a rules file says, as data.

>>> rule = Rule(Pattern.parse("*.q_proj.weight"), Template.parse("tp*{head_dim} -"), None)
>>> rule.pattern.text, rule.layout.text
('*.q_proj.weight', 'tp*{head_dim} -')
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.errors import ReshardError, RulesError
from reshard.layout.mesh import Mesh
from reshard.rules.expression import Place
from reshard.rules.pattern import Pattern
from reshard.rules.template import Template

__all__ = ["Document", "Factor", "Rule", "located", "quote"]


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
                raise RulesError(f"there is no number {quote(name)}: the numbers are {known}")
            if not isinstance(value, int) or value < 0:
                raise RulesError(f"{name}={value!r} is not a whole number of at least 0")
        given = {name: int(value) for name, value in numbers.items()}
        return replace(self, model={**self.model, **given})

    def with_fsdp(self, axes: str) -> Document:
        """This document with dim 0 of everything cut further by these axes."""
        for axis in axes.split():
            if axis not in self.axes:
                known = ", ".join(self.axes) or "none"
                raise RulesError(f"fsdp={quote(axes)} names no axis of the rules: they are {known}")
        named = tuple(axes.split())
        return replace(self, fsdp=named, requested=(*self.requested, *named))

    def with_replicate(self, axes: str) -> Document:
        """This document with replicas along these axes meant, whether its layouts know them or not.

        An axis cannot be asked to cut and to replicate at once.
        """
        named = tuple(axes.split())
        twice = next((axis for axis in named if axis in self.fsdp), None)
        if twice is not None:
            raise RulesError(
                f"axis {quote(twice)} is named by fsdp and by replicate: leave one out"
            )
        return replace(self, replicate=named, requested=(*self.requested, *named))

    def sizes(self, mesh: Mesh) -> dict[str, int]:
        """The sizes of all axes as formulas name them; 1 for axes the mesh lacks."""
        return {f"{axis}_size": mesh.axes.get(axis, 1) for axis in self.axes}


def quote(text: str) -> str:
    """A text from outside as one short ASCII line.

    >>> quote("a" * 100)[-6:]
    'aa..."'
    """
    quoted = json.dumps(text)
    return quoted if len(quoted) <= 90 else f'{quoted[:86]}..."'


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors raised inside become one-line RulesErrors that begin with where they happened."""
    try:
        yield
    except ReshardError as error:
        raise RulesError(" ".join(f"{where}: {error}".split())) from None
