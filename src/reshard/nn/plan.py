"""Sharding plans: which tensors and outputs of a module are sharded, and how.

For a module, a plan is resolved in four steps:

1. every value is a spec or a Sharder, and every path is a string;
2. patterns are replaced by the paths that they match; a path that is written out beats a pattern;
3. nothing is below a module that a Sharder replaces;
4. two names of one tied parameter have the same spec.

All errors are found before one is raised.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from reshard.errors import ArgumentError, ArgumentTypeError, PathError, ReshardError, StateError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.nn.paths import find_module, find_slot, is_below, is_pattern, matching
from reshard.rules import Rules
from reshard.sharded.specs import LayoutShardingSpec, ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.text import quoted

Value = TypeVar("Value")

MAX_ERRORS = 20
"""How many errors are reported at once; a typing error in a pattern can cause thousands."""


class Sharder(ABC):
    """Replaces a module by a sharded one, for what no spec can describe.

    class EmbeddingBags(Sharder):
        def shard(self, module):
            return ShardedEmbeddingBags(module)

    shard_module(model, ShardingPlan({"embeddings": EmbeddingBags()}))
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module to use instead; it may be the same one, changed in place."""


class EmptyPathError(PathError, KeyError):
    """A path of a plan is empty."""

    __str__ = Exception.__str__  # a KeyError would put quotes around the message


@dataclass(frozen=True, slots=True)
class Entry(Generic[Value]):
    """One path of a module, its value in the plan, and the path or pattern that it has there."""

    path: str
    value: Value
    key: str

    @property
    def is_explicit(self) -> bool:
        return not is_pattern(self.key)

    def __str__(self) -> str:
        by = "" if self.is_explicit else f" (matched by {quoted(self.key)})"
        return f"{quoted(self.path)}{by}"


@dataclass(frozen=True)
class Resolved:
    """A plan for one module, without errors."""

    sharders: Sequence[Entry[Sharder]]
    tensors: Sequence[Entry[ShardingSpec]]
    """Each tensor once, a tied one too."""
    outputs: Mapping[str, ShardingSpec]
    """As in the plan, with patterns: a Sharder may yet create the modules."""
    local: Sequence[str]
    unmatched: tuple[str, ...]


def resolve_modules(module: nn.Module, plan: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """The modules that a plan names, with their values; an explicit path beats a pattern."""
    resolver = _Resolver(module)
    entries = resolver.modules(plan)
    resolver.raise_first()
    return [(entry.path, entry.value) for entry in entries]


def warn_unmatched(patterns: Iterable[str]) -> None:
    """Warn the caller's caller of patterns that match nothing."""
    for pattern in patterns:
        text = f"{quoted(pattern)} in the sharding plan matches nothing in the module"
        warnings.warn(text, UserWarning, stacklevel=3)


