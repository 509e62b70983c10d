"""Contents of this rank: from a spec, or from the shards that the ranks already have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, ArgumentTypeError, StateError
from reshard.layout.layout import Layout
from reshard.live.inputs.bound import with_index
from reshard.sharded.content import Content
from reshard.sharded.groups import Group, check_members, check_rpc, default_device_of
from reshard.sharded.specs import (
    LayoutShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    check_tensor,
)
from reshard.sharded.splits import EnumerableShardingSpec, infer_sharding_spec
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.text import quoted


def content_for(
    spec: ShardingSpec, shape: Sequence[int], properties: TensorProperties, group: Group
) -> Content:
    """The content that a spec gives this rank of a tensor, without parts."""
    advice = 'a ShardingSpec, such as ChunkShardingSpec(0, ["rank:0/cpu"])'
    _require(spec, ShardingSpec, "sharding_spec is", advice)
    properties.check()
    size, shards = torch.Size(shape), None
    layout = spec.layout(size)
    if isinstance(spec, LayoutShardingSpec):
        device = with_index(torch.device(spec.device))
    else:
        shards = tuple(spec.build_metadata(size, properties).shards_metadata)
        devices = {one.rank: one.placement.device() for one in shards if one.placement}
        # A rank without shards takes the device of the others, if that is the host.
        placed = devices.get(this_rank()) or next(iter(devices.values()), None)
        if placed is not None and (this_rank() in devices or placed.type == "cpu"):
            device = placed
        else:
            device = default_device_of(group)
    check_members(layout.ranks, group)
    kept = copy(spec)  # its fields may be assigned, as those of torch's specs
    return Content(layout, tuple(size), properties.dtype, (), device, group, kept, shards)


def content_of_shards(
    shards: tuple[ShardMetadata, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
    parts: Sequence[torch.Tensor],
    group: Group,
    spec: ShardingSpec | None = None,
) -> Content:
    """The content of a rank that has these parts; refuses shards that are not all of a tensor."""
    known = infer_sharding_spec(shards) if spec is None else spec
    check_tensor(shards, shape)
    layout = (known if spec is None else EnumerableShardingSpec(shards)).layout(shape)
    if not dist.is_initialized() and len(parts) == len(shards):
        layout = Layout.from_boxes(shape, {this_rank(): [shard.box for shard in shards]})
    check_members(layout.ranks, group)
    device = parts[0].device if parts else default_device_of(group)
    return Content(layout, tuple(shape), dtype, tuple(parts), device, group, known, shards)


def size_of(size: Sequence[int | Sequence[int]]) -> torch.Size:
    """A size given as numbers, or as one list of them.

    >>> size_of((3, 4)) == size_of(([3, 4],)) == torch.Size([3, 4])
    True
    """
    listed = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
    try:
        numbers = [index(number) for number in listed]  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(
            f"size {quoted(listed)} should be whole numbers: give one per dim"
        ) from None
    if any(number < 0 for number in numbers):
        raise ArgumentError(f"size {numbers} has a number below 0: give sizes >= 0")
    return torch.Size(numbers)


KIND = ("dtype", "requires_grad", "pin_memory", "ndim")
"""The properties that the shards of all ranks must have in common."""


def from_local_shards(
    local_shards: Sequence[Shard],
    global_size: Sequence[int | Sequence[int] | None],
    group: Group,
    init_rrefs: bool,
) -> tuple[Content, bool]:
    """The content with the shards of each rank, and whether it requires gradients."""
    agreement = Agreement(group, "init_from_local_shards", error=ArgumentError)
    described = agreement.run(lambda: _describe(local_shards, global_size, init_rrefs))
    common = _common_kind(described)
    size = common["global_size"]
    shards = [ShardMetadata(*row) for one in described.values() for row in one["shards"]]
    if size is None:
        shards, size = _stacked(shards)
    dtype = getattr(torch, common["dtype"])
    parts = [shard.tensor.detach() for shard in local_shards]
    content = content_of_shards(tuple(shards), size, dtype, parts, group)
    return content, common["requires_grad"]


def _describe(
    local_shards: Sequence[Shard], global_size: Sequence[Any], init_rrefs: bool
) -> dict[str, Any]:
    """The shards of this rank as JSON, with what they have in common and the size."""
    if init_rrefs:
        check_rpc()
    _require(local_shards, Sequence, "local_shards is", "a list")
    unknown = bool(global_size) and global_size[0] is None
    size = None if unknown else list(size_of(global_size))
    rows = [_row(shard) for shard in local_shards]
    kinds = {
        (str(one.dtype).removeprefix("torch."), one.requires_grad, one.is_pinned(), one.ndim)
        for one in (shard.tensor for shard in local_shards)
    }
    if len(kinds) > 1:
        raise ArgumentError(
            f"the local shards of rank {this_rank()} differ in {', '.join(KIND)}: "
            f"{sorted(kinds)}; give shards of one kind"
        )
    common = dict(zip(KIND, *kinds, strict=True)) if kinds else {}
    return {"shards": rows, "common": {**common, "global_size": size}}


def _require(value: object, kind: type, what: str, advice: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{what} of type {type(value).__name__}: give {advice}")


def _row(shard: Shard) -> list[list[int] | str | None]:
    """The metadata of a shard as JSON; without a placement, the shard belongs to this rank."""
    _require(shard, Shard, "a local shard is", "Shards")
    metadata, tensor, rank = shard.metadata, shard.tensor, this_rank()
    if metadata.placement is not None and metadata.rank != rank:
        raise ArgumentError(
            f"a local shard of rank {rank} has placement {metadata.placement}: give rank:{rank}, "
            "ranks count in the default group"
        )
    TensorProperties(tensor.dtype, tensor.layout).check()
    offsets, sizes, place = metadata.to_row()
    return [offsets, sizes, place or f"rank:{rank}/{tensor.device}"]


def _common_kind(described: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The kind and the size that all ranks have; the error names two ranks that differ."""
    first = next((rank for rank, one in described.items() if one["shards"]), None)
    if first is None:
        raise ArgumentError(
            "have no local shards on all ranks: give at least one shard on one rank"
        )
    common: dict[str, Any] = described[first]["common"]
    for rank, other in described.items():
        for name, two in other["common"].items():
            if two != common[name]:
                raise ArgumentError(
                    f"ShardedTensor {name} property does not match from different ranks! Found "
                    f"{name}={common[name]} on rank:{first}, and {name}={two} on rank:{rank}: give "
                    "all ranks the same"
                )
    return common


