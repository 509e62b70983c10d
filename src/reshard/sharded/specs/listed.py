"""Specs that list shards or name a layout, and the contents that specs and shards give a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import index

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.layout.layout import Layout
from reshard.live.inputs.bound import with_index
from reshard.sharded.content import Content
from reshard.sharded.groups import Group, check_members, default_device_of
from reshard.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_disjoint,
    check_tensor,
)
from reshard.sharded.specs.base import AnyPlacement, ShardingSpec, layout_of_shards
from reshard.sharded.specs.grids import ChunkShardingSpec, RaggedShardingSpec
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = [
    "EnumerableShardingSpec",
    "LayoutShardingSpec",
    "check_spec",
    "content_for",
    "content_of_shards",
    "infer_sharding_spec",
    "size_of",
]


@dataclass(frozen=True)
class EnumerableShardingSpec(ShardingSpec):
    """A list of all shards: any boxes that cover the tensor without overlap, on any ranks.

    >>> top = ShardMetadata([0, 0], [2, 4], "rank:0/cpu")
    >>> rest = ShardMetadata([2, 0], [3, 4], "rank:1/cpu")
    >>> metadata = EnumerableShardingSpec([top, rest]).build_metadata((5, 4), TensorProperties())
    >>> [f"{shard.box} on {shard.rank}" for shard in metadata.shards_metadata]
    ['[0:2, 0:4] on 0', '[2:5, 0:4] on 1']
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Iterable[ShardMetadata]) -> None:
        object.__setattr__(self, "shards", tuple(shards))
        if not self.shards:
            raise ArgumentError("Empty shard list provided: give at least 1 shard")
        check_disjoint(self.shards)

    @staticmethod
    def from_sizes(
        dim: int, sizes: Iterable[int], placements: Iterable[AnyPlacement]
    ) -> RaggedShardingSpec:
        """Consecutive parts of these sizes along a dim, for tensors of any size in other dims."""
        return RaggedShardingSpec(dim, sizes, placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The listed shards; raises if they do not cover a tensor of this size."""
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(self.shards, tensor_sizes, tensor_properties)

    def layout(self, shape: Sequence[int]) -> Layout:
        """The boxes of the shards by rank."""
        check_tensor(self.shards, shape)
        return layout_of_shards(shape, self.shards)


@dataclass(frozen=True)
class LayoutShardingSpec(ShardingSpec):
    """A layout in any words or boxes, on one device of each of its ranks.

    >>> from reshard import Layout, Mesh
    >>> spec = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp"))
    >>> spec.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata[1].shard_offsets
    (0, 3)
    """

    stated: Layout
    """The layout as it was given, for any shape that it fits."""
    device: str = "cpu"

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        object.__setattr__(self, "stated", layout)
        object.__setattr__(self, "device", device)

    def layout(self, shape: Sequence[int]) -> Layout:
        """The given layout; raises if it does not fit the shape."""
        self.stated.dims(tuple(shape))
        return self.stated

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All boxes on all ranks; replicas are listed once for each rank that holds them."""
        layout, shape = self.layout(tensor_sizes), tuple(tensor_sizes)
        shards = tuple(
            ShardMetadata(piece.box.start, piece.box.shape, f"rank:{rank}/{self.device}")
            for rank in layout.ranks
            for piece in layout.pieces(rank, shape)
        )
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def __repr__(self) -> str:
        return f"LayoutShardingSpec({self.stated!r}, {self.device!r})"


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The chunk spec with exactly these shards, or the spec that lists them.

    The shards may come in any order: the placements of the chunk spec follow the offsets. If chunks
    of several dims are the same shards, the spec has the first such dim.

    >>> shards = [ShardMetadata([2], [2], "rank:0/cpu"), ShardMetadata([0], [2], "rank:1/cpu")]
    >>> infer_sharding_spec(shards)
    ChunkShardingSpec(0, ['rank:1/cpu', 'rank:0/cpu'])
    """
    listed = EnumerableShardingSpec(shards_metadata)
    shards = listed.shards
    dims = range(len(shards[0].shard_sizes))
    split = [dim for dim in dims if any(shard.shard_offsets[dim] for shard in shards)]
    for dim in (split or dims) if len(split) < 2 else ():
        spec = _chunks_along(dim, shards)
        if spec is not None:
            return spec
    return listed


def _chunks_along(dim: int, shards: Sequence[ShardMetadata]) -> ChunkShardingSpec | None:
    # Empty chunks all begin at the end of the dim; sorting keeps these in the given order.
    rising = sorted(shards, key=lambda shard: shard.shard_offsets[dim])
    placements = [shard.placement for shard in rising if shard.placement is not None]
    if len(placements) != len(rising):
        return None
    stops = [shard.box.stop for shard in shards if not shard.is_empty]
    stops = stops or [shard.box.stop for shard in shards]
    size = torch.Size(map(max, zip(*stops, strict=True)))
    spec = ChunkShardingSpec(dim, placements)
    chunks = spec.cells(size).metadata()
    pairs = zip(chunks, rising, strict=True)
    return spec if all(one == _clamped(other, dim, size[dim]) for one, other in pairs) else None


def _clamped(shard: ShardMetadata, dim: int, length: int) -> ShardMetadata:
    """The shard with offsets as ours: torch lets empty chunks begin beyond the end of the dim."""
    if not shard.is_empty or shard.shard_offsets[dim] <= length:
        return shard
    offsets = list(shard.shard_offsets)
    offsets[dim] = length
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


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
