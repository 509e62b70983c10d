"""Shards and their metadata; ShardingSpec, the base class of all specs; the spec of a layout."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from operator import add
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device

from reshard.errors import ArgumentError
from reshard.layout.box import Box
from reshard.layout.coverage import first_overlap, missing_boxes
from reshard.layout.layout import BoxLayout, Layout
from reshard.planning.plans import ONE
from reshard.sharded.groups import Group, is_running, worker_rank

Placement = _remote_device
"""A rank, or an RPC worker, and a device: made from texts such as "rank:3/cuda:1"."""
AnyPlacement = str | torch.device | Placement
"""What a placement may be given as: a text such as "rank:3/cuda:1", a device, or a placement."""


def rank_of(placement: Placement) -> int | None:
    """The global rank of a placement; RPC knows the ranks of workers."""
    worker = placement.worker_name()
    return placement.rank() if worker is None else worker_rank(worker)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The offsets, sizes and placement of one shard.

    >>> shard = ShardMetadata([4, 0], [2, 8], "rank:1/cpu")
    >>> shard.shard_sizes, shard.placement.rank()
    ((2, 8), 1)
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: Placement | None = None

    def __init__(
        self,
        shard_offsets: Iterable[int],
        shard_sizes: Iterable[int],
        placement: str | Placement | None = None,
    ) -> None:
        offsets, sizes = tuple(map(int, shard_offsets)), tuple(map(int, shard_sizes))
        if len(offsets) != len(sizes):
            raise ArgumentError(
                f"shard_offsets {offsets} and shard_sizes {sizes} should have the same number of "
                f"elements, found {len(offsets)} and {len(sizes)}"
            )
        if min(offsets, default=0) < 0:
            raise ArgumentError(f"shard_offsets should be >=0, found {offsets}")
        if min(sizes, default=0) < 0:
            raise ArgumentError(f"shard_sizes should be >= 0, found {sizes}")
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        where = Placement(placement) if isinstance(placement, str) else placement
        object.__setattr__(self, "placement", where)

    @property
    def box(self) -> Box:
        """The shard as a box of the tensor."""
        return Box(self.shard_offsets, tuple(map(add, self.shard_offsets, self.shard_sizes)))

    @property
    def rank(self) -> int | None:
        """The global rank of the placement, if it has one."""
        return None if self.placement is None else rank_of(self.placement)

    def to_row(self) -> list[list[int] | str | None]:
        """The shard as JSON: ``ShardMetadata(*row)`` reads it."""
        place = None if self.placement is None else str(self.placement)
        return [list(self.shard_offsets), list(self.shard_sizes), place]

    def on(self, device: torch.device) -> ShardMetadata:
        """The same shard on another device of the same rank."""
        if self.placement is None or self.rank is None:
            return self
        return ShardMetadata(self.shard_offsets, self.shard_sizes, f"rank:{self.rank}/{device}")

    @property
    def is_empty(self) -> bool:
        return 0 in self.shard_sizes


@dataclass(frozen=True, slots=True)
class TensorProperties:
    """The properties that all shards of a tensor have in common."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of a tensor."""
        common = (tensor.dtype, tensor.layout, tensor.requires_grad)
        return TensorProperties(*common, pin_memory=not tensor.is_meta and tensor.is_pinned())

    def check(self) -> None:
        """Refuse sparse tensors and memory formats that shards cannot have."""
        if self.layout is not torch.strided:
            raise ArgumentError(
                f"Only torch.strided layout is currently supported, found {self.layout}: make "
                "the tensor dense"
            )
        if self.memory_format is not torch.contiguous_format:
            raise ArgumentError(
                "Only torch.contiguous_format memory_format is currently supported, found "
                f"{self.memory_format}: call contiguous()"
            )


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """All shards of a tensor, on all ranks."""

    shards_metadata: tuple[ShardMetadata, ...] = ()
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards_metadata", tuple(self.shards_metadata))
        object.__setattr__(self, "size", torch.Size(self.size))


class Shard:
    """One shard on this rank: a tensor and its metadata.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 8), [4, 0], rank=1).metadata.shard_sizes
    (2, 8)
    """

    __slots__ = ("_tensor", "metadata")

    metadata: ShardMetadata

    def __init__(self, tensor: torch.Tensor, metadata: ShardMetadata) -> None:
        self.metadata = metadata
        self.tensor = tensor

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """A shard of a rank, with the size and the device of its tensor."""
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), placement))

    @property
    def tensor(self) -> torch.Tensor:
        """The values of the shard."""
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self.check(tensor)
        self._tensor = tensor

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor of another size or on another device than the metadata says."""
        sizes, expected = tuple(tensor.size()), self.metadata.shard_sizes
        if sizes != expected:
            raise ArgumentError(
                "Shard tensor size does not match with metadata.shard_lengths! Found shard tensor "
                f"size {list(sizes)}, metadata.shard_lengths {list(expected)}: give the tensor of "
                "this shard"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != tensor.device:
            raise ArgumentError(
                "Local shard tensor device does not match with local Shard's placement! Found "
                f"{tensor.device} and {placement.device()}: move one to the other"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Shard:
        values = self.tensor
        clone = values.detach().clone().requires_grad_(values.requires_grad)
        return Shard(clone, copy.deepcopy(self.metadata, memo))

    def __reduce__(self) -> tuple[type[Shard], tuple[torch.Tensor, ShardMetadata]]:
        return Shard, (self.tensor.detach(), self.metadata)

    def __repr__(self) -> str:
        return f"Shard(tensor={self.tensor}, metadata={self.metadata})"


def shards_of_layout(
    layout: Layout, shape: tuple[int, ...], device_of: Callable[[int], object]
) -> tuple[ShardMetadata, ...]:
    """All boxes on all ranks; replicas are listed once for each rank that holds them."""
    return tuple(
        ShardMetadata(piece.box.start, piece.box.shape, f"rank:{rank}/{device_of(rank)}")
        for rank in layout.ranks
        for piece in layout.pieces(rank, shape)
    )


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


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Refuse disjoint shards that are not exactly a tensor of this size."""
    shards, size = shards_metadata, tuple(tensor_dims)
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
        gaps = missing_boxes(Box.whole(size), [shard.box for shard in shards])
        largest = max(gaps, key=lambda gap: gap.size)
        why = f"they do not cover the entire tensor, add a shard for {largest}"
    raise ArgumentError(
        f"the {len(shards)} shards have {covered} elements, which does not match tensor volume "
        f"{prod(size)} of size {list(size)}: {why}"
    )


