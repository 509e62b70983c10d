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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from reshard.errors import ArgumentError, ArgumentTypeError, PathError, StateError
from reshard.nn.activations.handle import Resharding
from reshard.nn.activations.hooks import SavedTensorHooks
from reshard.nn.activations.policy import Policy
from reshard.nn.activations.region import SavedTensor, SavedView
from reshard.nn.activations.replicated import Parameters, ReplicatedInputs, mesh_axis
from reshard.nn.activations.restore import restorer_of
from reshard.nn.shard.paths import find_module, matching
from reshard.tensors.moving import move
from reshard.text import quoted

__all__ = ["input_reshard", "pack_activation", "resharded_activations", "unpack_activation"]

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
        handle.attach(child, path or type(child).__name__, dim, parameters)
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
    handle, ranks = Resharding(policy), policy.restorer.ranks
    if len(ranks) == 1:
        yield handle
        return
    replicated = ReplicatedInputs(tuple(inputs), {}, ranks, Parameters(None))
    with SavedTensorHooks(policy, replicated, "resharded_activations", policy.check) as hooks:
        yield handle
    hooks.finish()


def pack_activation(
    mesh_or_group: MeshOrGroup, dim: int, tensor: torch.Tensor
) -> SavedView | SavedTensor:
    """Keep a share of one tensor that is identical on all ranks; ``unpack_activation`` restores it.

    The tensor is kept whole if it cannot be split. PyTorch's hooks of the same purpose are
    ``_pack_hook_tp`` and ``_unpack_hook_tp``.
    """
    policy = _policy(mesh_or_group, {})
    ranks = policy.restorer.ranks
    inputs = ReplicatedInputs((tensor,), {}, ranks, Parameters(None))
    view = policy.pack(tensor, inputs, "pack_activation", 0) if len(ranks) > 1 else None
    return SavedTensor(tensor) if view is None else view


def unpack_activation(mesh_or_group: MeshOrGroup, dim: int, packed: Any) -> torch.Tensor:
    """Restore a tensor on all ranks; a DTensor that is sharded over the ranks is replicated."""
    if isinstance(packed, SavedView | SavedTensor):
        return packed.tensor()
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
        return _group_of_mesh(mesh_or_group)
    if mesh_or_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ArgumentError(f"rank {dist.get_rank()} is not in the process group that was given")
    if mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        kind = type(mesh_or_group).__name__
        raise ArgumentTypeError(f"mesh_or_group is a {kind}: give a DeviceMesh or a process group")
    group = mesh_or_group or dist.group.WORLD
    if group is None:
        raise StateError("input_reshard needs a process group: call init_process_group first")
    return group


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
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
    return list(selected.items())
