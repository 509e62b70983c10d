"""The tensors of one call on one rank: checked against the plan, and bound to base addresses.

All errors about tensors are raised before anything moves.

Each rank announces where its tensors are when plans are compared. If every rank has all of its
tensors on one GPU, data goes from GPU to GPU where that is possible. Otherwise it goes by way of
the hosts, that of GPU tensors too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import _dynamo

from reshard.errors import TensorError
from reshard.layout.columns import Ints
from reshard.live.inputs.memory import are_huge_pages_on_request, collapse
from reshard.live.program.rounds import HAVE, WANT, Strides
from reshard.planning.plans import Plan
from reshard.text import and_more

Tensors = Mapping[str, torch.Tensor | None]

guards: Any = getattr(_dynamo, "guards", None)
"""What compiled code checks and allocates tensors with; private to torch, so it may be missing."""

_empty_on_host: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cpu", None)

HOST = torch.device("cpu")

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_is_nested: Callable[[torch.Tensor], bool] = attrgetter("is_nested")

FREED_BELOW = 1 << 36
"""The address of a freed tensor is its offset in its storage, which is less than this. Addresses of
other tensors rarely are."""

MIN_HUGE_BYTES = 4 << 20
"""Smaller tensors are left alone; numpy requests huge pages from the same size on."""


class LocalSpec(NamedTuple):
    """What a plan says of one local tensor."""

    number: int
    """In the table of base addresses."""
    name: str
    shape: torch.Size
    dtype: torch.dtype


class Side:
    """One rank's local tensors on one side of a plan."""

    accepted: AcceptedTensors | None = None
    """What tensors of the last call were like that had to be checked one by one."""

    def __init__(self, plan: Plan, side: int, rank: int) -> None:
        self.rank, self.role = rank, ("to move", "to move into")[side]
        self.planned = (plan.have, plan.want)[side]
        moved = {names[side] for stack in plan.stacks for names in stack.names}
        shapes: dict[tuple[object, ...], torch.Size | None] = {}
        self.specs: list[LocalSpec] = []
        """The tensors that are moved."""
        for number, (name, spec) in enumerate(self.planned.items(), len(plan.have) * side):
            key = (id(spec.layout), spec.shape)
            if key not in shapes:
                held = spec.layout.holds(rank) is not None
                local = spec.layout.local_shape(rank, spec.shape) if held else ()
                shapes[key] = torch.Size(local) if held else None
            shape = shapes[key]
            if shape is not None and name in moved:
                self.specs.append(LocalSpec(number, name, shape, getattr(torch, spec.dtype)))
        strides = {one.shape: torch.empty(one.shape, device="meta").stride() for one in self.specs}
        self.contiguous = [
            (one.number, one.name, tuple(one.shape), strides[one.shape], one.dtype)
            for one in self.specs
        ]
        """What new tensors are like."""
        sizes = [(one.number, one.shape.numel() * one.dtype.itemsize) for one in self.specs]
        self.large = [number for number, size in sizes if size >= MIN_HUGE_BYTES]
        """Base numbers of tensors that get huge pages if they recur at the same addresses."""
        self.last_large: list[int] = []
        self.times = 0
        """Where these were in the last call, and in how many calls before it in a row."""

    def check_names(self, given: Tensors) -> None:
        unknown = [f'"{name}"' for name in given if name not in self.planned]
        if unknown:
            raise TensorError(
                f"rank {self.rank} was given {and_more(unknown)} {self.role}, which the plan does "
                "not have: give only what was planned"
            )


class AcceptedTensors:
    """What the tensors of a call were like, to accept others like them without checking each.

    torch compares class, dtype, device, shape, strides and whether it is a lazy conjugate or
    negative, of all tensors at once in C++; compiled functions check their inputs like that.
    ``benchmarks/reports/gpu_move.md`` has what it saves.
    """

    def __init__(self, specs: Sequence[LocalSpec], bound: BoundTensors) -> None:
        self._names = [one.name for one in specs]
        self._numbers = [one.number for one in specs]
        numbers, tensors = set(self._numbers), [bound.tensors[n] for n in self._numbers]
        self._strides = {n: one for n, one in bound.strides.items() if n in numbers}
        self._on_devices = [n for n in bound.on_devices if n in numbers]
        self._devices = {bound.tensors[n].device for n in self._on_devices}
        self._is_plain = not (self._strides or self._on_devices)
        first, last = self._numbers[0], self._numbers[-1] + 1
        self._in_a_row = last - first == len(tensors)
        self._slots = slice(first, last)
        """Where they are in the table of base addresses, if they are in a row there."""
        self._guards = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )

    def bind(self, bound: BoundTensors, given: Tensors) -> bool:
        """Add the given tensors, if they are like those of the earlier call; whether they are."""
        if len(given) != len(self._names):
            return False
        tensors: list[Any] = [*map(given.get, self._names)]
        try:
            # First: the guards end the process if they get a nested tensor.
            if any(map(_is_nested, tensors)) or not self._guards.check(*tensors):
                return False
        except AttributeError:  # one of them is no tensor
            return False
        places = [*map(_data_ptr, tensors)]
        if min(places) < FREED_BELOW:  # there is at least one: `BoundTensors.bind`
            low = [one for one, at in zip(tensors, places, strict=True) if at < FREED_BELOW]
            if any(map(_is_freed, low)):
                return False
        addresses = bound.addresses
        bound.tensors.update(zip(self._numbers, tensors))  # noqa: B905 - one place per number
        bound.last_bound = tensors
        if self._in_a_row:
            addresses[self._slots] = places
        else:
            for number, address in zip(self._numbers, places, strict=True):
                addresses[number] = address
        if not self._is_plain:
            bound.note_special(self._strides, self._on_devices, self._devices)
        return True


