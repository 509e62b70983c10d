"""The tensors of an output when names change: renamed, joined, stacked, split or unchanged.

>>> from reshard.planning.names import join
>>> have = {f"layers.{i}.{p}": Outline((4, 8), "float32") for i in range(2) for p in "qkv"}
>>> names = {"layers.{i}.qkv": join("layers.{i}.q", "layers.{i}.k", "layers.{i}.v", dim=0)}
>>> outlines_of(have | {"norm": Outline((8,), "float32")}, names)["layers.1.qkv"]
Outline(shape=(12, 8), dtype='float32')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import TypeAlias

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.transfer.transfers import SourceTensor, one_dtype, pieces_of
from reshard.errors import NamesError, PlanError
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
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


Tensors: TypeAlias = Mapping[str, Outline | StoredTensor]


def outlines_of(have: Tensors, names: Names, drop: Sequence[str] = ()) -> dict[str, Outline]:
    """All output tensors: those that names produces, and the others unchanged.

    Tensors that match ``drop`` are used only where names takes them.
    """
    found: dict[str, Outline] = {}
    keys: dict[str, str] = {}
    used: set[str] = set()
    for key, source in names.items():
        for name, parts in _filled_in(key, source, have):
            if name in found:
                raise NamesError(
                    f"names makes {quoted(name)} twice, as {quoted(keys[name])} and as "
                    f"{quoted(key)}: give one of the two another name"
                )
            found[name] = _outline(name, source, [have[part] for part in parts])
            keys[name] = key
            used |= set(parts)
    gone = used | _dropped(have, drop)
    kept = {name: Outline(o.shape, o.dtype) for name, o in have.items() if name not in gone}
    double = next((name for name in kept if name in found), None)
    if double is not None:
        raise NamesError(
            f"names makes {quoted(double)} of other tensors, and the source has one of that name "
            "which nothing else takes: rename it too"
        )
    return kept | found


def left_over(have: Tensors, names: Names, drop: Sequence[str] = ()) -> tuple[str, ...]:
    """Parts of source tensors that are in no output tensor and were not dropped by request.

    >>> from reshard.planning.names import take
    >>> left_over({"w": Outline((4, 2), "float32")}, {"v": take("w", crop={0: (0, 3)})})
    ('w [3:4, 0:2]',)
    """
    taken: dict[str, list[Box]] = {}
    whole: set[str] = _dropped(have, drop)
    for key, source in names.items():
        for _, parts in _filled_in(key, source, have):
            if isinstance(source, Take):
                limits = {dim: (0, size) for dim, size in enumerate(have[parts[0]].shape)}
                limits |= dict(source.crop) | {dim: (at, at + 1) for dim, at in source.index}
                low, high = zip(*limits.values(), strict=True) if limits else ((), ())
                taken.setdefault(parts[0], []).append(Box(low, high))
            else:
                whole |= set(parts)
    found = []
    for name in sorted(taken.keys() - whole):
        holes = missing_boxes(Box.whole(have[name].shape), taken[name])
        more = f" and {count(len(holes) - 1, 'more box', 'more boxes')}" if len(holes) > 1 else ""
        found += [f"{name} {holes[0]}{more}"] if holes else []
    return tuple(found)


def _dropped(have: Tensors, drop: Sequence[str]) -> set[str]:
    """The source tensors that patterns match; a pattern that matches none is an error."""
    found: set[str] = set()
    for pattern in drop:
        matched = {*matching(pattern, have)}
        if not matched:
            near = get_close_matches(pattern, have, n=1)
            hint = f"did you mean {quoted(near[0])}" if near else "leave it out of --drop (drop=)"
            raise NamesError(f"drop has {quoted(pattern)}, which matches no tensor: {hint}")
        found |= matched
    return found


def sources_for(
    wanted: Mapping[str, tuple[int, ...]], catalog: Catalog, names: Names
) -> Iterator[tuple[str, tuple[SourceTensor, ...], tuple[Box, ...]]]:
    """For each output tensor its source tensors, and the boxes that are filled with zeros."""
    stored = catalog.tensors
    if not names:
        yield from ((name, (SourceTensor(stored[name], Feed(name)),), ()) for name in wanted)
        return
    specs = {key: TensorSpec(one.shape, one.dtype, _ANYWHERE) for key, one in stored.items()}
    for name, shape in wanted.items():
        found = feeds_of(name, TensorSpec(shape, "uint8", _ANYWHERE), specs, names)
        if isinstance(found, list):
            raise NamesError(f"{quoted(name)} needs {', '.join(found[:3])}, which is absent")
        feeds, zeros = found
        yield name, tuple(SourceTensor(stored[feed.name], feed) for feed in feeds), zeros


def rename_tensors(catalog: Catalog, names: Names, drop: Sequence[str] = ()) -> Catalog:
    """The catalog with tensors renamed, joined, stacked, split and dropped, in the same files.

    This verifies a conversion with names: the renamed source must equal the output bit by bit.
    """
    outlines = outlines_of(catalog.tensors, names, drop)
    shapes = {name: outline.shape for name, outline in outlines.items()}
    tensors = {}
    for name, fed, zeros in sources_for(shapes, catalog, names):
        if len(fed) == 1 and not fed[0].feed.moves and not zeros:
            tensors[name] = replace(fed[0].tensor, name=name)
            continue
        dtype = one_dtype(name, fed, outlines[name].dtype)
        pieces = tuple(pieces_of(fed, len(shapes[name])).pieces())
        tensors[name] = StoredTensor(name, shapes[name], dtype, pieces, zeros)
    return replace(catalog, tensors=tensors)


def _filled_in(key: str, source: Source, have: Tensors) -> Iterator[tuple[str, list[str]]]:
    """The output names that a key stands for, each with its source names."""
    match source:
        case str():
            templates: tuple[str, ...] = (source,)
        case Take():
            templates = (source.name,)
        case Join() | Stacked():
            templates = source.names
        case _:
            raise PlanError(f"{source!r} in names: give a name, take, join or stack")
    template, free = _leading(key, source, templates)
    captured = _captures(template, free, have)
    if not captured:
        raise NamesError(f"names has {quoted(key)}, whose source {quoted(template)} is absent")
    for values, numbers in captured:
        name, parts = fill_in(key, values), [fill_in(one, values) for one in templates]
        if free is not None:
            parts = _counted(name, parts[0], free, numbers)
        missing = [part for part in parts if part not in have]
        if missing:
            raise NamesError(
                f"{quoted(name)} needs {', '.join(missing[:3])}, which the source lacks"
            )
        yield name, parts


def _leading(key: str, source: Source, templates: Sequence[str]) -> tuple[str, str | None]:
    """The source template that determines the numbers, and the placeholder that a stack counts.

    >>> from reshard.planning.names import stack
    >>> _leading("layers.{i}.w", stack("layers.{i}.expert.{e}.w"), ["layers.{i}.expert.{e}.w"])
    ('layers.{i}.expert.{e}.w', 'e')
    """
    if not templates:
        raise NamesError(f"names has {quoted(key)}, which is made of nothing: give it a source")
    places = set(placeholders(key))
    free = {place for one in templates for place in placeholders(one)} - places
    counts = isinstance(source, Stacked) and len(templates) == 1 and len(free) == 1
    if free and not counts:
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
    template: str, free: str | None, have: Tensors
) -> list[tuple[dict[str, str], set[str]]]:
    """The numbers for which the source has a name that fits, each once, with those of a stack."""
    pattern = template_regex(template)
    found: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for match in filter(None, map(pattern.fullmatch, have)):
        values = match.groupdict()
        number = values.pop(free) if free is not None else ""
        found.setdefault(tuple(sorted(values.items())), set()).add(number)
    order = sorted(found, key=lambda values: [(place, int(n)) for place, n in values])
    return [(dict(values), found[values]) for values in order]


def _counted(name: str, template: str, place: str, numbers: set[str]) -> list[str]:
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
    return [fill_in(template, {place: number}) for number in expected]


def _outline(name: str, source: Source, parts: Sequence[Outline | StoredTensor]) -> Outline:
    """The shape and dtype of an output tensor, from its sources."""
    first = parts[0]
    match source:
        case str():
            shape = first.shape
        case Take():
            shape = _taken(source, first.shape)
        case Join():
            _check_dim(name, source.dim, len(first.shape) - 1)
            length = sum(part.shape[source.dim] for part in parts if len(part.shape) > source.dim)
            shape = (*first.shape[: source.dim], length, *first.shape[source.dim + 1 :])
        case Stacked():
            _check_dim(name, source.dim, len(first.shape))
            shape = (*first.shape[: source.dim], len(parts), *first.shape[source.dim :])
    if prod(shape) > MAX_ELEMENTS:
        raise PlanError(
            f"{quoted(name)} would have shape {shape}, and at most {MAX_ELEMENTS} elements can be "
            "counted: check the sizes in names"
        )
    return Outline(shape, first.dtype)


def _check_dim(name: str, dim: int, last: int) -> None:
    if not 0 <= dim <= last:
        raise PlanError(f"{quoted(name)} is joined in dim {dim}: the dims are 0 to {last}")


def _taken(source: Take, shape: tuple[int, ...]) -> tuple[int, ...]:
    for dim, (low, high) in source.crop:
        if not (0 <= dim < len(shape) and 0 <= low <= high <= shape[dim]):
            raise PlanError(
                f"{low} to {high} of dim {dim} is taken of {quoted(source.name)}, which has shape "
                f"{shape}: stay inside it"
            )
    cropped = {dim: high - low for dim, (low, high) in source.crop}
    gone = {dim for dim, _ in source.index}
    sizes = [cropped.get(dim, size) for dim, size in enumerate(shape) if dim not in gone]
    for dim, size in source.pad:
        if not 0 <= dim < len(sizes):
            raise PlanError(
                f"{quoted(source.name)} is padded in dim {dim} and has {len(sizes)} dims"
            )
        if size < sizes[dim]:
            raise PlanError(
                f"{quoted(source.name)} is padded in dim {dim} to {size} and is {sizes[dim]} long "
                "there: crop it, or give a larger size"
            )
        sizes[dim] = size
    return tuple(sizes)
