"""The tensors of an output when names change: renamed, joined, stacked, split or unchanged.

>>> from reshard.planning.names import join
>>> have = {f"layers.{i}.{p}": Outline((4, 8), "float32") for i in range(2) for p in "qkv"}
>>> names = {"layers.{i}.qkv": join("layers.{i}.q", "layers.{i}.k", "layers.{i}.v", dim=0)}
>>> outlines_of(have | {"norm": Outline((8,), "float32")}, names)["layers.1.qkv"]
Outline(shape=(12, 8), dtype='float32')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from typing import TypeAlias

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.transfer.transfers import pieces_of
from reshard.errors import ArgumentTypeError, NamesError, PlanError
from reshard.layout.box import Box
from reshard.layout.coverage import missing_boxes
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.planning.classes import feeds_of
from reshard.planning.names import (
    Feed,
    Join,
    Names,
    Source,
    Stacked,
    Take,
    check_names,
    fill_in,
    placeholders,
    template_regex,
)
from reshard.rules.language import matching
from reshard.text import count, quoted

_ANYWHERE = Layout(Mesh(), "...")

MAX_ELEMENTS = 1 << 56
"""The most elements of a tensor: sizes and strides of more do not fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape and dtype of a tensor; of an output tensor also where its elements come from."""

    shape: tuple[int, ...]
    dtype: str
    feeds: tuple[Feed, ...] = field(default=(), compare=False, repr=False)
    """The source tensors, each with the part that it provides."""
    zeros: tuple[Box, ...] = field(default=(), compare=False, repr=False)
    """Boxes that have no source and are zero."""


Tensors: TypeAlias = Mapping[str, Outline | StoredTensor]


def outlines_of(have: Tensors, names: Names, drop: Sequence[str] = ()) -> dict[str, Outline]:
    """All output tensors: those that names produces, and the others unchanged.

    Tensors that match ``drop`` are used only where names takes them.
    """
    if names != {}:
        check_names(names)
    produced: dict[str, Outline] = {}
    keys: dict[str, str] = {}
    used = _dropped(have, drop)
    for key, source in names.items():
        for name, resolved, parts in _resolved(key, source, have):
            if name in produced:
                raise NamesError(
                    f"names makes {quoted(name)} twice, as {quoted(keys[name])} and as "
                    f"{quoted(key)}: give one of the two another name"
                )
            produced[name] = _outline(name, resolved, {part: have[part] for part in parts})
            keys[name] = key
            used.update(parts)
    kept = {
        name: Outline(one.shape, one.dtype, (Feed(name),))
        for name, one in have.items()
        if name not in used
    }
    double = next((name for name in kept if name in produced), None)
    if double is not None:
        raise NamesError(
            f"names makes {quoted(double)} of other tensors, and the source has one of that name "
            "which nothing else takes: rename it too"
        )
    return kept | produced


def left_over(
    have: Tensors, outlines: Mapping[str, Outline], drop: Sequence[str] = ()
) -> tuple[str, ...]:
    """Parts of source tensors that are in no output tensor and were not dropped by request.

    >>> from reshard.planning.names import take
    >>> have = {"w": Outline((4, 2), "float32")}
    >>> left_over(have, outlines_of(have, {"v": take("w", crop={0: (0, 3)})}))
    ('w [3:4, 0:2]',)
    """
    taken: dict[str, list[Box]] = {}
    whole = _dropped(have, drop)
    for outline in outlines.values():
        feed, *others = outline.feeds
        if others or not feed.moves:  # joins and stacks take each source whole
            whole.update(one.name for one in outline.feeds)
        else:
            taken.setdefault(feed.name, []).append(_source_box(feed))
    rest = []
    for name in sorted(taken.keys() - whole):
        holes = missing_boxes(Box.whole(have[name].shape), taken[name])
        more = f" and {count(len(holes) - 1, 'more box', 'more boxes')}" if len(holes) > 1 else ""
        rest += [f"{name} {holes[0]}{more}"] if holes else []
    return tuple(rest)


def _source_box(feed: Feed) -> Box:
    """The part of a source tensor that a feed takes."""
    dims = [segments for dim, segments in enumerate(feed.moves) if dim not in feed.have_insert]
    start = tuple(min((low for low, _, _ in segments), default=0) for segments in dims)
    stop = tuple(max((low + size for low, _, size in segments), default=0) for segments in dims)
    return Box(start, stop)


def _dropped(have: Tensors, drop: Sequence[str]) -> set[str]:
    """The source tensors that patterns match; a pattern that matches none is an error."""
    if isinstance(drop, str) or not isinstance(drop, Iterable):
        raise ArgumentTypeError(f"drop= got {drop!r:.60}: give a list of names or patterns")
    dropped: set[str] = set()
    for pattern in drop:
        matched = matching(pattern, have)
        if not matched:
            near = get_close_matches(pattern, have, n=1)
            hint = f"did you mean {quoted(near[0])}" if near else "leave it out of --drop (drop=)"
            raise NamesError(f"drop has {quoted(pattern)}, which matches no tensor: {hint}")
        dropped |= {*matched}
    return dropped


def rename_tensors(
    catalog: Catalog, names: Names, drop: Sequence[str] = ()
) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog with tensors renamed, joined, stacked, split and dropped, in the same files; and
    the parts of tensors that are left over.

    This verifies a conversion with names: the renamed source must equal the output bit by bit.
    """
    outlines = outlines_of(catalog.tensors, names, drop)
    tensors = {}
    for name, outline in outlines.items():
        feed, *others = outline.feeds
        if not (others or feed.moves or outline.zeros):
            tensors[name] = replace(catalog.tensors[feed.name], name=name)
            continue
        pieces = tuple(pieces_of(outline.feeds, catalog.tensors).pieces())
        tensors[name] = StoredTensor(name, outline.shape, outline.dtype, pieces, outline.zeros)
    return replace(catalog, tensors=tensors), left_over(catalog.tensors, outlines, drop)


