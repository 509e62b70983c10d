"""The parameters and buffers of a model: they are never kept as shares."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["Owned"]

UNKNOWN = -1
LOOK_AGAIN = 256
"""Questions after which it is looked whether a model has other tensors now."""


class Owned:
    """Knows the memory of all parameters and buffers of a model."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._addresses: set[int] = set()
        self._asked = 0
        self._changes = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them, or a view of one."""
        if isinstance(tensor, nn.Parameter):
            return True
        if self._changes or self._asked % LOOK_AGAIN == 0:
            self._look()
        self._asked += 1
        address = _address(tensor)
        return address != UNKNOWN and address in self._addresses

    def _look(self) -> None:
        model = None if self._model is None else self._model()
        if model is not None:
            self._addresses = {_address(one) for one in (*model.parameters(), *model.buffers())}
            # FSDP gives parameters other memory while a module runs.
            self._changes = any(isinstance(one, FSDPModule) for one in model.modules())


def _address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer) or local.is_meta:
        return UNKNOWN
    return int(local.untyped_storage()._cdata)
