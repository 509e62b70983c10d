"""The words of a layout as values: what each dim's cuts are, and the suffixes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from reshard.layout.mesh import format_ranks

__all__ = [
    "OPS",
    "Chunk",
    "Cut",
    "Cuts",
    "Cyclic",
    "Packed",
    "Ragged",
    "Segment",
    "Units",
    "Words",
    "ZigZag",
    "axes_of",
    "format_cuts",
    "from_placements",
]

OPS = ("sum", "avg", "max", "min", "prod")
"""How addends along the axes of a pending reduction become the value."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """``tp``: as ``torch.chunk`` cuts, sizes rounded up, trailing shards shorter or empty."""

    axis: str

    def __repr__(self) -> str:
        return f"Chunk({self.axis!r})"

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True, slots=True)
class Units:
    """``tp*128``: as ``tp``, but in whole units of 128."""

    axis: str
    unit: int

    def __repr__(self) -> str:
        return f"Units({self.axis!r}, {self.unit})"

    def __str__(self) -> str:
        return f"{self.axis}*{self.unit}"


@dataclass(frozen=True, slots=True)
class Cyclic:
    """``tp:128``: blocks of 128 dealt round-robin, a rank's blocks joined in order."""

    axis: str
    block: int

    def __repr__(self) -> str:
        return f"Cyclic({self.axis!r}, {self.block})"

    def __str__(self) -> str:
        return f"{self.axis}:{self.block}"


@dataclass(frozen=True, slots=True)
class Ragged:
    """``tp[3,1,4,2]``: these sizes, 0 allowed."""

    axis: str
    sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Ragged({self.axis!r}, {self.sizes})"

    def __str__(self) -> str:
        return f"{self.axis}[{','.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class ZigZag:
    """``cp~``: 2n blocks, rank i holds block i and then block 2n-1-i."""

    axis: str

    def __repr__(self) -> str:
        return f"ZigZag({self.axis!r})"

    def __str__(self) -> str:
        return f"{self.axis}~"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a packed dim: its length and the cuts that act on it."""

    size: int
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Packed:
    """``tp{4096,1024}`` or ``{4096 (kv rep), 1024 kv}``: segments, each cut on its own."""

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        first = self.segments[0].cuts
        alike = all(segment.cuts == first for segment in self.segments)
        if first and alike and not any(isinstance(cut, Packed) for cut in first):
            sizes = ",".join(str(segment.size) for segment in self.segments)
            return f"{format_cuts(first)}{{{sizes}}}"
        return "{" + ", ".join(map(_format_segment, self.segments)) + "}"


Cut: TypeAlias = Chunk | Units | Cyclic | Ragged | ZigZag | Packed
Cuts: TypeAlias = tuple[Cut, ...]
"""What happens to one dim, left to right; empty means the dim is whole."""


@dataclass(frozen=True, slots=True)
class Words:
    """A parsed layout text."""

    dims: tuple[Cuts, ...]
    """The cuts of each dim that has a word of its own."""
    rest: int | None = None
    """Where ``...`` stands among the dims, if it does."""
    on: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The coordinates that hold the tensor, for axes where not all do."""
    reduce: tuple[str, tuple[str, ...]] | None = None
    """The operation and the axes of a pending reduction."""
    flat: Cuts = ()
    """How the flattened local tensor is cut."""
    without: tuple[int, ...] = ()
    """The ranks that are lost."""

    def __str__(self) -> str:
        words = [format_cuts(cuts) or "-" for cuts in self.dims]
        if self.rest is not None:
            words.insert(self.rest, "...")
        return " | ".join([" ".join(words), *self._suffixes()])

    def _suffixes(self) -> Iterator[str]:
        if self.on:
            yield "on " + " ".join(f"{axis}={','.join(map(str, at))}" for axis, at in self.on)
        if self.reduce:
            op, axes = self.reduce
            yield f"{op} {' '.join(axes)}"
        if self.flat:
            yield f"flat {format_cuts(self.flat)}"
        if self.without:
            yield f"without {format_ranks(self.without)}"

    def expand(self, num_dims: int) -> tuple[Cuts, ...] | None:
        """The cuts of each of ``num_dims`` dims, or None if the words do not fit."""
        missing = num_dims - len(self.dims)
        if missing == 0:
            return self.dims
        if self.rest is None or missing < 0:
            return None
        return self.dims[: self.rest] + ((),) * missing + self.dims[self.rest :]


def format_cuts(cuts: Cuts) -> str:
    """The word for these cuts; empty for a whole dim."""
    text = " ".join(map(str, cuts))
    return f"({text})" if len(cuts) > 1 else text


def _format_segment(segment: Segment) -> str:
    return f"{segment.size} {format_cuts(segment.cuts) or '-'}"


def axes_of(cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The axes that cuts name, in order of first appearance.

    >>> axes_of([Chunk("kv"), Cyclic("rep", 4)])
    ('kv', 'rep')
    """
    axes: dict[str, None] = {}
    for cut in cuts:
        if isinstance(cut, Packed):
            for segment in cut.segments:
                axes.update(dict.fromkeys(axes_of(segment.cuts)))
        else:
            axes[cut.axis] = None
    return tuple(axes)


def from_placements(axes: Iterable[str], placements: object) -> str | None:
    """What DTensor's placements are in the notation, for who types them as a layout; else None."""
    listed = _typed(placements) if isinstance(placements, str) else _made(placements)
    kinds = [kind for kind, _ in listed]
    if not kinds or not set(kinds) <= {"Shard", "_StridedShard", "Replicate", "Partial"}:
        return None
    names = [*axes]
    names += [f"axis{number}" for number in range(len(names), len(listed))]
    cuts: dict[int, list[str]] = {}
    for axis, (kind, dim) in zip(names, listed, strict=False):
        if "Shard" in kind:
            cuts.setdefault(dim, []).append(axis)
    words = [" ".join(cuts.get(dim, "-")) for dim in range(max(cuts, default=-1) + 1)]
    text = " ".join([*(f"({word})" if " " in word else word for word in words), "..."])
    pending = [axis for axis, kind in zip(names, kinds, strict=False) if kind == "Partial"]
    text += f" | sum {' '.join(pending)}" if pending else ""
    return (
        f"{placements!s:.80} is how DTensor writes it: in the notation of layouts, which names "
        f'axes of the mesh, it is "{text}"'
    )


MAX_TYPED = 200
_PLACEMENT = re.compile(
    r"(_StridedShard|Shard|Replicate|Partial)\((?:dim=)?(\d{0,2})[^)]*\)", re.ASCII
)


def _typed(text: str) -> list[tuple[str, int]]:
    """The placements that a text of a sensible length names, as class names and dims."""
    if len(text) > MAX_TYPED:
        return []
    return [(found[1], int(found[2] or 0)) for found in _PLACEMENT.finditer(text)]


def _made(placements: object) -> list[tuple[str, int]]:
    """The same of objects."""
    listed: list[Any] = [*placements] if isinstance(placements, list | tuple) else [placements]
    return [(type(one).__name__, getattr(one, "dim", 0)) for one in listed]
