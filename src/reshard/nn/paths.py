"""Modules, parameters and buffers of a module, by path and by pattern.

Patterns are those of rules files (reshard.rules.language): ``{i}`` is one part of a path that is an
integer, ``*`` is any text, dots included.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reshard.errors import ArgumentError, PathError
from reshard.rules.language import Pattern
from reshard.text import quoted


@dataclass(frozen=True, slots=True)
class Slot:
    """A name under which a module holds a tensor, as a parameter or as a buffer."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._table[self.name]
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the tensor; the order of names stays."""
        self._table[self.name] = tensor

    @property
    def _table(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.module._parameters
        return parameters if self.name in parameters else self.module._buffers


def find_module(root: nn.Module, path: str) -> nn.Module:
    """The module that a path names; "" is the root."""
    module, parts = root, path.split(".") if path else []
    for depth, part in enumerate(parts):
        # Also a module that an attribute or a property of the module returns.
        child = module._modules.get(part)
        child = getattr(module, part, None) if child is None else child
        if not isinstance(child, nn.Module):
            raise _missing(path, ".".join(parts[:depth]), module, part)
        module = child
    return module


def find_slot(root: nn.Module, path: str) -> Slot:
    above, _, name = path.rpartition(".")
    try:
        module = find_module(root, above)
    except PathError as error:
        raise PathError(f"{quoted(path)} names no parameter: {error}") from None
    for table in (module._parameters, module._buffers):
        if table.get(name) is not None:
            return Slot(module, name)
    if not hasattr(module, name):
        raise _missing(path, above, module, name)
    value = getattr(module, name)
    kind = "a plain Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    raise ArgumentError(
        f"Expected {type(module).__name__}.{name} to be a Tensor, but found {kind}: {quoted(path)} "
        "should be a parameter or a buffer"
    )


def holders(root: nn.Module) -> dict[int, tuple[Slot, ...]]:
    """All slots by the id of their tensor; a tied parameter has several."""
    slots: dict[int, tuple[Slot, ...]] = {}
    for module in root.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                slots[id(tensor)] = (*slots.get(id(tensor), ()), Slot(module, name))
    return slots


def parents(root: nn.Module, module: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """The parents of a module, each with its name there."""
    return tuple(
        (parent, name)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is module
    )


def is_below(path: str, above: str) -> bool:
    """Whether a path is the same as another one or below it, compared by whole parts.

    >>> is_below("fc1.weight", "fc1"), is_below("fc10.weight", "fc1")
    (True, False)
    """
    return path == above or path.startswith(f"{above}.") or not above


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, also those that are not supported any more."""
    return any(mark in path for mark in "*{?[")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern of the rules' language matches.

    Patterns used to be shell patterns in which ``*`` stayed inside one part of a path. Those that
    would now mean something else raise, and the error names the new spelling.

    >>> matching("layers.{i}.weight", ["layers.0.weight", "layers.0.norm.weight"])
    ['layers.0.weight']
    """
    if "?" in pattern or "[" in pattern:
        raise ArgumentError(
            f"{quoted(pattern)} has ? or [...], which are not wildcards: write {{i}} for one part "
            "of a path that is an integer, * for any text, or several paths"
        )
    parsed = Pattern.parse(pattern)
    matched = [path for path in paths if parsed.match(path) is not None]
    same_depth = [path for path in matched if path.count(".") == pattern.count(".")]
    if "**" not in pattern and 0 < len(same_depth) < len(matched):
        deeper = next(path for path in matched if path not in same_depth)
        raise ArgumentError(
            f"{quoted(pattern)} matches {quoted(same_depth[0])} and, because * matches dots too, "
            f"also {quoted(deeper)}: write {{i}} for one part that is an integer, or ** for any "
            "depth"
        )
    return matched


def _missing(path: str, above: str, module: nn.Module, name: str) -> PathError:
    where = f"module {quoted(above)} ({type(module).__name__})" if above else type(module).__name__
    text = f"{quoted(path)}: {where} has no attribute {quoted(name)}"
    value = getattr(module, name, None)
    if value is not None:
        return PathError(f"{text} that is a module, found {type(value).__name__}")
    names = [*module._modules, *module._parameters, *module._buffers]
    near = difflib.get_close_matches(name, names, n=1)
    return PathError(f"{text}, the nearest is {quoted(near[0])}" if near else text)
