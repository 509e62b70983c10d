"""Which tensors and modules do the paths of a plan name, and does all of it make sense?

1. every value is a spec or a Sharder, and every path is a text;
2. wildcards are replaced by what they match; a path that is written out beats a wildcard;
3. nothing lies below a module that a Sharder replaces;
4. two names of one tied parameter are given the same spec.

All errors are found before one is raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn

from reshard.nn.paths import find_module, find_slot, is_below, is_pattern, matching
from reshard.nn.sharder import Sharder
from reshard.sharded.spec import ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.text import quoted

__all__ = ["Entry", "Resolved", "module_entries", "raise_first", "resolve"]

Value = TypeVar("Value")

MOST_TOLD = 20
"""How many errors are told at once; a wrong word in a wildcard can make thousands."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[Value]):
    """One path of a module, what the plan says of it, and the words in which it does."""

    path: str
    value: Value
    written: str
    """The path or the pattern in the plan."""

    @property
    def explicit(self) -> bool:
        """Whether the path is written out."""
        return not is_pattern(self.written)

    def __str__(self) -> str:
        by = "" if self.explicit else f" (matched by {quoted(self.written)})"
        return f"{quoted(self.path)}{by}"


@dataclass(frozen=True)
class Resolved:
    """A plan for one module, without wildcards and without errors."""

    sharders: tuple[Entry[Sharder], ...]
    tensors: tuple[Entry[ShardingSpec], ...]
    """Each tensor once, a tied one too."""
    outputs: Mapping[str, ShardingSpec]
    local: Sequence[str]

    def paths(self) -> tuple[str, ...]:
        """What should be the same on all ranks."""
        sharders = (entry.path for entry in self.sharders)
        tensors = (entry.path for entry in self.tensors)
        return (*sharders, "tensors", *tensors, "outputs", *self.outputs, "local", *self.local)


@dataclass
class _Reading:
    """A module that a plan is read for, and the errors so far."""

    module: nn.Module
    errors: list[Exception] = field(default_factory=list)

    def try_to(self, find: Callable[[nn.Module, str], Value], path: str) -> Value | None:
        """What is found under a path, or None and one more error."""
        try:
            return find(self.module, path)
        except (AttributeError, ValueError) as error:
            self.errors.append(error)
            return None


def resolve(
    plan: Mapping[str, ShardingSpec | Sharder],
    outputs: Mapping[str, ShardingSpec],
    local: Sequence[str],
    module: nn.Module,
) -> Resolved:
    """The plan for this module; raises the first error, with the others as notes."""
    reading = _Reading(module, [*_wrong_values(plan, outputs, local)])
    raise_first(reading.errors)
    sharders = _sharders(reading, {p: v for p, v in plan.items() if isinstance(v, Sharder)})
    specs = {p: v for p, v in plan.items() if isinstance(v, ShardingSpec)}
    tensors = _above(_tensors(reading, specs), sharders)
    reading.errors += [*_conflicts(sharders, tensors)]
    tensors = _one_per_tensor(reading, tensors)
    _check_hooked(reading, outputs, sharders)
    _check_hooked(reading, dict.fromkeys(local), sharders)
    raise_first(reading.errors)
    return Resolved(tuple(sharders), tuple(tensors), outputs, local)


def module_entries(
    module: nn.Module, plan: Mapping[str, Value], *, warn: bool = True
) -> list[tuple[str, Value]]:
    """The modules that a plan names and what it says of them; a wildcard gives way."""
    reading = _Reading(module)
    entries = _found(reading, find_module, _expanded(plan, _module_paths(module), warn=warn))
    chosen = _strongest(reading, entries, lambda path: path)
    raise_first(reading.errors)
    return [(entry.path, entry.value) for entry in chosen]


def raise_first(errors: Sequence[Exception]) -> None:
    """Raise the first error, if there is one; the others become its notes."""
    if not errors:
        return
    for other in errors[1:MOST_TOLD]:
        errors[0].add_note(f"also: {type(other).__name__}: {other}")
    if len(errors) > MOST_TOLD:
        errors[0].add_note(f"and {len(errors) - MOST_TOLD} more")
    raise errors[0]


def _wrong_values(
    plan: Mapping[str, object], outputs: Mapping[str, object], local: Sequence[object]
) -> Iterator[Exception]:
    for path, value in plan.items():
        if not isinstance(value, ShardingSpec | Sharder):
            yield TypeError(
                "Only `ShardingSpec` and `Sharder` are supported to shard, "
                f"{quoted(path)} has {type(value).__name__}"
            )
        elif path == "":
            yield KeyError(
                "path must not be empty for custom sharder! Nor for a spec: the module itself "
                "stays, name what is inside it"
            )
    for path, value in outputs.items():
        if not isinstance(value, ShardingSpec):
            yield TypeError(
                "Only `ShardingSpec` is supported as output_plan, "
                f"{quoted(path)} has {type(value).__name__}"
            )
    for given in (*plan, *outputs, *local):
        if not isinstance(given, str):
            yield TypeError(f"a path is a text such as fc1.weight, found {type(given).__name__}")


