"""Where in a module is what a path names, and who else holds the same?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from reshard.text import quoted

__all__ = [
    "Slot",
    "find_module",
    "find_slot",
    "holders",
    "is_below",
    "is_pattern",
    "matching",
    "parents",
    "swap_module",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """A name under which a module holds a tensor, as a parameter or as a buffer.

    >>> slot = find_slot(nn.Sequential(nn.Linear(2, 3)), "0.bias")
    >>> slot.name, tuple(slot.tensor.shape), slot.is_parameter
    ('bias', (3,), True)
    """

    module: nn.Module
    name: str

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter; if not, it is a buffer."""
        return self.name in self.module._parameters

    @property
    def tensor(self) -> torch.Tensor:
        """What it holds now."""
        tensor: torch.Tensor = self._table[self.name]
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Hold this one instead, at the same place in the order of names."""
        self._table[self.name] = tensor

    @property
    def _table(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


def find_module(root: nn.Module, path: str) -> nn.Module:
    """The module that a path names; "" is the root.

    >>> find_module(nn.Sequential(nn.ReLU(), nn.Tanh()), "1")
    Tanh()
    """
    module, parts = root, path.split(".") if path else []
    for depth, part in enumerate(parts):
        child = _child(module, part)
        if child is None:
            raise _missing(path, ".".join(parts[:depth]), module, part)
        module = child
    return module


def find_slot(root: nn.Module, path: str) -> Slot:
    """The parameter or buffer that a path names."""
    above, _, name = path.rpartition(".")
    try:
        module = find_module(root, above)
    except AttributeError as error:
        raise AttributeError(f"{quoted(path)} names no parameter: {error}") from None
    for table in (module._parameters, module._buffers):
        if table.get(name) is not None:
            return Slot(module, name)
    if not hasattr(module, name):
        raise _missing(path, above, module, name)
    found = getattr(module, name)
    kind = "a plain Tensor" if isinstance(found, torch.Tensor) else type(found).__name__
    raise ValueError(
        f"Expected {type(module).__name__}.{name} to be a Tensor, but found {kind}: {quoted(path)} "
        "should be a parameter or a buffer"
    )


def holders(root: nn.Module) -> dict[int, tuple[Slot, ...]]:
    """All slots by the id of what they hold: a tied parameter has several.

    >>> pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> pair[1].weight = pair[0].weight
    >>> [len(slots) for slots in holders(pair).values()]
    [2, 1, 1]
    """
    found: dict[int, list[Slot]] = {}
    for module in root.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(Slot(module, name))
    return {key: tuple(slots) for key, slots in found.items()}


def parents(root: nn.Module, module: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Every module and name under which this very module is a child."""
    return tuple(
        (parent, name)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is module
    )


def swap_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put one module in the place of another, under all names that it has.

    >>> model = nn.Sequential(nn.ReLU(), nn.Tanh())
    >>> swap_module(model, model[0], nn.Identity())
    >>> model
    Sequential(
      (0): Identity()
      (1): Tanh()
    )
    """
    for parent, name in parents(root, old):
        parent._modules[name] = new


def is_below(path: str, above: str) -> bool:
    """Whether a path is another one or lies below it, compared by whole parts.

    >>> is_below("fc1.weight", "fc1"), is_below("fc10.weight", "fc1")
    (True, False)
    """
    return path == above or path.startswith(f"{above}.") or not above


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards."""
    return any(mark in path for mark in "*?[")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern names: ``*``, ``?`` and ``[0-9]`` inside one part.

    >>> matching("layers.*.weight", ["layers.0.weight", "layers.0.norm.weight", "layers.1.weight"])
    ['layers.0.weight', 'layers.1.weight']
    """
    wanted = pattern.split(".")
    return [path for path in paths if _matches(wanted, path.split("."))]


def _matches(wanted: list[str], parts: list[str]) -> bool:
    if len(wanted) != len(parts):
        return False
    return all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True))


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """A child, or a module under another name, as properties of models give it."""
    found = module._modules.get(name)
    if found is None:
        found = getattr(module, name, None)
    return found if isinstance(found, nn.Module) else None


def _missing(path: str, above: str, module: nn.Module, name: str) -> AttributeError:
    where = f"module {quoted(above)} ({type(module).__name__})" if above else type(module).__name__
    names = [*module._modules, *module._parameters, *module._buffers]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f", the nearest is {quoted(near[0])}" if near else ""
    found = getattr(module, name, None)
    kind = "" if found is None else f" that is a module, found {type(found).__name__}"
    text = f"{where} has no attribute {quoted(name)}{kind}"
    return AttributeError(f"{quoted(path)}: {text}{hint if not kind else ''}")
