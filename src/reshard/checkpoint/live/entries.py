"""What is in a state dict: its tensors under the names that ``rs.describe`` gives them, and the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import ReshardError, TensorError
from reshard.layout.spec import TensorSpec
from reshard.tensors.describe import spec_of
from reshard.tensors.reading import parts_of
from reshard.text import quoted

__all__ = ["Entries", "Memory", "entries_of"]

MAX_DEPTH = 64
"""A dict deeper than this holds itself."""

Keys = tuple[str | int, ...]
"""The keys that lead to an entry, as torch's checkpoints have them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Which tensors of a rank are the same memory, as tied parameters are."""

    names: frozenset[str]
    """All tensors of the rank."""
    groups: tuple[frozenset[str], ...]
    """Names of one memory each, two or more."""
    empty: frozenset[str]
    """Tensors of which this rank has no element."""

    def names_beside(self, name: str) -> set[str]:
        """The other names of a tensor's memory."""
        return {other for group in self.groups if name in group for other in group} - {name}

    def has_as_one(self, one: str, two: str) -> bool:
        """Whether two tensors are one memory here, or the rank has no element of either."""
        without = self.empty | ({one, two} - self.names)
        return {one, two} <= without or any({one, two} <= group for group in self.groups)

    def to_data(self) -> list[list[Any]]:
        """The groups and the empty tensors as plain data."""
        return [[sorted(group) for group in self.groups], sorted(self.empty)]

    @classmethod
    def from_data(cls, names: Iterable[str], data: Sequence[Any]) -> Memory:
        """Read what ``to_data`` gave."""
        groups, empty = data
        return cls(frozenset(names), tuple(map(frozenset, groups)), frozenset(empty))


@dataclass(frozen=True, slots=True)
class Entries:
    """A state dict, flat."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    """Numbers, texts, lists of them, objects: whatever is no tensor."""
    keys: dict[str, Keys] = field(default_factory=dict)

    def specs(self) -> dict[str, TensorSpec]:
        """What every tensor is and how it lies; an error names the tensor."""
        return {name: _spec(name, tensor) for name, tensor in self.tensors.items()}

    def memory(self) -> Memory:
        """Which of the tensors share all of their memory."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        empty = []
        for name, tensor in self.tensors.items():
            parts = [part for part in parts_of(tensor) if part.numel()]
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
    """Whether a list is looked into: one of numbers is one entry, as torch has it."""
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


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    try:
        spec = spec_of(tensor)
    except ReshardError as error:
        raise type(error)(f"{quoted(name)}: {error}") from None
    for part in parts_of(tensor):
        if part.is_meta or part.is_conj() or part.is_neg():
            kind = "on the meta device" if part.is_meta else "a lazy conjugate or negative"
            raise TensorError(f"{quoted(name)} is {kind}: give a tensor that has its own memory")
    if spec.layout.reduce is not None:
        raise TensorError(
            f'{quoted(name)} has layout "{spec.layout}", which leaves a sum pending: a checkpoint '
            "holds values; redistribute the tensor first"
        )
    return spec
