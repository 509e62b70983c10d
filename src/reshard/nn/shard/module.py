"""Shard the tensors of a module by a plan: all of it or nothing.

1. every rank resolves the plan, and all ranks agree on it;
2. Sharders create the modules that replace others;
3. all tensors are sharded together, with one comparison between ranks;
4. the results replace the tensors, and output hooks are registered.

If a step fails, the module is restored.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.errors import ArgumentTypeError, StateError
from reshard.nn.shard.handle import ReplacedModule, ReplacedTensor, ShardHandle, Snapshot
from reshard.nn.shard.outputs import Change, LocalTensor, OutputHook, ReshardedTensor
from reshard.nn.shard.paths import find_module, find_slot, holders, parents
from reshard.nn.shard.plan import ShardingPlan
from reshard.nn.shard.resolve import (
    Entry,
    Resolved,
    Sharder,
    resolve_modules,
    warn_unmatched,
)
from reshard.sharded.api import digest, shard_tensors
from reshard.sharded.specs.base import ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.agreement import Agreement

__all__ = ["shard_module", "shard_parameter"]


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: Any = None,
) -> ShardHandle:
    """Shard the tensors that a plan names, swap modules, and hook outputs.

        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        handle = shard_module(model, ShardingPlan({"layers.{i}.fc1.weight": rows}))
        model.layers[0].fc1.weight          # a Parameter, and a ShardedTensor
        handle.remove()                     # whole again

    All ranks of the group call this. The values are those of ``src_rank``. Tied parameters stay
    tied, frozen ones frozen, buffers buffers. Create the optimizer afterwards: the parameters are
    new objects.
    """
    agreement = Agreement(process_group, "shard_module")
    resolved = _resolve_on_all_ranks(module, plan, agreement)
    warn_unmatched(resolved.unmatched, stacklevel=2)
    before = Snapshot.of(module)
    try:
        modules = _swap_on_all_ranks(module, resolved, agreement)
        tensors = _shard(module, resolved.tensors, src_rank, process_group)
        hooks = _hook_outputs(module, resolved)
    except BaseException:
        before.restore()
        raise
    return ShardHandle(tensors, modules, hooks)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Any = None,
) -> ShardHandle:
    """Shard one parameter or buffer of a module, under all names that it has inside the module.

    shard_parameter(model.fc1, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
    """
    plan = ShardingPlan({param_name: sharding_spec})
    return shard_module(module, plan, src_rank, process_group)


def _resolve_on_all_ranks(module: nn.Module, plan: ShardingPlan, agreement: Agreement) -> Resolved:
    """The plan for this module, if it is correct and the same on all ranks."""
    resolved: list[Resolved] = []

    def step() -> None:
        _check_type(module, nn.Module, "module")
        _check_type(plan, ShardingPlan, "plan")
        resolved.append(plan.resolve(module))

    agreement.run(step)
    # Checksums: a model may have many paths, and a group many ranks.
    agreement.check_equal(
        {
            f"{kind} in its plan": f"{len(paths)} paths with checksum {digest(repr(paths)):x}"
            for kind, paths in resolved[0].paths().items()
        }
    )
    return resolved[0]


def _check_type(value: object, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} should be a {kind.__name__}, found {type(value).__name__}")


def _swap_on_all_ranks(
    module: nn.Module, resolved: Resolved, agreement: Agreement
) -> list[ReplacedModule]:
    """Let Sharders replace modules; if one fails on a rank, raise on all ranks."""
    if not resolved.sharders:
        return []
    planned = [find_slot(module, entry.path).tensor for entry in resolved.tensors]
    swapped: list[ReplacedModule] = []

    def step() -> None:
        swapped.extend(_swap(module, entry) for entry in resolved.sharders)
        for entry, tensor in zip(resolved.tensors, planned, strict=True):
            if find_slot(module, entry.path).tensor is not tensor:
                raise StateError(
                    f"{entry} should not conflict with a Sharder, and one has replaced it: leave "
                    "it to the Sharder or to the plan"
                )
        _hooked_modules(module, resolved)

    agreement.run(step)
    return swapped


def _swap(root: nn.Module, entry: Entry[Sharder]) -> ReplacedModule:
    old = find_module(root, entry.path)
    before, places = Snapshot.of(old), parents(root, old)
    new = entry.value.shard(old)
    if not isinstance(new, nn.Module):
        raise ArgumentTypeError(
            f"{type(entry.value).__name__}.shard of module {entry} ({type(old).__name__}) should "
            f"return a Module, found {type(new).__name__}"
        )
    for parent, name in places:
        parent._modules[name] = new
    return ReplacedModule(old, new, places, before)


def _shard(
    root: nn.Module, entries: Sequence[Entry[ShardingSpec]], src_rank: int, group: Any
) -> list[ReplacedTensor]:
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
        replaced.append(ReplacedTensor(path, slots[id(tensor)], weakref.ref(tensor)))
    return replaced


def _sharded(
    tensors: Mapping[str, torch.Tensor],
    entries: Sequence[Entry[ShardingSpec]],
    src_rank: int,
    group: Any,
) -> dict[str, ShardedTensor]:
    """All tensors, sharded together, except those whose spec overrides ``shard``."""
    specs = {entry.path: entry.value for entry in entries}
    own = {path for path, spec in specs.items() if type(spec).shard is not ShardingSpec.shard}
    together = {path: tensor.detach() for path, tensor in tensors.items() if path not in own}
    sharded = shard_tensors(together, specs, src_rank, group, "fingerprint") if together else {}
    for path in sorted(own):
        sharded[path] = specs[path].shard(tensors[path].detach(), src_rank, group)
    return sharded


def _like(old: torch.Tensor, new: ShardedTensor) -> torch.Tensor:
    """A sharded tensor as a parameter or a buffer, as the original was."""
    if not isinstance(old, nn.Parameter):
        return new.requires_grad_(old.requires_grad)
    parameter = nn.Parameter(new, old.requires_grad)
    for name, value in vars(old).items():
        # Attributes that models and optimizers set on parameters, such as one against weight decay.
        if name not in vars(parameter):
            setattr(parameter, name, value)
    return parameter


def _hook_outputs(root: nn.Module, resolved: Resolved) -> list[RemovableHandle]:
    """Register the output hooks: first outputs are resharded, then they become local."""
    outputs, local = _hooked_modules(root, resolved)
    changes: list[tuple[str, Change]] = [(path, ReshardedTensor(spec)) for path, spec in outputs]
    changes += [(path, LocalTensor()) for path, _ in local]
    return [
        find_module(root, path).register_forward_hook(OutputHook(change))
        for path, change in changes
    ]


def _hooked_modules(
    root: nn.Module, resolved: Resolved
) -> tuple[list[tuple[str, ShardingSpec]], list[tuple[str, None]]]:
    """The modules whose outputs are resharded and become local, also those made by Sharders."""
    local = resolve_modules(root, dict.fromkeys(resolved.local))
    return resolve_modules(root, resolved.outputs), local
