"""The tensors of one call on one rank: checked against the plan, and bound to base addresses.

All errors about tensors are raised here, before anything moves.

Each rank announces where its tensors are when plans are compared. If every rank has all of its
tensors on one GPU, and the caller's process group has NCCL, data goes from GPU to GPU. Otherwise,
on a gloo group or where some tensors are on the host, data goes by way of the hosts, that of GPU
tensors too.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.layout.columns import Ints
from reshard.live.inputs.huge_pages import RepeatedTensors
from reshard.live.inputs.overlap import check_overlaps
from reshard.live.options import Options
from reshard.live.program.rounds import HAVE, WANT
from reshard.planning.plans import Plan

__all__ = [
    "GPU",
    "BoundTensors",
    "Locals",
    "Request",
    "Tensors",
    "all_on_gpus",
    "check_request",
    "default_device",
    "device_of",
    "placement_of",
    "with_index",
]

Tensors = Mapping[str, torch.Tensor | None]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_ROLES = ("to move", "to move into")


class LocalSpec(NamedTuple):
    """What a plan says of one local tensor."""

    number: int
    """In the table of base addresses."""
    name: str
    shape: torch.Size
    dtype: torch.dtype


class Locals:
    """One rank's local tensors on both sides of a plan, and what is kept about them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.names = rank, (plan.have, plan.want)
        self.staging = len(plan.have) + len(plan.want)
        self.sides = _local_specs(plan, HAVE, rank), _local_specs(plan, WANT, rank)
        self.repeated = [
            RepeatedTensors([(one.number, one.shape.numel() * one.dtype.itemsize) for one in side])
            for side in self.sides
        ]
        self.disjoint: object = None
        """The identity of the tensors that were last found not to overlap."""


def _local_specs(plan: Plan, side: int, rank: int) -> list[LocalSpec]:
    """The local tensors of a rank on one side of a plan that are moved."""
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
            found.append(LocalSpec(number, name, shape, getattr(torch, spec.dtype)))
    return found


