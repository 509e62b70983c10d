"""Sharded tensors in ``get_model_state_dict`` and the other functions that torch has beside it.

With ``full_state_dict=True`` these gather DTensors and torch's own ShardedTensors, and leave any
other tensor as it is: shards would pass for whole tensors. There is nothing to register with, so
the functions of torch that do it are replaced, by such that see to tensors of ours and call them
for the others. This happens when the first ShardedTensor is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from reshard.errors import DisagreementError, OperationError, TensorError
from reshard.sharded.alone import cut_here
from reshard.sharded.content import Content, members
from reshard.sharded.gathering import gathered_on
from reshard.sharded.moving import split
from reshard.sharded.pickling import for_all_ranks
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = ["install", "pre_load_state_dict_hook", "state_dict_hook"]

MEET_WITHIN = 60.0
"""Seconds that a rank waits for others to load the same state dict."""
LOADING = "loading a full state dict (with broadcast_from_rank0=True rank 0 alone may have it)"

Tensors = dict[str, Any]
Function = Callable[..., Any]


def install() -> None:
    """Replace the functions of torch that gather and spread the tensors of a state dict."""
    import torch.distributed._state_dict_utils as utils
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    DefaultSavePlanner.transform_object = _pickling(DefaultSavePlanner.transform_object)  # type: ignore[method-assign]
    for name, replacing in REPLACING.items():
        original = getattr(utils, name, None)
        if original is None:
            continue
        ours = replacing(original)
        for module in (utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
            if getattr(module, name, None) is original:
                setattr(module, name, ours)


def _pickling(original: Function) -> Function:
    """For ``DefaultSavePlanner.transform_object``: what is no tensor is pickled by one rank."""

    @wraps(original)
    def transform(planner: Any, write_item: Any, object: Any) -> Any:
        token = for_all_ranks.set(True)
        try:
            return original(planner, write_item, object)
        finally:
            for_all_ranks.reset(token)

    return transform


def _gathering(original: Function) -> Function:
    """For ``_gather_state_dict``: ShardedTensors become whole tensors."""

    @wraps(original)
    def gather(state_dict: Any, **options: Any) -> Any:
        ranks = options.get("ranks_only") or ()
        device = torch.device("cpu") if options.get("cpu_offload") else None
        return original(_gathered(state_dict, ranks, device), **options)

    return gather


def _gathered(value: Any, ranks: Sequence[int], device: torch.device | None) -> Any:
    """What is nested in dicts and lists, with whole tensors on the given ranks, or on all."""
    if isinstance(value, ShardedTensor):
        group = members(value._content.group)
        whole = gathered_on(value, [rank for rank in group if not ranks or rank in ranks])
        # At once: the whole tensors of a model may be too much for the device.
        return whole if whole is None or device is None else whole.to(device)
    if isinstance(value, dict):
        return {key: _gathered(one, ranks, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        found = [_gathered(one, ranks, device) for one in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value


def _distributing(original: Function) -> Function:
    """For ``_distribute_state_dict``: every rank has whole tensors and takes its parts of them."""

    @wraps(original)
    def distribute(full: Tensors, local: Tensors, *args: Any, **options: Any) -> None:
        _meet(_sharded(local, [*full]))
        for name, value in full.items():
            wanted = _sharded(local, [name])
            original({name: value}, local, *args, **options)
            _take_parts(local, wanted)

    return distribute


def _meet(wanted: Mapping[str, Content]) -> None:
    """Wait for the other ranks, which must load the same; else their shards would stay as they are.

    Where rank 0 alone has the state dict, ``broadcast_from_rank0=True`` would be the right option.
    """
    groups = {members(content.group): content.group for content in wanted.values()}
    for ranks, group in sorted(groups.items(), key=lambda pair: pair[0]):
        names = [name for name, one in wanted.items() if members(one.group) == ranks]
        if len(ranks) > 1:
            told = Agreement(group, LOADING, MEET_WITHIN).gather(sorted(names))
            _check_alike({rank: set(found) for rank, found in told.items()})


def _check_alike(told: Mapping[int, set[str]]) -> None:
    (first, names), *others = sorted(told.items())
    for rank, found in others:
        if found != names:
            name = min(found ^ names)
            has, lacks = (first, rank) if name in names else (rank, first)
            raise DisagreementError(
                f"rank {has} has {quoted(name)} in its full state dict and rank {lacks} has not: "
                "give the same to all ranks, or to rank 0 with broadcast_from_rank0=True"
            )


def _broadcasting(original: Function) -> Function:
    """For ``_broadcast_tensors``: rank 0 has whole tensors, and every rank takes its parts."""

    @wraps(original)
    def broadcast(
        full: Tensors, local: Tensors, keys: Sequence[str], *args: Any, **options: Any
    ) -> None:
        wanted = _sharded(local, keys)
        original(full, local, keys, *args, **options)
        _take_parts(local, wanted)

    return broadcast


def _broadcasting_scalars(original: Function) -> Function:
    """For ``_broadcast_state_dict``: tensors without dims, which go another way than the others."""

    @wraps(original)
    def broadcast(full: Tensors, local: Tensors, *args: Any, **options: Any) -> None:
        found = _sharded(local, [*local])
        wanted = {name: content for name, content in found.items() if not content.shape}
        original(full, local, *args, **options)
        _take_parts(local, wanted)

    return broadcast


REPLACING: Mapping[str, Callable[[Function], Function]] = {
    "_gather_state_dict": _gathering,
    "_distribute_state_dict": _distributing,
    "_broadcast_tensors": _broadcasting,
    "_broadcast_state_dict": _broadcasting_scalars,
}


def _sharded(local: Tensors, names: Sequence[str]) -> dict[str, Content]:
    """How the sharded ones among some tensors are cut."""
    pairs = ((name, local.get(name)) for name in names)
    return {name: one._content for name, one in pairs if isinstance(one, ShardedTensor)}


def _take_parts(local: Tensors, wanted: Mapping[str, Content]) -> None:
    """Put shards where torch has put whole tensors."""
    for name, content in wanted.items():
        found: Any = local.get(name)
        if type(found) in (torch.Tensor, nn.Parameter):
            local[name] = wrap(_cut(name, found.detach(), content))


def _cut(name: str, whole: torch.Tensor, like: Content) -> Content:
    """This rank's parts of a whole tensor that it has; nobody communicates."""
    if tuple(whole.shape) != like.shape:
        raise TensorError(
            f"{quoted(name)} has shape {list(whole.shape)} in the state dict and the ShardedTensor "
            f"has {list(like.shape)}: load the state dict of a model of the same sizes"
        )
    if like.layout.reduce is not None:
        raise OperationError(
            f"{quoted(name)} is loaded into a ShardedTensor of layout {quoted(like.layout)}, of "
            "which a sum is pending: reshard it first"
        )
    if like.layout.holds(this_rank()) is None:
        return like.of_kind(whole.dtype, whole.device)
    return like.with_parts(split(cut_here(whole, like.layout), like.layout, like.shape))


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Add ShardedTensors that are mere attributes to the state dict of a module.

    For ``module._register_state_dict_hook``; parameters are there without it.
    """
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if isinstance(value, ShardedTensor):
                destination[_key(prefix, path, name)] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set attributes to the ShardedTensors that a state dict has for them.

    For ``module._register_load_state_dict_pre_hook`` with ``with_module=True``.
    """
    for path, one in module.named_modules():
        for name in vars(one):
            value = state_dict.get(_key(prefix, path, name))
            if isinstance(value, ShardedTensor):
                setattr(one, name, value)


def _key(prefix: str, path: str, name: str) -> str:
    return f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
