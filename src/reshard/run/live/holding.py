"""The tensors that one rank brings to a move: checked, and where each lies in memory.

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
from reshard.planning.plan import Plan
from reshard.run.live.memory import array_at

__all__ = ["Held", "Local", "locals_of"]

Tensors = Mapping[str, torch.Tensor | None]


class Local(NamedTuple):
    """What a plan says of one rank's local tensor."""

    number: int
    name: str
    shape: torch.Size
    kind: torch.dtype


def locals_of(plan: Plan, side: int, rank: int) -> list[Local]:
    """The local tensors that a rank has of one side of a plan, and that are moved."""
    specs = (plan.have, plan.want)[side]
    moved = {names[side] for stack in plan.stacks for names in stack.names}
    shapes: dict[tuple[object, ...], torch.Size | None] = {}
    found = []
    for number, (name, spec) in enumerate(specs.items()):
        key = (id(spec.layout), spec.shape)
        if key not in shapes:
            held = spec.layout.holds(rank) is not None
            shapes[key] = torch.Size(spec.layout.local_shape(rank, spec.shape)) if held else None
        shape = shapes[key]
        if shape is not None and name in moved:
            found.append(Local(number, name, shape, getattr(torch, spec.dtype)))
    return found


class Held:
    """The tensors of one side on this rank, by number, and their addresses."""

    def __init__(self, count: int) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._addresses = [0] * count
        self.strided: dict[int, tuple[int, ...]] = {}
        """The strides of tensors that are not contiguous."""
        self.elsewhere: list[int] = []
        """Numbers of tensors that are not in the memory of the host."""
        self.devices: set[torch.device] = set()
        """Where those are."""

    @cached_property
    def address(self) -> Ints:
        """Where each tensor begins; 0 for what this rank has not, or what is on a device."""
        return np.array(self._addresses, dtype=np.int64)

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Take in a tensor that was checked."""
        self.tensors[number] = tensor
        if tensor.is_cpu:
            self._addresses[number] = tensor.data_ptr()
        else:
            self.elsewhere.append(number)
            self.devices.add(tensor.device)
        if not tensor.is_contiguous():
            self.strided[number] = tensor.stride()

    @cached_property
    def spots(self) -> Ints:
        """Where each tensor begins, on whatever device; 0 for what this rank has not."""
        table = self.address.copy()
        table[self.elsewhere] = [self.tensors[number].data_ptr() for number in self.elsewhere]
        return table

    @cached_property
    def published(self) -> Ints:
        """The addresses that peers may use: of contiguous tensors."""
        if not self.strided:
            return self.address
        table = self.address.copy()
        table[list(self.strided)] = 0
        return table

    @property
    def where(self) -> tuple[object, ...]:
        """All that the places of blocks in these tensors depend on."""
        others = [self.tensors[number] for number in self.elsewhere]
        moved = [(tensor.data_ptr(), tensor.stride()) for tensor in others]
        return self.address.tobytes(), self.strided, moved

    @property
    def is_ordinary(self) -> bool:
        """Whether all tensors are contiguous memory of the host."""
        return not (self.strided or self.elsewhere)


def held_of(locals_: list[Local], given: Tensors, count: int, rank: int, role: str) -> Held:
    """Check the given tensors against the plan."""
    held = Held(count)
    for local in locals_:
        tensor = given.get(local.name)
        if tensor is None:
            if local.shape.numel():
                raise TensorError(
                    f"rank {rank} holds {local.kind}{list(local.shape)} of "
                    f'"{local.name}" and was given none {role}: give its local tensor'
                )
            continue
        # The common case costs four comparisons: this runs for every tensor of every call.
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        plain = plain and (tensor.is_cpu or tensor.is_cuda)
        lazy = tensor.is_conj() or tensor.is_neg() if plain else False
        if not plain or lazy or tensor.shape != local.shape or tensor.dtype != local.kind:
            _check(tensor, local, rank, role)
        held.add(local.number, tensor)
    return held


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _check(tensor: Any, local: Local, rank: int, role: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(
            f'"{local.name}" {role} on rank {rank} is a {type(tensor).__name__}: give a tensor'
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TensorError(
            f'"{local.name}" {role} on rank {rank} is a {tensor.layout} tensor on '
            f"{tensor.device}: give a dense tensor that has memory"
        )
    if _is_wrapper(tensor):
        raise TensorError(
            f'"{local.name}" {role} on rank {rank} is a {type(tensor).__name__}, which has no '
            "memory of its own: give its local tensor, or move it with rs.move"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError(
            f'"{local.name}" {role} on rank {rank} is a lazy conjugate or negative, whose memory '
            "holds other values: give tensor.resolve_conj().resolve_neg()"
        )
    if tensor.shape != local.shape or tensor.dtype is not local.kind:
        raise TensorError(
            f'"{local.name}" {role} on rank {rank} is {tensor.dtype}{list(tensor.shape)} and its '
            f"layout says {local.kind}{list(local.shape)}: give this rank's local tensor"
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


def check_apart(have: Held, want: Held, names: tuple[list[str], list[str]], rank: int) -> None:
    """Refuse destinations that overlap one another or a source; equal ones are tied and fine."""
    for number in (*want.strided, *want.elsewhere):
        if _overlaps_itself(want.tensors[number]):
            raise TensorError(
                f'on rank {rank} elements of the destination "{names[1][number]}" overlap one '
                "another in memory: give memory of its own for every element, as clone() does"
            )
    spans = [
        (*_span(tensor), side, number)
        for side, held in enumerate((have, want))
        for number, tensor in held.tensors.items()
        if tensor.device.type in ("cpu", "cuda") and tensor.numel()
    ]
    if not spans:
        return
    table = np.array(spans, dtype=np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    # Only where the furthest end so far reaches into the next span can two overlap.
    reach = np.maximum.accumulate(table[:, 1])
    for at in np.flatnonzero(reach[:-1] > table[1:, 0]) + 1:
        for before in range(at - 1, -1, -1):
            if reach[before] <= table[at, 0]:
                break
            _check_pair(have, want, names, table[before], table[at], rank)


def _check_pair(
    have: Held, want: Held, names: tuple[list[str], list[str]], one: Ints, other: Ints, rank: int
) -> None:
    sides = (int(one[2]), int(other[2]))
    tensors = [
        (have, want)[side].tensors[int(row[3])]
        for side, row in zip(sides, (one, other), strict=True)
    ]
    if sides == (0, 0) or one[1] <= other[0]:
        return
    a, b = tensors
    tied = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    if (sides == (1, 1) and tied) or not _share(a, b):
        return
    first, second = (
        f'"{names[side][int(row[3])]}"' for side, row in zip(sides, (one, other), strict=True)
    )
    if sides == (1, 1):
        raise TensorError(
            f"on rank {rank} the destinations {first} and {second} overlap in memory: tied tensors "
            "have the same memory, shape and strides; give others memory of their own"
        )
    raise TensorError(
        f"on rank {rank} a destination overlaps a source in memory ({first} and {second}): the "
        "source is read while the destination is written; give other memory, or leave out into="
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: where a dim's step does not pass the ones inside."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; where that is hard to say, yes."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    arrays = [
        array_at(
            t.data_ptr(),
            tuple(t.shape),
            np.dtype(f"V{t.element_size()}"),
            [stride * t.element_size() for stride in t.stride()],
        )
        for t in (one, other)
    ]
    try:
        # Exact, and bounded: the general question is hard.
        return bool(np.shares_memory(arrays[0], arrays[1], max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
