"""Cut a sharded tensor in another way, along one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from reshard.planning.plans import Plan, plan
from reshard.sharded.content import Content, Group, members
from reshard.sharded.gradients import from_local, to_layout, to_layout_in_place
from reshard.sharded.making import content_for
from reshard.sharded.metadata import Placement, ShardMetadata, TensorProperties
from reshard.sharded.moving import laid_as
from reshard.sharded.shard import Shard
from reshard.sharded.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from reshard.sharded.spec import ShardingSpec

__all__ = [
    "build_reshard_metadata",
    "get_idx_from_placements",
    "plan_reshard",
    "reshard_in_place",
    "reshard_local_shard",
    "resharded",
    "reshuffle_local_shard",
]


MOST_TARGETS = 4096


class PlacementsError(ValueError, RuntimeError):
    """A rank is not among placements."""


def resharded(tensor: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    """The same tensor as another spec cuts it; itself where every rank keeps what it has."""
    content = tensor._content
    _check_spec(spec)
    target = _target(content, spec)
    if target.layout == content.layout and target.shards_metadata == content.shards_metadata:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return to_layout(tensor, target)
    return wrap(laid_as(content, target))


def reshard_in_place(tensor: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    """Cut this very tensor in another way."""
    _check_spec(spec)
    content = tensor._content
    target = _target(content, spec)
    if target.layout == content.layout and target.shards_metadata == content.shards_metadata:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        raise RuntimeError(
            "reshard() changes a tensor in place, and this one is a leaf that collects gradients: "
            "use resharded(), which gives a new tensor, or reshard it before requires_grad_()"
        )
    if target.device.type != content.device.type:
        raise ValueError(
            f"reshard() keeps a tensor on its devices, which are {content.device.type}, and the "
            f"spec is for {target.device.type}: move it with to(), or use resharded()"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        to_layout_in_place(tensor, target)
    else:
        tensor._content = laid_as(content, target)
    return tensor


class _Alone:
    """Stands for the group where there is none."""


_targets: WeakKeyDictionary[Any, dict[Any, tuple[Content, ShardingSpec, Any]]] = WeakKeyDictionary()
"""What specs give this rank, by group; training reshards the same tensors in every step."""


def _target(content: Content, spec: ShardingSpec) -> Content:
    """What a spec gives this rank of a tensor, without its parts."""
    known = _targets.setdefault(content.group or dist.group.WORLD or _Alone, {})
    # What a spec is made of may be assigned, and these are other objects then.
    fields = tuple(vars(spec).values())
    quick = (id(spec), *map(id, fields), content.shape, content.dtype)
    found = known.get(quick)
    if found is None:
        if len(known) >= MOST_TARGETS:
            known.clear()
        size, properties = torch.Size(content.shape), TensorProperties(content.dtype)
        target = content_for(spec, size, properties, content.group)
        # Without the group: what a weak key points to may not point back. With the spec and its
        # fields: no other object can have their ids then.
        found = known[quick] = (replace(target, group=None), spec, fields)
    return replace(found[0], group=content.group)


def _check_spec(spec: object) -> None:
    from reshard.sharded.spec import ShardingSpec

    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"reshard needs a ShardingSpec, found {type(spec).__name__}: give a spec")


def build_reshard_metadata(
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    group_or_world: Group | int = None,
    *,
    world_size: int | None = None,
) -> tuple[tuple[ShardMetadata, ...], tuple[int, ...]]:
    """All shards of a spec in the order of ranks, and those ranks.

    >>> from reshard.sharded.chunk import ChunkShardingSpec
    >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    >>> shards, ranks = build_reshard_metadata([4, 6], spec, 2)
    >>> [shard.shard_offsets for shard in shards], ranks
    ([(2, 0), (0, 0)], (0, 1))
    """
    shards = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties()).shards_metadata
    ordered = tuple(sorted(shards, key=lambda shard: -1 if shard.rank is None else shard.rank))
    ranks = tuple(-1 if shard.rank is None else shard.rank for shard in ordered)
    group_or_world = group_or_world if world_size is None else world_size
    known = range(group_or_world) if isinstance(group_or_world, int) else members(group_or_world)
    for rank in ranks:
        if rank not in known:
            raise PlacementsError(f"rank {rank} of the spec is not among {list(known)}")
    return ordered, ranks


def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: bool = False
) -> Any:
    """Where a rank stands among placements: its first place, or with ``all`` every one.

    >>> get_idx_from_placements(["rank:3/cpu", "rank:1/cpu"], 1)
    1
    """
    read = [Placement(place) if isinstance(place, str) else place for place in placements]
    found = [number for number, place in enumerate(read) if place.rank() == current_rank]
    if not found and not all:
        raise PlacementsError(
            f"rank {current_rank} is not among the placements {[str(place) for place in read]}"
        )
    return tuple(found) if all else found[0]


def plan_reshard(
    src: ShardingSpec, dst: ShardingSpec, size: Sequence[int], dtype: torch.dtype = torch.float32
) -> Plan:
    """The plan of a reshard, without communication: it can be printed, proven and simulated."""
    from reshard.sharded.by_layout import lowered

    properties = TensorProperties(dtype)
    have, want = (lowered(spec, torch.Size(size), properties)[0] for spec in (src, dst))
    return plan(have, want, shape=tuple(size), dtype=str(dtype))


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards as another spec cuts the tensor, and all shards; gradients flow back."""
    size = torch.Size(st_size)
    properties = TensorProperties(local_tensor.dtype)
    content = content_for(sharding_spec, size, properties, pg)
    tensor = from_local(local_tensor, content)
    moved = resharded(tensor, resharding_spec)
    found = content_for(resharding_spec, size, properties, pg)
    shards_metadata = list(found.shards_metadata)
    if len(moved._content.parts) == 1:
        local = moved.local_tensor()
        return [Shard(local, moved._content.shards[0].metadata)], shards_metadata
    return moved.local_shards(), shards_metadata


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup | None = None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """The same for specs that cut the same dim; there is one planner for both."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
