"""What a rank has of a sharded tensor: the layout that all ranks share, and its own parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.layout.box import Box, row_major
from reshard.layout.layout import BoxLayout, Layout
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.shard import Shard
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import piece_view

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.sharded.spec import ShardingSpec

__all__ = [
    "Content",
    "Group",
    "layout_of_shards",
    "materialized",
    "members",
    "part_shapes",
    "strides_like",
]

Group = Any
"""A process group, or None for the default one."""


class NoRankError(ValueError, RuntimeError):
    """A placement names no rank."""


@dataclass(frozen=True, eq=False)
class Content:
    """What a rank has of a sharded tensor."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[torch.Tensor, ...]
    """This rank's tensors: one per box of a layout of boxes, one for a layout in words."""
    device: torch.device
    group: Group = None
    spec: ShardingSpec | None = None
    """The spec that the layout was made from, if it was."""
    stated: tuple[ShardMetadata, ...] | None = None
    """All shards, as the spec or the user gave them."""
    mesh: DeviceMesh | None = None
    """The DeviceMesh that the layout was read from, if it was."""
    stated_stride: tuple[int, ...] | None = None
    """The strides that the whole tensor would have, where they are not those of its rows.

    The same on all ranks: autograd chooses operations by them. So they do not follow from the
    parts, of which one with a single row lies like its transpose.
    """

    def __post_init__(self) -> None:
        """Parts are memory that can be moved: flags that change how torch reads it are resolved."""
        if any(map(_is_lazy, self.parts)):
            object.__setattr__(self, "parts", tuple(map(materialized, self.parts)))

    @property
    def local(self) -> torch.Tensor | None:
        """This rank's parts as a move takes them: one as it is, several flattened and joined."""
        if len(self.parts) > 1:
            return torch.cat([part.reshape(-1) for part in self.parts])
        return self.parts[0] if self.parts else None

    def with_parts(self, parts: Sequence[torch.Tensor]) -> Content:
        """The same shards with other values, perhaps of another dtype or on another device."""
        if not parts:
            return replace(self, parts=())
        return self.of_kind(parts[0].dtype, parts[0].device, tuple(parts))

    def of_kind(
        self, dtype: torch.dtype, device: torch.device, parts: tuple[torch.Tensor, ...] = ()
    ) -> Content:
        """The same shards of another dtype or on another device, on a rank that may have none."""
        stated = self.stated
        if stated is not None and device != self.device:
            stated = tuple(shard.on(_device_on(shard.rank, device)) for shard in stated)
        return replace(self, parts=parts, dtype=dtype, device=device, stated=stated)

    def sized(self, shape: tuple[int, ...]) -> Content:
        """As it is cut, for a tensor of another shape; still without parts."""
        return replace(self, shape=shape, parts=(), spec=None, stated=None, stated_stride=None)

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides that the whole tensor would have."""
        return row_major(self.shape) if self.stated_stride is None else self.stated_stride

    def is_like(self, other: Content) -> bool:
        """Whether every rank holds the same elements of both, in the same order."""
        if self.layout is other.layout and self.shape == other.shape:
            return True
        if self.shape != other.shape or members(self.group) != members(other.group):
            return False
        return self.layout == other.layout or _is_same(self.layout, other.layout, self.shape)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies have copies of the parts, perhaps on another device; all else is the same."""
        names = [field.name for field in fields(self) if field.name != "parts"]
        return _rebuilt, (_Shared({name: getattr(self, name) for name in names}), self.parts)

    @cached_property
    def shards_metadata(self) -> tuple[ShardMetadata, ...]:
        """All shards on all ranks; a layout with replicas has none."""
        if self.stated is not None:
            return self.stated
        return tuple(
            ShardMetadata(
                piece.box.start,
                piece.box.shape,
                f"rank:{rank}/{_device_on(rank, self.device)}",
            )
            for rank in self.layout.ranks
            for piece in self.layout.pieces(rank, self.shape)
        )

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """This rank's shards; views of its part where that holds several boxes."""
        rank = this_rank()
        mine = [shard for shard in self.shards_metadata if shard.rank == rank]
        if not dist.is_initialized() and len(self.parts) == len(self.shards_metadata):
            mine = list(self.shards_metadata)  # without a group all may be here, of any rank
        if isinstance(self.layout, BoxLayout):
            return tuple(Shard(part, one) for part, one in zip(self.parts, mine, strict=True))
        return tuple(Shard(view, one) for view, one in zip(self._views(), mine, strict=True))

    def _views(self) -> list[torch.Tensor]:
        if not self.parts:
            return []
        part, pieces = self.parts[0], self.layout.pieces(this_rank(), self.shape)
        if len(pieces) == 1 and part.shape == pieces[0].box.shape:
            return [part]
        return [piece_view(part, piece) for piece in pieces]


