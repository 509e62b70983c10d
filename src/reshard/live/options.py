"""How a plan is run: what `plan.run`, `plan.start` and `rs.move` take besides tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

import torch

from reshard.errors import LiveError
from reshard.live.session.tags import Tag

__all__ = ["CHECKS", "TRANSPORTS", "Options", "RunOptions", "options_from"]

TRANSPORTS = ("auto", "peer", "shared", "network")
CHECKS = ("first", "always", "never")


class RunOptions(TypedDict, total=False):
    """The keyword options of `plan.run`, `plan.start` and `rs.move`; see `Options`."""

    timeout: float
    deadline: float | None
    transport: Literal["auto", "peer", "shared", "network"]
    check: Literal["first", "always", "never"]
    atomic: bool
    donate: bool
    progress: bool | None
    tag: int | str | None
    sync: bool


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run."""

    timeout: float = 60.0
    """The longest wait without a heartbeat from the rank that is waited for, in seconds."""
    deadline: float | None = None
    """The longest that the whole call may take."""
    transport: str = "auto"
    """``auto``, or one that is forced: ``peer`` memory, ``shared`` memory, ``network``."""
    check: Literal["first", "always", "never"] = "first"
    """When ranks compare what they were given. ``never`` is for moves in which nothing travels and
    which not all ranks make: they are neither compared nor counted."""
    atomic: bool = False
    """Whether destinations change only when every rank has all of its part."""
    donate: bool = False
    """Whether each source tensor is freed when its last element has been read."""
    device: torch.device | str | None = None
    """Where new destination tensors are made; where the sources are, if it is not given."""
    progress: bool | None = None
    """Whether the lowest rank shows a progress bar; None: if standard error is a terminal."""
    tag: int | str | None = None
    """The user's name of this call, such as the training step. Ranks that are in calls with
    different tags raise, so a rank that left out a call is noticed."""
    sync: bool = False
    """Whether a move between GPUs waits until all messages have come, and raises what failed.
    Otherwise it enqueues its work and returns; what fails later is raised by the next call of the
    same ranks, by `rs.check`, or by the handle."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise LiveError(f'transport "{self.transport}" is none of {", ".join(TRANSPORTS)}')
        if self.check not in CHECKS:
            raise LiveError(f'check "{self.check}" is none of {", ".join(CHECKS)}')
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
            Tag.of(self.tag, 0)  # says what is wrong with it

    @property
    def shared(self) -> dict[str, object]:
        """The options that must be equal on all ranks of a call."""
        return {"transport": self.transport, "atomic": self.atomic}

    @property
    def name(self) -> str:
        """The same as one text."""
        return f"{self.transport}, atomic" if self.atomic else self.transport


_DEFAULT = Options()
_KNOWN = sorted(field.name for field in fields(Options))


def options_from(given: Mapping[str, Any], device: torch.device | str | None = None) -> Options:
    """The options that a caller gave by name; the transport may come from the environment."""
    # Bytes, because looking up a text takes three times as long.
    variable = os.environb.get(b"RESHARD_TRANSPORT")
    if not given and device is None and variable is None:
        return _DEFAULT
    for name in given:
        if name not in _KNOWN:
            near = get_close_matches(name, _KNOWN, 1)
            hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(_KNOWN)}"
            raise LiveError(f"a move has no option {name}=: {hint}")
    named = dict(given)
    if device is not None:
        named["device"] = device
    if variable is not None:
        named.setdefault("transport", os.fsdecode(variable))
    return Options(**named)
