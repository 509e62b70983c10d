"""Shard the tensors of a module along a plan: all of it or nothing.

1. the plan is checked on every rank, and the ranks tell each other whether that went well;
2. Sharders make their modules, which take their places;
3. all tensors are sharded at once, with one comparison between ranks;
4. the results are put where the tensors were, and the hooks on outputs are set.

If a step fails, the module is what it was before.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.nn.agreeing import agree
from reshard.nn.handle import Replaced, ShardHandle, Snapshot, Swapped
from reshard.nn.outputs import LocalTensor, Resharded, change_output
from reshard.nn.paths import find_module, find_slot, holders, parents, swap_module
from reshard.nn.plan import ShardingPlan
from reshard.nn.resolving import Entry, Resolved, module_entries
from reshard.nn.sharder import Sharder
from reshard.sharded.sharding import shard_tensors
from reshard.sharded.spec import ShardingSpec
from reshard.sharded.tensor import ShardedTensor

__all__ = ["shard_module", "shard_parameter"]


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: Any = None,
) -> ShardHandle:
    """Shard the tensors that a plan names, swap modules, and set what happens to outputs.

        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        handle = shard_module(model, ShardingPlan({"layers.*.fc1.weight": rows}))
        model.layers[0].fc1.weight          # a Parameter, and a ShardedTensor
        handle.remove()                     # whole again

    All ranks of the group call this. The values are those of ``src_rank``. Tied parameters stay
    tied, frozen ones frozen, buffers buffers. An optimizer is made afterwards: the parameters are
    new ones.
    """
    resolved = _resolved_together(module, plan, process_group)
    before = Snapshot.of(module)
    try:
        swapped = _swap_together(module, resolved, process_group)
        replaced = _shard(module, resolved.tensors, src_rank, process_group)
        hooks = _hook_outputs(module, resolved)
    except BaseException:
        before.restore()
        raise
    return ShardHandle(replaced, swapped, hooks)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Any = None,
) -> ShardHandle:
    """Shard one parameter or buffer of a module, under all names that it has inside of it.

    shard_parameter(model.fc1, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
    """
    plan = ShardingPlan({param_name: sharding_spec})
    return shard_module(module, plan, src_rank, process_group)


def _resolved_together(module: nn.Module, plan: ShardingPlan, group: Any) -> Resolved:
    """The plan for this module, if it is right on all ranks."""
    try:
        _check_kind(module, nn.Module, "module")
        _check_kind(plan, ShardingPlan, "plan")
        resolved = plan.resolve(module)
    except Exception as error:
        agree(group, (), error)
        raise
    agree(group, resolved.paths())
    return resolved


def _check_kind(given: object, kind: type, name: str) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"{name} should be a {kind.__name__}, found {type(given).__name__}")


def _swap_together(module: nn.Module, resolved: Resolved, group: Any) -> list[Swapped]:
    """Let the Sharders make their modules, and go on if that went well on all ranks."""
    if not resolved.sharders:
        return []
    planned = [find_slot(module, entry.path).tensor for entry in resolved.tensors]
    try:
        swapped = [_swap(module, entry) for entry in resolved.sharders]
        for entry, tensor in zip(resolved.tensors, planned, strict=True):
            _check_same(module, entry, tensor)
        _check_hooked(module, resolved)
    except Exception as error:
        agree(group, (), error)
        raise
    agree(group, ())
    return swapped


def _swap(root: nn.Module, entry: Entry[Sharder]) -> Swapped:
    old = find_module(root, entry.path)
    before, places = Snapshot.of(old), parents(root, old)
    new = entry.value.shard(old)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"{type(entry.value).__name__}.shard of module {entry} ({type(old).__name__}) should "
            f"return a Module, found {type(new).__name__}"
        )
    swap_module(root, old, new)
    return Swapped(old, new, places, before)


def _check_same(root: nn.Module, entry: Entry[ShardingSpec], tensor: torch.Tensor) -> None:
    if find_slot(root, entry.path).tensor is not tensor:
        raise RuntimeError(
            f"{entry} should not conflict with a Sharder, and one has replaced it: leave it to "
            "the Sharder or to the plan"
        )


def _check_hooked(root: nn.Module, resolved: Resolved) -> None:
    """Modules that Sharders have made can be looked at only now."""
    module_entries(root, resolved.outputs)
    module_entries(root, dict.fromkeys(resolved.local))


def _shard(
    root: nn.Module, entries: Sequence[Entry[ShardingSpec]], src_rank: int, group: Any
) -> list[Replaced]:
    if not entries:
        return []
    tensors = {entry.path: find_slot(root, entry.path).tensor for entry in entries}
    sharded = _sharded(tensors, entries, src_rank, group)
    slots = holders(root)
    replaced = []
    for path, tensor in tensors.items():
        new = _like(tensor, sharded[path])
        for slot in slots[id(tensor)]:
            slot.put(new)
        replaced.append(Replaced(path, slots[id(tensor)], weakref.ref(tensor)))
    return replaced


def _sharded(
    tensors: Mapping[str, torch.Tensor],
    entries: Sequence[Entry[ShardingSpec]],
    src_rank: int,
    group: Any,
) -> dict[str, ShardedTensor]:
    """All tensors, cut together, apart from those whose spec has its own way to cut."""
    specs = {entry.path: entry.value for entry in entries}
    own = {path for path, spec in specs.items() if type(spec).shard is not ShardingSpec.shard}
    together = {path: tensor.detach() for path, tensor in tensors.items() if path not in own}
    sharded = shard_tensors(together, specs, src_rank, group, "fingerprint") if together else {}
    for path in sorted(own):
        sharded[path] = specs[path].shard(tensors[path].detach(), src_rank, group)
    return sharded


def _like(old: torch.Tensor, new: ShardedTensor) -> torch.Tensor:
    """A sharded tensor as a parameter or a buffer, whatever the whole one was."""
    if not isinstance(old, nn.Parameter):
        return new.requires_grad_(old.requires_grad)
    made = nn.Parameter(new, old.requires_grad)
    for name, value in vars(old).items():
        # Marks that models and optimizers put on parameters, such as one against weight decay.
        if name not in vars(made):
            setattr(made, name, value)
    return made


def _hook_outputs(root: nn.Module, resolved: Resolved) -> list[RemovableHandle]:
    """First outputs are resharded, then they become local."""
    hooks = [
        change_output(find_module(root, path), Resharded(spec))
        for path, spec in module_entries(root, resolved.outputs, warn=False)
    ]
    local = dict.fromkeys(resolved.local)
    hooks += [
        change_output(find_module(root, path), LocalTensor())
        for path, _ in module_entries(root, local, warn=False)
    ]
    return hooks