def _resolved(
    key: str, source: Source, have: Tensors
) -> Iterator[tuple[str, Source, tuple[str, ...]]]:
    """The output names that a key stands for, each with its source, without placeholders, and the
    names in it."""
    source = Take(source) if isinstance(source, str) else source
    if not isinstance(source, Take | Join | Stacked):
        raise PlanError(f"{source!r} in names: give a name, take, join or stack")
    templates = (source.name,) if isinstance(source, Take) else source.names
    template, counter = _leading(key, source, templates)
    captures = _captures(template, counter, have)
    if not captures:
        raise NamesError(f"names has {quoted(key)}, whose source {quoted(template)} is absent")
    for values, numbers in captures:
        name, parts = fill_in(key, values), tuple(fill_in(one, values) for one in templates)
        if counter is not None:
            parts = _counted(name, parts[0], counter, numbers)
        missing = [part for part in parts if part not in have]
        if missing:
            raise NamesError(
                f"{quoted(name)} needs {', '.join(missing[:3])}, which the source lacks"
            )
        if isinstance(source, Take):
            yield name, replace(source, name=parts[0]), parts
        else:
            yield name, replace(source, names=parts), parts


def _leading(key: str, source: Source, templates: Sequence[str]) -> tuple[str, str | None]:
    """The source template that determines the numbers, and the placeholder that a stack counts."""
    if not templates:
        raise NamesError(f"names has {quoted(key)}, which is made of nothing: give it a source")
    places = set(placeholders(key))
    free = {place for one in templates for place in placeholders(one)} - places
    if free and not (isinstance(source, Stacked) and len(templates) == len(free) == 1):
        raise NamesError(
            f"names has {quoted(key)} without the {{{min(free)}}} of its source "
            f"{quoted(templates[0])}: use the same {{name}}s on both sides"
        )
    leading = next((one for one in templates if places <= set(placeholders(one))), None)
    if leading is None:
        lacking = min(places - set(placeholders(templates[0])))
        raise NamesError(
            f"names has {quoted(key)}, and its source {quoted(templates[0])} has no "
            f"{{{lacking}}}: use the same {{name}}s on both sides"
        )
    return leading, min(free, default=None)


