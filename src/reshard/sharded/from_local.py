"""Sharded tensors of shards that ranks already have: gathered, checked, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.layout.layout import Layout
from reshard.sharded.content import Content, Group, layout_of_shards, members
from reshard.sharded.enumerable import check_disjoint, check_tensor
from reshard.sharded.inference import infer_sharding_spec
from reshard.sharded.making import (
    check_members,
    check_properties,
    content_for,
    home_of,
    size_of,
)
from reshard.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from reshard.sharded.rpc import check_rrefs
from reshard.sharded.shard import Shard
from reshard.sharded.telling import all_told_or_raised
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.kinds import this_rank

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = ["init_from_local_shards", "init_from_local_tensor", "init_from_metadata"]

COMMON = ("dtype", "requires_grad", "pin_memory", "ndim")
"""What shards of all ranks must have in common."""


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: int | Sequence[int] | None,
    process_group: Group = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A tensor of the shards that each rank has; ranks tell each other which these are.

    With ``None`` as the size, or as its first number, shards lie one after the other along dim 0 in
    the order of ranks.
    """
    told = all_told_or_raised(
        lambda: _said(local_shards, global_size, init_rrefs), process_group, home_of(process_group)
    )
    common = _common(told, members(process_group))
    size = None if told[0]["size"] is None else torch.Size(told[0]["size"])
    shards = [ShardMetadata(*row) for said in told for row in said["shards"]]
    if size is None:
        shards, size = _stacked(shards)
        local_shards = _placed(local_shards, shards)
    check_disjoint(shards)
    check_tensor(shards, size)
    properties = TensorProperties(
        getattr(torch, common["dtype"]), requires_grad=common["requires_grad"]
    )
    metadata = ShardedTensorMetadata(tuple(shards), size, properties)
    tensor = _made(local_shards, metadata, None, process_group)
    return tensor.refer_to_others(init_rrefs)


def _said(
    local_shards: Sequence[Shard], global_size: Sequence[Any], init_rrefs: bool
) -> dict[str, Any]:
    """What a rank tells of its shards."""
    check_rrefs(init_rrefs)
    if not isinstance(local_shards, Sequence):
        raise TypeError(f"local_shards is of type {type(local_shards).__name__}: give a list")
    unknown = bool(global_size) and global_size[0] is None
    size = None if unknown else list(size_of(global_size))
    rows = [_row(shard) for shard in local_shards]
    kinds = {_kind(shard.tensor) for shard in local_shards}
    if len(kinds) > 1:
        raise ValueError(
            f"the local shards of rank {this_rank()} differ in {', '.join(COMMON)}: "
            f"{sorted(kinds)}; give shards of one kind"
        )
    kind = dict(zip(COMMON, kinds.pop(), strict=True)) if kinds else None
    return {"shards": rows, "kind": kind, "size": size}


def _row(shard: Shard) -> list[Any]:
    """Where a shard lies; one without a placement is of this rank."""
    if not isinstance(shard, Shard):
        raise TypeError(f"a local shard is of type {type(shard).__name__}: give Shards")
    one, tensor, rank = shard.metadata, shard.tensor, this_rank()
    if one.placement is not None and one.rank != rank:
        raise ValueError(
            f"a local shard of rank {rank} has placement {one.placement}: give rank:{rank}, ranks "
            "count in the default group"
        )
    if tensor.layout is not torch.strided:
        check_properties(TensorProperties(tensor.dtype, tensor.layout))
    place = f"rank:{rank}/{tensor.device}" if one.placement is None else str(one.placement)
    return [list(one.shard_offsets), list(one.shard_sizes), place]


def _kind(tensor: torch.Tensor) -> tuple[str, bool, bool, int]:
    name = str(tensor.dtype).removeprefix("torch.")
    return name, tensor.requires_grad, tensor.is_pinned(), tensor.ndim


def _common(told: Sequence[dict[str, Any]], ranks: tuple[int, ...]) -> dict[str, Any]:
    """What all ranks say alike; the error names two ranks that do not."""
    speaking = [(rank, said) for rank, said in zip(ranks, told, strict=True) if said["kind"]]
    if not speaking:
        raise ValueError("have no local shards on all ranks: give at least one shard on one rank")
    first, said = speaking[0]
    for rank, other in speaking[1:]:
        for name in COMMON:
            one, two = said["kind"][name], other["kind"][name]
            if one != two:
                raise ValueError(
                    f"ShardedTensor {name} property does not match from different ranks! Found "
                    f"{name}={one} on rank:{first}, and {name}={two} on rank:{rank}: give shards "
                    "of one kind"
                )
    for rank, other in zip(ranks, told, strict=True):
        if other["size"] != said["size"]:
            raise ValueError(
                "ShardedTensor global_size property does not match from different ranks! Found "
                f"global_size={said['size']} on rank:{first}, and global_size={other['size']} on "
                f"rank:{rank}: give all ranks the same"
            )
    found: dict[str, Any] = said["kind"]
    return found


