"""The layouts of one document on one mesh, each computed once.

A model has thousands of names and a handful of layouts. Names that differ only in their integers
match the same rules, so a rule is looked up once per such family of names, a place once per value
of the integers it uses, and equal layouts are one object.

>>> str(keep_axes(parse("(tp*128 kv) - | on pp=1"), {"kv", "dp"}))
'kv -'
>>> str(shard_first_dim(parse("tp*128 -"), ["dp"], num_dims=2))
'(tp*128 dp) -'
>>> idle_ranks({"q": Layout(Mesh(tp=16), "tp*128 -")}, {"q": (1024, 4096)})[0][:53]
'warning: 8 of 16 ranks along tp hold nothing of "q": '
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product

from reshard.errors import RulesError
from reshard.layout.columns import sized_cache
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.notation import parse
from reshard.layout.words import Chunk, Cut, Cuts, Packed, Segment, Words, held_intervals
from reshard.rules.document import Document, Rule, located
from reshard.rules.language import INDEX, Place, Template
from reshard.text import and_more, count, quoted


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ``on`` puts tensors along one axis, by the integers in their names."""

    place: Place
    ordinals: Mapping[str, int]  # which integer of the name each captured index is
    known: dict[object, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the rules say of all names that differ only in their integers."""

    where: str
    words: Words
    placements: tuple[Placement, ...]
    layouts: dict[tuple[tuple[int, ...], ...], Layout] = field(default_factory=dict)


class Table:
    def __init__(self, document: Document, mesh: Mesh) -> None:
        self._document = document
        self._mesh = mesh
        sizes = {f"{axis}_size": mesh.axes.get(axis, 1) for axis in document.axes}
        self._numbers = {**document.model, **sizes}
        self._digits = tuple(set().union(*(rule.pattern.digits() for rule in document.rules)))
        self._entries: dict[tuple[object, ...], Entry | None] = {}

    def layout(self, name: str, num_dims: int | None) -> Layout | None:
        """The layout of one tensor, or None if no rule matches its name.

        ``num_dims`` is checked against the words, if given.
        """
        parts = INDEX.split(f".{name}")
        indices = parts[1::2]
        key: tuple[object, ...] = (num_dims, *parts[::2])
        if self._digits:
            # A pattern such as ``layers.0.*`` may tell this integer from others.
            spelt_out = (any(digits in index for digits in self._digits) for index in indices)
            key += tuple(i if spelt else "" for i, spelt in zip(indices, spelt_out, strict=True))
        if key not in self._entries:
            self._entries[key] = self._entry(name, num_dims)
        entry = self._entries[key]
        if entry is None:
            return None
        at = tuple([self._coords(one, name, indices) for one in entry.placements])
        if at not in entry.layouts:
            on = tuple((one.place.axis, c) for one, c in zip(entry.placements, at, strict=True))
            with located(f"tensor {quoted(name)}, {entry.where}"):
                words = replace(entry.words, on=on) if on else entry.words
                entry.layouts[at] = _shared(self._mesh, str(words))
        return entry.layouts[at]

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

    def unmatched(self, names: Sequence[str]) -> RulesError:
        """The error for names that no rule matches."""
        texts = [rule.pattern.text for rule in self._document.rules if rule.layout]
        near = difflib.get_close_matches(names[0], texts, n=3, cutoff=0.3)
        others = f" ({len(names)} names match no rule)" if len(names) > 1 else ""
        return RulesError(
            f"no rule matches tensor {quoted(names[0])} (nearest patterns: "
            f"{', '.join(map(quoted, near)) or 'none'}): "
            f'add a rule for it, or "*" = "..." to keep all others whole{others}'
        )

    def _entry(self, name: str, num_dims: int | None) -> Entry | None:
        rule, _ = self._best(name, [rule for rule in self._document.rules if rule.layout])
        if rule is None or rule.layout is None:
            return None
        where = f"tensor {quoted(name)}, rule {quoted(rule.pattern.text)}"
        with located(where):
            words = self._words(rule.layout, num_dims)
            placements = [] if words.on else [*self._placements(name)]
            words = keep_axes(words, self._axes)
            placed = {one.place.axis for one in placements}
            further = [a for a in self._document.fsdp if a in self._mesh.axes and a not in placed]
            words = shard_first_dim(words, further, num_dims=num_dims)
        return Entry(f"rule {quoted(rule.pattern.text)}", words, tuple(placements))

    def _placements(self, name: str) -> Iterator[Placement]:
        order = [match.start() for match in INDEX.finditer(f".{name}")]
        rule, starts = self._best(name, [one for one in self._document.rules if one.on is not None])
        for place in (rule.on if rule else None) or ():
            if place.axis in self._mesh.axes:
                used = sorted(place.names & starts.keys())
                yield Placement(place, {index: order.index(starts[index]) for index in used})

    def _best(self, name: str, rules: Iterable[Rule]) -> tuple[Rule | None, dict[str, int]]:
        """The most specific rule that matches; two that are equally specific are an error."""
        best, best_starts = None, dict[str, int]()
        for rule in rules:
            if best and rule.pattern.rank < best.pattern.rank:
                break
            starts = rule.pattern.match(name)
            if best and starts is not None:
                raise RulesError(
                    f"{quoted(best.pattern.text)} and {quoted(rule.pattern.text)} match "
                    f"{quoted(name)} and are equally specific: write out more of one of them"
                )
            if starts is not None:
                best, best_starts = rule, starts
        return best, best_starts

    def _words(self, layout: Template, num_dims: int | None) -> Words:
        """The words of a rule; a number that is not known may be missing where it cuts nothing.

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
                self._needed(unknown)
        for factor in self._document.factors:
            # Whether a large axis is read as two depends on a number: it must be known.
            if self._mesh.axes.get(factor.axis, 1) > 1 and factor.axis in words.axes:
                self._needed([factor.at_most])
        if num_dims is not None and words.expand(num_dims) is None:
            raise RulesError(
                f'layout "{words}" has {count(len(words.dims), "word")} and the tensor '
                f"{count(num_dims, 'dim')}: "
                'write one word per dim, or "..." for dims that are whole'
            )
        return words

    def _needed(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers by name; the first that is not known is an error that says where to give it."""
        numbers: dict[str, int] = {}
        for name in names:
            number = self._numbers.get(name)
            if number is None:
                counted = name in self._document.counts
                raise RulesError(
                    f"needs {name}, which is not known: give the model's config.json (beside the "
                    f"checkpoint, or config=), {name}=..., or {name} under [model] of a rules file"
                    f"{', or count it with rules.fit(names)' if counted else ''}"
                )
            numbers[name] = number
        return numbers

    def _coords(self, to: Placement, name: str, indices: Sequence[str]) -> tuple[int, ...]:
        key = tuple([indices[k] for k in to.ordinals.values()])
        if key in to.known:
            return to.known[key]
        axis, size = to.place.axis, self._mesh.axes[to.place.axis]
        own = {index: int(indices[k]) for index, k in to.ordinals.items()}
        with located(f"tensor {quoted(name)}, on {axis}"):
            numbers = {**self._needed(to.place.names - own.keys()), **own}
            at = tuple(sorted({formula.value(numbers) for formula in to.place.at}))
            for value in (at[0], at[-1]):
                if not 0 <= value < size:
                    known = ", ".join(f"{key}={numbers[key]}" for key in sorted(numbers))
                    raise RulesError(
                        f"{axis}={value} with {known or 'no numbers'}, and mesh {self._mesh} has "
                        f"{axis}=0 to {size - 1}: check these numbers"
                    )
        to.known[key] = at
        return at


@sized_cache(16 << 20, lambda layout, *_: layout.num_bytes)
def _shared(mesh: Mesh, text: str) -> Layout:
    """One Layout object for equal texts on equal meshes."""
    return Layout(mesh, text)


def idle_ranks(layouts: Mapping[str, Layout], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Warnings about ranks that get none of the whole units, such as heads, of some tensors."""
    names_of: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
    idle_of = cache(lambda layout, shape: {*_idle(layout, shape)})
    for name, layout in layouts.items():
        for idle in idle_of(layout, tuple(shapes[name])):
            names_of.setdefault(idle, []).append(name)
    return [
        f"warning: {idle} of {count} ranks along {', '.join(axes)} hold nothing of "
        f"{and_more([quoted(names[0]), *names[1:]])}: there are "
        "fewer whole heads (units of the layout) than ranks"
        for (idle, count, axes), names in names_of.items()
    ]


def _idle(layout: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """For each dim and segment: how many ranks along which axes get none of its units."""
    sizes = layout.mesh.axes
    left = [*zip(shape, layout.dims(shape), strict=True)]
    for length, cuts in left:
        packed = [cut for cut in cuts if isinstance(cut, Packed)]
        left += [(part.size, part.cuts) for cut in packed for part in cut.segments]
        units = [cut for cut in cuts if isinstance(cut, Chunk) and cut.unit > 1]
        axes = tuple(cut.axis for cut in units)
        places = [*product(*(range(sizes[axis]) for axis in axes))]
        coords = (dict(zip(axes, place, strict=True)) for place in places)
        idle = sum(not held_intervals(tuple(units), length, sizes, at) for at in coords)
        if idle and length:
            yield idle, len(places), axes


def keep_axes(words: Words, axes: Collection[str]) -> Words:
    """The words without the axes a mesh lacks: along these there is only one rank."""
    pending = tuple(axis for axis in words.reduce[1] if axis in axes) if words.reduce else ()
    return replace(
        words,
        dims=tuple(_keep(cuts, axes) for cuts in words.dims),
        on=tuple((axis, at) for axis, at in words.on if axis in axes),
        reduce=(words.reduce[0], pending) if words.reduce and pending else None,
        flat=_keep(words.flat, axes),
    )


def shard_first_dim(words: Words, axes: Iterable[str], *, num_dims: int | None) -> Words:
    """Shard dim 0 of what every rank holds by each of these axes that is not in use yet."""
    more = tuple(Chunk(axis) for axis in axes if axis not in words.axes)
    if not more or words.flat or num_dims == 0:
        return words
    if words.rest == 0 and num_dims is not None:
        words = replace(words, dims=words.expand(num_dims) or words.dims, rest=None)
    if words.rest == 0:
        return replace(words, dims=(more, *words.dims), rest=1)
    return replace(words, dims=((*words.dims[0], *more), *words.dims[1:]))


def _keep(cuts: Cuts, axes: Collection[str]) -> Cuts:
    kept: list[Cut] = []
    for cut in cuts:
        if isinstance(cut, Packed):
            segments = tuple(Segment(part.size, _keep(part.cuts, axes)) for part in cut.segments)
            kept += [Packed(segments)] if any(part.cuts for part in segments) else []
        elif cut.axis in axes:
            kept.append(cut)
    return tuple(kept)