class BoundTensors:
    """The tensors of one call on one rank, by their number in the table of base addresses."""

    def __init__(self, staging: int) -> None:
        """``staging`` is the number of the staging buffer, after all tensors."""
        self.staging = staging
        self.tensors: dict[int, torch.Tensor] = {}
        self.addresses = [0] * (staging + 1)
        """The base addresses, on any device; 0 for tensors that this rank does not have."""
        self._table: Ints | None = None
        self.strides: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Shape and strides of tensors that are not contiguous."""
        self.on_devices: list[int] = []
        """Numbers of tensors that are not in the memory of the host."""
        self.result: dict[str, torch.Tensor] = {}

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Add a tensor that was checked."""
        self.tensors[number] = tensor
        self.addresses[number] = tensor.data_ptr()
        self._table = None
        if not tensor.is_cpu:
            self.on_devices.append(number)
        if not tensor.is_contiguous():
            self.strides[number] = tuple(tensor.shape), tensor.stride()

    def copy(self) -> BoundTensors:
        """The same tensors, to which others can be added."""
        found = BoundTensors(self.staging)
        for number, tensor in self.tensors.items():
            found.add(number, tensor)
        return found

    @property
    def table(self) -> Ints:
        """The base addresses as an array."""
        if self._table is None:
            self._table = np.array(self.addresses, dtype=np.int64)
        return self._table

    @property
    def devices(self) -> set[torch.device]:
        """The devices of tensors that are not in the memory of the host."""
        return {self.tensors[number].device for number in self.on_devices}

    @property
    def is_host(self) -> bool:
        """Whether all tensors are in the memory of the host."""
        return not self.on_devices

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are contiguous memory of the host, which peers may access."""
        return not (self.strides or self.on_devices)

    @property
    def published(self) -> array[int]:
        """The addresses that peers may access; 0 for the others."""
        found = array("q", self.addresses)
        for number in (*self.strides, *self.on_devices):
            found[number] = 0
        return found

    @property
    def identity(self) -> tuple[object, ...]:
        """Where the tensors are and how they are strided."""
        return tuple(self.addresses[:-1]), self.strides, tuple(self.on_devices)

    def bind(self, specs: list[LocalSpec], given: Tensors, rank: int, role: str) -> None:
        """Check the given tensors of one side against the plan, and add them."""
        for local in specs:
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
                _check(tensor, local, f'"{local.name}" {role} on rank {rank}')
            self.add(local.number, tensor)


def _check(tensor: Any, local: LocalSpec, where: str) -> None:
    """Refuse a tensor that has no memory of its own, or is not what the plan says."""
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
    """Whether a tensor of another class only wraps the tensors that it holds, as DTensor does."""
    if not tensor.numel() or hasattr(tensor, "__tensor_flatten__"):
        return hasattr(tensor, "__tensor_flatten__")
    try:
        return tensor.data_ptr() == 0
    except RuntimeError:
        return True


def _check_names(given: Tensors, names: Mapping[str, object], rank: int, role: str) -> None:
    """Refuse names that the plan does not have."""
    if not given.keys() <= names.keys():
        unknown = [name for name in given if name not in names]
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise TensorError(
            f'rank {rank} was given "{unknown[0]}"{more} {role}, which the plan does not have: '
            "give only what was planned"
        )


def check_request(tensors: object, into: object, group: object) -> None:
    """Refuse arguments of the wrong type."""
    for what, given in (("to move", tensors), ("into=", into)):
        if given is not None and not isinstance(given, Mapping):
            raise TensorError(
                f"the tensors {what} are a {type(given).__name__}: give a dict of this rank's "
                "tensors by name; rs.move takes one tensor"
            )
    usual = group is None or isinstance(group, dist.ProcessGroup)
    # new_group returns this to ranks that are not in the group: they may call, without a part.
    if not usual and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise LiveError(
            f"group= is {group!r}: give a process group of torch.distributed, as new_group makes"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """The arguments of one call on one rank."""

    tensors: Tensors
    into: Tensors | None
    group: dist.ProcessGroup
    options: Options

    def all_tensors(self) -> list[torch.Tensor]:
        """The tensors of both sides."""
        both = [*self.tensors.values(), *(self.into or {}).values()]
        return [tensor for tensor in both if tensor is not None]

    def gpus(self) -> set[torch.device]:
        """The GPUs that this call accesses."""
        found = {tensor.device for tensor in self.all_tensors() if tensor.is_cuda}
        if self.options.device is not None or not found:
            found |= {gpu for gpu in [self._home()] if gpu.type == GPU}
        return found

    def bind(self, locals_: Locals) -> BoundTensors:
        """Check this rank's tensors and create missing destinations."""
        bound = BoundTensors(locals_.staging)
        self._bind_side(bound, locals_, HAVE, self.tensors)
        if self.into is not None:
            # For an atomic call they are only checked: it writes new tensors and copies at the end.
            checked = bound.copy() if self.options.atomic else bound
            self._bind_side(checked, locals_, WANT, self.into)
            places = checked.identity
            if locals_.disjoint != places:
                check_overlaps(checked.tensors, locals_.names, locals_.rank)
                locals_.disjoint = places
        if self.into is None or self.options.atomic:
            self._create_destinations(bound, locals_.sides[WANT])
        else:
            bound.result = {n: tensor for n, tensor in self.into.items() if tensor is not None}
        return bound

    def _bind_side(self, bound: BoundTensors, locals_: Locals, side: int, given: Tensors) -> None:
        _check_names(given, locals_.names[side], locals_.rank, _ROLES[side])
        bound.bind(locals_.sides[side], given, locals_.rank, _ROLES[side])
        locals_.repeated[side].note(bound.tensors)

    def _create_destinations(self, bound: BoundTensors, wanted: list[LocalSpec]) -> None:
        """Create each on the device of options, of the source of its name, or of any source."""
        given = [tensor for tensor in self.tensors.values() if tensor is not None]
        fixed = self.options.device is not None or not bound.tensors
        device = self._home() if fixed else given[0].device
        for local in wanted:
            near = None if fixed else self.tensors.get(local.name)
            tensor = torch.empty(
                local.shape, dtype=local.dtype, device=device if near is None else near.device
            )
            bound.add(local.number, tensor)
            bound.result[local.name] = tensor

    def _home(self) -> torch.device:
        """The device of new tensors that no source determines."""
        if self.options.device is None:
            return default_device(self.group)
        return with_index(torch.device(self.options.device))


GPU, NOWHERE = "cuda", "none"


def placement_of(bound: BoundTensors, group: dist.ProcessGroup) -> str:
    """Where the tensors of this rank are, as it tells the others: `GPU` if NCCL can move them."""
    if bound.is_host and bound.tensors:
        return "cpu"
    devices = bound.devices
    kinds = {device.type for device in devices}
    if len(bound.on_devices) < len(bound.tensors):
        kinds.add("cpu")
    if kinds == {GPU} and len(devices) > 1:
        return f"{len(devices)} GPUs"
    if not kinds <= {GPU}:
        return "+".join(sorted(kinds))
    where = GPU if kinds else NOWHERE
    return where if _backends(group).get(GPU) == "nccl" else f"{where}, and no NCCL"


def all_on_gpus(placements: Mapping[int, str]) -> bool:
    """Whether data goes from GPU to GPU, given the placements of all ranks."""
    return GPU in placements.values() and set(placements.values()) <= {GPU, NOWHERE}


def device_of(bound: BoundTensors) -> torch.device:
    """The GPU of this rank: that of its tensors, or the current one if it has none."""
    return next(iter(bound.devices), None) or with_index(torch.device(GPU))


def with_index(device: torch.device) -> torch.device:
    """The device; for a GPU without an index the current one."""
    if device.type == GPU and device.index is None:
        return torch.device(GPU, torch.cuda.current_device())
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a rank without source tensors creates new ones: where its group can move them."""
    return with_index(torch.device(GPU if set(_backends(group)) == {GPU} else "cpu"))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each kind of device."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}