def _stacked(shards: Sequence[ShardMetadata]) -> tuple[list[ShardMetadata], list[int]]:
    """Shards one after the other along dim 0, and the size of their tensor."""
    stacked, start = [], 0
    # Of the shards that have elements: an empty one may have any sizes.
    rest = next((one for one in shards if not one.is_empty), shards[0]).shard_sizes[1:]
    for shard in shards:
        offsets = (start, *(0 for _ in shard.shard_sizes[1:]))
        stacked.append(ShardMetadata(offsets, shard.shard_sizes, shard.placement))
        start += shard.shard_sizes[0] if shard.shard_sizes else 0
    return stacked, [start, *rest]


def from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    global_size: Sequence[int | Sequence[int]],
    group: Group,
) -> Content:
    """The content with the one shard that a spec gives each rank; nothing is communicated."""
    _require(local_tensor, torch.Tensor, "local_tensor is", "a tensor")
    size, properties = size_of(global_size), TensorProperties.create_from_tensor(local_tensor)
    properties.check()
    if not local_tensor.is_contiguous():
        raise ArgumentError(
            "local_tensor is not a contiguous Tensor. Its strides are "
            f"{local_tensor.stride()}: call contiguous()"
        )
    content = content_for(sharding_spec, size, properties, group)
    own = [shard for shard in content.shards_metadata if shard.rank == this_rank()]
    if len(own) != 1 or own[0].shard_sizes != tuple(local_tensor.shape):
        sizes = [list(shard.shard_sizes) for shard in own]
        raise ArgumentError(
            f"local tensors do not cover the entire tensor: rank {this_rank()} has "
            f"{list(local_tensor.shape)} and the spec gives it {sizes} of {list(size)}"
        )
    return content.with_parts((local_tensor.detach(),))


def from_metadata(
    local_shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    sharding_spec: ShardingSpec | None,
    group: Group,
) -> Content:
    """The content with local shards and the metadata of all shards; nothing is communicated."""
    shards, rank, properties = metadata.shards_metadata, this_rank(), metadata.tensor_properties
    if not shards:
        raise ArgumentError("shards_metadata must not be empty: give the metadata of all shards")
    properties.check()
    own = [shard for shard in shards if shard.rank in (rank, None)]
    if not dist.is_initialized() and len(local_shards) == len(shards):
        own = list(shards)  # without a group, all shards may be in this process
    if len(own) != len(local_shards):
        raise StateError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({len(own)}) on rank ({rank})"
        )
    for shard, one in zip(local_shards, own, strict=True):
        _check_against(shard, one, properties)
    parts = [shard.tensor.detach() for shard in local_shards]
    size, dtype = metadata.size, properties.dtype
    return content_of_shards(tuple(shards), size, dtype, parts, group, sharding_spec)


def _check_against(shard: Shard, stated: ShardMetadata, common: TensorProperties) -> None:
    """Refuse a local shard that differs from its entry in the metadata."""
    _require(shard, Shard, "a local shard is", "Shards")
    if shard.metadata != stated:
        raise ArgumentError(
            f"local shard metadata {shard.metadata} does not match with {stated} of "
            "sharded_tensor_metadata"
        )
    tensor = shard.tensor
    own = TensorProperties.create_from_tensor(tensor)
    for name in ("layout", "dtype", "requires_grad", "pin_memory"):
        one, two = getattr(own, name), getattr(common, name)
        if one != two:
            raise ArgumentError(
                f"the {name} property of a local shard of rank {this_rank()} is {one} and that of "
                f"the tensor is {two}: give shards of the tensor's kind"
            )
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a local shard of rank {this_rank()} with strides {tensor.stride()} is not "
            "contiguous, and only torch.contiguous_format is supported: call contiguous()"
        )
