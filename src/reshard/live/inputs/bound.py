"""What one rank was given for one call: tensors that are checked, and bound to addresses.

Everything that can be wrong with a tensor is found here, before anything moves.

Each rank says where its tensors are when plans are compared. If all ranks have all of theirs on one
GPU each, and the caller's process group has NCCL, they go from GPU to GPU. Otherwise, on a gloo
group or where some tensors are on the host, they go by way of the host, GPU tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.layout.columns import Ints
from reshard.live.inputs.huge_pages import MIN_BYTES, RepeatedTensors
from reshard.live.inputs.overlap import check_overlaps
from reshard.live.options import Options
from reshard.live.program.rounds import HAVE, WANT
from reshard.planning.plans import Plan

__all__ = [
    "GPU",
    "BoundTensors",
    "LocalTensor",
    "Request",
    "Tensors",
    "all_on_gpus",
    "bind_side",
    "check_names",
    "check_request",
    "default_device",
    "device_of",
    "locals_of",
    "placement_of",
    "with_index",
]

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
        self.addresses = [0] * (staging + 1)
        """Where each tensor begins, on whatever device; 0 for what this rank does not have. Last
        comes the staging buffer of the copies at hand."""
        self.strides: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Shape and strides of tensors that are not contiguous."""
        self.on_devices: list[int] = []
        """Numbers of tensors that are not in the memory of the host."""
        self.devices: set[torch.device] = set()
        """Where those are."""
        self.result: dict[str, torch.Tensor] = {}
        self._table: Ints | None = None

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
        self._table = None

    @property
    def table(self) -> Ints:
        """The addresses as an array."""
        if self._table is None:
            self._table = np.array(self.addresses, dtype=np.int64)
        return self._table

    @property
    def is_host(self) -> bool:
        """Whether all tensors are in the memory of the host."""
        return not self.on_devices

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are contiguous memory of the host, which peers may touch."""
        return not (self.strides or self.on_devices)

    @property
    def published(self) -> list[int]:
        """The addresses that peers may use; 0 for the others."""
        if self.is_plain:
            return self.addresses[:-1]
        hidden = {*self.strides, *self.on_devices}
        return [0 if n in hidden else at for n, at in enumerate(self.addresses[:-1])]

    @property
    def identity(self) -> tuple[object, ...]:
        """Where the tensors are and how they are strided."""
        return tuple(self.addresses[:-1]), self.strides, tuple(self.on_devices)


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


def check_request(tensors: object, into: object, group: object) -> None:
    """Refuse what a caller may have mixed up, before anything is done with it."""
    for what, given in (("to move", tensors), ("into=", into)):
        if given is not None and not isinstance(given, Mapping):
            raise TensorError(
                f"the tensors {what} are a {type(given).__name__}: give a dict of this rank's "
                "tensors by name; rs.move takes one tensor"
            )
    usual = group is None or isinstance(group, dist.ProcessGroup)
    # What new_group gives to ranks that are not in it: they may call, if they have no part.
    if not usual and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise LiveError(
            f"group= is {group!r}: give a process group of torch.distributed, as new_group makes"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What one rank was given for one call."""

    tensors: Tensors
    into: Tensors | None
    group: dist.ProcessGroup
    options: Options

    def all_tensors(self) -> list[torch.Tensor]:
        """The tensors of both sides."""
        both = [*self.tensors.values(), *(self.into or {}).values()]
        return [tensor for tensor in both if tensor is not None]

    def gpus(self) -> set[torch.device]:
        """The GPUs that this call touches."""
        found = {tensor.device for tensor in self.all_tensors() if tensor.is_cuda}
        if self.options.device is not None or not found:
            found |= {gpu for gpu in [self._home()] if gpu.type == GPU}
        return found

    def bind(self, locals_: Locals, rank: int) -> BoundTensors:
        """Check this rank's tensors and make those that are missing."""
        bound = BoundTensors(locals_.num_have, locals_.staging)
        check_names(self.tensors, locals_.names[HAVE], rank, "to move")
        bind_side(bound, locals_.sides[HAVE], self.tensors, rank, "to move")
        if locals_.has_large:
            locals_.repeated[HAVE].note(bound.addresses, bound.tensors)
        if self.into is None:
            self._make_destinations(bound, locals_.sides[WANT])
            return bound
        check_names(self.into, locals_.names[WANT], rank, "to move into")
        bind_side(bound, locals_.sides[WANT], self.into, rank, "to move into")
        places = bound.identity
        if locals_.disjoint != places:
            check_overlaps(bound.tensors, locals_.names, rank)
            locals_.disjoint = places
        if locals_.has_large:
            locals_.repeated[WANT].note(bound.addresses, bound.tensors)
        if self.options.atomic:
            bound.drop_destinations()
            self._make_destinations(bound, locals_.sides[WANT])
        else:
            bound.result = {n: tensor for n, tensor in self.into.items() if tensor is not None}
        return bound

    def _make_destinations(self, bound: BoundTensors, wanted: list[LocalTensor]) -> None:
        only = self._only_device(bound)
        for local in wanted:
            device = self._device(local) if only is None else only
            tensor = torch.empty(local.shape, dtype=local.dtype, device=device)
            bound.add(local.number, tensor)
            bound.result[local.name] = tensor

    def _only_device(self, bound: BoundTensors) -> torch.device | None:
        """The device of all new tensors, where they need not be asked for one by one."""
        if self.options.device is not None or not bound.tensors:
            return self._home()
        return None if bound.on_devices else torch.device("cpu")

    def _home(self) -> torch.device:
        """Where new tensors are made of which no source says where."""
        if self.options.device is None:
            return default_device(self.group)
        return with_index(torch.device(self.options.device))

    def _device(self, local: LocalTensor) -> torch.device:
        """With the source of the same name, or with any source."""
        near = self.tensors.get(local.name)
        if near is None:
            near = next((tensor for tensor in self.tensors.values() if tensor is not None), None)
        return torch.device("cpu") if near is None else near.device


