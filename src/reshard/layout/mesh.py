"""A mesh gives names to the ways a set of ranks is arranged: which rank sits where?

>>> mesh = Mesh(dp=2, tp=4)
>>> mesh.coords(6)
{'dp': 1, 'tp': 2}
>>> str(Mesh(tp=2, ranks=[8, 9]))
'tp=2 @ 8-9'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import eq, index
from types import MappingProxyType
from typing import Never

from reshard.errors import MeshError, NotationError
from reshard.text import quoted

RESERVED = frozenset({"on", "sum", "avg", "max", "min", "prod", "flat", "without", "ranks"})
"""Words of the notation that cannot name an axis."""

MAX_TEXT = 1 << 20
MAX_AXES = 32
MAX_RANK = 1 << 40
MAX_RANKS = 1 << 20  # more ranks than any cluster has; a text may not make us allocate more
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_AXIS_SIZE = re.compile(r"([^\s=]+)=([0-9]+)\Z")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z", re.ASCII)


class Mesh:
    """Named axes over ranks; the last axis varies fastest.

    >>> Mesh(dp=2, tp=2).ranks, Mesh(pp=2, ranks=[7, 3]).coords(3)
    (range(0, 4), {'pp': 1})
    """

    axes: Mapping[str, int]
    """The number of ranks along each axis, in order."""
    ranks: Sequence[int]
    """The ranks in row-major order; a ``range`` where they are evenly spaced."""

    def __init__(self, /, ranks: Sequence[int] | None = None, *more: Never, **axes: int) -> None:
        is_list = ranks is None or (isinstance(ranks, Iterable) and not isinstance(ranks, str))
        if more or not is_list:
            values = ", ".join(map(repr, (ranks, *more)))
            raise MeshError(
                f"Mesh({values:.60}): give axes by name and ranks as a list, such as "
                'Mesh(dp=2, tp=4, ranks=range(8)), or a text to Mesh.parse("dp=2 tp=4")'
            )
        ranks = ranks if ranks is None or isinstance(ranks, range) else tuple(map(_rank, ranks))
        self._sizes = tuple((axis, _checked_size(axis, size)) for axis, size in axes.items())
        self.axes = MappingProxyType(dict(self._sizes))
        if len(axes) > MAX_AXES:
            raise MeshError(
                f"mesh {quoted(self._axes_text())} has {len(axes)} axes: at most {MAX_AXES} work; "
                "use fewer"
            )
        count = prod(self.axes.values())
        if count > MAX_RANKS:
            raise MeshError(
                f"mesh {quoted(self._axes_text())} has {count} ranks: at most {MAX_RANKS} work"
            )
        if ranks is not None and len(ranks) != count:
            raise MeshError(
                f"mesh {self._axes_text() or 'without axes'} needs {count} ranks "
                f"and got {len(ranks)} ({format_ranks(ranks[:64])}): "
                "give as many ranks as the product of the axes"
            )
        self.ranks = range(count) if ranks is None else _as_ranks(ranks)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``dp=2 tp=4`` or ``dp=2 tp=4 @ 8-11,16-19``."""
        if len(text) > MAX_TEXT:
            raise NotationError(f"a mesh text of {len(text)} characters: at most {MAX_TEXT} work")
        axes_text, at, ranks_text = text.partition("@")
        axes: dict[str, int] = {}
        for word in axes_text.split():
            match = _AXIS_SIZE.match(word)
            if not match:
                raise NotationError(
                    f"{quoted(word)} in mesh {quoted(text)} is not an axis: "
                    "expected name=size, such as tp=4"
                )
            if match[1] in axes:
                raise MeshError(
                    f"axis {quoted(match[1])} appears twice in mesh {quoted(text)}: name each once"
                )
            axes[match[1]] = _checked_size(match[1], _bounded(match[2], text))
        if not axes and not at:
            raise NotationError(
                f"mesh {quoted(text)} names no axis: expected name=size, such as tp=4"
            )
        return cls(ranks=parse_ranks(ranks_text, text) if at else None, **axes)

    @classmethod
    def of(cls, mesh: Mesh | str) -> Mesh:
        """A mesh, or the one that a text describes, wherever a mesh is wanted as an argument.

        >>> Mesh.of("dp=2 tp=4")
        Mesh(dp=2, tp=4)
        """
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if not isinstance(mesh, Mesh):
            raise MeshError(f'{mesh!r:.60} is no mesh: give a Mesh, or a text such as "dp=2 tp=4"')
        return mesh

    @property
    def num_ranks(self) -> int:
        """How many ranks the mesh has."""
        return len(self.ranks)

    def stride(self, axis: str) -> int:
        """The distance in ``ranks`` between consecutive ranks of an axis."""
        names = [*self.axes]
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    def index(self, rank: int) -> int | None:
        """The place of a rank in ``ranks``, or None if the mesh does not have it."""
        if isinstance(self.ranks, range):
            return self.ranks.index(rank) if rank in self.ranks else None
        return self._places.get(rank)

    def coords(self, rank: int) -> dict[str, int]:
        """Where a rank sits, one coordinate per axis."""
        place = self.index(rank)
        if place is None:
            raise MeshError(f"rank {rank} is not in mesh {self}: its ranks are {self.ranks_text}")
        return {axis: place // self.stride(axis) % size for axis, size in self._sizes}

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def ranks_text(self) -> str:
        """The ranks as the notation writes them, such as ``8-11,16-19``."""
        return format_ranks(self.ranks)

    def _axes_text(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self._sizes)

    def __str__(self) -> str:
        if self.ranks == range(len(self.ranks)) and self._sizes:
            return self._axes_text()
        return f"{self._axes_text()} @ {self.ranks_text}".strip()

    def __repr__(self) -> str:
        words = self._axes_text().split()
        if self.ranks != range(len(self.ranks)):
            evenly = isinstance(self.ranks, range)
            words.append(f"ranks={self.ranks if evenly else [*self.ranks]}")
        return f"Mesh({', '.join(words)})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._sizes, self.ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._sizes == other._sizes and self.ranks == other.ranks

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self._sizes, self.ranks))


