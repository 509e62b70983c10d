"""How a plan is run: the options of `plan.run`, `plan.start` and `rs.move`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

import torch

from reshard.errors import LiveError
from reshard.live.session.cause import Tag

__all__ = ["CHECKS", "TRANSPORTS", "Options", "options_from"]

TRANSPORTS = ("auto", "peer", "shared", "network")
CHECKS = ("first", "always", "never")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run; callers know them as `RunOptions`."""

    timeout: float = 60.0
    """The longest wait without a heartbeat from the awaited rank, in seconds."""
    deadline: float | None = None
    """The longest time that the whole call may take, in seconds."""
    transport: str = "auto"
    """``auto``, or a forced transport: ``peer`` memory, ``shared`` memory, ``network``."""
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
