"""Forward hooks that change the sharded tensors in a module's output.

Sharded tensors are found inside tuples, lists, dicts and dataclasses, and replaced in copies of
these. All other values are passed on, and nothing that the module itself holds is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from operator import setitem
from typing import Any, Literal

import torch
from torch import nn

from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.planning.adjoint import unreduced
from reshard.sharded.specs import LayoutShardingSpec, ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.text import quoted

__all__ = [
    "Change", "OutputHook", "collect_local_shard", "local_shard", "map_sharded",
    "remove_output_hooks", "reshard_output", "resharding_to",
]  # fmt: skip

Squeeze = Literal["auto"] | bool
Change = Callable[[ShardedTensor], torch.Tensor]


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Reshard the sharded tensors in a module's output to a spec; returns the module.

    reshard_output(model.fc1, ChunkShardingSpec(1, placements))

    ``remove_output_hooks`` undoes it.
    """
    if not isinstance(resharding_spec, ShardingSpec):
        raise ArgumentTypeError(
            f"reshard_output of {type(module).__name__} takes a ShardingSpec, found "
            f"{type(resharding_spec).__name__}"
        )
    module.register_forward_hook(OutputHook(resharding_to(resharding_spec)))
    return module


def collect_local_shard(module: nn.Module, squeeze: Squeeze = "auto") -> nn.Module:
    """Replace sharded tensors in a module's output by this rank's plain tensors.

    If the sharded dim has size 1 in the shard, it is dropped: with "auto" only if all ranks drop
    it, with True wherever this rank's shard has size 1, with False never. ``[4, 16]`` sharded into
    4 rows becomes ``[16]``. A pending sum over ranks is reduced first.

    ``remove_output_hooks`` undoes it.
    """
    if squeeze not in ("auto", True, False):
        raise ArgumentError(f'squeeze is "auto", True or False, found {quoted(squeeze)}')
    module.register_forward_hook(OutputHook(partial(local_shard, squeeze=squeeze)))
    return module


def remove_output_hooks(module: nn.Module) -> int:
    """Undo ``reshard_output`` and ``collect_local_shard``; returns the number of hooks removed."""
    hooks = [key for key, hook in module._forward_hooks.items() if isinstance(hook, OutputHook)]
    for key in hooks:
        del module._forward_hooks[key]
    return len(hooks)


@dataclass(frozen=True)
class OutputHook:
    """A forward hook that changes sharded tensors; a class, so that it can be found and pickled."""

    change: Change

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """The new output."""
        return map_sharded(output, self.change)


def resharding_to(spec: ShardingSpec) -> Change:
    """Reshards a tensor to a spec; gives a new one, because it may be the module's own."""
    return partial(ShardedTensor.resharded, resharding_spec=spec)


def local_shard(tensor: ShardedTensor, squeeze: Squeeze = "auto") -> torch.Tensor:
    """This rank's shard of a tensor, as a plain tensor."""
    layout = tensor.cut
    if layout.reduce is not None:
        # A rank's addend of a pending sum is not the module's output.
        tensor = tensor.resharded(LayoutShardingSpec(unreduced(layout), str(tensor.device)))
    local = tensor.local_tensor()
    dim = None if squeeze is False else _sharded_dim(tensor)
    shards = tensor.metadata().shards_metadata
    if dim is None or (squeeze == "auto" and any(one.shard_sizes[dim] != 1 for one in shards)):
        return local
    return local.squeeze(dim)


def map_sharded(value: Any, change: Change) -> Any:
    """A copy of a value with every sharded tensor changed, once each; itself if it has none.

    >>> map_sharded((1, [torch.ones(2)], {"a": None}), lambda tensor: tensor)
    (1, [tensor([1., 1.])], {'a': None})
    """
    return _Walk(change).walk(value)


@dataclass
class _Walk:
    """A traversal of one output; a tensor that occurs twice is changed once."""

    change: Change
    done: dict[int, torch.Tensor] = field(default_factory=dict)

    def walk(self, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if id(value) not in self.done:
                self.done[id(value)] = self.change(value)
            return self.done[id(value)]
        if isinstance(value, torch.Tensor | str | bytes):
            return value
        if isinstance(value, tuple):
            items = [self.walk(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return getattr(type(value), "_make", type(value))(items)
        if isinstance(value, list):
            return self._assigned(value, enumerate(value), setitem)
        # Before dataclasses: the outputs of transformers are both, and keep the two consistent.
        if isinstance(value, Mapping):
            return self._assigned(value, value.items(), setitem)
        if is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in fields(value) if hasattr(value, one.name)]
            # A frozen one as well.
            pairs = [(name, getattr(value, name)) for name in names]
            return self._assigned(value, pairs, object.__setattr__)
        return value

    def _assigned(
        self, value: Any, items: Iterable[tuple[Any, Any]], assign: Callable[[Any, Any, Any], None]
    ) -> Any:
        """A copy to which the changed items are assigned; the value itself if there are none."""
        walked = [(key, item, self.walk(item)) for key, item in items]
        if all(new is old for _, old, new in walked):
            return value
        copied = copy.copy(value)
        for key, old, new in walked:
            if new is not old:
                assign(copied, key, new)
        return copied


def _sharded_dim(tensor: ShardedTensor) -> int | None:
    """The dim along which a tensor is sharded, if it is only one; the same on all ranks."""
    dim = getattr(tensor.sharding_spec(), "dim", None)
    if isinstance(dim, int):
        return dim % tensor.dim()
    whole = tuple(tensor.size())
    shards = [shard.shard_sizes for shard in tensor.metadata().shards_metadata]
    dims = [at for at, size in enumerate(whole) if any(shard[at] != size for shard in shards)]
    return dims[0] if len(dims) == 1 else None
