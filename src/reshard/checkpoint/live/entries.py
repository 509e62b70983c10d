"""The entries of a state dict by name, and views of this rank's part of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from reshard.errors import ReshardError, TensorError
from reshard.layout.box import Box, Piece
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.spec import TensorSpec
from reshard.tensors.local import box_view, parts_of, piece_view, spec_of
from reshard.text import quoted

__all__ = ["Entries", "Held", "Memory", "RankBoxes", "View", "entries_of", "part_of"]

MAX_DEPTH = 64
"""A dict that is nested deeper is taken to contain itself."""

Keys = tuple[str | int, ...]
"""The path of keys to an entry, as in torch's checkpoints."""

View = tuple[Box, torch.Tensor]
"""A box of a tensor, and the memory that holds it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The tensors of a rank that share memory, as tied parameters do."""

    names: frozenset[str]
    """All tensors of the rank."""
    groups: tuple[frozenset[str], ...]
    """Groups of two or more names for the same memory."""
    empty: frozenset[str]
    """Tensors without an element on this rank."""

    def other_names(self, name: str) -> set[str]:
        """The other names for a tensor's memory."""
        return {other for group in self.groups if name in group for other in group} - {name}

    def has_as_one(self, one: str, two: str) -> bool:
        """Whether two tensors share their memory here, or the rank has no element of either."""
        without = self.empty | ({one, two} - self.names)
        return {one, two} <= without or any({one, two} <= group for group in self.groups)

    def to_data(self) -> list[list[Any]]:
        """The groups and the empty tensors as plain data."""
        return [[sorted(group) for group in self.groups], sorted(self.empty)]

    @classmethod
    def from_data(cls, names: Iterable[str], data: Sequence[Any]) -> Memory:
        """Read what ``to_data`` wrote."""
        groups, empty = data
        return cls(frozenset(names), tuple(map(frozenset, groups)), frozenset(empty))


class Held(NamedTuple):
    """A tensor of this rank: its spec, and the memory of its parts in the order of its boxes."""

    spec: TensorSpec
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entries:
    """A flattened state dict."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    """Entries that are not tensors: numbers, strings, lists, objects."""
    keys: dict[str, Keys] = field(default_factory=dict)

    @cached_property
    def held(self) -> dict[str, Held]:
        """All tensors; an error names the tensor."""
        return {name: _held(name, tensor) for name, tensor in self.tensors.items()}

    def specs(self) -> dict[str, TensorSpec]:
        """The spec of every tensor."""
        return {name: held.spec for name, held in self.held.items()}

    def memory(self) -> Memory:
        """The tensors that share all of their memory."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        empty = []
        for name, held in self.held.items():
            parts = [part for part in held.parts if part.numel()]
            if parts:
                key = tuple((p.data_ptr(), p.device, p.dtype, p.shape, p.stride()) for p in parts)
                groups.setdefault(key, []).append(name)
            else:
                empty.append(name)
        tied = tuple(frozenset(group) for group in groups.values() if len(group) > 1)
        return Memory(frozenset(self.tensors), tied, frozenset(empty))


def entries_of(state_dict: Mapping[Any, Any]) -> Entries:
    """The entries of a nested or flat state dict, with dotted names."""
    if not isinstance(state_dict, Mapping):
        raise TensorError(f"a {type(state_dict).__name__} is no state dict: give a dict of tensors")
    found = Entries()
    for keys, value in _walk((), state_dict):
        name = ".".join(map(str, keys))
        if name in found.keys:
            raise TensorError(
                f"two entries of the state dict are called {quoted(name)}, one of them nested: "
                "rename one"
            )
        found.keys[name] = keys
        kind = found.tensors if isinstance(value, torch.Tensor) else found.others
        kind[name] = value
    return found


def _walk(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if len(keys) > MAX_DEPTH:
        raise TensorError(f"{quoted(keys[0])} is nested more than {MAX_DEPTH} deep: flatten it")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk((*keys, _checked(key)), inner)
    elif isinstance(value, list | tuple) and _has_tensors(value, len(keys)):
        for at, inner in enumerate(value):
            yield from _walk((*keys, at), inner)
    else:
        yield keys, value


def _has_tensors(value: Any, depth: int) -> bool:
    """Whether a list is flattened: a list of numbers is one entry, as in torch."""
    if isinstance(value, torch.Tensor | Mapping) or depth > MAX_DEPTH:
        return True
    inside = value if isinstance(value, list | tuple) else ()
    return any(_has_tensors(one, depth + 1) for one in inside)


def _checked(key: object) -> str:
    if not isinstance(key, str | int):
        raise TensorError(
            f"the key {quoted(key)} is a {type(key).__name__}: names are strings or numbers"
        )
    return str(key)


def _held(name: str, tensor: torch.Tensor) -> Held:
    try:
        spec = spec_of(tensor)
    except ReshardError as error:
        raise type(error)(f"{quoted(name)}: {error}") from None
    parts = tuple(part.detach() for part in parts_of(tensor))
    for part in parts:
        if part.is_meta or part.is_conj() or part.is_neg():
            kind = "on the meta device" if part.is_meta else "a lazy conjugate or negative"
            raise TensorError(f"{quoted(name)} is {kind}: give a tensor that has its own memory")
    if spec.layout.reduce is not None:
        raise TensorError(
            f'{quoted(name)} has layout "{spec.layout}", which leaves a sum pending: a checkpoint '
            "holds values; redistribute the tensor first"
        )
    return Held(spec, parts)


class RankBoxes:
    """The boxes that ranks hold, computed once for each layout of one load or save."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[Layout, tuple[int, ...]], dict[int, tuple[Box, ...]]] = {}
        self._pieces: dict[tuple[Layout, int, tuple[int, ...]], tuple[Piece, ...]] = {}

    def of(self, layout: Layout, shape: tuple[int, ...]) -> dict[int, tuple[Box, ...]]:
        """The boxes of every rank in ascending order, without ranks that have none."""
        key = layout, shape
        if key not in self._boxes:
            held = {rank: self._held(layout, rank, shape) for rank in layout.ranks}
            self._boxes[key] = {
                rank: tuple(sorted(piece.box for piece in pieces))
                for rank, pieces in held.items()
                if pieces
            }
        return self._boxes[key]

    def _held(self, layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """The pieces of one rank that are not empty."""
        key = layout, rank, shape
        if key not in self._pieces:
            pieces = layout.pieces(rank, shape)
            self._pieces[key] = tuple(piece for piece in pieces if piece.box.size)
        return self._pieces[key]

    def views(self, held: Held, rank: int) -> list[View]:
        """The boxes that this rank holds in ascending order, and the memory of each.

        Writing to that memory changes the tensor. The layout is that of the tensor itself: the
        layout that all ranks together describe may be an equal one in other words.
        """
        layout, parts = held.spec.layout, held.parts
        if isinstance(layout, BoxLayout):
            pairs = zip(layout.boxes.get(rank, ()), parts, strict=True)
            found = [(box, part) for box, part in pairs if box.size]
        else:
            pieces = self._held(layout, rank, held.spec.shape) if parts else ()
            found = [(piece.box, piece_view(parts[0], piece)) for piece in pieces]
        return sorted(found, key=lambda view: view[0])


def part_of(view: View, box: Box) -> torch.Tensor:
    """The part of a view that is in a box."""
    outer, tensor = view
    return box_view(tensor, outer, box)
