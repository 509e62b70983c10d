"""Shard the tensors of a module by a plan, all of it or nothing; the handle undoes it.

1. every rank resolves the plan, and all ranks agree on it;
2. Sharders create the modules that replace others;
3. all tensors are sharded together, with one comparison between ranks;
4. the results replace the tensors, and output hooks are registered.

If a step fails, the module is restored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reshard.errors import ArgumentTypeError, StateError
from reshard.nn.outputs import Change, OutputHook, local_shard
from reshard.nn.paths import Slot, find_module, find_slot, holders, parents
from reshard.nn.plan import Entry, Resolved, Sharder, ShardingPlan, resolve_modules, warn_unmatched
from reshard.sharded.api import shard_tensors
from reshard.sharded.content import ContentTensor
from reshard.sharded.groups import digest
from reshard.sharded.specs import ShardingSpec
from reshard.sharded.tensor import ShardedTensor
from reshard.tensors.agreement import Agreement

Undo = Callable[[], None]


def _restoring(root: nn.Module) -> Undo:
    """A function that restores the present attributes of a module and of all modules inside it.

    Values of tensors are not restored. The dicts stay the same objects: handles of hooks have them.
    """
    own = [vars(module) for module in root.modules()]
    inner = [value for one in own for value in one.values() if isinstance(value, dict)]
    contents = [(table, dict(table)) for table in (*own, *inner)]

    def restore() -> None:
        for table, content in contents:
            table.clear()
            table.update(content)

    return restore


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
            original = _like(slot.tensor, whole)
        elif (original.dtype, original.device) == (whole.dtype, whole.device):
            with torch.no_grad():
                original.copy_(whole)
        else:
            original.data = whole
        original.grad = None  # it belongs to older values
        original.requires_grad_(requires_grad)
        for slot in self.slots:
            slot.put(original)


class ShardHandle:
    """Undoes ``shard_module``.

    handle = shard_module(model, plan)
    ...
    handle.remove()

    It holds the modules that Sharders replaced, but not the parameters that were sharded.
    """

    def __init__(
        self, tensors: list[ReplacedTensor], modules: list[Undo], hooks: list[RemovableHandle]
    ) -> None:
        self._tensors, self._modules, self._hooks = tensors, modules, hooks

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
        for put_back in reversed(self._modules):
            put_back()
        for hook in self._hooks:
            hook.remove()
        for done in (self._tensors, self._modules, self._hooks):
            done.clear()

    def __repr__(self) -> str:
        names = ", ".join(self.sharded)
        swaps = f", {len(self._modules)} modules swapped" if self._modules else ""
        return f"ShardHandle({names or 'nothing'}{swaps})"


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
    warn_unmatched(resolved.unmatched)
    restore = _restoring(module)
    try:
        modules = _swap_on_all_ranks(module, resolved, agreement)
        tensors = _shard(module, resolved.tensors, src_rank, process_group)
        hooks = [
            find_module(module, path).register_forward_hook(OutputHook(change))
            for path, change in _output_changes(module, resolved)
        ]
    except BaseException:
        restore()
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

    def step() -> dict[str, str]:
        for value, kind, name in ((module, nn.Module, "module"), (plan, ShardingPlan, "plan")):
            if not isinstance(value, kind):
                other = type(value).__name__
                raise ArgumentTypeError(f"{name} should be a {kind.__name__}, found {other}")
        own = plan.resolve(module)
        resolved.append(own)
        paths_by_kind = {
            "Sharders": [entry.path for entry in own.sharders],
            "tensors": [entry.path for entry in own.tensors],
            "outputs": list(own.outputs),
            "local outputs": list(own.local),
        }
        # Checksums: a model may have many paths, and a group many ranks.
        return {
            f"{kind} in its plan": f"{len(paths)} paths with checksum {digest(repr(paths)):x}"
            for kind, paths in paths_by_kind.items()
        }

    agreement.check_gathered(agreement.run(step))
    return resolved[0]


def _swap_on_all_ranks(module: nn.Module, resolved: Resolved, agreement: Agreement) -> list[Undo]:
    """Let Sharders replace modules; if one fails on a rank, raise on all ranks."""
    if not resolved.sharders:
        return []
    planned = [find_slot(module, entry.path).tensor for entry in resolved.tensors]
    swapped: list[Undo] = []

    def step() -> None:
        swapped.extend(_swap(module, entry) for entry in resolved.sharders)
        for entry, tensor in zip(resolved.tensors, planned, strict=True):
            if find_slot(module, entry.path).tensor is not tensor:
                raise StateError(
                    f"{entry} should not conflict with a Sharder, and one has replaced it: leave "
                    "it to the Sharder or to the plan"
                )
        _output_changes(module, resolved)  # raises if a Sharder removed one of them

    agreement.run(step)
    return swapped


def _swap(root: nn.Module, entry: Entry[Sharder]) -> Undo:
    """Let a Sharder replace a module; the returned function puts the old one back."""
    old = find_module(root, entry.path)
    restore, places = _restoring(old), parents(root, old)
    new = entry.value.shard(old)
    if not isinstance(new, nn.Module):
        raise ArgumentTypeError(
            f"{type(entry.value).__name__}.shard of module {entry} ({type(old).__name__}) should "
            f"return a Module, found {type(new).__name__}"
        )
    for parent, name in places:
        parent._modules[name] = new

    def put_back() -> None:
        training = new.training
        restore()  # a Sharder may have changed the module in place
        if old.training != training:
            old.train(training)
        for parent, name in places:
            parent._modules[name] = old

    return put_back


def _shard(
    root: nn.Module, entries: Sequence[Entry[ShardingSpec]], src_rank: int, group: Any
) -> list[ReplacedTensor]:
    if not entries:
        return []
    tensors = {entry.path: find_slot(root, entry.path).tensor for entry in entries}
    specs = {entry.path: entry.value for entry in entries}
    # All together, except those whose spec overrides ``shard``.
    own = {path for path, spec in specs.items() if type(spec).shard is not ShardingSpec.shard}
    together = {path: tensor.detach() for path, tensor in tensors.items() if path not in own}
    sharded = shard_tensors(together, specs, src_rank, group, "fingerprint") if together else {}
    for path in sorted(own):
        sharded[path] = specs[path].shard(tensors[path].detach(), src_rank, group)
    slots = holders(root)
    replaced = []
    for path, tensor in tensors.items():
        new = _like(tensor, sharded[path])
        for slot in slots[id(tensor)]:
            slot.put(new)
        replaced.append(ReplacedTensor(path, slots[id(tensor)], weakref.ref(tensor)))
    return replaced


OWN_ATTRIBUTES = {*ContentTensor.__annotations__, *ShardedTensor.__annotations__}


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A sharded or whole tensor as a parameter or a buffer, as the one that it replaces."""
    if not isinstance(old, nn.Parameter):
        return new.requires_grad_(old.requires_grad)
    parameter = nn.Parameter(new, old.requires_grad)
    for name, value in vars(old).items():
        # Attributes that models and optimizers set on parameters, such as one against weight decay.
        if name not in OWN_ATTRIBUTES:
            setattr(parameter, name, value)
    return parameter


def _output_changes(root: nn.Module, resolved: Resolved) -> list[tuple[str, Change]]:
    """The modules whose outputs change, also those that Sharders have made, and how.

    Outputs are resharded first, and then become local.
    """
    outputs = resolve_modules(root, resolved.outputs)
    local = resolve_modules(root, dict.fromkeys(resolved.local))
    reshard = ShardedTensor.resharded
    changes = [(path, partial(reshard, resharding_spec=spec)) for path, spec in outputs]
    return [*changes, *((path, local_shard) for path, _ in local)]