def _named(shard: ShardMetadata) -> str:
    return f"{shard.box}" if shard.placement is None else f"{shard.box} on {shard.placement}"


class PlacementError(ArgumentError, RuntimeError):
    """A placement names no rank, or a rank is not among placements."""


class PlacementSpec(ABC):  # noqa: B024 - a name to derive from, as in torch
    """Says where something is placed; open to classes of your own."""


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """One device of one rank or worker.

    >>> DevicePlacementSpec("rank:1/cuda:0").device.rank()
    1
    """

    device: Placement

    def __init__(self, device: AnyPlacement) -> None:
        vars(self).update(device=check_placements([device])[0])


# No slots in the specs: in a class derived from a frozen one with slots, Python 3.11 can set no
# attribute of its own.
class ShardingSpec(ABC):
    """How a tensor is split into shards, and the rank of each; open to classes of your own.

    A class of your own needs ``build_metadata`` only: everything else follows from the shards. It
    may also have its own ``shard``, or derive from one of the specs here.

    >>> class OnOneRank(ShardingSpec):
    ...     def build_metadata(self, tensor_sizes, tensor_properties):
    ...         whole = ShardMetadata([0] * len(tensor_sizes), tensor_sizes, "rank:0/cpu")
    ...         return ShardedTensorMetadata((whole,), tensor_sizes, tensor_properties)
    >>> OnOneRank().layout((3, 4)).boxes
    {0: (Box((0, 0), (3, 4)),)}
    """

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The metadata of all shards of a tensor of this size; needs no communication."""

    def layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a tensor of this shape: words on a mesh if they express it, else boxes."""
        size = torch.Size(shape)
        shards = tuple(self.build_metadata(size, TensorProperties()).shards_metadata)
        check_disjoint(shards)
        check_tensor(shards, size)
        return layout_of_shards(size, shards)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Group = None) -> Any:
        """The ShardedTensor of the tensor of ``src_rank``; the others give tensors of its kind."""
        # Loaded by name: a spec is below the tensors that it describes.
        api = import_module("reshard.sharded.api")
        return api.shard_tensors({ONE: tensor}, {ONE: self}, src_rank, process_group)[ONE]


@dataclass(frozen=True)
class LayoutShardingSpec(ShardingSpec):
    """A layout in any words or boxes, on one device of each of its ranks.

    >>> from reshard import Layout, Mesh
    >>> spec = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp"))
    >>> spec.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata[1].shard_offsets
    (0, 3)
    """

    stated: Layout
    device: str = "cpu"

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        vars(self).update(stated=layout, device=device)

    def layout(self, shape: Sequence[int]) -> Layout:
        self.stated.dims(tuple(shape))
        return self.stated

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        layout, shape = self.layout(tensor_sizes), tuple(tensor_sizes)
        shards = shards_of_layout(layout, shape, lambda rank: self.device)
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def __repr__(self) -> str:
        return f"LayoutShardingSpec({self.stated!r}, {self.device!r})"


def layout_of_shards(shape: Sequence[int], shards: Iterable[ShardMetadata]) -> BoxLayout:
    """The boxes of shards by rank, in the order of the shards."""
    boxes: dict[int, list[Box]] = {}
    for shard in shards:
        if shard.rank is not None:
            boxes.setdefault(shard.rank, []).append(shard.box)
            continue
        worker = None if shard.placement is None else shard.placement.worker_name()
        where = f"the shard at {list(shard.shard_offsets)} has placement {shard.placement}"
        advice = "use placements such as rank:3/cpu"
        if worker is None:
            raise PlacementError(f"{where}, which names no rank: {advice}")
        raise PlacementError(
            f"Invalid worker name: {worker}; {where}, and RPC has no such worker"
            if is_running()
            else f"RPC framework needs to be initialized for using worker names: {where}; call "
            f"torch.distributed.rpc.init_rpc, or {advice}"
        )
    return Layout.from_boxes(shape, boxes)


def check_placements(placements: Iterable[AnyPlacement]) -> tuple[Placement, ...]:
    """The placements of a spec as a tuple of its own, which the caller cannot change."""
    if isinstance(placements, str):
        # Each letter of it would pass as the name of a worker.
        raise ArgumentError(f'placements is the text "{placements}": give a list, ["{placements}"]')
    listed = list(placements)
    for index, place in enumerate(listed):
        if not isinstance(place, Placement | str | torch.device):
            raise ArgumentError(
                f"placement {index} is {place!r}, of type {type(place).__name__}: "
                'give a text such as "rank:0/cpu"'
            )
    if not listed:
        raise ArgumentError("placements is empty: give at least 1, one for each shard")
    return tuple(one if isinstance(one, Placement) else Placement(one) for one in listed)
