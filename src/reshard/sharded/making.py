"""From a spec to what a rank holds: which shards are its own, and are they all somewhere?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.layout import BoxLayout, Layout
from reshard.sharded.by_layout import lowered
from reshard.sharded.content import Content, Group, members
from reshard.sharded.metadata import ShardMetadata, TensorProperties
from reshard.tensors.meshes import this_rank

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = [
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
    check_properties(properties)
    layout, stated = lowered(spec, shape, properties)
    check_members(layout, stated, group)
    device = device_of(stated, group)
    sizes = tuple(shape)
    return Content(layout, sizes, properties.dtype, (), device, group, spec, stated)


def shapes_here(content: Content) -> list[tuple[int, ...]]:
    """The shapes of this rank's parts."""
    rank, layout = this_rank(), content.layout
    if isinstance(layout, BoxLayout):
        return [box.shape for box in layout.boxes.get(rank, ())]
    held = layout.holds(rank) is not None
    return [layout.local_shape(rank, content.shape)] if held else []


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


def check_members(layout: Layout, stated: Sequence[ShardMetadata] | None, group: Group) -> None:
    """Refuse ranks that are not in the group."""
    if not dist.is_initialized():
        return
    known = members(group)
    for rank in layout.ranks:
        if rank not in known:
            raise ValueError(
                f"Global rank {rank} does not exist in the process group of ranks {list(known)}: "
                "give placements of its ranks, or the group that they are in"
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
    from reshard.run.live.routes import default_device

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
    numbers = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return torch.Size(numbers)  # type: ignore[arg-type]
