"""Forward hooks that change the sharded tensors in a module's output.

Sharded tensors are found inside tuples, lists, dicts and dataclasses, and replaced in copies of
these. All other values are passed on, and nothing that the module itself holds is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.planning.adjoint import unreduced
from reshard.sharded.content import map_nested
from reshard.sharded.specs import LayoutShardingSpec, ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.text import quoted

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
    # A new tensor, because the output may be the module's own.
    change = partial(ShardedTensor.resharded, resharding_spec=resharding_spec)
    module.register_forward_hook(OutputHook(change))
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
        return map_sharded(output, self.change)


def local_shard(tensor: ShardedTensor, squeeze: Squeeze = "auto") -> torch.Tensor:
    """This rank's shard of a tensor, as a plain tensor."""
    layout = tensor.cut
    if layout.reduce is not None:
        # A rank's addend of a pending sum is not the module's output.
        tensor = tensor.resharded(LayoutShardingSpec(unreduced(layout), str(tensor.device)))
    local, dim = tensor.local_tensor(), getattr(tensor.sharding_spec(), "dim", None)
    sizes = [shard.shard_sizes for shard in tensor.metadata().shards_metadata]
    if not isinstance(dim, int):  # the dim along which it is sharded, if that is only one
        whole = enumerate(tensor.shape)
        dims = [at for at, length in whole if any(one[at] != length for one in sizes)]
        dim = dims[0] if len(dims) == 1 else None
    if dim is None or squeeze is False:
        return local
    # The metadata is the same on all ranks, and so is what "auto" does.
    is_kept = squeeze == "auto" and any(one[dim] != 1 for one in sizes)
    return local if is_kept else local.squeeze(dim)


def map_sharded(value: Any, change: Change) -> Any:
    """A copy of a value with every sharded tensor changed, once each; itself if it has none."""
    done: dict[int, torch.Tensor] = {}

    def change_once(tensor: ShardedTensor) -> torch.Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = change(tensor)
        return done[id(tensor)]

    return map_nested(change_once, value, ShardedTensor)
