"""Which saved tensors are identical on all ranks of a group? Only those may be kept as shares.

- the tensor inputs of a module, and views of them, as long as they are not changed in place
- DTensors that are replicated along the group's axis of their mesh
- tensors that the user marks with `mark_replicated`

All others stay as they are: parameters, buffers, sharded and partial tensors, and what a rank
computes for itself, even where it shares a storage with an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from reshard.errors import require_type

RESCAN_PERIOD = 256
"""Lookups after which the parameters of a model are listed again."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where the elements of a tensor are in memory, and their version, without keeping them.

    >>> x = torch.zeros(6, 4)
    >>> dense, gapped = TensorLocation.of(x.t(), "x"), TensorLocation.of(x[:, :2], "x")
    >>> (dense.start, dense.stop, dense.is_dense), (gapped.start, gapped.stop, gapped.is_dense)
    ((0, 96, True), (0, 88, False))
    >>> gapped.elements == TensorLocation.of(x[:, :2].t().unsqueeze(0), "x").elements
    True
    """

    label: str
    storage: StorageWeakRef
    """As long as this exists, torch gives the address of the storage to no other one."""
    version: int
    start: int
    """First byte in the storage."""
    stop: int
    is_dense: bool
    """Whether every byte from start to stop belongs to the tensor."""
    elements: tuple[tuple[int, int], ...]
    """Sizes and strides, sorted: which elements, whatever the order of dims."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, label: str) -> TensorLocation:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        (start, stop), elements = _byte_range(tensor), _elements(tensor)
        where = (tensor._version, start, stop, _is_dense(elements), elements)
        return cls(label, storage, *where, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def address(self) -> int:
        return int(self.storage.cdata)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the same storage and version has only elements of this one."""
        if tensor._version != self.version:
            return False
        start, stop = _byte_range(tensor)
        if self.is_dense:
            return self.start <= start and stop <= self.stop
        # The gaps may hold values that differ between ranks: accept exactly the same elements only.
        return (tensor.dtype, start, _elements(tensor)) == (self.dtype, self.start, self.elements)


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    unit, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in _elements(tensor))
    return start * unit, (start + last + 1) * unit


def _elements(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(sorted((size, stride) for size, stride in dims if size > 1 and stride))


def _is_dense(elements: Iterable[tuple[int, int]]) -> bool:
    expected = 1
    for size, stride in sorted(elements, key=lambda dim: dim[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor that is fully described by its bytes, dtype and strides."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_nested:
        return False
    kinds = (tensor.is_inference(), tensor.is_meta, tensor.is_quantized)
    return not (any(kinds) or tensor.is_conj() or tensor.is_neg())


_marked: dict[int, list[TensorLocation]] = {}
"""Marked tensors by the address of their storage; entries of freed storages are removed."""


def mark_replicated(tensor: torch.Tensor, label: str = "a marked tensor") -> torch.Tensor:
    """Declare that a tensor has the same values on all ranks, until it is changed in place.

    x = mark_replicated(norm(x))      # in a module whose activations are resharded
    """
    require_type(tensor, torch.Tensor, "mark_replicated", "give a tensor")
    if is_plain(tensor) and tensor.numel():
        for address, locations in list(_marked.items()):
            if all(one.storage.expired() for one in locations):  # type: ignore[no-untyped-call]
                _marked.pop(address, None)
        new = TensorLocation.of(tensor, label)
        known = _marked.get(new.address, ())
        valid = [one for one in known if one.version == new.version and one != new]
        _marked[new.address] = [*valid, new]
    return tensor


class Parameters:
    """The storages of all parameters and buffers of a model: these are never kept as shares."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else ref(model)
        self._addresses: set[int | None] = set()
        self._num_lookups = 0
        self._uses_fsdp = False

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or a view of one."""
        if isinstance(tensor, nn.Parameter):
            return True
        model = None if self._model is None else self._model()
        # FSDP gives parameters other memory while a module runs.
        if model is not None and (self._uses_fsdp or self._num_lookups % RESCAN_PERIOD == 0):
            tensors = (*model.parameters(), *model.buffers())
            self._addresses = {_storage_address(tensor) for tensor in tensors}
            self._uses_fsdp = any(isinstance(one, FSDPModule) for one in model.modules())
        self._num_lookups += 1
        address = _storage_address(tensor)
        return address is not None and address in self._addresses


def _storage_address(tensor: torch.Tensor) -> int | None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer) or local.is_meta:
        return None
    return int(local.untyped_storage()._cdata)


class ReplicatedInputs:
    """The tensors that are identical on all ranks during one forward call."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ranks: tuple[int, ...],
        parameters: Parameters,
    ) -> None:
        self._ranks, self.parameters = ranks, parameters
        self._inputs: dict[int, list[TensorLocation]] = {}
        for name, value in (*enumerate(args), *kwargs.items()):
            for leaf in tree_leaves(value):
                if is_plain(leaf) and leaf.numel() and leaf not in parameters:
                    location = TensorLocation.of(leaf, f"argument {name}")
                    self._inputs.setdefault(location.address, []).append(location)

    def find(self, tensor: torch.Tensor) -> TensorLocation | None:
        """The input or marked tensor that a plain saved tensor is a view of, if any."""
        address = tensor.untyped_storage()._cdata
        known = (*self._inputs.get(address, ()), *_marked.get(address, ()))
        return next((location for location in known if location.contains(tensor)), None)

    def is_replicated(self, tensor: DTensor) -> bool:
        """Whether all ranks have the same local tensor of a DTensor."""
        axis = mesh_axis(tensor.device_mesh, self._ranks)
        return axis is not None and tensor.placements[axis].is_replicate()


_axes: WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], int | None]] = WeakKeyDictionary()


def mesh_axis(mesh: DeviceMesh, ranks: tuple[int, ...]) -> int | None:
    """The axis of a mesh along which these ranks, this one among them, are neighbours."""
    known = _axes.setdefault(mesh, {})
    if ranks not in known:
        found = None
        for axis in range(mesh.ndim):
            lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
            if sorted(ranks) in map(sorted, lines):
                found = axis
                break
        known[ranks] = found  # at once: other threads look it up
    return known[ranks]
