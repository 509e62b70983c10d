"""Tensors moved to the layout of another spec, and the functions of torch's ``reshard`` module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, ArgumentTypeError, OperationError
from reshard.layout.columns import SizedCache
from reshard.planning.plans import Plan, plan
from reshard.sharded.content import Content
from reshard.sharded.groups import Group, members
from reshard.sharded.metadata import Placement, ShardMetadata, TensorProperties
from reshard.sharded.specs.base import ShardingSpec
from reshard.sharded.specs.listed import content_for

__all__ = [
    "build_reshard_metadata",
    "check_in_place",
    "get_idx_from_placements",
    "plan_reshard",
    "reshard_target",
]

MAX_TARGET_BYTES, SHARD_BYTES = 16 << 20, 512
"""Bytes of the targets that are kept per group, and about what the metadata of one shard takes."""


class PlacementsError(ArgumentError, RuntimeError):
    """A rank is not among placements."""


class _NoGroup:
    """The key of the targets of a process without a group."""


Target = tuple[Content, ShardingSpec, tuple[object, ...]]
_targets: WeakKeyDictionary[object, SizedCache[tuple[object, ...], Target]] = WeakKeyDictionary()
"""The contents that specs give this rank, by group: training reshards to them in every step."""


def reshard_target(content: Content, spec: ShardingSpec) -> Content | None:
    """The content that a spec gives this rank, without parts; None if the tensor has it already."""
    if not isinstance(spec, ShardingSpec):
        raise ArgumentTypeError(
            f"reshard needs a ShardingSpec, found {type(spec).__name__}: give a spec"
        )
    target = _target(content, spec)
    same = target.is_like(content) and target.shards_metadata == content.shards_metadata
    return None if same else target


def _target(content: Content, spec: ShardingSpec) -> Content:
    group = content.group or dist.group.WORLD or _NoGroup
    known = _targets.setdefault(group, SizedCache(MAX_TARGET_BYTES))
    # The fields of a spec may be assigned; they are other objects then.
    fields = tuple(vars(spec).values())
    key = (id(spec), *map(id, fields), content.shape, content.dtype)
    entry = known.get(key)
    if entry is None:
        target = content_for(spec, content.shape, TensorProperties(content.dtype), content.group)
        # Without the group: the value of a weak key must not refer to it. With the spec and its
        # fields: while they live, no other object has their ids.
        size = SHARD_BYTES * (1 + len(target.stated or ()))
        entry = known.put(key, (replace(target, group=None), spec, fields), size)
    return replace(entry[0], group=content.group)


def check_in_place(content: Content, target: Content, is_leaf: bool) -> None:
    """Refuse to reshard in place what cannot be: a leaf that collects gradients, other devices."""
    if is_leaf:
        raise OperationError(
            "reshard() changes a tensor in place, and this one is a leaf that collects gradients: "
            "use resharded(), which gives a new tensor, or reshard it before requires_grad_()"
        )
    if target.device.type != content.device.type:
        raise ArgumentError(
            f"reshard() keeps a tensor on its devices, which are {content.device.type}, and the "
            f"spec is for {target.device.type}: move it with to(), or use resharded()"
        )


def build_reshard_metadata(
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    group_or_world: Group | int = None,
    *,
    world_size: int | None = None,
) -> tuple[tuple[ShardMetadata, ...], tuple[int, ...]]:
    """The metadata of all shards of a spec in rank order, and those ranks.

    >>> from reshard.sharded import ChunkShardingSpec
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


@overload
def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: Literal[False] = False
) -> int: ...


@overload
def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: bool
) -> tuple[int, ...] | int: ...


def get_idx_from_placements(
    placements: Sequence[Placement | str], current_rank: int, *, all: bool = False
) -> tuple[int, ...] | int:
    """The index of a rank among placements: the first one, or with ``all`` a tuple of all.

    >>> get_idx_from_placements(["rank:3/cpu", "rank:1/cpu"], 1)
    1
    """
    read = [Placement(place) if isinstance(place, str) else place for place in placements]
    indices = [index for index, place in enumerate(read) if place.rank() == current_rank]
    if not indices and not all:
        raise PlacementsError(
            f"rank {current_rank} is not among the placements {[str(place) for place in read]}"
        )
    return tuple(indices) if all else indices[0]


def plan_reshard(
    src: ShardingSpec, dst: ShardingSpec, size: Sequence[int], dtype: torch.dtype = torch.float32
) -> Plan:
    """The plan of a reshard, without communication: it can be printed, proven and simulated."""
    shape = tuple(size)
    return plan(src.layout(shape), dst.layout(shape), shape=shape, dtype=str(dtype))