class _Resolver:
    """Looks up the paths of a plan in a module, and collects errors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.errors: list[Exception] = []
        self.unmatched: dict[str, None] = {}

    def raise_first(self) -> None:
        """Raise the first error, if there is one; the others become its notes."""
        if not self.errors:
            return
        first, *others = self.errors
        for other in others[: MAX_ERRORS - 1]:
            first.add_note(f"also: {type(other).__name__}: {other}")
        if len(others) >= MAX_ERRORS:
            first.add_note(f"and {len(self.errors) - MAX_ERRORS} more")
        raise first

    def modules(self, plan: Mapping[str, Value], root: bool = True) -> list[Entry[Value]]:
        """One entry per module; patterns match the root too, unless it is left out."""
        paths = [path for path, _ in self._module.named_modules(remove_duplicate=False)]
        entries = self._expand(plan, paths if root else paths[1:], find_module)
        return self._one_each(entries, lambda path: find_module(self._module, path))

    def tensors(self, plan: Mapping[str, ShardingSpec]) -> list[Entry[ShardingSpec]]:
        """One entry per name of a parameter or buffer."""
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = self._module.named_buffers(remove_duplicate=False)
        return self._expand(plan, [name for name, _ in (*parameters, *buffers)], find_slot)

    def one_per_tensor(self, entries: Iterable[Entry[ShardingSpec]]) -> list[Entry[ShardingSpec]]:
        """One entry per tensor, which must not be sharded yet."""
        chosen = self._one_each(entries, self._tensor_at)
        for entry in chosen:
            tensor = self._tensor_at(entry.path)
            if isinstance(tensor, ShardedTensor):
                text = f"{entry} is sharded already, by {tensor.sharding_spec()}: change that with"
                self.errors.append(ArgumentError(f"{text} its method reshard"))
        return chosen

    def _tensor_at(self, path: str) -> torch.Tensor:
        return find_slot(self._module, path).tensor

    def _expand(
        self,
        plan: Mapping[str, Value],
        paths: Sequence[str],
        find: Callable[[nn.Module, str], object],
    ) -> list[Entry[Value]]:
        """One entry per path that a plan names and that exists in the module."""
        entries = []
        for key, value in plan.items():
            try:
                matched = matching(key, paths) if is_pattern(key) else [key]
                for path in matched:
                    find(self._module, path)
            except ReshardError as error:
                self.errors.append(error)
                continue
            if not matched:
                self.unmatched[key] = None
            entries += [Entry(path, value, key) for path in matched]
        return entries

    def _one_each(
        self, entries: Iterable[Entry[Value]], find: Callable[[str], object]
    ) -> list[Entry[Value]]:
        """One entry per object: an explicit one, if there is any.

        Of several explicit ones, or several by patterns, all must have the same value.
        """
        chosen: dict[int, Entry[Value]] = {}
        for entry in sorted(entries, key=lambda entry: not entry.is_explicit):
            known = chosen.setdefault(id(find(entry.path)), entry)
            if known.is_explicit == entry.is_explicit and known.value != entry.value:
                text = (
                    f"{quoted(known.key)} and {quoted(entry.key)} both match {quoted(known.path)} "
                    f"and give it {known.value} and {entry.value}: write that path out"
                    if known.path == entry.path
                    else f"{known} and {entry} are tied, they are the same object, and are given "
                    f"{known.value} and {entry.value}: give both the same"
                )
                self.errors.append(ArgumentError(text))
        return [*chosen.values()]


def _wrong_values(
    plan: Mapping[str, object], outputs: Mapping[str, object], local: Sequence[object]
) -> Iterator[Exception]:
    for values, kinds, what in (
        (plan, (ShardingSpec, Sharder), "`ShardingSpec` and `Sharder` are supported to shard"),
        (outputs, (ShardingSpec,), "`ShardingSpec` is supported as output_plan"),
    ):
        for path, value in values.items():
            if not isinstance(value, kinds):
                kind = type(value).__name__
                yield ArgumentTypeError(f"Only {what}, {quoted(path)} has {kind}")
    if "" in plan:
        yield EmptyPathError(
            "path must not be empty for custom sharder! Nor for a spec: the module itself stays, "
            "name what is inside it"
        )
    for key in (*plan, *outputs, *local):
        if not isinstance(key, str):
            kind = type(key).__name__
            yield ArgumentTypeError(f"a path is a string such as fc1.weight, found {kind}")


@dataclass(frozen=True)
class ShardingPlan:
    """How the tensors and the outputs of a module are sharded, by path.

        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ShardingPlan(
            {"embed.weight": rows, "layers.{i}.fc1.weight": rows, "tower": MySharder()},
            output_plan={"layers.{i}": rows},
            return_local_tensor=[""],
        )

    Patterns are those of rules files: ``{i}`` is one part of a path that is an integer, ``*`` any
    text. A path that is written out beats a pattern.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    """Parameters and buffers with a spec, modules with a Sharder."""
    output_plan: Mapping[str, ShardingSpec] | None = None
    """Modules whose sharded outputs are resharded to a spec; "" is the root."""
    return_local_tensor: Sequence[str] | None = None
    """Modules whose sharded outputs become this rank's plain tensors; "" is the root."""

    def __post_init__(self) -> None:
        # Copies: the caller may change its own dicts later.
        for name in ("plan", "output_plan"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, dict(value))
            elif value is not None:
                kind = type(value).__name__
                raise ArgumentTypeError(f"{name} is a dict with paths as keys, found {kind}")
        paths = self.return_local_tensor
        if isinstance(paths, str):
            raise ArgumentTypeError(
                f"return_local_tensor is a list of paths: write [{quoted(paths)}]"
            )
        if paths is not None:
            object.__setattr__(self, "return_local_tensor", tuple(paths))

    def validate(self, module: nn.Module) -> None:
        """Raise what is wrong with the plan for this module; change nothing.

        If several things are wrong, the first is raised and the others are its notes.
        """
        warn_unmatched(self.resolve(module).unmatched)

    def resolve(self, module: nn.Module) -> Resolved:
        """The plan with every pattern replaced by the paths that it matches in this module.

        Raises as `validate` does.
        """
        plan, outputs, local = self.plan, self.output_plan or {}, self.return_local_tensor or ()
        resolver = _Resolver(module)
        resolver.errors += _wrong_values(plan, outputs, local)
        resolver.raise_first()
        specs = {path: value for path, value in plan.items() if isinstance(value, ShardingSpec)}
        swapped = {path: value for path, value in plan.items() if isinstance(value, Sharder)}
        sharders, tensors = resolver.modules(swapped, root=False), resolver.tensors(specs)
        # A pattern does not reach below a Sharder that is written out.
        explicit = [sharder.path for sharder in sharders if sharder.is_explicit]
        tensors = [
            entry
            for entry in tensors
            if entry.is_explicit or not any(is_below(entry.path, path) for path in explicit)
        ]
        others: list[Entry[Any]] = [*sharders, *tensors]
        resolver.errors += (
            StateError(
                f"{other} should not conflict with the submodule tree of the Sharder of "
                f"{sharder}, which replaces all of it: remove one of the two"
            )
            for sharder in sharders
            for other in others
            if other is not sharder and is_below(other.path, sharder.path)
        )
        tensors = resolver.one_per_tensor(tensors)
        for hooked in (outputs, dict.fromkeys(local)):
            # Without paths below a Sharder, which may have yet to create them.
            outside = {
                path: value
                for path, value in hooked.items()
                if not any(path != one.path and is_below(path, one.path) for one in sharders)
            }
            resolver.modules(outside)
        resolver.raise_first()
        return Resolved(sharders, tensors, outputs, local, tuple(resolver.unmatched))

    @classmethod
    def from_rules(
        cls,
        rules: Rules,
        module: nn.Module,
        mesh: Mesh,
        device: str | torch.device = "cpu",
    ) -> ShardingPlan:
        """The plan that rules give for a module; tensors that they replicate stay as they are.

        rules = Rules.for_config(config.to_dict())
        shard_module(model, ShardingPlan.from_rules(rules, model, Mesh(tp=4)))
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        layouts = rules.fit(shapes).layouts(shapes, mesh)

        @cache  # a model has few different pairs
        def is_whole(layout: Layout, shape: tuple[int, ...]) -> bool:
            return all(
                layout.holds(rank) is not None and layout.local_shape(rank, shape) == shape
                for rank in layout.ranks
            )

        sharded = [name for name, layout in layouts.items() if not is_whole(layout, shapes[name])]
        return cls({name: LayoutShardingSpec(layouts[name], str(device)) for name in sharded})


class ShardingPlanner(ABC):
    """Builds the plan for a module.

        class Rows(ShardingPlanner):
            def build_plan(self, module):
                return ShardingPlan({name: self.rows for name, _ in module.named_parameters()})

    All ranks build the same plan; `shard_module` compares them.
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for this module."""
