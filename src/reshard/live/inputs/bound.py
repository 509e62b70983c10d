"""The tensors that one rank brings to a call: checked, and with their addresses.

Everything that can be wrong with a tensor is found here, before anything moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.columns import Ints
from reshard.errors import TensorError
from reshard.live.copy.gpu import TensorTable
from reshard.live.program.memory import RAW, array_at
from reshard.planning.plan import Plan

__all__ = ["BoundTensors", "LocalTensor", "Tensors", "bind_side", "check_names", "locals_of"]

Tensors = Mapping[str, torch.Tensor | None]

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class LocalTensor(NamedTuple):
    """What a plan says of one local tensor."""

    number: int
    """In the table of base addresses."""
    name: str
    shape: torch.Size
    dtype: torch.dtype


def locals_of(plan: Plan, side: int, rank: int) -> list[LocalTensor]:
    """The local tensors that a rank has of one side of a plan, and that are moved."""
    specs = (plan.have, plan.want)[side]
    first = len(plan.have) if side else 0
    moved = {names[side] for stack in plan.stacks for names in stack.names}
    shapes: dict[tuple[object, ...], torch.Size | None] = {}
    found = []
    for number, (name, spec) in enumerate(specs.items(), first):
        key = (id(spec.layout), spec.shape)
        if key not in shapes:
            held = spec.layout.holds(rank) is not None
            shapes[key] = torch.Size(spec.layout.local_shape(rank, spec.shape)) if held else None
        shape = shapes[key]
        if shape is not None and name in moved:
            found.append(LocalTensor(number, name, shape, getattr(torch, spec.dtype)))
    return found


class BoundTensors:
    """The tensors of one call on one rank, by their number in the table of base addresses."""

    def __init__(self, num_have: int, staging: int) -> None:
        self.num_have, self.staging = num_have, staging
        self.tensors: dict[int, torch.Tensor] = {}
        self.addresses = [0] * staging
        """Where each tensor begins, on whatever device; 0 for what this rank does not have."""
        self.strides: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Shape and strides of tensors that are not contiguous."""
        self.on_devices: list[int] = []
        """Numbers of tensors that are not in the memory of the host."""
        self.devices: set[torch.device] = set()
        """Where those are."""
        self.result: dict[str, torch.Tensor] = {}

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Take in a tensor that was checked."""
        self.tensors[number] = tensor
        self.addresses[number] = tensor.data_ptr()
        if not tensor.is_cpu:
            self.on_devices.append(number)
            self.devices.add(tensor.device)
        if not tensor.is_contiguous():
            self.strides[number] = tuple(tensor.shape), tensor.stride()

    def drop_destinations(self) -> None:
        """Forget the destination tensors: others are written to first."""
        for number in [number for number in self.tensors if number >= self.num_have]:
            tensor = self.tensors.pop(number)
            self.addresses[number] = 0
            self.strides.pop(number, None)
            if not tensor.is_cpu:
                self.on_devices.remove(number)
        self.devices = {self.tensors[number].device for number in self.on_devices}
        self.__dict__.pop("table", None)

    @cached_property
    def table(self) -> Ints:
        """The addresses as an array."""
        return np.array(self.addresses, dtype=np.int64)

    @property
    def is_host(self) -> bool:
        """Whether all tensors are in the memory of the host."""
        return not self.on_devices

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are contiguous memory of the host, which peers may touch."""
        return not (self.strides or self.on_devices)

    @cached_property
    def published(self) -> Ints:
        """The addresses that peers may use; 0 for the others."""
        if self.is_plain:
            return self.table
        table = self.table.copy()
        table[[*self.strides, *self.on_devices]] = 0
        return table

    @property
    def identity(self) -> tuple[object, ...]:
        """Where the tensors are and how they are strided."""
        return self.table.tobytes(), self.strides, tuple(self.on_devices)

    def with_staging(self, address: int, num_bytes: int) -> TensorTable:
        """The tensors for copies with torch, with this memory of the host as staging buffer."""
        tensors = dict(self.tensors)
        if num_bytes:
            array = array_at(address, (num_bytes,), RAW[1], (1,))
            tensors[self.staging] = torch.from_numpy(array)
        return TensorTable(np.append(self.table, address), tensors, torch.device("cpu"))


def bind_side(
    bound: BoundTensors, locals_: list[LocalTensor], given: Tensors, rank: int, role: str
) -> None:
    """Check the given tensors of one side against the plan, and take them in."""
    for local in locals_:
        tensor = given.get(local.name)
        if tensor is None:
            if local.shape.numel():
                raise TensorError(
                    f"rank {rank} holds {local.dtype}{list(local.shape)} of "
                    f'"{local.name}" and was given none {role}: give its local tensor'
                )
            continue
        # The common case costs four comparisons: this runs for every tensor of every call.
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        plain = plain and (tensor.is_cpu or tensor.is_cuda)
        lazy = tensor.is_conj() or tensor.is_neg() if plain else False
        if not plain or lazy or tensor.shape != local.shape or tensor.dtype != local.dtype:
            _check(tensor, local, rank, role)
        bound.add(local.number, tensor)


def _check(tensor: Any, local: LocalTensor, rank: int, role: str) -> None:
    where = f'"{local.name}" {role} on rank {rank}'
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{where} is a {type(tensor).__name__}: give a tensor")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TensorError(
            f"{where} is a {tensor.layout} tensor on {tensor.device}: give a dense tensor that has "
            "memory"
        )
    if _is_wrapper(tensor):
        raise TensorError(
            f"{where} is a {type(tensor).__name__}, which has no memory of its own: give its local "
            "tensor, or move it with rs.move"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError(
            f"{where} is a lazy conjugate or negative, whose memory holds other values: give "
            "tensor.resolve_conj().resolve_neg()"
        )
    if tensor.shape != local.shape or tensor.dtype is not local.dtype:
        raise TensorError(
            f"{where} is {tensor.dtype}{list(tensor.shape)} and its layout says "
            f"{local.dtype}{list(local.shape)}: give this rank's local tensor"
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another class stands for tensors that it holds: DTensor and its like."""
    if not tensor.numel() or hasattr(tensor, "__tensor_flatten__"):
        return hasattr(tensor, "__tensor_flatten__")
    try:
        return tensor.data_ptr() == 0
    except RuntimeError:
        return True


def check_names(given: Tensors, names: Mapping[str, object], rank: int, role: str) -> None:
    """Refuse names that the plan does not have."""
    if not given.keys() <= names.keys():
        unknown = [name for name in given if name not in names]
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise TensorError(
            f'rank {rank} was given "{unknown[0]}"{more} {role}, which the plan does not have: '
            "give only what was planned"
        )
