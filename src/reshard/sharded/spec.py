"""What says how a tensor is cut into shards, and who holds each: the classes all specs build on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from reshard.sharded.metadata import Placement, ShardedTensorMetadata, TensorProperties

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from reshard.sharded.tensor import ShardedTensor

__all__ = [
    "AnyPlacement",
    "DevicePlacementSpec",
    "PlacementSpec",
    "ShardingSpec",
    "check_dim",
    "check_placements",
    "dim_of",
]

AnyPlacement = str | torch.device | Placement
"""What a placement may be given as: a text such as "rank:3/cuda:1", a device, or a placement."""


class PlacementSpec(ABC):  # noqa: B024 - a name to derive from; where something is has no method
    """Says where something is placed; open to classes of your own."""


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """Says that something is on one device of one rank or worker.

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
    """Says how a tensor is cut into shards, and who holds each; open to classes of your own.

    A class of your own needs ``build_metadata`` only: everything else follows from where the
    shards lie. It may also have its own ``shard``, or derive from one of the specs here.

    >>> class OnOneRank(ShardingSpec):
    ...     def build_metadata(self, tensor_sizes, tensor_properties):
    ...         whole = ShardMetadata([0] * len(tensor_sizes), tensor_sizes, "rank:0/cpu")
    ...         return ShardedTensorMetadata((whole,), tensor_sizes, tensor_properties)
    >>> from reshard.sharded.metadata import ShardMetadata
    >>> OnOneRank().build_metadata(torch.Size([3, 4]), TensorProperties()).shards_metadata[0].box
    Box((0, 0), (3, 4))
    """

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All shards of a tensor of this size, on all ranks; needs no communication."""

    def shard(
        self,
        tensor: torch.Tensor,
        src_rank: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """Cut the tensor of ``src_rank`` into shards and give each to its rank.

        All ranks of the group call it, each with a tensor of the same size and dtype.
        """
        # Sharding needs the specs; they need it only here.
        from reshard.sharded.sharding import shard_by_spec

        return shard_by_spec(self, tensor, src_rank, process_group)


def check_placements(placements: Iterable[AnyPlacement]) -> tuple[Placement, ...]:
    """The placements of a spec as a tuple of its own, which the caller cannot change.

    >>> check_placements(["rank:0/cpu", torch.device("cpu")])
    (rank:0/cpu, cpu)
    """
    if isinstance(placements, str):
        # Each letter of it would pass as the name of a worker.
        raise ValueError(f'placements is the text "{placements}": give a list, ["{placements}"]')
    found = tuple(placements)
    if not found:
        raise ValueError("placements is empty: give at least 1, one for each shard")
    return tuple(map(_placement, range(len(found)), found))


def _placement(at: int, given: AnyPlacement) -> Placement:
    if isinstance(given, Placement):
        return given
    if isinstance(given, str | torch.device):
        return Placement(given)
    raise ValueError(
        f"placement {at} is {given!r}, of type {type(given).__name__}: "
        'give a text such as "rank:0/cpu"'
    )


def check_dim(dim: object) -> int:
    """The dim of a spec: any whole number, since the tensor is not known yet."""
    if isinstance(dim, str):
        raise NotImplementedError(
            f'a ShardingSpec does not support named dimension "{dim}": give the number of the dim'
        )
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool):
        raise ValueError(
            f"sharding dim needs to be an integer, found {dim!r} of type {type(dim).__name__}: "
            "give the number of a dim, such as 0 or -1"
        )
    return int(dim)


def dim_of(dim: int, ndim: int) -> int:
    """The dim of a tensor of so many dims, counted from the front.

    >>> dim_of(-1, 3)
    2
    """
    if not -ndim <= dim < ndim:
        wanted = f"give one from {-ndim} to {ndim - 1}" if ndim else "a scalar cannot be cut"
        raise ValueError(f"Invalid sharding dim {dim} for a tensor of {ndim} dims: {wanted}")
    return dim % ndim
