"""The arguments of one call on one rank: tensors, and the options of `plan.run` and `rs.move`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.live.inputs.bound import (
    GPU,
    BoundTensors,
    Locals,
    Side,
    Tensors,
    default_device,
    with_index,
)
from reshard.live.inputs.overlap import check_overlaps
from reshard.live.session.cause import Tag

__all__ = [
    "CHECKS", "GPU_TRANSPORTS", "TRANSPORTS", "Options", "Request", "check_request",
    "options_from",
]  # fmt: skip

TRANSPORTS = ("auto", "peer", "shared", "network", "gpu_peer", "nccl")
GPU_TRANSPORTS = ("gpu_peer", "nccl")
CHECKS = ("first", "always", "never")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run; callers know them as `RunOptions`."""

    timeout: float = 60.0
    """The longest wait without a heartbeat from the awaited rank, in seconds."""
    deadline: float | None = None
    """The longest time that the whole call may take, in seconds."""
    transport: str = "auto"
    """``auto``, or a forced transport: ``peer`` memory, ``shared`` memory or ``network`` between
    hosts, ``gpu_peer`` memory or ``nccl`` between GPUs."""
    check: Literal["first", "always", "never"] = "first"
    """In which calls of a plan the ranks compare it. ``never`` is for moves without messages that
    not all ranks make: those have no number and are not compared."""
    atomic: bool = False
    """Whether destinations change only when every rank has received all of its part."""
    donate: bool = False
    """Whether each source tensor is freed when its last element has been read."""
    device: torch.device | str | None = None
    """The device of new destination tensors; None: the device of the sources."""
    progress: bool | None = None
    """Whether the lowest rank shows a progress bar; None: if standard error is a terminal."""
    tag: int | str | None = None
    """The user's name of this call, such as the training step. Ranks that are in calls with
    different tags raise, so a rank that left out a call is noticed."""
    sync: bool = False
    """Whether a move between GPUs waits until all messages have arrived, and raises its errors.
    Otherwise it enqueues its work and returns; a later error is raised by the next call of the same
    ranks, by `rs.check`, or by the handle."""

    def __post_init__(self) -> None:
        for name, allowed in (("transport", TRANSPORTS), ("check", CHECKS)):
            if getattr(self, name) not in allowed:
                raise LiveError(f'{name} "{getattr(self, name)}" is none of {", ".join(allowed)}')
        for name in ("timeout", "deadline"):
            seconds = getattr(self, name)
            if seconds is None and name == "deadline":
                continue
            if not isinstance(seconds, int | float) or not seconds > 0:
                raise LiveError(f"a {name} of {seconds!r}: give a number of seconds above 0")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError):
                raise LiveError(
                    f'device={self.device!r}: give "cpu", "cuda", "cuda:1" or a torch.device'
                ) from None
        if self.tag is not None:
            Tag.of(self.tag, 0)  # raises if it is no valid tag

    @property
    def shared(self) -> dict[str, object]:
        """The options that must be equal on all ranks of a call."""
        return {"transport": self.transport, "atomic": self.atomic}

    @property
    def name(self) -> str:
        """The same as a text."""
        return f"{self.transport}, atomic" if self.atomic else self.transport


_DEFAULT = Options()
_NAMES = sorted(field.name for field in fields(Options))


def options_from(given: Mapping[str, Any], device: torch.device | str | None = None) -> Options:
    """Check the options of a caller; the transport may come from the environment."""
    # Looking up a str takes three times as long as bytes.
    variable = os.environb.get(b"RESHARD_TRANSPORT")
    if not given and device is None and variable is None:
        return _DEFAULT
    for name in given:
        if name not in _NAMES:
            near = get_close_matches(name, _NAMES, 1)
            hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(_NAMES)}"
            raise LiveError(f"a move has no option {name}=: {hint}")
    options = dict(given)
    if device is not None:
        options["device"] = device
    if variable is not None:
        options.setdefault("transport", os.fsdecode(variable))
    return Options(**options)


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


class Request(NamedTuple):
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
        have, want = locals_.sides
        into, atomic = self.into, self.options.atomic
        bound = BoundTensors(locals_.staging)
        _bind_side(bound, have, self.tensors)
        if into is not None:
            # For an atomic call they are only checked: it writes new tensors and copies at the end.
            checked = bound.copy() if atomic else bound
            _bind_side(checked, want, into)
            places = checked.identity
            if locals_.disjoint != places:
                check_overlaps(checked.tensors, locals_.names, locals_.rank)
                locals_.disjoint = places
            if not atomic:
                bound.result = {n: tensor for n, tensor in into.items() if tensor is not None}
                return bound
        created = self._create(bound, want)
        bound.add(want.numbers, created)
        bound.result = dict(zip(want.names, created, strict=True))
        return bound

    def _create(self, bound: BoundTensors, want: Side) -> list[torch.Tensor]:
        """Create each on the device of options, of the source of its name, or of any source."""
        if self.options.device is not None or not bound.tensors:
            device = self._home()
        elif bound.is_host:
            device = CPU
        else:
            device = next(one.device for one in self.tensors.values() if one is not None)
            if len(bound.devices) > 1 or len(bound.on_devices) < len(bound.tensors):
                near = [self.tensors.get(name) for name in want.names]
                return [
                    torch.empty(shape, dtype=dtype, device=device if one is None else one.device)
                    for one, (_, _, shape, dtype) in zip(near, want.specs, strict=True)
                ]
        return [torch.empty(shape, dtype=dtype, device=device) for _, _, shape, dtype in want.specs]

    def _home(self) -> torch.device:
        """The device of new tensors that no source determines."""
        if self.options.device is None:
            return default_device(self.group)
        return with_index(torch.device(self.options.device))


def _bind_side(bound: BoundTensors, side: Side, given: Tensors) -> None:
    numbers, tensors = side.match(given)
    bound.add(numbers, tensors)
    if side.repeated.any:
        side.repeated.note(tensors)
