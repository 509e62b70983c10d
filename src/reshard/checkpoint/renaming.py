"""Which tensors an output has, when names change: joined, stacked, taken apart or as they are.

>>> from reshard.planning.names import join
>>> have = {f"layers.{i}.{p}": Outline((4, 8), "float32") for i in range(2) for p in "qkv"}
>>> names = {"layers.{i}.qkv": join("layers.{i}.q", "layers.{i}.k", "layers.{i}.v", dim=0)}
>>> outlines_of(have | {"norm": Outline((8,), "float32")}, names)["layers.1.qkv"]
Outline(shape=(12, 8), dtype='float32')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.box import Box
from reshard.errors import NamesError, PlanError, quoted
from reshard.layout import Layout
from reshard.mesh import Mesh
from reshard.planning.names import Feed, Join, Names, Source, Stacked, Take, feeds_of
from reshard.spec import TensorSpec

__all__ = ["Outline", "feeds_for", "outlines_of"]

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
_ANYWHERE = Layout(Mesh(), "...")


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def outlines_of(have: Mapping[str, Outline], names: Names) -> dict[str, Outline]:
    """All tensors of the output: those that names speaks of, and the others as they are."""
    found: dict[str, Outline] = {}
    used: set[str] = set()
    for key, source in names.items():
        for name, parts in _filled_in(key, source, have):
            found[name] = _outline(name, source, [have[part] for part in parts])
            used |= set(parts)
    kept = {name: outline for name, outline in have.items() if name not in used}
    double = next((name for name in kept if name in found), None)
    if double is not None:
        raise NamesError(
            f"names makes {quoted(double)} of other tensors, and the source has one of that name "
            "which nothing else takes: rename it too"
        )
    return kept | found


def feeds_for(
    wanted: Mapping[str, tuple[int, ...]], have: Mapping[str, Outline], names: Names
) -> Iterator[tuple[str, list[Feed], tuple[Box, ...]]]:
    """For each output tensor the source tensors it is made of, and the boxes left to zeros."""
    specs = {key: TensorSpec(o.shape, o.dtype, _ANYWHERE) for key, o in have.items()}
    for name, shape in wanted.items():
        found = feeds_of(name, TensorSpec(shape, "uint8", _ANYWHERE), specs, names)
        if isinstance(found, list):
            raise NamesError(f"{quoted(name)} needs {', '.join(found[:3])}, which is absent")
        yield (name, *found)


def _parts(source: Source) -> tuple[str, ...]:
    match source:
        case str():
            return (source,)
        case Take():
            return (source.name,)
        case Join() | Stacked():
            return source.names
    raise PlanError(f"{source!r} in names: give a name, take, join or stack")


def _filled_in(
    key: str, source: Source, have: Mapping[str, Outline]
) -> Iterator[tuple[str, list[str]]]:
    """The output names behind a key, each with the source names that it is made of."""
    places, templates = _PLACE.findall(key), _parts(source)
    matches = 0
    for values in _captures(templates[0], places, have):
        parts = [_fill(template, values) for template in templates]
        if isinstance(source, Stacked) and len(parts) == 1 and _PLACE.search(parts[0]):
            parts = list(_counted(parts[0], have))
        missing = [part for part in parts if part not in have]
        if missing:
            raise NamesError(
                f"{quoted(_fill(key, values))} needs {', '.join(missing[:3])}, "
                "which the source lacks"
            )
        matches += 1
        yield _fill(key, values), parts
    if not matches:
        raise NamesError(f"names has {quoted(key)}, whose source {quoted(templates[0])} is absent")


def _captures(
    template: str, places: Sequence[str], have: Mapping[str, Outline]
) -> list[dict[str, str]]:
    """The numbers for which the source has a name that fits, each once."""
    texts = _PLACE.split(template)
    free = [place for place in texts[1::2] if place not in places]
    pattern = "".join(
        re.escape(text) if at % 2 == 0 else r"\d+" if text in free else rf"(?P<{text}>\d+)"
        for at, text in enumerate(texts)
    )
    matches = (re.fullmatch(pattern, name) for name in have)
    found = {tuple(sorted(match.groupdict().items())) for match in matches if match}
    return [dict(values) for values in sorted(found, key=lambda v: [(k, int(n)) for k, n in v])]


def _fill(template: str, values: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


def _counted(template: str, have: Mapping[str, Outline]) -> Iterator[str]:
    """The names of a stack, from 0 on."""
    place = _PLACE.search(template)
    assert place is not None
    number = 0
    while (name := template.replace(place[0], str(number))) in have:
        yield name
        number += 1


def _outline(name: str, source: Source, parts: Sequence[Outline]) -> Outline:
    """The shape that an output tensor has, from its sources."""
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
    return Outline(shape, first.dtype)


def _check_dim(name: str, dim: int, last: int) -> None:
    if not 0 <= dim <= last:
        raise PlanError(f"{quoted(name)} is joined in dim {dim}: the dims are 0 to {last}")


def _taken(source: Take, shape: tuple[int, ...]) -> tuple[int, ...]:
    cropped = {dim: high - low for dim, (low, high) in source.crop}
    gone = {dim for dim, _ in source.index}
    sizes = [cropped.get(dim, size) for dim, size in enumerate(shape) if dim not in gone]
    for dim, size in source.pad:
        if not 0 <= dim < len(sizes):
            raise PlanError(
                f"{quoted(source.name)} is padded in dim {dim} and has {len(sizes)} dims"
            )
        sizes[dim] = size
    return tuple(sizes)