def _expanded(
    plan: Mapping[str, Value], names: Sequence[str], *, warn: bool = True
) -> list[Entry[Value]]:
    """One entry per path that a plan names; a wildcard that matches nothing is a warning."""
    entries = []
    for written, value in plan.items():
        found = matching(written, names) if is_pattern(written) else [written]
        if warn and not found:
            text = f"{quoted(written)} in the sharding plan matches nothing in the module"
            warnings.warn(text, UserWarning, stacklevel=7)  # where shard_module was called
        entries += [Entry(path, value, written) for path in found]
    return entries


def _strongest(
    reading: _Reading, entries: Iterable[Entry[Value]], same: Callable[[str], object]
) -> list[Entry[Value]]:
    """One entry for all paths that are the same; those written out come first and win."""
    chosen: dict[object, Entry[Value]] = {}
    for entry in sorted(entries, key=lambda entry: not entry.explicit):
        known = chosen.setdefault(same(entry.path), entry)
        if known.explicit == entry.explicit and known.value != entry.value:
            reading.errors.append(_differ(known, entry))
    return [*chosen.values()]


def _found(
    reading: _Reading,
    find: Callable[[nn.Module, str], object],
    entries: Iterable[Entry[Value]],
) -> list[Entry[Value]]:
    """The entries whose paths exist; the others are errors."""
    return [entry for entry in entries if reading.try_to(find, entry.path) is not None]


def _sharders(reading: _Reading, plan: Mapping[str, Sharder]) -> list[Entry[Sharder]]:
    paths = [path for path in _module_paths(reading.module) if path]
    entries = _found(reading, find_module, _expanded(plan, paths))
    return _strongest(reading, entries, lambda path: id(find_module(reading.module, path)))


def _tensors(reading: _Reading, plan: Mapping[str, ShardingSpec]) -> list[Entry[ShardingSpec]]:
    return _found(reading, find_slot, _expanded(plan, _tensor_paths(reading.module)))


def _module_paths(module: nn.Module) -> list[str]:
    return [path for path, _ in module.named_modules(remove_duplicate=False)]


def _tensor_paths(module: nn.Module) -> list[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def _above(
    tensors: Iterable[Entry[ShardingSpec]], sharders: Iterable[Entry[Sharder]]
) -> list[Entry[ShardingSpec]]:
    """The tensors without those that a wildcard matches inside of a Sharder's module."""
    named = [sharder.path for sharder in sharders if sharder.explicit]
    return [
        entry
        for entry in tensors
        if entry.explicit or not any(is_below(entry.path, path) for path in named)
    ]


def _conflicts(
    sharders: Sequence[Entry[Sharder]], tensors: Sequence[Entry[ShardingSpec]]
) -> Iterator[Exception]:
    """What lies below a module that a Sharder replaces."""
    others: list[Entry[Any]] = [*sharders, *tensors]
    for sharder in sharders:
        for other in others:
            if other is not sharder and is_below(other.path, sharder.path):
                yield RuntimeError(
                    f"{other} should not conflict with the submodule tree of the Sharder of "
                    f"{sharder}, which replaces all of it: remove one of the two"
                )


def _check_hooked(
    reading: _Reading, plan: Mapping[str, object], sharders: Iterable[Entry[Sharder]]
) -> None:
    """Modules whose outputs are changed exist, unless a Sharder has yet to make them."""
    made = [sharder.path for sharder in sharders]
    now = {
        path: value
        for path, value in plan.items()
        if not any(path != at and is_below(path, at) for at in made)
    }
    entries = _expanded(now, _module_paths(reading.module))
    _strongest(reading, _found(reading, find_module, entries), lambda path: path)


def _one_per_tensor(
    reading: _Reading, entries: Sequence[Entry[ShardingSpec]]
) -> list[Entry[ShardingSpec]]:
    """One entry per tensor, however many names it has; they must say the same."""
    tensors = {entry.path: find_slot(reading.module, entry.path).tensor for entry in entries}
    chosen = _strongest(reading, entries, lambda path: id(tensors[path]))
    for entry in chosen:
        tensor = tensors[entry.path]
        if isinstance(tensor, ShardedTensor):
            reading.errors.append(
                ValueError(
                    f"{entry} is sharded already, by {tensor.sharding_spec()}: change that with "
                    "its method reshard"
                )
            )
    return chosen


def _differ(one: Entry[Value], other: Entry[Value]) -> Exception:
    if one.path == other.path:
        return ValueError(
            f"{quoted(one.written)} and {quoted(other.written)} both match {quoted(one.path)} and "
            f"give it {one.value} and {other.value}: write that path out"
        )
    return ValueError(
        f"{one} and {other} are tied, they are the same object, and are given {one.value} and "
        f"{other.value}: give both the same"
    )