class Locals:
    """What a plan says of one rank's local tensors."""

    def __init__(
        self,
        sides: tuple[list[LocalTensor], list[LocalTensor]],
        names: tuple[Mapping[str, object], Mapping[str, object]],
    ) -> None:
        self.sides, self.names = sides, names
        self.num_have = len(names[HAVE])
        self.staging = self.num_have + len(names[WANT])
        sizes = [
            [(one.number, one.shape.numel() * one.dtype.itemsize) for one in side] for side in sides
        ]
        self.has_large = any(size >= MIN_BYTES for side in sizes for _, size in side)
        self.repeated = tuple(map(RepeatedTensors, sizes)) if self.has_large else ()
        self.disjoint: object = None
        """The tensors that were last found not to overlap."""


GPU, NOWHERE = "cuda", "none"


def placement_of(bound: BoundTensors, group: dist.ProcessGroup) -> str:
    """Where the tensors of this rank are, as it tells the others: `GPU` if NCCL can move them."""
    if bound.is_host and bound.tensors:
        return "cpu"
    kinds = {device.type for device in bound.devices}
    if len(bound.on_devices) < len(bound.tensors):
        kinds.add("cpu")
    if kinds == {GPU} and len(bound.devices) > 1:
        return f"{len(bound.devices)} GPUs"
    if not kinds <= {GPU}:
        return "+".join(sorted(kinds))
    where = GPU if kinds else NOWHERE
    return where if _backends(group).get(GPU) == "nccl" else f"{where}, and no NCCL"


def all_on_gpus(placements: Mapping[int, str]) -> bool:
    """Whether tensors go from GPU to GPU, by what all ranks have said."""
    return GPU in placements.values() and set(placements.values()) <= {GPU, NOWHERE}


def device_of(bound: BoundTensors) -> torch.device:
    """The GPU of this rank: that of its tensors, or the current one if it has none."""
    for device in bound.devices:
        return device
    return with_index(torch.device(GPU))


def with_index(device: torch.device) -> torch.device:
    """The device; of GPUs the current one, if it does not say which."""
    if device.type == GPU and device.index is None:
        return torch.device(GPU, torch.cuda.current_device())
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a rank without source tensors wants its new ones: where its group can move them."""
    return with_index(torch.device(GPU if set(_backends(group)) == {GPU} else "cpu"))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each kind of device."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}
