"""The values of ``names={...}``: take, join and stack, and the feeds they are resolved to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from reshard.errors import PlanError

__all__ = [
    "Feed",
    "Join",
    "Names",
    "Segments",
    "Source",
    "Stacked",
    "Take",
    "join",
    "stack",
    "take",
]


@dataclass(frozen=True, slots=True)
class Take:
    """One source tensor, or a part of it, perhaps padded."""

    name: str
    crop: tuple[tuple[int, tuple[int, int]], ...] = ()
    """Dims of which only start to stop is taken."""
    index: tuple[tuple[int, int], ...] = ()
    """Dims of which one index is taken; the destination lacks these dims."""
    pad: tuple[tuple[int, int], ...] = ()
    """Dims that are longer in the destination, filled with zeros at the end."""


@dataclass(frozen=True, slots=True)
class Join:
    """Several sources one after the other along a dim, or interleaved in groups of rows."""

    names: tuple[str, ...]
    dim: int
    rows: tuple[int, ...] | None = None
    """How many rows of each source make one group, if the sources are interleaved."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """Equal sources stacked along a new dim."""

    names: tuple[str, ...]
    dim: int


Source: TypeAlias = str | Take | Join | Stacked
"""What take, join and stack return: a dict of several of them is then one that `plan` takes."""
Names: TypeAlias = Mapping[str, Source]


def take(
    name: str,
    *,
    crop: Mapping[int, tuple[int, int]] | None = None,
    index: Mapping[int, int] | None = None,
    pad: Mapping[int, int] | None = None,
) -> Source:
    """A source tensor, cropped, indexed or padded on its way.

    >>> take("embed", pad={0: 128512})
    Take(name='embed', crop=(), index=(), pad=((0, 128512),))
    """
    crops = tuple(sorted((dim, (lo, hi)) for dim, (lo, hi) in (crop or {}).items()))
    return Take(name, crops, _items(index), _items(pad))


def _items(mapping: Mapping[int, int] | None) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((mapping or {}).items()))


def join(*names: str, dim: int = 0, source: str = "{part}", **rows: int) -> Source:
    """Sources joined along a dim, or interleaved in groups of so many rows of each.

    >>> join("q", "k", dim=0)
    Join(names=('q', 'k'), dim=0, rows=None)
    >>> join(dim=0, source="layers.0.{part}", q=512, k=128)
    Join(names=('layers.0.q', 'layers.0.k'), dim=0, rows=(512, 128))
    """
    if bool(names) == bool(rows):
        raise PlanError("join takes names, or parts with rows such as q=512, k=128: give one kind")
    if names:
        return Join(names, dim)
    if any(not isinstance(count, int) or count < 1 for count in rows.values()):
        raise PlanError(f"join got rows {rows}: each part of a group has at least 1 row")
    return Join(tuple(source.replace("{part}", part) for part in rows), dim, tuple(rows.values()))


def stack(*names: str, dim: int = 0) -> Source:
    """Equal sources stacked along a new dim; one name with a free ``{e}`` counts from 0."""
    return Stacked(names, dim)


Segments: TypeAlias = tuple[tuple[int, int, int], ...]
"""Runs of one dim: where each starts in the source, where in the destination, how long it is."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One source tensor that provides a part of a destination tensor.

    Both are seen with the same dims: where one side lacks a dim, a dim of size 1 is inserted.
    """

    name: str
    moves: tuple[Segments, ...] = ()
    """The runs of each dim; none at all where the tensor moves as it is."""
    have_insert: tuple[int, ...] = ()
    want_insert: tuple[int, ...] = ()
