"""Which saved tensors are equal on all ranks of a group? Only those may be kept as shares.

- the tensor inputs of a module, and views of them, as long as nobody has changed them in place
- DTensors that are replicated along the axis of the group
- tensors that the user has marked with `mark_replicated`

Everything else stays as it is: parameters, buffers, sharded and pending tensors, and what a rank
has computed for itself, also where that lies in one storage with an input.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from reshard.nn.activations.extent import Extent, Lattice, extent_of, lattice_of
from reshard.nn.activations.owned import Owned

__all__ = ["Known", "Source", "axis_along", "is_simple", "mark_replicated", "sources_in"]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is equal on all ranks."""

    label: str
    storage: StorageWeakRef
    """While this is there, no other storage has its address."""
    version: int
    extent: Extent
    lattice: Lattice
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, label: str) -> Source:
        """A tensor as it is now."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        size, stride = tuple(tensor.shape), tensor.stride()
        extent, lattice = extent_of(tensor), lattice_of(tensor)
        return cls(label, storage, tensor._version, extent, lattice, size, stride, tensor.dtype)

    @property
    def address(self) -> int:
        """Where its storage is."""
        return int(self.storage.cdata)

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the memory any more."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all elements of a tensor of this storage are of the source, and unchanged."""
        if tensor._version != self.version:
            return False
        if self.extent.is_full:
            return extent_of(tensor) in self.extent
        # Between its elements lies what is not known to be equal: take only the very same ones.
        return tensor.dtype == self.dtype and lattice_of(tensor) == self.lattice


_marked: dict[int, list[Source]] = {}
"""By the address of the storage."""


def mark_replicated(tensor: torch.Tensor, label: str = "a marked tensor") -> torch.Tensor:
    """Say that a tensor has the same values on all ranks, until it is changed in place.

    x = mark_replicated(norm(x))      # in a module whose activations are resharded
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mark_replicated got a {type(tensor).__name__}: give a tensor")
    if is_simple(tensor) and tensor.numel():
        for address, sources in list(_marked.items()):
            if all(source.is_gone for source in sources):
                _marked.pop(address, None)
        source = Source.of(tensor, label)
        before = _marked.get(source.address, ())
        valid = [one for one in before if one.version == source.version and one != source]
        _marked[source.address] = [*valid, source]
    return tensor


class Known:
    """What is known of one call of a module."""

    def __init__(self, sources: Iterable[Source], ranks: tuple[int, ...], owned: Owned) -> None:
        self._sources: dict[int, list[Source]] = {}
        for source in sources:
            self._sources.setdefault(source.address, []).append(source)
        self._ranks = ranks
        self._owned = owned

    def source(self, tensor: torch.Tensor) -> Source | None:
        """The source that a plain saved tensor is a view of, if any."""
        address = tensor.untyped_storage()._cdata
        found = (*self._sources.get(address, ()), *_marked.get(address, ()))
        return next((source for source in found if source.holds(tensor)), None)

    def is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or a view of one."""
        return self._owned.holds(tensor)

    def is_replicated(self, tensor: DTensor) -> bool:
        """Whether all ranks have the same local tensor of a DTensor."""
        axis = axis_along(tensor.device_mesh, self._ranks)
        return axis is not None and tensor.placements[axis].is_replicate()


def sources_in(args: tuple[Any, ...], kwargs: Mapping[str, Any], owned: Owned) -> list[Source]:
    """The plain tensors among the arguments of a call, each with a name for messages."""
    named = [(f"argument {number}", arg) for number, arg in enumerate(args)]
    named += [(f"argument {name}", arg) for name, arg in kwargs.items()]
    return [
        Source.of(leaf, label)
        for label, value in named
        for leaf in tree_leaves(value)
        if is_simple(leaf) and leaf.numel() and not owned.holds(leaf)
    ]


def is_simple(tensor: object) -> bool:
    """Whether something is a tensor that is nothing but bytes with strides."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_nested:
        return False
    if tensor.is_inference() or tensor.is_meta or tensor.is_quantized:
        return False
    return not tensor.is_conj() and not tensor.is_neg()


_axes: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], int | None]] = (
    weakref.WeakKeyDictionary()
)


def axis_along(mesh: DeviceMesh, ranks: tuple[int, ...]) -> int | None:
    """The axis of a mesh along which this rank meets exactly these ranks."""
    known = _axes.setdefault(mesh, {})
    if ranks not in known:
        known[ranks] = _axis_along(mesh, ranks)
    return known[ranks]


def _axis_along(mesh: DeviceMesh, ranks: tuple[int, ...]) -> int | None:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for axis in range(mesh.ndim):
        index: list[Any] = list(coordinate)
        index[axis] = slice(None)
        if sorted(mesh.mesh[tuple(index)].tolist()) == sorted(ranks):
            return axis
    return None
