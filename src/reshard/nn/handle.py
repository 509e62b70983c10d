"""How a sharded module becomes what it was."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.nn.paths import Slot
from reshard.sharded.tensor import ShardedTensor

__all__ = ["Replaced", "ShardHandle", "Snapshot", "Swapped"]


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """All attributes of some modules, without copies of tensors."""

    kept: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    """Dicts of the modules, and what was in them."""

    @classmethod
    def of(cls, root: nn.Module) -> Snapshot:
        """The attributes of a module and of all inside it, as they are now."""
        tables = [table for module in root.modules() for table in _tables(module)]
        return cls(tuple((table, dict(table)) for table in tables))

    def restore(self) -> None:
        """Make the modules what they were; the dicts stay the same, hook handles point to them."""
        for table, content in self.kept:
            table.clear()
            table.update(content)


@dataclass(frozen=True, eq=False, slots=True)
class Replaced:
    """A tensor that was sharded, and every place that held it."""

    path: str
    slots: tuple[Slot, ...]
    original: weakref.ref[torch.Tensor]
    """Weak: a handle must not keep the memory that sharding has freed."""

    def gathered(self) -> torch.Tensor:
        """The whole tensor with the values that it has now; all ranks of the group call this."""
        now = self.slots[0].tensor.detach()
        return now.full_tensor() if isinstance(now, ShardedTensor) else now

    def put_back(self, whole: torch.Tensor) -> None:
        """The original object, if anybody still has it, else one like it, with these values."""
        now = self.slots[0]
        original, requires_grad = self.original(), now.tensor.requires_grad
        if original is None:
            original = nn.Parameter(whole, False) if now.is_parameter else whole
        elif (original.dtype, original.device) == (whole.dtype, whole.device):
            with torch.no_grad():
                original.copy_(whole)
        else:
            original.data = whole
        original.grad = None  # of older values
        original.requires_grad_(requires_grad)
        for slot in self.slots:
            slot.put(original)


@dataclass(frozen=True, eq=False, slots=True)
class Swapped:
    """A module that a Sharder was given, the one it gave, and where that stands."""

    old: nn.Module
    new: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    before: Snapshot
    """Of the old module: a Sharder may have changed it in place."""

    def put_back(self) -> None:
        """The old module as it was, in training or not as the new one is."""
        training = self.new.training
        self.before.restore()
        if self.old.training != training:
            self.old.train(training)
        for parent, name in self.places:
            parent._modules[name] = self.old


class ShardHandle:
    """Undoes ``shard_module``.

    handle = shard_module(model, plan)
    ...
    handle.remove()

    It keeps the modules that Sharders replaced; parameters that were sharded it does not keep.
    """

    def __init__(
        self,
        replaced: Sequence[Replaced] = (),
        swapped: Sequence[Swapped] = (),
        hooks: Sequence[RemovableHandle] = (),
    ) -> None:
        self._replaced = list(replaced)
        self._swapped = list(swapped)
        self._hooks = list(hooks)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The paths of the tensors that are sharded because of it."""
        return tuple(replaced.path for replaced in self._replaced)

    def remove(self) -> None:
        """Make the module what it was, on all ranks that sharded it; a second time does nothing.

        Parameters and buffers are whole again, with the values they have now and without
        gradients. Modules that Sharders replaced come back as they were before.
        """
        whole = [replaced.gathered() for replaced in self._replaced]
        for replaced, tensor in zip(self._replaced, whole, strict=True):
            replaced.put_back(tensor)
        for swapped in reversed(self._swapped):
            swapped.put_back()
        for hook in self._hooks:
            hook.remove()
        for done in (self._replaced, self._swapped, self._hooks):
            done.clear()

    def __repr__(self) -> str:
        names = ", ".join(self.sharded)
        swaps = f", {len(self._swapped)} modules swapped" if self._swapped else ""
        return f"ShardHandle({names or 'nothing'}{swaps})"


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    own = module.__dict__
    return [own, *(value for value in own.values() if isinstance(value, dict))]
