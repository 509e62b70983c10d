"""From a spec, or from shards, to the content of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from operator import index

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.layout.layout import Layout
from reshard.live.inputs.bound import with_index
from reshard.sharded.content import Content
from reshard.sharded.groups import Group, check_members, default_device_of
from reshard.sharded.metadata import ShardMetadata, TensorProperties
from reshard.sharded.specs.base import ShardingSpec, layout_of_shards
from reshard.sharded.specs.grids import ChunkShardingSpec
from reshard.sharded.specs.listed import LayoutShardingSpec, infer_sharding_spec
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = ["check_spec", "content_for", "content_of_shards", "size_of"]


def check_spec(spec: object) -> ShardingSpec:
    """The spec itself; raises if it is something else."""
    if isinstance(spec, ShardingSpec):
        return spec
    raise ArgumentTypeError(
        f"sharding_spec is of type {type(spec).__name__}: give a ShardingSpec, such as "
        'ChunkShardingSpec(0, ["rank:0/cpu"])'
    )


def content_for(
    spec: ShardingSpec, shape: Sequence[int], properties: TensorProperties, group: Group
) -> Content:
    """The content that a spec gives this rank of a tensor, without parts."""
    check_spec(spec)
    properties.check()
    size, shards = torch.Size(shape), None
    layout = spec.layout(size)
    if isinstance(spec, LayoutShardingSpec):
        device = with_index(torch.device(spec.device))
    else:
        shards = tuple(spec.build_metadata(size, properties).shards_metadata)
        device = _device_of(shards, group)
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
    """The content of a rank that has these parts of a tensor with these shards."""
    layout: Layout = layout_of_shards(shape, shards)
    inferred = infer_sharding_spec(shards) if spec is None else None
    if not dist.is_initialized() and len(parts) == len(shards):
        layout = Layout.from_boxes(shape, {this_rank(): [shard.box for shard in shards]})
    elif isinstance(inferred, ChunkShardingSpec):
        layout = inferred.layout(shape)
    check_members(layout.ranks, group)
    device = parts[0].device if parts else default_device_of(group)
    return Content(
        layout, tuple(shape), dtype, tuple(parts), device, group, spec or inferred, shards
    )


def _device_of(shards: Sequence[ShardMetadata], group: Group) -> torch.device:
    """The device of this rank's shards; a rank without shards takes that of the others."""
    rank = this_rank()
    devices = {shard.rank: shard.placement.device() for shard in shards if shard.placement}
    device = devices.get(rank) or next(iter(devices.values()), None)
    if device is not None and (rank in devices or device.type == "cpu"):
        return torch.device(device)
    return default_device_of(group)


def size_of(given: Sequence[int | Sequence[int]]) -> torch.Size:
    """A size given as numbers, or as one list of them.

    >>> size_of((3, 4)) == size_of(([3, 4],)) == torch.Size([3, 4])
    True
    """
    listed = given[0] if len(given) == 1 and isinstance(given[0], Iterable) else given
    try:
        numbers = [index(number) for number in listed]  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(
            f"size {quoted(listed)} should be whole numbers: give one per dim"
        ) from None
    if any(number < 0 for number in numbers):
        raise ArgumentError(f"size {numbers} has a number below 0: give sizes >= 0")
    return torch.Size(numbers)