def _stacked(shards: Sequence[ShardMetadata]) -> tuple[list[ShardMetadata], torch.Size]:
    """Shards one after the other along dim 0."""
    found, at = [], 0
    rest = next((shard.shard_sizes[1:] for shard in shards if not shard.is_empty), None)
    for shard in shards:
        rest = shard.shard_sizes[1:] if rest is None else rest
        offsets = (at, *(0 for _ in shard.shard_sizes[1:]))
        found.append(ShardMetadata(offsets, shard.shard_sizes, shard.placement))
        at += shard.shard_sizes[0] if shard.shard_sizes else 0
    return found, torch.Size([at, *(rest or ())])


def _placed(local_shards: Sequence[Shard], shards: Sequence[ShardMetadata]) -> list[Shard]:
    mine = [shard for shard in shards if shard.rank == this_rank()]
    return [Shard(shard.tensor, one) for shard, one in zip(local_shards, mine, strict=True)]


def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: int | Sequence[int],
    process_group: Group = None,
) -> ShardedTensor:
    """A tensor of which each rank has the one shard that a spec gives it; nobody communicates."""
    if not isinstance(local_tensor, torch.Tensor):
        raise TypeError(f"local_tensor is of type {type(local_tensor).__name__}: give a tensor")
    size, properties = size_of(global_size), TensorProperties.create_from_tensor(local_tensor)
    check_properties(properties)
    if not local_tensor.is_contiguous():
        raise ValueError(
            "local_tensor is not a contiguous Tensor. Its strides are "
            f"{local_tensor.stride()}: call contiguous()"
        )
    content = content_for(sharding_spec, size, properties, process_group)
    mine = [shard for shard in content.shards_metadata if shard.rank == this_rank()]
    if len(mine) != 1 or mine[0].shard_sizes != tuple(local_tensor.shape):
        sizes = [list(shard.shard_sizes) for shard in mine]
        raise ValueError(
            f"local tensors do not cover the entire tensor: rank {this_rank()} has "
            f"{list(local_tensor.shape)} and the spec gives it {sizes} of {list(size)}"
        )
    tensor = wrap(content.with_parts((local_tensor.detach(),)))
    return tensor.requires_grad_() if local_tensor.requires_grad else tensor


def init_from_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    sharding_spec: ShardingSpec | None = None,
    process_group: Group = None,
) -> ShardedTensor:
    """A tensor of local shards and of what is known of all; nobody communicates."""
    stated, rank = sharded_tensor_metadata, this_rank()
    if not stated.shards_metadata:
        raise ValueError("shards_metadata must not be empty: say where the shards lie")
    check_properties(stated.tensor_properties)
    mine = [shard for shard in stated.shards_metadata if shard.rank in (rank, None)]
    if not dist.is_initialized() and len(local_shards) == len(stated.shards_metadata):
        mine = list(stated.shards_metadata)  # without a group all may be here, of any rank
    if len(mine) != len(local_shards):
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({len(mine)}) on rank ({rank})"
        )
    for shard, one in zip(local_shards, mine, strict=True):
        _check_stated(shard, one, stated.tensor_properties)
    check_disjoint(stated.shards_metadata)
    check_tensor(stated.shards_metadata, stated.size)
    return _made(local_shards, stated, sharding_spec, process_group)


def _check_stated(shard: Shard, stated: ShardMetadata, common: TensorProperties) -> None:
    if not isinstance(shard, Shard):
        raise TypeError(f"a local shard is of type {type(shard).__name__}: give Shards")
    tensor = shard.tensor
    if shard.metadata != stated:
        raise ValueError(
            f"local shard metadata {shard.metadata} does not match with {stated} of "
            "sharded_tensor_metadata"
        )
    found = TensorProperties.create_from_tensor(tensor)
    for name in ("layout", "dtype", "requires_grad", "pin_memory"):
        one, two = getattr(found, name), getattr(common, name)
        if one != two:
            raise ValueError(
                f"the {name} property of a local shard of rank {this_rank()} is {one} and that of "
                f"the tensor is {two}: give shards of the tensor's kind"
            )
    if not tensor.is_contiguous():
        raise ValueError(
            f"a local shard of rank {this_rank()} with strides {tensor.stride()} is not "
            "contiguous, and only torch.contiguous_format is supported: call contiguous()"
        )


def _made(
    local_shards: Sequence[Shard],
    stated: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    group: Group,
) -> ShardedTensor:
    shards = tuple(stated.shards_metadata)
    shape, properties = tuple(stated.size), stated.tensor_properties
    layout = layout_of_shards(shape, shards)
    if not dist.is_initialized() and len(local_shards) == len(shards):
        layout = Layout.from_boxes(shape, {this_rank(): [shard.box for shard in shards]})
    check_members(layout, group)
    parts = tuple(shard.tensor.detach() for shard in local_shards)
    device = parts[0].device if parts else home_of(group)
    known = infer_sharding_spec(shards) if spec is None else spec
    content = Content(layout, shape, properties.dtype, parts, device, group, known, shards)
    tensor = wrap(content)
    return tensor.requires_grad_() if properties.requires_grad else tensor
