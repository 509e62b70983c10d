"""Tensors with equal shapes, dtypes and layouts on both sides are planned once, as one stack.

A model has hundreds of tensors and about ten ways to move one. All tensors with the same shapes,
dtypes and layouts on both sides form a stack, and whatever is worked out holds for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from reshard.dtypes import itemsize, wire_dtype
from reshard.errors import LayoutError, PlanError
from reshard.layout.box import Box
from reshard.layout.grid import addend_of, num_addends
from reshard.layout.spec import TensorSpec, fingerprint
from reshard.planning.feeds import check_keys, feeds_of, missing_names
from reshard.planning.names import Feed, Names
from reshard.text import and_more

__all__ = ["Addends", "Fill", "Stack", "addends_of", "stacks_of"]


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
        """Whether receivers add up addends."""
        return num_addends(self.have.layout) != num_addends(self.want.layout)

    def dtype_at(self, hop: int) -> str:
        """The dtype that travels at a hop: sums are passed on as the destination holds them.

        They were rounded to it, and must not be rounded again.
        """
        return self.want.dtype if hop and self.adds else self.wire_dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element that a source rank sends."""
        return itemsize(self.wire_dtype)

    def itemsize_at(self, hop: int) -> int:
        """Bytes of one element that travels at a hop."""
        return itemsize(self.dtype_at(hop))

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
    stacks = _Stacks()
    fills: list[Fill] = []
    lacking: dict[str, list[str]] = {}
    used: set[str] = set()
    for name, spec in want.items():
        plain = have.get(name) if not names else None
        if plain is not None and plain.shape == spec.shape:
            used.add(name)
            stacks.add(plain, spec, None, name)
            continue
        found = feeds_of(name, spec, have, names)
        if isinstance(found, list):
            lacking[name] = found
            continue
        feeds, boxes = found
        fills += [Fill(name, spec, box) for box in boxes]
        for feed in feeds:
            used.add(feed.name)
            stacks.add(have[feed.name], spec, feed, name)
    if strict and names:
        check_keys(names, want)
    unused = [name for name in have if name not in used]
    if strict and (lacking or unused):
        raise missing_names(lacking, unused, len(have), len(want))
    for stack in stacks.found.values():
        _check_reduce(stack)
    return [*stacks.found.values()], fills


class _Stacks:
    """Puts tensors into stacks; fingerprints are taken once for each pair of layouts."""

    def __init__(self) -> None:
        self.found: dict[tuple[object, ...], Stack] = {}
        self._seen: dict[tuple[object, ...], Stack] = {}

    def add(self, have: TensorSpec, want: TensorSpec, feed: Feed | None, name: str) -> None:
        """Add a tensor; without a feed it is the source tensor of the same name."""
        how = feed and (feed.moves, feed.have_insert, feed.want_insert)
        specs = (have.shape, have.dtype, want.shape, want.dtype)
        key = (*specs, id(have.layout), id(want.layout), how)
        stack = self._seen.get(key)
        if stack is None:
            feed = feed or Feed(name)
            ends = (_placement(have, feed.name), _placement(want, name))
            how = (feed.moves, feed.have_insert, feed.want_insert)
            found = self.found.setdefault((*specs, *ends, how), Stack(have, want, feed))
            stack = self._seen[key] = found
        stack.names.append((feed.name if feed else name, name))


def _placement(spec: TensorSpec, name: str) -> bytes:
    """A fingerprint of who holds what: equal shards share a stack, in whatever words."""
    try:
        return fingerprint(spec.layout, spec.shape)
    except LayoutError as error:
        raise LayoutError(f'tensor "{name}": {error}') from None


def _check_reduce(stack: Stack) -> None:
    """A destination may keep a reduction pending only if the source has the same one."""
    had, wanted = stack.have.layout.reduce, stack.want.layout.reduce
    if wanted and (had is None or had[0] != wanted[0]):
        raise PlanError(
            f'{stack.label}: the destination "{stack.want.layout}" has a pending {wanted[0]} and '
            f'the source "{stack.have.layout}" has {f"a pending {had[0]}" if had else "none"}: '
            "take it out of the destination"
        )


@dataclass(frozen=True, slots=True)
class Addends:
    """Which addends of the source make up one addend of the destination."""

    have: tuple[int, ...]
    want: int | None
    """None where the destination wants the value itself."""


def addends_of(stack: Stack) -> list[Addends]:
    """Which source addends each destination addend is made of."""
    have, want = stack.have.layout, stack.want.layout
    num, kept = num_addends(have), num_addends(want)
    if want.reduce is None:
        return [Addends(tuple(range(num)), None)]
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
    return [
        Addends(tuple(a for a in range(num) if owner[a] == number), number)
        for number in range(kept)
    ]
