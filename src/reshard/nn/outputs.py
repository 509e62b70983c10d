"""What becomes of the sharded tensors in a module's output?

They are found inside tuples, lists, dicts and dataclasses, and replaced in copies of these.
Everything else is passed on as it is, and nothing that the module itself holds is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.planning.adjoint import unreduced
from reshard.sharded.by_layout import LayoutShardingSpec
from reshard.sharded.spec import ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.text import quoted

__all__ = [
    "LocalTensor",
    "OutputHook",
    "Resharded",
    "Squeeze",
    "change_output",
    "collect_local_shard",
    "map_sharded",
    "remove_output_hooks",
    "reshard_output",
]

Squeeze = Literal["auto"] | bool
Change = Callable[[ShardedTensor], torch.Tensor]


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Bring the sharded tensors in a module's output to a spec; the same module is returned.

    reshard_output(model.fc1, ChunkShardingSpec(1, placements))

    ``remove_output_hooks`` undoes it.
    """
    if not isinstance(resharding_spec, ShardingSpec):
        raise TypeError(
            f"reshard_output of {type(module).__name__} takes a ShardingSpec, found "
            f"{type(resharding_spec).__name__}"
        )
    change_output(module, Resharded(resharding_spec))
    return module


def collect_local_shard(module: nn.Module, squeeze: Squeeze = "auto") -> nn.Module:
    """Give this rank's plain tensor where a module's output is sharded.

    A dim of size 1 that is left of the sharded dim is dropped: with "auto" only where all ranks
    drop it, with True wherever this rank's shard has size 1, with False never. ``[4, 16]`` cut in
    4 rows gives ``[16]``. A sum over ranks that is still pending is done first.

    ``remove_output_hooks`` undoes it.
    """
    if squeeze not in ("auto", True, False):
        raise ValueError(f'squeeze is "auto", True or False, found {quoted(squeeze)}')
    change_output(module, LocalTensor(squeeze))
    return module


def remove_output_hooks(module: nn.Module) -> int:
    """Undo ``reshard_output`` and ``collect_local_shard``, and say how many there were."""
    hooks = [key for key, hook in module._forward_hooks.items() if isinstance(hook, OutputHook)]
    for key in hooks:
        del module._forward_hooks[key]
    return len(hooks)


def change_output(module: nn.Module, change: Change) -> RemovableHandle:
    """Do something with every sharded tensor in a module's output, after what is done already."""
    return module.register_forward_hook(OutputHook(change))


@dataclass(frozen=True)
class OutputHook:
    """Changes the sharded tensors in an output; a class, so that it is known again and pickles."""

    change: Change

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """What a forward hook does: the output to use instead."""
        return map_sharded(output, self.change)


@dataclass(frozen=True)
class Resharded:
    """A tensor cut by a spec."""

    spec: ShardingSpec

    def __call__(self, tensor: ShardedTensor) -> torch.Tensor:
        """A new tensor; the module's own may be the one that was given."""
        return tensor.resharded(self.spec)


@dataclass(frozen=True)
class LocalTensor:
    """A rank's plain tensor."""

    squeeze: Squeeze = "auto"

    def __call__(self, tensor: ShardedTensor) -> torch.Tensor:
        """This rank's shard."""
        tensor = _summed(tensor)
        dim = None if self.squeeze is False else _cut_dim(tensor)
        local = tensor.local_tensor()
        if dim is None or (self.squeeze == "auto" and not _is_one_each(tensor, dim)):
            return local
        return local.squeeze(dim)


def map_sharded(value: Any, change: Change) -> Any:
    """A value in which every sharded tensor is changed, once each; itself if it has none.

    >>> map_sharded((1, [torch.ones(2)], {"a": None}), lambda tensor: tensor)
    (1, [tensor([1., 1.])], {'a': None})
    """
    return _Walk(change).walk(value)


@dataclass
class _Walk:
    """One way through an output, on which a tensor that comes twice is changed once."""

    change: Change
    done: dict[int, torch.Tensor] = field(default_factory=dict)

    def walk(self, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if id(value) not in self.done:
                self.done[id(value)] = self.change(value)
            return self.done[id(value)]
        if isinstance(value, torch.Tensor | str | bytes):
            return value
        if isinstance(value, tuple | list):
            return self._sequence(value)
        # Before dataclasses: the outputs of transformers are both, and keep the two in step.
        if isinstance(value, Mapping):
            return self._mapping(value)
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return value

    def _sequence(self, value: Any) -> Any:
        items = [self.walk(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            copied = copy.copy(value)
            copied[:] = items
            return copied
        make = getattr(type(value), "_make", type(value))
        return make(items)

    def _mapping(self, value: Any) -> Any:
        changed = self._changed(value.items())
        if not changed:
            return value
        copied = copy.copy(value)
        for key, item in changed.items():
            copied[key] = item
        return copied

    def _dataclass(self, value: Any) -> Any:
        names = [one.name for one in fields(value) if hasattr(value, one.name)]
        changed = self._changed((name, getattr(value, name)) for name in names)
        if not changed:
            return value
        copied = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(copied, name, item)  # a frozen one as well
        return copied

    def _changed(self, items: Any) -> dict[Any, Any]:
        walked = ((key, item, self.walk(item)) for key, item in items)
        return {key: new for key, old, new in walked if new is not old}


def _summed(tensor: ShardedTensor) -> ShardedTensor:
    """The tensor without a pending sum: a rank's addend is not the module's output."""
    cut = tensor.cut
    if cut.reduce is None:
        return tensor
    return tensor.resharded(LayoutShardingSpec(unreduced(cut), str(tensor.device)))


def _cut_dim(tensor: ShardedTensor) -> int | None:
    """The dim along which a tensor is cut, if it is one; from what all ranks know."""
    dim = getattr(tensor.sharding_spec(), "dim", None)
    if isinstance(dim, int):
        return dim % tensor.dim()
    whole = tuple(tensor.size())
    shards = [shard.shard_sizes for shard in tensor.metadata().shards_metadata]
    cut = [at for at, size in enumerate(whole) if any(shard[at] != size for shard in shards)]
    return cut[0] if len(cut) == 1 else None


def _is_one_each(tensor: ShardedTensor, dim: int) -> bool:
    """Whether there are as many shards as elements in a dim, so that every rank has one."""
    shards = tensor.metadata().shards_metadata
    return all(shard.shard_sizes[dim] == 1 for shard in shards)