class Locals:
    """One rank's local tensors on both sides of a plan, and what is kept about them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.names = rank, (plan.have, plan.want)
        self.staging = len(plan.have) + len(plan.want)
        self.sides = Side(plan, HAVE, rank), Side(plan, WANT, rank)
        self.disjoint: tuple[Any, ...] = ()
        """The identity of the tensors that were last found not to overlap."""


class BoundTensors:
    """The tensors of one call on one rank, by their number in the table of base addresses."""

    _sides: tuple[Side, ...] = ()
    """Those with large tensors that were given."""
    _table: Ints | None = None
    last_bound: Sequence[torch.Tensor] = ()
    """The tensors of the side that was bound last."""
    is_host = True
    """Whether all tensors are in the memory of the host."""
    is_plain = True
    """Whether all tensors are contiguous memory of the host, which peers may access."""
    strides: Strides = MappingProxyType({})
    """Shape and strides of tensors that are not contiguous."""
    on_devices: Sequence[int] = ()
    """Numbers of tensors that are not in the memory of the host."""
    devices: Set[torch.device] = frozenset()
    """Their devices."""

    def __init__(self, staging: int) -> None:
        """``staging`` is the number of the staging buffer, after all tensors."""
        self.staging = staging
        self.tensors: dict[int, torch.Tensor] = {}
        self.addresses = [0] * (staging + 1)
        """The base addresses, on any device; 0 for tensors that this rank does not have."""
        self.result: dict[str, torch.Tensor] = {}

    def bind(self, side: Side, given: Tensors, resolves: bool = False) -> None:
        """Check the given tensors of one side against the plan, and add them.

        ``resolves`` is whether those that are lazy conjugates or negatives are resolved.
        """
        if side.large:
            self._sides = (*self._sides, side)
        if side.accepted is not None and side.accepted.bind(self, given):
            return
        side.check_names(given)
        before = len(self.tensors)
        may_recur = 0 < len(given) == len(side.specs) and hasattr(guards, "TensorGuards")
        all_strides, on_devices = dict[int, Any](), list[int]()
        for local in side.specs:
            number, tensor = local.number, given.get(local.name)
            if type(tensor) not in _PLAIN:
                may_recur = False
            if resolves and tensor is not None:
                tensor = materialize(tensor)
            if tensor is None:
                if local.shape.numel():
                    raise TensorError(
                        f"rank {side.rank} holds {local.dtype}{list(local.shape)} of "
                        f'"{local.name}" and was given none {side.role}: give its local tensor'
                    )
                continue
            problem = _problem(tensor, local)
            if problem is not None:
                raise TensorError(f'"{local.name}" {side.role} on rank {side.rank} {problem}')
            self.tensors[number] = tensor
            self.addresses[number] = tensor.data_ptr()
            if not tensor.is_contiguous():
                all_strides[number] = tuple(tensor.shape), tensor.stride()
            if not tensor.is_cpu:
                on_devices.append(number)
        if all_strides or on_devices:
            self.note_special(all_strides, on_devices, {self.tensors[n].device for n in on_devices})
        self.last_bound = [*self.tensors.values()][before:]
        if may_recur:
            side.accepted = AcceptedTensors(side.specs, self)

    def create(self, side: Side, device: torch.device, like: Tensors | None = None) -> None:
        """Create the tensors of one side on a device, or where those of the same name are."""
        tensors, result, addresses = self.tensors, self.result, self.addresses
        on_host = device is HOST and like is None
        allocate = (_empty_on_host if on_host else None) or _allocator_on(device)
        for number, name, shape, strides, dtype in side.contiguous:
            if like is not None:
                near = like.get(name)
                allocate = _allocator_on(device if near is None else near.device)
            tensors[number] = result[name] = tensor = allocate(shape, strides, dtype)
            addresses[number] = tensor.data_ptr()
        if not on_host:
            new = [one[0] for one in side.contiguous if not tensors[one[0]].is_cpu]
            if new:
                self.note_special({}, new, {tensors[number].device for number in new})

    def note_special(
        self, strides: Strides, on_devices: Sequence[int], devices: Set[torch.device]
    ) -> None:
        """Add what is known of tensors that are not contiguous memory of the host."""
        self.strides = {**self.strides, **strides}
        self.on_devices = [*self.on_devices, *on_devices]
        self.devices = self.devices | devices
        self.is_host = not self.on_devices
        self.is_plain = self.is_host and not self.strides

    def note_repeated(self) -> None:
        """Other processes access these tensors: large ones get huge pages in the second such call
        in which they are at the same addresses."""
        for side in self._sides:
            large = [self.tensors[number] for number in side.large if number in self.tensors]
            places = [tensor.data_ptr() for tensor in large]
            side.times = side.times + 1 if places == side.last_large else 0
            side.last_large = places
            if side.times == 1 and are_huge_pages_on_request():
                for tensor in large:
                    collapse(tensor)

    def note_written(self) -> None:
        """Tell autograd that the tensors of the last side change, as in-place operations do."""
        torch.autograd.graph.increment_version(self.last_bound)

    @property
    def table(self) -> Ints:
        """The base addresses as an array."""
        if self._table is None:
            self._table = np.array(self.addresses, dtype=np.int64)
        return self._table

    @property
    def published(self) -> array[int]:
        """The addresses that peers may access; 0 for the others."""
        addresses = array("q", self.addresses)
        for number in (*self.strides, *self.on_devices):
            addresses[number] = 0
        return addresses

    @property
    def identity(self) -> tuple[Any, ...]:
        """Where the tensors are and how they are strided."""
        return self.addresses, self.strides, self.on_devices


def _allocator_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Allocates a tensor of a shape, strides and dtype on a device.

    The function that compiled code allocates with on the host takes a quarter of the time of
    torch.empty, which is most of the time of a move into many new small tensors. That for GPUs
    keeps other threads from running while the driver frees memory: it may wait for a stream that
    one of them has to release.
    """
    return (_empty_on_host if device.type == "cpu" else None) or (
        lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )
    )


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory: not a lazy conjugate, negative or zero."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _problem(tensor: Any, local: LocalSpec) -> str | None:
    """Why a tensor has no memory of its own, or is not what the plan says; None if it is right."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}: give a tensor"
    if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):
        return f"is an {type(tensor).__name__}, which has no shape yet: run its module once"
    if tensor.is_nested:
        return "is a nested tensor, which has no shape: give a dense tensor"
    if tensor.layout is not torch.strided or tensor.is_meta:
        where = f"a {tensor.layout} tensor on {tensor.device}"
        return f"is {where}: give a dense tensor that has memory"
    if type(tensor) not in _PLAIN and _is_wrapper(tensor):
        return (
            f"is a {type(tensor).__name__}, which has no memory of its own: give its local tensor, "
            "or move it with rs.move"
        )
    if tensor.is_conj() or tensor.is_neg():
        return (
            "is a lazy conjugate or negative, whose memory holds other values: give "
            "tensor.resolve_conj().resolve_neg()"
        )
    if tensor.shape != local.shape or tensor.dtype is not local.dtype:
        return (
            f"is {tensor.dtype}{list(tensor.shape)} and its layout says "
            f"{local.dtype}{list(local.shape)}: give this rank's local tensor"
        )
    if _is_freed(tensor):
        return (
            "has no memory: its storage was freed, as donate=True does; give a tensor that has "
            "memory"
        )
    return None


def _is_freed(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another class only wraps the tensors that it holds, as DTensor does."""
    if not tensor.numel() or hasattr(tensor, "__tensor_flatten__"):
        return hasattr(tensor, "__tensor_flatten__")
    try:
        return tensor.data_ptr() == 0
    except RuntimeError:
        return True


GPU, NOWHERE = "cuda", "none"


def placement_of(bound: BoundTensors) -> str:
    """Where the tensors of this rank are, as it tells the others: `GPU` if all are on one GPU."""
    kinds = {device.type for device in bound.devices}
    if len(bound.on_devices) < len(bound.tensors):
        kinds.add("cpu")
    if kinds == {GPU} and len(bound.devices) > 1:
        return f"{len(bound.devices)} GPUs"
    return "+".join(sorted(kinds)) or NOWHERE


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
