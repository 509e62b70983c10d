"""Tensors with equal shapes, dtypes and layouts on both sides are planned once, as one stack.

A model has hundreds of tensors and about ten ways to move one. All tensors with the same shapes,
dtypes and layouts on both sides form a stack, and whatever is worked out holds for each of them.

A feed says which part of which source tensor fills which part of a destination tensor. Both tensors
are seen with the same dims: where one side lacks a dim, a dim of size 1 is inserted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from math import prod

from reshard.dtypes import accumulator, itemsize, wire_dtype
from reshard.errors import LayoutError, NamesError, PlanError
from reshard.layout.box import Box
from reshard.layout.grid import addend_of, num_addends
from reshard.layout.layout import BoxLayout
from reshard.layout.spec import TensorSpec, fingerprint
from reshard.planning.names import (
    Feed,
    Join,
    Names,
    Segments,
    Source,
    Stacked,
    Take,
    fill_in,
    placeholders,
    template_regex,
)
from reshard.text import and_more, quoted

RESIZE = "shapes must agree; try take(..., crop={dim: (start, stop)}) or take(..., pad={dim: size})"
"""What to do where the tensors of a take differ in size."""

Parts = Sequence[tuple[str, TensorSpec]]  # the names and the specs of sources
MAX_STACKED = 1 << 20
"""The most sources of a stack and groups of a join; a shape alone may not make us list more."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Tensors with the same sharding on both sides, and how source dims map to destination dims."""

    have: TensorSpec
    want: TensorSpec
    feed: Feed
    names: list[tuple[str, str]] = field(default_factory=list)
    """The source and the destination name of each tensor of the stack."""

    @property
    def wire_dtype(self) -> str:
        """The dtype that source ranks send: addends travel as they are, because they are no value.

        Other tensors travel in the narrower dtype of the two sides.
        """
        if self.have.layout.reduce is not None:
            return self.have.dtype
        return wire_dtype(self.have.dtype, self.want.dtype)

    @cached_property
    def adds(self) -> bool:
        return num_addends(self.have.layout) != num_addends(self.want.layout)

    def dtype_at(self, hop: int) -> str:
        """The dtype that travels at a hop: sums are passed on as the destination holds them.

        They were rounded to it, and must not be rounded again.
        """
        return self.want.dtype if hop and self.adds else self.wire_dtype

    def itemsize_at(self, hop: int) -> int:
        return itemsize(self.dtype_at(hop))

    @property
    def itemsize(self) -> int:
        """Bytes of one element that a source rank sends."""
        return itemsize(self.wire_dtype)

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of one element while addends are added up."""
        return itemsize(accumulator(self.have.dtype))

    @property
    def label(self) -> str:
        """A name for messages: the first tensor's, and how many more there are."""
        return and_more([f'"{name}"' for _, name in self.names])


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a destination tensor that no source fills; it becomes zeros."""

    name: str
    spec: TensorSpec
    box: Box


def stacks_of(
    have: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec], names: Names, strict: bool
) -> tuple[list[Stack], list[Fill]]:
    """Group the tensors of two state dicts into stacks, in the order of the wanted names."""
    stacks: dict[tuple[object, ...], Stack] = {}
    by_layouts: dict[tuple[object, ...], Stack] = {}
    fills: list[Fill] = []
    lacking: dict[str, list[str]] = {}
    used: set[str] = set()
    for name, spec in want.items():
        source = None if names else have.get(name)
        feeds = [Feed(name)]
        if source is None or source.shape != spec.shape:
            fed = feeds_of(name, spec, have, names)
            if isinstance(fed, list):
                lacking[name] = fed
                continue
            feeds, boxes = fed
            fills += [Fill(name, spec, box) for box in boxes]
        for feed in feeds:
            used.add(feed.name)
            source, moves = have[feed.name], (feed.moves, feed.have_insert, feed.want_insert)
            key = (source.shape, source.dtype, spec.shape, spec.dtype, moves)
            # Fingerprints are taken once for each pair of layouts.
            pair = (key, id(source.layout), id(spec.layout))
            if pair not in by_layouts:
                ends = _placement(source, feed.name), _placement(spec, name)
                by_layouts[pair] = stacks.setdefault((key, *ends), Stack(source, spec, feed))
            by_layouts[pair].names.append((feed.name, name))
    if strict and names:
        _check_keys(names, want)
    unused = [name for name in have if name not in used]
    if strict and (lacking or unused):
        raise _missing_names(lacking, unused, len(have), len(want))
    for stack in stacks.values():
        _check_reduce(stack)
    return [*stacks.values()], fills


def _placement(spec: TensorSpec, name: str) -> bytes:
    """A fingerprint of who holds what: equal shards share a stack, in whatever words."""
    try:
        return fingerprint(spec.layout, spec.shape)
    except LayoutError as error:
        raise LayoutError(f'tensor "{name}": {error}') from None


def _check_reduce(stack: Stack) -> None:
    """Refuse a destination that keeps a reduction pending which the source does not have."""
    had, wanted = stack.have.layout.reduce, stack.want.layout.reduce
    if wanted and (had is None or had[0] != wanted[0]):
        raise PlanError(
            f'{stack.label}: the destination "{stack.want.layout}" has a pending {wanted[0]} and '
            f'the source "{stack.have.layout}" has {f"a pending {had[0]}" if had else "none"}: '
            "take it out of the destination"
        )


def addends_of(stack: Stack) -> list[tuple[tuple[int, ...], int | None]]:
    """Which source addends each destination addend is made of; the last is None for a value."""
    have, want = stack.have.layout, stack.want.layout
    num, kept = num_addends(have), num_addends(want)
    if want.reduce is None:
        return [(tuple(range(num)), None)]
    if num % kept:
        raise PlanError(
            f'{stack.label}: the destination "{want}" has {kept} addends and the source "{have}" '
            f"has {num}: the source's number must be a multiple of the destination's"
        )
    owner = [addend * kept // num for addend in range(num)]
    if num > kept:
        # Where each addend already is, if that comes out even.
        have_at, want_at = addend_of(have), addend_of(want)
        both = [rank for rank in sorted(have_at, reverse=True) if rank in want_at]
        here = {have_at[rank]: want_at[rank] for rank in both}
        kept_here = [here.get(addend, -1) for addend in range(num)]
        if all(kept_here.count(number) == num // kept for number in range(kept)):
            owner = kept_here
    return [(tuple(a for a in range(num) if owner[a] == of), of) for of in range(kept)]


def feeds_of(
    name: str, want: TensorSpec, have: Mapping[str, TensorSpec], names: Names
) -> tuple[list[Feed], tuple[Box, ...]] | list[str]:
    """The feeds of a destination tensor and the boxes left to zeros, or the names that lack."""
    source, captured = _match(name, names)
    source = Take(source) if isinstance(source, str) else source
    match source:
        case Take():
            needed = [fill_in(source.name, captured)]
        case Join():
            needed = [fill_in(part, captured) for part in source.names]
        case Stacked():
            needed = [fill_in(part, captured) for part in source.names]
            free = placeholders(needed[0])[:1] if len(needed) == 1 else ()
            if free:
                count = want.shape[source.dim] if 0 <= source.dim < len(want.shape) else 0
                numbers = map(str, range(min(count, MAX_STACKED)))
                needed = [fill_in(needed[0], {free[0]: number}) for number in numbers]
        case _:
            raise PlanError(f'names["{name}"] is {source!r}: give a name, take, join or stack')
    missing = [part for part in needed if part not in have]
    if missing:
        return missing
    parts = [(part, have[part]) for part in needed]
    if isinstance(source, Take):
        return _taken(name, want, source, *parts[0])
    if isinstance(source, Join):
        return [*_joined(name, want, source, parts)], ()
    return [*_stacked(name, want, source, parts)], ()


def _match(name: str, names: Names) -> tuple[Source, dict[str, str]]:
    if name in names:
        return names[name], {}
    for pattern, source in names.items():
        match = template_regex(pattern).fullmatch(name) if "{" in pattern else None
        if match:
            return source, match.groupdict()
    return name, {}


def _check_keys(names: Names, want: Mapping[str, TensorSpec]) -> None:
    """Refuse an entry that names no wanted tensor: it is most likely a slip."""
    for pattern in names:
        if len({*placeholders(pattern)}) < len(placeholders(pattern)):
            raise PlanError(
                f"{quoted(pattern)} in names has the same {{name}} twice: use two names"
            )
        if pattern not in want and not any(map(template_regex(pattern).fullmatch, want)):
            near = get_close_matches(pattern, want, n=1)
            hint = f'did you mean "{near[0]}"' if near else "take it out or give strict=False"
            raise NamesError(f"names has {quoted(pattern)}, which matches no wanted name: {hint}")


def _moves(shape: Sequence[int], dim: int, segments: Segments) -> tuple[Segments, ...]:
    """The segments of one dim; all others move as they are."""
    whole: list[Segments] = [((0, 0, size),) for size in shape]
    return (*whole[:dim], segments, *whole[dim + 1 :])


def _joined(name: str, want: TensorSpec, source: Join, parts: Parts) -> Iterator[Feed]:
    """Sources one after the other are one group of all their rows."""
    dim = source.dim
    for part, spec in parts:
        others = spec.shape[:dim] + spec.shape[dim + 1 :]
        if not 0 <= dim < len(want.shape):
            raise PlanError(
                f'"{name}" has shape {want.shape} and its sources are joined in dim {dim}: dims '
                f"count from 0 to {len(want.shape) - 1}"
            )
        if len(want.shape) != len(spec.shape) or others != want.shape[:dim] + want.shape[dim + 1 :]:
            raise PlanError(
                f'"{part}" has shape {spec.shape} and "{name}" has {want.shape}: '
                f"tensors joined in dim {dim} agree in every other dim"
            )
    lengths, total = tuple(spec.shape[dim] for _, spec in parts), want.shape[dim]
    rows = lengths if source.rows is None else source.rows
    group = sum(rows)
    if source.rows is None and group != total:
        raise PlanError(
            f'"{name}" has {total} in dim {dim} and the {len(parts)} sources joined there have '
            f"{group} ({' + '.join(map(str, lengths))}): make them equal"
        )
    num = 1 if source.rows is None else total // group
    if num > MAX_STACKED:
        raise PlanError(f'"{name}" is dealt in {num} groups: at most {MAX_STACKED} work')
    starts = accumulate(rows, initial=0)
    for (part, _), length, count, start in zip(parts, lengths, rows, starts, strict=False):
        if length != num * count or num * group != total:
            raise PlanError(
                f'"{name}" has {total} in dim {dim}, that is {total / group:g} groups of '
                f'{group}, and "{part}" has {length}, that is '
                f"{length / count:g} groups of {count}: make them equal"
            )
        runs = tuple((g * count, g * group + start, count) for g in range(num))
        yield Feed(part, _moves(want.shape, dim, runs))


def _stacked(name: str, want: TensorSpec, source: Stacked, parts: Parts) -> Iterator[Feed]:
    dim = source.dim
    if not 0 <= dim < len(want.shape) or want.shape[dim] != len(parts):
        raise PlanError(
            f'"{name}" has shape {want.shape} and {len(parts)} sources are stacked in dim {dim}: '
            "that dim must be as long as there are sources"
        )
    inner = want.shape[:dim] + want.shape[dim + 1 :]
    for number, (part, spec) in enumerate(parts):
        if spec.shape != inner:
            raise PlanError(
                f'"{part}" has shape {spec.shape} and a slice of "{name}" has {inner}: '
                "only equal shapes can be stacked"
            )
        yield Feed(part, _moves(want.shape, dim, ((0, number, 1),)), have_insert=(dim,))


def _taken(
    name: str, want: TensorSpec, source: Take, part: str, spec: TensorSpec
) -> tuple[list[Feed], tuple[Box, ...]]:
    ranges = {dim: (0, size) for dim, size in enumerate(spec.shape)}
    for dim in dict(source.crop).keys() & dict(source.index).keys():
        raise PlanError(f'"{name}" crops dim {dim} of "{part}" and takes one index of it: give one')
    for dim, limits in [*source.crop, *((dim, (at, at + 1)) for dim, at in source.index)]:
        if dim not in ranges or not 0 <= limits[0] <= limits[1] <= spec.shape[dim]:
            raise PlanError(
                f'"{name}" takes {limits[0]} to {limits[1]} of dim {dim} of "{part}", which has '
                f"shape {spec.shape}: stay inside it"
            )
        ranges[dim] = limits
    inserted = tuple(dim for dim, _ in source.index)
    shape = tuple(high - low for dim, (low, high) in ranges.items() if dim not in inserted)
    padded = dict(source.pad)
    if any(not 0 <= dim < len(shape) for dim in padded):
        raise PlanError(f'"{name}" pads dims {sorted(padded)} of a tensor of shape {shape}')
    fits = len(shape) == len(want.shape) and all(
        size == padded.get(dim, had) and size >= had
        for dim, (had, size) in enumerate(zip(shape, want.shape, strict=True))
    )
    if not fits:
        is_resized = source.crop or source.index or source.pad
        advice = RESIZE if is_resized else _advice(spec, want)
        raise PlanError(f'"{part}" gives shape {shape} and "{name}" wants {want.shape}: {advice}')
    if spec.shape == want.shape and not inserted and not source.crop:
        return [Feed(part)], ()
    moves = tuple(((low, 0, high - low),) for low, high in ranges.values())
    zeros = Box.whole(want.shape) - Box((0,) * len(shape), shape) if padded else ()
    return [Feed(part, moves, want_insert=inserted)], zeros


def _advice(have: TensorSpec, want: TensorSpec) -> str:
    """What to do where shapes differ; a whole tensor that divides the other is likely a shard."""
    small, large = sorted((have, want), key=lambda spec: prod(spec.shape))
    if isinstance(small.layout, BoxLayout) or len(small.shape) != len(large.shape):
        return RESIZE
    dims = zip(small.shape, large.shape, small.layout.dims(small.shape), strict=True)
    if not all(a == b or (a and b % a == 0 and not cuts) for a, b, cuts in dims):
        return RESIZE
    return (
        "both must be shapes of the whole tensor, and a plain tensor counts as whole; describe a "
        f'shard as rs.TensorSpec({large.shape}, "{small.dtype}", rs.Layout(mesh, words))'
    )


def _missing_names(
    lacking: Mapping[str, Sequence[str]], unused: Sequence[str], num_have: int, num_want: int
) -> NamesError:
    """One error that lists what lacks on both sides."""
    lines = []
    if lacking:
        named = [
            f'"{name}"' if list(parts) == [name] else f'"{name}" (needs {", ".join(parts[:3])})'
            for name, parts in lacking.items()
        ]
        lines.append(f"{len(named)} of {num_want} wanted have no source: {and_more(named, 8)}")
    if unused:
        some = and_more([f'"{name}"' for name in unused], 8)
        lines.append(f"{len(unused)} of {num_have} source names are not wanted: {some}")
    return NamesError("; ".join(lines) + "; give names={...} or strict=False")
