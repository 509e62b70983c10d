"""The handle that undoes `shard_module`: what was replaced, and by what."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.nn.shard.paths import Slot
from reshard.sharded.tensor import ShardedTensor

__all__ = ["ReplacedModule", "ReplacedTensor", "ShardHandle", "Snapshot"]


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """All attributes of a module and its submodules; tensors are not copied."""

    tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    """Dicts of the modules, each with a copy of its content."""

    @classmethod
    def of(cls, root: nn.Module) -> Snapshot:
        """The attributes of a module and of all inside it, as they are now."""
        own = [vars(module) for module in root.modules()]
        inner = [value for one in own for value in one.values() if isinstance(value, dict)]
        return cls(tuple((table, dict(table)) for table in (*own, *inner)))

    def restore(self) -> None:
        """Restore the attributes; the dicts stay the same objects, hook handles point to them."""
        for table, content in self.tables:
            table.clear()
            table.update(content)


@dataclass(frozen=True, eq=False, slots=True)
class ReplacedTensor:
    """A tensor that was sharded, with every slot that held it."""

    path: str
    slots: tuple[Slot, ...]
    original: weakref.ref[torch.Tensor]
    """Weak: a handle must not keep the memory that sharding freed."""

    def gathered(self) -> torch.Tensor:
        """The whole tensor with its present values; all ranks of the group call this."""
        tensor = self.slots[0].tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor

    def put_back(self, whole: torch.Tensor) -> None:
        """Put these values into the original object, or into a new one if it was freed."""
        slot = self.slots[0]
        original, requires_grad = self.original(), slot.tensor.requires_grad
        if original is None:
            original = nn.Parameter(whole, False) if slot.is_parameter else whole
        elif (original.dtype, original.device) == (whole.dtype, whole.device):
            with torch.no_grad():
                original.copy_(whole)
        else:
            original.data = whole
        original.grad = None  # it belongs to older values
        original.requires_grad_(requires_grad)
        for slot in self.slots:
            slot.put(original)


@dataclass(frozen=True, eq=False, slots=True)
class ReplacedModule:
    """A module that a Sharder replaced, the new one, and its parents and names there."""

    old: nn.Module
    new: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    before: Snapshot
    """The old module's attributes: a Sharder may have changed it in place."""

    def put_back(self) -> None:
        """Restore the old module, in the training mode of the new one."""
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

    It holds the modules that Sharders replaced, but not the parameters that were sharded.
    """

    def __init__(
        self,
        tensors: Sequence[ReplacedTensor] = (),
        modules: Sequence[ReplacedModule] = (),
        hooks: Sequence[RemovableHandle] = (),
    ) -> None:
        self._tensors = list(tensors)
        self._modules = list(modules)
        self._hooks = list(hooks)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The paths of the tensors that were sharded."""
        return tuple(tensor.path for tensor in self._tensors)

    def remove(self) -> None:
        """Restore the module, on all ranks that sharded it; a second call does nothing.

        Parameters and buffers become whole, with their present values and without gradients.
        Modules that Sharders replaced come back as they were before.
        """
        wholes = [tensor.gathered() for tensor in self._tensors]
        for tensor, whole in zip(self._tensors, wholes, strict=True):
            tensor.put_back(whole)
        for module in reversed(self._modules):
            module.put_back()
        for hook in self._hooks:
            hook.remove()
        for done in (self._tensors, self._modules, self._hooks):
            done.clear()

    def __repr__(self) -> str:
        names = ", ".join(self.sharded)
        swaps = f", {len(self._modules)} modules swapped" if self._modules else ""
        return f"ShardHandle({names or 'nothing'}{swaps})"
