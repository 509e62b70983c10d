"""The layouts of one document on one mesh, each worked out once.

A model has thousands of names and a handful of layouts. Names that differ only in their integers
match the same rules, so a rule is looked up once per such family of names, a place once per value
of the integers it uses, and equal layouts are one object.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

from reshard.errors import RulesError
from reshard.layout.columns import sized_cache
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.notation import Words, parse
from reshard.rules.axes import keep_axes, shard_first_dim
from reshard.rules.document import Document, Rule, all_axes, located
from reshard.rules.formula import Place, Template
from reshard.rules.pattern import INDEX
from reshard.text import count, quoted

__all__ = ["Table", "UnmatchedError", "advice"]


class UnmatchedError(RulesError):
    """No rule gives a layout to a name."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where ``on`` puts tensors along one axis, by the integers in their names."""

    place: Place
    ordinals: Mapping[str, int]
    """Which integer of the name each captured index is."""
    pick: Callable[[Sequence[str]], object]
    """These integers of all those in a name."""
    known: dict[object, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the rules say of all names that differ only in their integers."""

    where: str
    words: Words
    spots: tuple[Spot, ...]
    layouts: dict[tuple[tuple[int, ...], ...], Layout] = field(default_factory=dict)


class Table:
    """Gives layouts to names; made once per rules and mesh."""

    def __init__(self, document: Document, mesh: Mesh) -> None:
        self._document = document
        self._mesh = mesh
        self._numbers = {**document.model, **document.sizes(mesh)}
        self._digits = tuple(set().union(*(rule.pattern.digits() for rule in document.rules)))
        self._entries: dict[tuple[object, ...], Entry] = {}

    def layout(self, name: str, num_dims: int | None) -> Layout:
        """The layout of one tensor; ``num_dims`` is checked against the words, if given."""
        parts = INDEX.split(f".{name}")
        indices = parts[1::2]
        key: tuple[object, ...] = (num_dims, *parts[::2])
        if self._digits:
            key += tuple(index if self._spelt_out(index) else "" for index in indices)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._entry(name, num_dims)
        if not entry.spots:
            return entry.layouts.get(()) or self._placed(entry, name, ())
        at = tuple(
            [
                spot.known.get(spot.pick(indices)) or self._coords(spot, name, indices)
                for spot in entry.spots
            ]
        )
        return entry.layouts.get(at) or self._placed(entry, name, at)

    def _spelt_out(self, index: str) -> bool:
        """Whether a pattern such as ``layers.0.*`` may tell this integer from others."""
        return any(digits in index for digits in self._digits)

    @cached_property
    def _axes(self) -> set[str]:
        """The axes of the mesh that rules may use.

        The axes an axis is factored into mean something only together: on a mesh with ``rep`` and
        without ``kv``, ``rep`` is an axis like any other, along which tensors are replicated.
        """
        axes = set(self._mesh.axes)
        for factor in self._document.factors:
            if not axes.issuperset(factor.into):
                axes -= set(factor.into)
        return axes

    def _entry(self, name: str, num_dims: int | None) -> Entry:
        found = self._best(name, [rule for rule in self._document.rules if rule.layout])
        if found is None:
            raise UnmatchedError(self._unmatched(name))
        rule = found[0]
        where = f"tensor {quoted(name)}, rule {quoted(rule.pattern.text)}"
        with located(where):
            words = self._words(rule, num_dims)
            spots = () if words.on else self._spots(name)
            words = keep_axes(words, self._axes)
            placed = {spot.place.axis for spot in spots}
            further = [a for a in self._document.fsdp if a in self._mesh.axes and a not in placed]
            words = shard_first_dim(words, further, num_dims=num_dims)
        return Entry(f"rule {quoted(rule.pattern.text)}", words, spots)

    def _best(self, name: str, rules: Iterable[Rule]) -> tuple[Rule, dict[str, int]] | None:
        """The most specific rule that matches; two that are equally specific are an error."""
        best: tuple[Rule, dict[str, int]] | None = None
        for rule in rules:
            if best and rule.pattern.rank < best[0].pattern.rank:
                break
            starts = rule.pattern.match(name)
            if best and starts is not None:
                raise RulesError(
                    f"{quoted(best[0].pattern.text)} and {quoted(rule.pattern.text)} match "
                    f"{quoted(name)} and are equally specific: write out more of one of them"
                )
            best = (rule, starts) if starts is not None else best
        return best

    def _words(self, rule: Rule, num_dims: int | None) -> Words:
        assert rule.layout is not None
        words = self._filled(rule.layout)
        self._check_factors(words)
        if num_dims is not None and words.expand(num_dims) is None:
            raise RulesError(
                f'layout "{words}" has {count(len(words.dims), "word")} and the tensor '
                f"{count(num_dims, 'dim')}: "
                'write one word per dim, or "..." for dims that are whole'
            )
        return words

    def _filled(self, layout: Template) -> Words:
        """The words of a layout; a number that is not known may be missing where it cuts nothing.

        Without tp, ``tp*{head_dim} -`` is the same for every head_dim: two values tell.
        """
        names = layout.names()
        unknown = [name for name in sorted(names) if self._numbers.get(name) is None]
        known = self._needed(names.difference(unknown))
        words = parse(layout.fill(known | dict.fromkeys(unknown, 1)))
        if unknown:
            other = parse(layout.fill(known | dict.fromkeys(unknown, 2)))
            cutting = {axis for axis in self._axes if self._mesh.axes[axis] > 1}
            if keep_axes(words, cutting) != keep_axes(other, cutting):
                raise RulesError(advice(self._document, unknown[0]))
        return words

    def _check_factors(self, words: Words) -> None:
        """Whether a large axis is read as two depends on a number: it must be known."""
        for factor in self._document.factors:
            is_cut = self._mesh.axes.get(factor.axis, 1) > 1 and factor.axis in all_axes(words)
            if is_cut and self._numbers.get(factor.at_most) is None:
                raise RulesError(advice(self._document, factor.at_most))

    def _needed(self, names: Iterable[str]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for name in names:
            number = self._numbers.get(name)
            if number is None:
                raise RulesError(advice(self._document, name))
            numbers[name] = number
        return numbers

    def _spots(self, name: str) -> tuple[Spot, ...]:
        found = self._best(name, [rule for rule in self._document.rules if rule.on is not None])
        if found is None:
            return ()
        rule, starts = found
        order = [match.start() for match in INDEX.finditer(f".{name}")]
        spots = []
        for place in rule.on or ():
            used = place.names & set(starts)
            ordinals = {index: order.index(starts[index]) for index in sorted(used)}
            if place.axis in self._mesh.axes:
                pick = itemgetter(*ordinals.values()) if ordinals else _nothing
                spots.append(Spot(place, ordinals, pick))
        return tuple(spots)

    def _coords(self, spot: Spot, name: str, indices: Sequence[str]) -> tuple[int, ...]:
        """The coordinates of one tensor along one axis."""
        own = {index: int(indices[k]) for index, k in spot.ordinals.items()}
        with located(f"tensor {quoted(name)}, on {spot.place.axis}"):
            at = spot.known[spot.pick(indices)] = self._evaluated(spot.place, own)
        return at

    def _evaluated(self, place: Place, own: Mapping[str, int]) -> tuple[int, ...]:
        numbers = {**self._needed(place.names - set(own)), **own}
        at = tuple(sorted({formula.value(numbers) for formula in place.at}))
        axis, size = place.axis, self._mesh.axes[place.axis]
        for value in (at[0], at[-1]):
            if not 0 <= value < size:
                given = ", ".join(f"{key}={numbers[key]}" for key in sorted(numbers))
                raise RulesError(
                    f"{axis}={value} with {given or 'no numbers'}, and mesh {self._mesh} has "
                    f"{axis}=0 to {size - 1}: check these numbers"
                )
        return at

    def _placed(self, entry: Entry, name: str, at: tuple[tuple[int, ...], ...]) -> Layout:
        on = tuple((spot.place.axis, c) for spot, c in zip(entry.spots, at, strict=True))
        with located(f"tensor {quoted(name)}, {entry.where}"):
            words = replace(entry.words, on=on) if on else entry.words
            layout = _shared(self._mesh, str(words))
        entry.layouts[at] = layout
        return layout

    def _unmatched(self, name: str) -> str:
        texts = [rule.pattern.text for rule in self._document.rules if rule.layout]
        near = difflib.get_close_matches(name, texts, n=3, cutoff=0.3)
        nearest = ", ".join(map(quoted, near)) or "none"
        return (
            f"no rule matches tensor {quoted(name)} (nearest patterns: {nearest}): "
            'add a rule for it, or "*" = "..." to keep all others whole'
        )


def _nothing(_: Sequence[str]) -> object:
    return ()


def advice(document: Document, name: str) -> str:
    """What to do about a number of the model that is not known."""
    counted = ", or count it with rules.fit(names)" if name in document.counts else ""
    return (
        f"needs {name}, which is not known: give the model's config.json (beside the checkpoint, "
        f"or config=), {name}=..., or {name} under [model] of a rules file{counted}"
    )


@sized_cache(16 << 20, lambda layout, *_: layout.num_bytes)
def _shared(mesh: Mesh, text: str) -> Layout:
    """One Layout object for equal texts on equal meshes."""
    return Layout(mesh, text)
