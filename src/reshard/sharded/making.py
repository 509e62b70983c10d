"""From a spec to what a rank holds: which shards are its own, and are they all somewhere?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from operator import index

import torch
import torch.distributed as dist

from reshard.layout.layout import Layout
from reshard.live.inputs.bound import with_index
from reshard.sharded.by_layout import LayoutShardingSpec, lowered
from reshard.sharded.content import Content, Group, members, part_shapes
from reshard.sharded.enumerable import check_disjoint, check_tensor
from reshard.sharded.metadata import ShardMetadata, TensorProperties
from reshard.sharded.spec import ShardingSpec
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = [
    "check_known",
    "check_members",
    "check_properties",
    "content_for",
    "device_of",
    "home_of",
    "shapes_here",
    "size_of",
]


def content_for(
    spec: ShardingSpec, shape: torch.Size, properties: TensorProperties, group: Group
) -> Content:
    """What a spec gives this rank of a tensor, still without its parts."""
    if not isinstance(spec, ShardingSpec):
        raise TypeError(
            f"sharding_spec is of type {type(spec).__name__}: give a ShardingSpec, such as "
            'ChunkShardingSpec(0, ["rank:0/cpu"])'
        )
    check_properties(properties)
    layout, stated = lowered(spec, shape, properties)
    if stated is not None:
        _check_whole(shape, stated)
    check_members(layout, group)
    device = device_of(stated, group)
    if isinstance(spec, LayoutShardingSpec):
        device = with_index(torch.device(spec.device))
    kept = copy(spec)  # its fields may be assigned, as those of torch's specs
    return Content(layout, tuple(shape), properties.dtype, (), device, group, kept, stated)


def shapes_here(content: Content) -> list[tuple[int, ...]]:
    """The shapes of this rank's parts."""
    return list(part_shapes(content.layout, this_rank(), content.shape))


@lru_cache(maxsize=4096)
def _check_whole(shape: torch.Size, stated: tuple[ShardMetadata, ...]) -> None:
    """Refuse shards, perhaps of a user's own spec, that are not the whole tensor, each once."""
    check_disjoint(stated)
    check_tensor(stated, shape)


def check_properties(properties: TensorProperties) -> None:
    """Refuse what shards cannot be."""
    if properties.layout is not torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported, found {properties.layout}: make "
            "the tensor dense"
        )
    if properties.memory_format is not torch.contiguous_format:
        raise ValueError(
            "Only torch.contiguous_format memory_format is currently supported, found "
            f"{properties.memory_format}: call contiguous()"
        )


def check_members(layout: Layout, group: Group) -> None:
    """Refuse ranks that are not in the group."""
    for rank in layout.ranks:
        check_known(rank, group)


def check_known(rank: int | None, group: Group) -> None:
    """Refuse a rank that is not in the group, as far as this rank can tell."""
    if not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    known = members(group)
    if rank not in known:
        raise ValueError(
            f"Global rank {rank} does not exist in input process group: {list(known)}; give "
            "placements of its ranks, or the group that they are in"
        )


def device_of(stated: Sequence[ShardMetadata] | None, group: Group) -> torch.device:
    """Where this rank's shards are; where it has none, where the others have theirs."""
    rank = this_rank()
    devices = {shard.rank: shard.placement.device() for shard in stated or () if shard.placement}
    found = devices.get(rank) or next(iter(devices.values()), None)
    if found is not None and (rank in devices or found.type == "cpu"):
        return torch.device(found)
    return home_of(group)


def home_of(group: Group) -> torch.device:
    """Where ranks of a group have tensors of which nothing else is known."""
    from reshard.live.inputs.bound import default_device

    if not dist.is_initialized():
        return torch.device("cpu")
    known = group or dist.group.WORLD
    assert known is not None
    return default_device(known)


def size_of(given: Sequence[int | Sequence[int]]) -> torch.Size:
    """A size that was given as numbers, or as one list of them.

    >>> size_of((3, 4)) == size_of(([3, 4],)) == torch.Size([3, 4])
    True
    """
    listed = given[0] if len(given) == 1 and isinstance(given[0], Iterable) else given
    try:
        numbers = [index(number) for number in listed]  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"size {quoted(listed)} should be whole numbers: give one per dim"
        ) from None
    if any(number < 0 for number in numbers):
        raise ValueError(f"size {numbers} has a number below 0: give sizes >= 0")
    return torch.Size(numbers)