def _captures(
    template: str, counter: str | None, have: Tensors
) -> list[tuple[dict[str, str], set[str]]]:
    """The numbers for which the source has a name that fits, each once, with those of a stack."""
    numbers: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for match in filter(None, map(template_regex(template).fullmatch, have)):
        values = match.groupdict()
        number = values.pop(counter) if counter is not None else ""
        numbers.setdefault(tuple(sorted(values.items())), set()).add(number)
    order = sorted(numbers, key=lambda values: [(place, int(n)) for place, n in values])
    return [(dict(values), numbers[values]) for values in order]


def _counted(name: str, template: str, place: str, numbers: set[str]) -> tuple[str, ...]:
    """The names of a stack, from 0 without a gap."""
    expected = [str(number) for number in range(len(numbers))]
    missing = next((number for number in expected if number not in numbers), None)
    if missing is not None:
        beyond = max(numbers.difference(expected), key=int)
        raise NamesError(
            f"{quoted(name)} stacks {len(numbers)} tensors from 0 on, and the source has "
            f"{quoted(fill_in(template, {place: beyond}))} and no "
            f"{quoted(fill_in(template, {place: missing}))}: give stack a list of names"
        )
    return tuple(fill_in(template, {place: number}) for number in expected)


def _outline(name: str, source: Source, parts: Tensors) -> Outline:
    """An output tensor with its shape, dtype and feeds, from its sources."""
    dtypes = {part.dtype: one for one, part in parts.items()}
    if len(dtypes) > 1:
        (first, one), (second, two), *_ = dtypes.items()
        raise PlanError(
            f"{quoted(name)} is joined from {quoted(one)} of {first} and {quoted(two)} of "
            f"{second}: convert the sources to one dtype first"
        )
    shape = _shape(name, source, parts)
    if prod(shape) > MAX_ELEMENTS:
        raise PlanError(
            f"{quoted(name)} would have shape {shape}, and at most {MAX_ELEMENTS} elements can be "
            "counted: check the sizes in names"
        )
    [dtype] = dtypes
    specs = {one: TensorSpec(part.shape, dtype, _ANYWHERE) for one, part in parts.items()}
    fed = feeds_of(name, TensorSpec(shape, dtype, _ANYWHERE), specs, {name: source})
    assert isinstance(fed, tuple)  # it is a list if sources are missing
    return Outline(shape, dtype, tuple(fed[0]), fed[1])


def _shape(name: str, source: Source, parts: Tensors) -> tuple[int, ...]:
    """The shape of an output tensor from those of its sources; ``feeds_of`` checks the rest."""
    first = next(iter(parts.values())).shape
    if not isinstance(source, Join | Stacked):
        return _taken(source, first) if isinstance(source, Take) else first
    dim, joins = source.dim, isinstance(source, Join)
    last = len(first) - joins
    if not 0 <= dim <= last:
        raise PlanError(f"{quoted(name)} is joined in dim {dim}: the dims are 0 to {last}")
    shapes = [parts[one].shape for one in source.names]  # one tensor may be a part several times
    length = sum(shape[dim] for shape in shapes if len(shape) > dim) if joins else len(shapes)
    return (*first[:dim], length, *first[dim + joins :])


def _taken(source: Take, shape: tuple[int, ...]) -> tuple[int, ...]:
    crops, pads, removed = dict(source.crop), dict(source.pad), dict(source.index)
    ranges = (range(size)[slice(*crops.get(dim, (0, size)))] for dim, size in enumerate(shape))
    sizes = [len(part) for dim, part in enumerate(ranges) if dim not in removed]
    for dim, size in enumerate(sizes):
        if pads.get(dim, size) < size:
            raise PlanError(
                f"{quoted(source.name)} is padded in dim {dim} to {pads[dim]} and is {size} long "
                "there: crop it, or give a larger size"
            )
    return tuple(pads.get(dim, size) for dim, size in enumerate(sizes))
