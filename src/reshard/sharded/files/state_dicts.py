"""Sharded tensors in ``get_model_state_dict`` and the functions of torch beside it.

With ``full_state_dict=True`` these gather DTensors and torch's own ShardedTensors, and leave any
other tensor as it is: shards would pass for whole tensors. torch has no registry for tensor classes
there, so the functions that gather and scatter are replaced by functions that handle our tensors
and call the original ones for all others. This happens when the first ShardedTensor is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from reshard.errors import DisagreementError, OperationError, TensorError
from reshard.sharded.content import Content, ContentTensor, map_nested, wrap
from reshard.sharded.files.pickles import written_for_all
from reshard.sharded.groups import members
from reshard.sharded.move import gather_on, local_part, split_parts
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = ["install", "pre_load_state_dict_hook", "state_dict_hook"]

LOADING = "loading a full state dict (with broadcast_from_rank0=True rank 0 alone may have it)"

Tensors = dict[str, Any]
Function = Callable[..., Any]


def install() -> None:
    """Replace the functions of torch that gather and scatter the tensors of a state dict."""
    import torch.distributed._state_dict_utils as utils
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    DefaultSavePlanner.transform_object = _pickling(DefaultSavePlanner.transform_object)  # type: ignore[method-assign]
    for name, replacement in REPLACEMENTS.items():
        original = getattr(utils, name, None)
        if original is None:
            continue
        ours = replacement(original)
        for module in (utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
            if getattr(module, name, None) is original:
                setattr(module, name, ours)


def _pickling(original: Function) -> Function:
    """For ``DefaultSavePlanner.transform_object``: one rank pickles objects that are no tensors."""

    @wraps(original)
    def transform(planner: object, write_item: object, object: object) -> Any:
        token = written_for_all.set(True)
        try:
            return original(planner, write_item, object)
        finally:
            written_for_all.reset(token)

    return transform


def _gathering(original: Function) -> Function:
    """For ``_gather_state_dict``: ShardedTensors become whole tensors."""

    @wraps(original)
    def gather(state_dict: object, **options: Any) -> Any:
        ranks = options.get("ranks_only") or ()

        def whole_of(value: Any) -> Any:
            if not isinstance(value, ContentTensor):
                return value
            group = members(value._content.group)
            chosen = [rank for rank in group if not ranks or rank in ranks]
            whole = gather_on(value._content, chosen)
            # One by one: the whole tensors of a model may not fit on the device together.
            return whole.cpu() if whole is not None and options.get("cpu_offload") else whole

        return original(map_nested(whole_of, state_dict), **options)

    return gather


def _distributing(original: Function) -> Function:
    """For ``_distribute_state_dict``: every rank has whole tensors and takes its own parts."""

    @wraps(original)
    def distribute(full: Tensors, local: Tensors, *args: object, **options: object) -> None:
        _check_same_names(_contents(local, [*full]))
        for name, value in full.items():
            wanted = _contents(local, [name])
            original({name: value}, local, *args, **options)
            _take_parts(local, wanted)

    return distribute


def _check_same_names(wanted: Mapping[str, Content]) -> None:
    """Wait for the other ranks, which must load the same names; other shards would not change.

    If only rank 0 has the state dict, ``broadcast_from_rank0=True`` is the right option.
    """
    groups = {members(content.group): content.group for content in wanted.values()}
    for ranks, group in sorted(groups.items(), key=lambda pair: pair[0]):
        if len(ranks) == 1:
            continue
        own = sorted(name for name, one in wanted.items() if members(one.group) == ranks)
        gathered = Agreement(group, LOADING).gather(own)
        (first, names), *others = sorted((rank, set(one)) for rank, one in gathered.items())
        for rank, other in others:
            if other != names:
                name = min(other ^ names)
                has, lacks = (first, rank) if name in names else (rank, first)
                raise DisagreementError(
                    f"rank {has} has {quoted(name)} in its full state dict and rank {lacks} has "
                    "not: give the same to all ranks, or to rank 0 with broadcast_from_rank0=True"
                )


def _broadcasting(wanted_of: Callable[..., dict[str, Content]]) -> Callable[[Function], Function]:
    """For functions that broadcast the whole tensors of rank 0: every rank takes its own parts."""

    def replacement(original: Function) -> Function:
        @wraps(original)
        def broadcast(full: Tensors, local: Tensors, *args: object, **options: object) -> None:
            wanted = wanted_of(local, *args)
            original(full, local, *args, **options)
            _take_parts(local, wanted)

        return broadcast

    return replacement


def _scalars(local: Tensors, *_: object) -> dict[str, Content]:
    """Tensors without dims, which torch handles separately."""
    return {name: one for name, one in _contents(local, [*local]).items() if not one.shape}


def _contents(local: Tensors, names: Sequence[str], *_: object) -> dict[str, Content]:
    """The contents of the sharded tensors among these names."""
    pairs = ((name, local.get(name)) for name in names)
    return {name: one._content for name, one in pairs if isinstance(one, ContentTensor)}


REPLACEMENTS: Mapping[str, Callable[[Function], Function]] = {
    "_gather_state_dict": _gathering,
    "_distribute_state_dict": _distributing,
    "_broadcast_tensors": _broadcasting(_contents),
    "_broadcast_state_dict": _broadcasting(_scalars),
}


def _take_parts(local: Tensors, wanted: Mapping[str, Content]) -> None:
    """Replace the whole tensors that torch has stored by this rank's parts of them."""
    for name, like in wanted.items():
        full: Any = local.get(name)
        if type(full) not in (torch.Tensor, nn.Parameter):
            continue
        if tuple(full.shape) != like.shape:
            raise TensorError(
                f"{quoted(name)} has shape {list(full.shape)} in the state dict and the "
                f"ShardedTensor has {list(like.shape)}: load the state dict of a model of the same "
                "sizes"
            )
        if like.layout.reduce is not None:
            raise OperationError(
                f"{quoted(name)} is loaded into a ShardedTensor of layout {quoted(like.layout)}, "
                "of which a sum is pending: reshard it first"
            )
        if like.layout.holds(this_rank()) is None:
            content = like.of_kind(full.dtype, full.device)
        else:
            part = local_part(full.detach(), like.layout)
            content = like.with_parts(split_parts(part, like.layout))
        local[name] = wrap(content)


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Add ShardedTensors that are plain attributes to the state dict of a module.

    For ``module._register_state_dict_hook``; parameters do not need it.
    """
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if isinstance(value, ContentTensor):
                destination[_key(prefix, path, name)] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set plain attributes to the ShardedTensors that a state dict has for them.

    For ``module._register_load_state_dict_pre_hook`` with ``with_module=True``.
    """
    for path, one in module.named_modules():
        for name in vars(one):
            value = state_dict.get(_key(prefix, path, name))
            if isinstance(value, ContentTensor):
                setattr(one, name, value)


def _key(prefix: str, path: str, name: str) -> str:
    return f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