def _rank(rank: object) -> int:
    try:
        return index(rank)  # type: ignore[arg-type]
    except TypeError:
        raise MeshError(f"{rank!r:.60} in ranks is no rank: ranks are whole numbers") from None


def _rebuild(sizes: tuple[tuple[str, int], ...], ranks: Sequence[int]) -> Mesh:
    return Mesh(ranks=ranks, **dict(sizes))


def _checked_size(axis: str, size: object) -> int:
    """The size of an axis, any kind of integer, as an int; refuses other sizes and wrong names."""
    if not _AXIS.match(axis) or axis in RESERVED:
        raise MeshError(
            f"{quoted(axis)} cannot name an axis: use letters, digits and _, "
            f"and none of {' '.join(sorted(RESERVED))}"
        )
    try:
        number = 0 if isinstance(size, bool) else index(size)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise MeshError(f"axis {quoted(axis)} has size {size!r}: an axis has at least 1 rank")
    return number


def _as_ranks(ranks: Sequence[int]) -> Sequence[int]:
    """A range if the ranks are evenly spaced and rising, else a tuple of distinct ranks."""
    if len(set(ranks)) != len(ranks):
        twice = min(rank for rank, count in Counter(ranks).items() if count > 1)
        raise MeshError(f"rank {twice} appears twice in a mesh: each rank has one place")
    if ranks and not 0 <= min(ranks) <= max(ranks) < MAX_RANK:
        raise MeshError(
            f"ranks {min(ranks)} to {max(ranks)} in a mesh: ranks count from 0 to {MAX_RANK - 1}"
        )
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = range(ranks[0], ranks[-1] + 1, step) if ranks and step > 0 else ()
    # Compared in length first: a step of 1 to a large last rank is a long range.
    return even if len(even) == len(ranks) and all(map(eq, even, ranks)) else tuple(ranks)


def parse_ranks(text: str, where: str) -> Sequence[int]:
    """Read ``8-11,16`` as the ranks 8, 9, 10, 11, 16."""
    ranks, source = list[int](), quoted(where.strip())
    for word in map(str.strip, text.split(",")):
        match = _RANGE.match(word)
        if not match:
            raise NotationError(f"{quoted(word)} in {source} is not a rank: expected 8 or 8-11")
        first, last = _bounded(match[1], where), _bounded(match[2] or match[1], where)
        if last < first or last - first >= MAX_RANKS:
            raise NotationError(f"{quoted(word)} in {source} goes backwards or too far")
        ranks.extend(range(first, last + 1))
        if len(ranks) > MAX_RANKS:
            raise NotationError(f"{source} lists more than {MAX_RANKS} ranks")
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ranks the short way, in their order.

    >>> format_ranks([8, 9, 10, 3])
    '8-10,3'
    """
    if not len(ranks):
        return "none"
    if isinstance(ranks, range) and ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1]
    runs = [(ranks[i], ranks[j - 1]) for i, j in pairwise([0, *breaks, len(ranks)])]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _bounded(digits: str, where: str) -> int:
    if len(digits) > 12:
        raise NotationError(f"{quoted(digits)} in {quoted(where.strip())} is too large a number")
    return int(digits)
