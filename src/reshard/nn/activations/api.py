"""Keep activations as 1/N between forward and backward, with bit-identical gradients.

    from reshard import nn

    nn.input_reshard(block, mesh["tp"], 0)              # the inputs of a tensor-parallel block
    nn.input_reshard(model, mesh["tp"], 0, modules="layers.{i}.mlp")
    nn.input_reshard(model, mesh["tp"], 0, budget="2GiB")
    print(nn.resharding_of(block).stats())

Tensor-parallel ranks save some tensors that are identical on all of them: the inputs of a block.
Each rank keeps a share of those, and backward restores them with an all-gather.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from reshard.errors import ArgumentError, ArgumentTypeError, PathError, StateError, require_type
from reshard.nn.activations.policy import Policy, SavedTensorHooks
from reshard.nn.activations.region import SavedTensor, SavedView, Stats
from reshard.nn.activations.replicated import Parameters, ReplicatedInputs, mesh_axis
from reshard.nn.activations.restore import restorer_of
from reshard.nn.paths import find_module, matching
from reshard.tensors.kinds import not_compiled
from reshard.tensors.moving import move
from reshard.text import quoted


class Resharding:
    """The modules of one `input_reshard` call; ``remove`` restores their forwards."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.forwards: WeakKeyDictionary[nn.Module, ReshardedForward] = WeakKeyDictionary()

    def detach(self, module: nn.Module) -> None:
        """Restore the forward of a module; what it has saved is still restored in backward."""
        if module not in self.forwards:
            return
        forward = self.forwards.pop(module)
        forward.is_removed = True
        if vars(module).get("forward") is forward:  # else another wrapper is around it
            del module.forward
            if forward.replaces_attribute:
                module.forward = forward.__wrapped__

    def remove(self) -> None:
        """Restore the forwards of all modules; a second call does nothing."""
        for module in list(self.forwards):
            self.detach(module)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules."""
        return tuple(forward.path for forward in self.forwards.values())

    def stats(self) -> Stats:
        """The counters so far."""
        return replace(self.policy.stats)

    def __repr__(self) -> str:
        return f"Resharding({', '.join(self.modules) or 'nothing'}: {self.stats()})"


class ReshardedForward:
    """Replaces the forward of a module and runs the original under saved-tensor hooks.

    An attribute of the module rather than a pair of forward hooks: then an interrupt, too, removes
    the saved-tensor hooks, and the inputs are those that forward gets after all other hooks.
    """

    def __init__(
        self, module: nn.Module, handle: Resharding, path: str, dim: int, parameters: Parameters
    ) -> None:
        self.replaces_attribute = "forward" in vars(module)
        self.__wrapped__ = module.forward
        self.handle, self.path = handle, path
        self.is_removed = False
        self._parameters, self._dim = parameters, dim
        self._must_check = handle.policy.check

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_removed or self._is_idle():
            return self.__wrapped__(*args, **kwargs)
        with self._hooks(args, kwargs) as hooks:
            output = self.__wrapped__(*args, **kwargs)
        if hooks.finish():
            self._must_check = False
        return output

    @not_compiled
    def _is_idle(self) -> bool:
        """Whether nothing is saved, or hooks are not possible, as in torch.func."""
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        is_alone = len(self.handle.policy.restorer.ranks) == 1
        return is_alone or not torch.is_grad_enabled() or forbidden is not None

    @not_compiled
    def _hooks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SavedTensorHooks:
        leaves = tree_leaves((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and not any(-one.ndim <= self._dim < one.ndim for one in tensors):
            shapes = [list(one.shape) for one in tensors]
            raise ArgumentError(
                f"{self.path} has inputs of shapes {shapes}, of which none has a dim "
                f"{self._dim}: give a dim that one of them has"
            )
        policy = self.handle.policy
        inputs = ReplicatedInputs(policy.restorer.ranks, args, kwargs, self._parameters)
        return SavedTensorHooks(policy, inputs, self.path, self._must_check)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReshardedForward:
        copied = object.__new__(ReshardedForward)
        vars(copied).update(vars(self))
        copied.__wrapped__ = copy.deepcopy(self.__wrapped__, memo)
        module = getattr(copied.__wrapped__, "__self__", None)
        if isinstance(module, nn.Module):
            copied._parameters = Parameters(module)
            self.handle.forwards[module] = copied
        return copied

    def __reduce__(self) -> Any:
        # A process group cannot be pickled: a module that is loaded has its original forward.
        method: Any = self.__wrapped__
        if hasattr(method, "__self__"):
            return getattr, (method.__self__, method.__name__)
        return copy.copy, (method,)  # a function, of which a copy is the function itself


def resharding_of(module: nn.Module) -> Resharding:
    """The handle of a module whose activations are resharded, or of modules inside it."""
    for one in module.modules():
        forward = vars(one).get("forward")
        if isinstance(forward, ReshardedForward):
            return forward.handle
    raise ArgumentError(
        f"{type(module).__name__} is not resharded: call input_reshard(module, mesh, dim) first"
    )


MeshOrGroup = DeviceMesh | dist.ProcessGroup | None
"""A mesh of one axis, or a process group; None is the default group."""


def input_reshard(
    module: nn.Module,
    mesh_or_group: MeshOrGroup = None,
    dim: int | None = None,
    *,
    modules: str | Sequence[str] | None = None,
    tp_device_mesh: MeshOrGroup = None,
    input_reshard_dim: int | None = None,
    **options: Any,
) -> nn.Module:
    """Keep the inputs of a module, or of the modules inside it that patterns name, as shares.

    Returns the module; without a dim it is unchanged. Every rank of the mesh's axis must pass the
    same inputs, as in tensor parallelism. ``options``: ``budget`` ("2GiB": keep what fits),
    ``min_bytes`` (smaller tensors stay whole), ``timeout`` in seconds, and ``check`` (compare
    checksums across ranks in the first call).

    Memory is split by elements, whatever the dim: shares are exact and nothing is reordered.
    """
    dim = input_reshard_dim if dim is None else dim
    if dim is None:
        return module
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ArgumentTypeError(f"dim={dim!r}: give a dim of the inputs, such as 0")
    handle = Resharding(_policy(mesh_or_group or tp_device_mesh, options))
    parameters = Parameters(module)
    for path, child in _select_modules(module, modules):
        before = vars(child).get("forward")
        if isinstance(before, ReshardedForward):
            before.handle.detach(child)
        forward = ReshardedForward(child, handle, path or type(child).__name__, dim, parameters)
        child.forward = handle.forwards[child] = forward
    return module


@contextmanager
def resharded_activations(
    mesh_or_group: MeshOrGroup, inputs: Iterable[torch.Tensor], **options: Any
) -> Iterator[Resharding]:
    """Keep saved tensors as shares in a block of code; ``inputs`` are identical on all ranks.

    with resharded_activations(group, [x]) as handle:
        y = torch.nn.functional.linear(x, weight)
    """
    policy = _policy(mesh_or_group, options)
    if len(policy.restorer.ranks) == 1:  # also where hooks are not possible, as in torch.func
        yield Resharding(policy)
        return
    replicated = ReplicatedInputs(policy.restorer.ranks, inputs)
    with SavedTensorHooks(policy, replicated, "resharded_activations", policy.check) as hooks:
        yield Resharding(policy)
    hooks.finish()


def pack_activation(
    mesh_or_group: MeshOrGroup, dim: int, tensor: torch.Tensor
) -> SavedView | SavedTensor:
    """Keep a share of one tensor that is identical on all ranks; ``unpack_activation`` restores it.

    The tensor is kept whole if it cannot be split. PyTorch's hooks of the same purpose are
    ``_pack_hook_tp`` and ``_unpack_hook_tp``.
    """
    require_type(tensor, torch.Tensor, "pack_activation", "give a tensor")
    policy = _policy(mesh_or_group, {})
    inputs = ReplicatedInputs(policy.restorer.ranks, [tensor])
    return policy.pack(tensor, inputs, "pack_activation", 0) or SavedTensor(tensor)


def unpack_activation(mesh_or_group: MeshOrGroup, dim: int, packed: Any) -> torch.Tensor:
    """Restore a tensor on all ranks; a DTensor that is sharded over the ranks is replicated."""
    if isinstance(packed, SavedView | SavedTensor):
        return packed()
    if isinstance(packed, DTensor):
        axis = mesh_axis(packed.device_mesh, restorer_of(_process_group(mesh_or_group)).ranks)
        if axis is None:
            return packed
        placements = list(packed.placements)
        placements[axis] = Replicate()
        replicated: torch.Tensor = move(packed, to=(packed.device_mesh, placements))
        return replicated
    if isinstance(packed, torch.Tensor):
        return packed
    raise ArgumentTypeError(
        f"unpack_activation got a {type(packed).__name__}: give what pack_activation returned"
    )


def _policy(mesh_or_group: MeshOrGroup, options: dict[str, Any]) -> Policy:
    return Policy(restorer_of(_process_group(mesh_or_group)), **options)


def _process_group(mesh_or_group: MeshOrGroup) -> dist.ProcessGroup:
    """The process group of the ranks that have the same inputs; this rank is in it."""
    if isinstance(mesh_or_group, DeviceMesh):
        mesh = mesh_or_group
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
            raise ArgumentError(
                f"the mesh has {mesh.ndim} axes, {names}: give the one along which inputs are the "
                f'same, such as mesh["{names[-1]}"]'
            )
        if mesh.get_coordinate() is None:
            ranks = mesh.mesh.flatten().tolist()
            raise ArgumentError(f"rank {dist.get_rank()} is not in the mesh of ranks {ranks}")
        return mesh.get_group()
    if mesh_or_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ArgumentError(f"rank {dist.get_rank()} is not in the process group that was given")
    if mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        kind = type(mesh_or_group).__name__
        raise ArgumentTypeError(f"mesh_or_group is a {kind}: give a DeviceMesh or a process group")
    group = mesh_or_group or dist.group.WORLD
    if group is None:
        raise StateError("input_reshard needs a process group: call init_process_group first")
    return group


def _select_modules(
    module: nn.Module, patterns: str | Sequence[str] | None
) -> list[tuple[str, nn.Module]]:
    if patterns is None:
        return [("", module)]
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    selected: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = matching(pattern, paths)
        if not matched:
            raise PathError(
                f"{quoted(pattern)} matches no module of {type(module).__name__}: patterns are "
                "paths in which {i} is an integer and * any text, such as layers.{i}.mlp"
            )
        selected |= {path: find_module(module, path) for path in matched}
    return [*selected.items()]
