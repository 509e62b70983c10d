"""The arguments of one call on one rank: tensors, and the options of `plan.run` and `rs.move`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live.inputs.bound import GPU, HOST, BoundTensors, Locals, Tensors, with_index
from reshard.live.inputs.memory import check_overlaps
from reshard.live.session.control import Tag

TRANSPORTS = ("auto", "peer", "shared", "network", "gpu_peer", "nccl")
GPU_TRANSPORTS = ("gpu_peer", "nccl")
CHECKS = ("first", "always", "never")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run; callers know them as `RunOptions`."""

    timeout: float = 60.0
    """The longest wait without a heartbeat from the awaited rank, in seconds."""
    deadline: float | None = None
    """The longest time that the whole call may take, in seconds."""
    transport: str | None = None
    """``auto``, or a forced transport: ``peer`` memory, ``shared`` memory or ``network`` between
    hosts, ``gpu_peer`` memory or ``nccl`` between GPUs; None: that of the environment."""
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
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        check_choice("check", self.check, CHECKS)
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


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise LiveError(f'{name} "{value}" is none of {", ".join(allowed)}')


_NAMES = sorted(field.name for field in fields(Options))


def transport_of_environment() -> str:
    """The transport of plans that are run without one."""
    transport = os.environ.get("RESHARD_TRANSPORT", "auto")
    check_choice("transport", transport, TRANSPORTS)
    return transport


@lru_cache(maxsize=64)
def _default_on(device: torch.device | str | None) -> Options:
    return Options(device=device)


def options_from(given: Mapping[str, Any], device: torch.device | str | None = None) -> Options:
    """Check the options of a caller."""
    if not given:
        return _default_on(device)
    for name in given:
        if name not in _NAMES:
            near = get_close_matches(name, _NAMES, 1)
            hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(_NAMES)}"
            raise LiveError(f"a move has no option {name}=: {hint}")
    where = {} if device is None else {"device": device}
    return Options(**{**given, **where})


def bind(
    locals_: Locals,
    tensors: Tensors,
    into: Tensors | None,
    group: dist.ProcessGroup | None,
    options: Options,
    resolves: bool = False,
) -> BoundTensors:
    """Check the tensors that this rank has given to a call, and create missing destinations;
    ``resolves`` is that of `BoundTensors.bind`."""
    have, want = locals_.sides
    bound = BoundTensors(locals_.staging)
    bound.bind(have, tensors, resolves)
    if into is not None:
        checked = bound
        if options.atomic:
            # They are only checked: the call writes new tensors and copies at the end.
            checked = BoundTensors(locals_.staging)
            checked.bind(have, tensors, resolves)
        checked.bind(want, into)
        places, known = checked.identity, locals_.disjoint
        if known == places:
            checked.addresses = known[0]  # the same list: what is kept for it is found at once
        else:
            check_overlaps(checked.tensors, locals_.names, locals_.rank)
            locals_.disjoint = places
        if not options.atomic:
            bound.result = {n: tensor for n, tensor in into.items() if tensor is not None}
            return bound
    if options.device is not None or not bound.tensors:
        bound.create(want, home_device(group, options))
    elif not bound.on_devices:
        bound.create(want, HOST)
    else:
        # Where the source of the same name is, or else the first one. A tensor that is given and of
        # which nothing is here is not bound, and may be on any device.
        on_host = len(bound.tensors) - len(bound.on_devices)
        is_mixed = len(bound.devices) + min(on_host, 1) > 1
        first = next(iter(bound.tensors.values()))
        bound.create(want, first.device, tensors if is_mixed else None)
    return bound


def home_device(group: dist.ProcessGroup | None, options: Options) -> torch.device:
    """The device of new tensors that no source determines."""
    if options.device is None:
        return default_device(group)
    return with_index(torch.device(options.device))


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a rank without source tensors creates new ones: where its group can move them."""
    return with_index(torch.device(GPU if set(_backends(group)) == {GPU} else "cpu"))


def has_nccl(group: dist.ProcessGroup | None) -> bool:
    """Whether a group moves tensors between GPUs with NCCL."""
    return _backends(group).get(GPU) == "nccl"


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend of a group for each kind of device; None: the group of all ranks."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}