@dataclass(frozen=True, eq=False, slots=True)
class _Shared:
    """What a content and its copies have in common, process groups for example."""

    fields: dict[str, Any]

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


def _rebuilt(shared: _Shared, parts: Sequence[torch.Tensor]) -> Content:
    content = Content(parts=tuple(parts), **shared.fields)
    moved = any(part.device != content.device for part in parts)
    return content.with_parts(parts) if moved else content


def part_shapes(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a rank's parts."""
    if isinstance(layout, BoxLayout):
        return tuple(box.shape for box in layout.boxes.get(rank, ()))
    held = layout.holds(rank) is not None
    return (layout.local_shape(rank, shape),) if held else ()


@lru_cache(maxsize=4096)
def _is_same(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether layouts are the same for all ranks; one that moved alone would wait for the others.

    Empty tensors are the same in any layout, and their parts may still have different shapes.
    """
    ranks = {*one.ranks, *other.ranks}
    return one.same_as(other, shape) and all(
        part_shapes(one, rank, shape) == part_shapes(other, rank, shape) for rank in ranks
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory: not a lazy conjugate, negative or zero."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def _device_on(rank: int | None, device: torch.device) -> torch.device:
    """The device of a rank, as far as this one knows: of others it knows the kind only."""
    return device if rank == this_rank() else torch.device(device.type)


@lru_cache(maxsize=4096)
def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims lie in the order of these.

    >>> strides_like((4, 6), (1, 2)), strides_like((4, 6), (6, 1))
    ((1, 4), (6, 1))
    """
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def _no_rank(shard: ShardMetadata) -> NoRankError:
    from reshard.sharded.rpc import is_running

    worker = None if shard.placement is None else shard.placement.worker_name()
    where = f"the shard at {list(shard.shard_offsets)} has placement {shard.placement}"
    if worker is None:
        return NoRankError(f"{where}, which names no rank: use placements such as rank:3/cpu")
    if is_running():
        return NoRankError(f"Invalid worker name: {worker}; {where}, and RPC has no such worker")
    return NoRankError(
        f"RPC framework needs to be initialized for using worker names: {where}; call "
        "torch.distributed.rpc.init_rpc, or use placements such as rank:3/cpu"
    )


@lru_cache(maxsize=4096)
def layout_of_shards(shape: tuple[int, ...], shards: tuple[ShardMetadata, ...]) -> BoxLayout:
    """The boxes of shards, by the ranks that hold them, in the order in which they are given."""
    boxes: dict[int, list[Box]] = {}
    for shard in shards:
        rank = shard.rank
        if rank is None:
            raise _no_rank(shard)
        boxes.setdefault(rank, []).append(shard.box)
    return Layout.from_boxes(shape, boxes)


def members(group: Group) -> tuple[int, ...]:
    """The global ranks of a group; rank 0 alone where there is no process group."""
    if not dist.is_initialized():
        return (0,)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that was given: call this on the "
            "ranks of the group only"
        )
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
