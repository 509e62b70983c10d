"""Which saved tensors are equal on all ranks of a group? Only those may be kept as shares.

- the tensor inputs of a module, and views of them, as long as nobody has changed them in place
- DTensors that are replicated along the axis of the group
- tensors that the user has marked with `mark_replicated`

Everything else stays as it is: parameters, buffers, sharded and pending tensors, and what a rank
has computed for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from reshard.nn.activations.region import Span, span_of

__all__ = ["Known", "Owned", "Source", "axis_along", "mark_replicated", "sources_in", "tensors_in"]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is equal on all ranks."""

    label: str
    storage: StorageWeakRef
    """While this is there, no other storage has its address."""
    version: int
    span: Span | None
    unit: int
    """Bytes of an element."""

    @classmethod
    def of(cls, tensor: torch.Tensor, label: str) -> Source:
        """A tensor as it is now."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(label, storage, tensor._version, span_of(tensor), tensor.element_size())

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the memory any more."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this memory, and nobody has changed that since."""
        return tensor._version == self.version


_marked: dict[int, Source] = {}
"""By the address of the storage."""


def mark_replicated(tensor: torch.Tensor, label: str = "a marked tensor") -> torch.Tensor:
    """Say that a tensor has the same values on all ranks, until it is changed in place.

    x = mark_replicated(norm(x))      # in a module whose activations are resharded
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mark_replicated got a {type(tensor).__name__}: give a tensor")
    if not isinstance(tensor, DTensor):
        for address in [key for key, source in _marked.items() if source.is_gone]:
            del _marked[address]
        source = Source.of(tensor, label)
        _marked[source.storage.cdata] = source
    return tensor


class Known:
    """The sources of one call of a module."""

    def __init__(self, sources: Iterable[Source], ranks: tuple[int, ...], owned: Owned) -> None:
        self._sources = {source.storage.cdata: source for source in sources}
        self._ranks = ranks
        self._owned = owned

    def source(self, tensor: torch.Tensor) -> Source | None:
        """The source that a plain saved tensor is a view of, if any."""
        address = tensor.untyped_storage()._cdata
        for found in (self._sources.get(address), _marked.get(address)):
            if found is not None and found.is_of(tensor):
                return found
        return None

    def is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer of the module, or a view of one."""
        return self._owned.holds(tensor)

    def is_replicated(self, tensor: DTensor) -> bool:
        """Whether all ranks have the same local tensor of a DTensor, which is no parameter."""
        axis = axis_along(tensor.device_mesh, self._ranks)
        if axis is None or not tensor.placements[axis].is_replicate():
            return False
        return not self.is_owned(tensor)


class Owned:
    """The parameters and buffers of a module: they stay where they are."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._shapes: frozenset[tuple[int, ...]] | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them, or a view."""
        module = None if self._module is None else self._module()
        if module is None:
            return False
        if self._shapes is None:
            self._shapes = frozenset(_sorted_shape(one) for one in _tensors_of(module))
        if _sorted_shape(tensor) not in self._shapes:
            return False
        # FSDP puts other memory into parameters, so that it is looked at anew.
        mine = _storage_of(tensor)
        return any(mine == _storage_of(one) for one in _tensors_of(module))


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _sorted_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _storage_of(tensor: torch.Tensor) -> int | None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if type(local) in (torch.Tensor, nn.Parameter) else None


def sources_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Source]:
    """The plain tensors among the arguments of a call, each with a name for messages."""
    named = [(f"argument {number}", arg) for number, arg in enumerate(args)]
    named += [(f"argument {name}", arg) for name, arg in kwargs.items()]
    return [
        Source.of(leaf, label)
        for label, value in named
        for leaf in tree_leaves(value)
        if is_input(leaf)
    ]


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """All tensors among the arguments of a call, DTensors too."""
    return [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def is_input(leaf: object) -> bool:
    """Whether an argument is a plain tensor with memory of its own, and no parameter."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
        return False
    if leaf.is_meta or isinstance(leaf._base, nn.Parameter):
        return False
    return not leaf.is_quantized


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
