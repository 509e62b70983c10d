"""Which saved tensors are identical on all ranks of a group? Only those may be kept as shares.

- the tensor inputs of a module, and views of them, as long as they are not changed in place
- DTensors that are replicated along the group's axis of their mesh
- tensors that the user marks with `mark_replicated`

All others stay as they are: parameters, buffers, sharded and partial tensors, and what a rank
computes for itself, even where it shares a storage with an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from reshard.errors import require_type
from reshard.nn.activations.region import TensorLocation

RESCAN_PERIOD = 256
"""Lookups after which the parameters of a model are listed again."""


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

    def __init__(self, model: nn.Module | None = None) -> None:
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
        ranks: tuple[int, ...],
        args: Iterable[Any],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        parameters: Parameters | None = None,
    ) -> None:
        self._ranks = ranks
        self.parameters = parameters = parameters or Parameters()
        self._inputs: dict[int, list[TensorLocation]] = {}
        for name, value in (*enumerate(args), *kwargs.items()):
            for leaf in tree_leaves(value):
                if is_plain(leaf) and leaf.numel() and leaf not in parameters:
                    location = TensorLocation.of(leaf, f"argument {name}")
                    self._inputs.setdefault(location.address, []).append(location)

    def find(self, saved: torch.Tensor, local: torch.Tensor) -> TensorLocation | None:
        """The memory that is identical on all ranks and of which a saved tensor is a view, if any.

        ``local`` is the tensor itself, or the local tensor of a DTensor.
        """
        if isinstance(saved, DTensor):
            axis = mesh_axis(saved.device_mesh, self._ranks)
            is_same = axis is not None and saved.placements[axis].is_replicate()
            if not is_same or saved in self.parameters:
                return None
            return TensorLocation.of(local, f"DTensor {list(saved.shape)}")
        address = local.untyped_storage()._cdata
        known = (*self._inputs.get(address, ()), *_marked.get(address, ()))
        return next((location for location in known if location.contains(local)), None)


_axes: WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], int | None]] = WeakKeyDictionary()


def mesh_axis(mesh: DeviceMesh, ranks: tuple[int, ...]) -> int | None:
    """The axis of a mesh along which these ranks, this one among them, are neighbours."""
    known = _axes.setdefault(mesh, {})
    if ranks not in known:
        rows = (
            mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)) for axis in range(mesh.ndim)
        )
        matches = (sorted(ranks) in row.sort().values.tolist() for row in rows)
        known[ranks] = next((axis for axis, is_match in enumerate(matches) if is_match), None)
    return known[ranks]
