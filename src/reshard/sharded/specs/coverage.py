"""Checks that shards do not overlap and that they cover a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from reshard.errors import ArgumentError
from reshard.layout.box import Box
from reshard.layout.coverage import first_overlap, one_missing_box
from reshard.sharded.metadata import ShardMetadata

__all__ = ["check_disjoint", "check_tensor"]


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """Refuse shards that have an element in common; a shard without elements overlaps nothing."""
    boxes = [shard.box for shard in shards]
    for box in boxes:
        if len(box.shape) != len(boxes[0].shape):
            raise ArgumentError(
                f"Found inconsistent ranks for shards: {box} has {len(box.shape)} "
                f"dims and {boxes[0]} has {len(boxes[0].shape)}; give shards of one tensor"
            )
    overlap = first_overlap(boxes)
    if overlap is not None:
        one, other = overlap
        raise ArgumentError(
            f"Shards {_named(shards[one])} and {_named(shards[other])} overlap in "
            f"{boxes[one] & boxes[other]}: cut one of them, every element is in one shard"
        )


def check_tensor(shards: Sequence[ShardMetadata], tensor_sizes: Sequence[int]) -> None:
    """Refuse disjoint shards that are not exactly a tensor of this size."""
    size = tuple(tensor_sizes)
    for shard in shards:
        if len(shard.shard_sizes) != len(size):
            raise ArgumentError(
                f"Rank of tensor is {len(size)}, but shards rank is {len(shard.shard_sizes)}: give "
                f"shard {_named(shard)} one offset and one size per dim of {list(size)}"
            )
        for dim, (stop, length) in enumerate(zip(shard.box.stop, size, strict=True)):
            if stop > length:
                raise ArgumentError(
                    f"shard {_named(shard)} exceeds tensor dim {dim}: it ends at {stop} and the "
                    f"dim has {length}, give shards inside {list(size)}"
                )
    covered = sum(prod(shard.shard_sizes) for shard in shards)
    if covered == prod(size):
        return
    why = "some overlap, every element is in one shard"
    if covered < prod(size):
        missing = one_missing_box(Box.whole(size), [shard.box for shard in shards])
        why = f"they do not cover the entire tensor, add a shard for {missing}"
    raise ArgumentError(
        f"the {len(shards)} shards have {covered} elements, which does not match tensor volume "
        f"{prod(size)} of size {list(size)}: {why}"
    )


def _named(shard: ShardMetadata) -> str:
    return f"{shard.box}" if shard.placement is None else f"{shard.box} on {shard.placement}"
