"""ShardingSpec, the base class of all specs, the spec of a layout, and checks of placements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.sharded.groups import Group, is_running
from reshard.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_disjoint,
    check_tensor,
    shards_of_layout,
)

AnyPlacement = str | torch.device | Placement
"""What a placement may be given as: a text such as "rank:3/cuda:1", a device, or a placement."""


class PlacementError(ArgumentError, RuntimeError):
    """A placement names no rank, or a rank is not among placements."""


class NamedDimError(ArgumentError, NotImplementedError):
    """A sharding dim is given by name."""


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
        (placement,) = check_placements([device])
        object.__setattr__(self, "device", placement)


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
        """The ShardedTensor of the tensor of ``src_rank``.

        All ranks of the group call it, each with a tensor of the same size and dtype.
        """
        # Loaded by name: a spec is below the tensors that it describes.
        api = import_module("reshard.sharded.api")
        one = {"tensor": tensor}
        return api.shard_tensors(one, {"tensor": self}, src_rank, process_group)["tensor"]


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
    """The placements of a spec as a tuple of its own, which the caller cannot change.

    >>> check_placements(["rank:0/cpu", torch.device("cpu")])
    (rank:0/cpu, cpu)
    """
    if isinstance(placements, str):
        # Each letter of it would pass as the name of a worker.
        raise ArgumentError(f'placements is the text "{placements}": give a list, ["{placements}"]')
    checked = []
    for index, given in enumerate(placements):
        if not isinstance(given, Placement | str | torch.device):
            raise ArgumentError(
                f"placement {index} is {given!r}, of type {type(given).__name__}: "
                'give a text such as "rank:0/cpu"'
            )
        checked.append(given if isinstance(given, Placement) else Placement(given))
    if not checked:
        raise ArgumentError("placements is empty: give at least 1, one for each shard")
    return tuple(checked)


def check_dim(dim: object) -> int:
    """The dim of a spec: any whole number, since the tensor is not known yet."""
    if isinstance(dim, str):
        raise NamedDimError(
            f'a ShardingSpec does not support named dimension "{dim}": give the number of the dim'
        )
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool):
        raise ArgumentError(
            f"sharding dim needs to be an integer, found {dim!r} of type {type(dim).__name__}: "
            "give the number of a dim, such as 0 or -1"
        )
    return int(dim)


def dim_of(dim: int, ndim: int) -> int:
    """The dim of a tensor with ``ndim`` dims, counted from the front.

    >>> dim_of(-1, 3)
    2
    """
    if not -ndim <= dim < ndim:
        wanted = f"give one from {-ndim} to {ndim - 1}" if ndim else "a scalar cannot be cut"
        raise ArgumentError(f"Invalid sharding dim {dim} for a tensor of {ndim} dims: {wanted}")
    return dim % ndim
