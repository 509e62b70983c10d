"""How a plan is run: what `plan.run`, `plan.start` and `rs.move` take besides tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

import torch

from reshard.errors import LiveError
from reshard.run.live.tags import Tag

__all__ = ["GRAD_CODES", "TRANSPORTS", "Options", "options_of"]

GRAD_CODES = {None: 0, False: 1, True: 2}
"""How a greeting says whether gradients are wanted."""

TRANSPORTS = ("auto", "peer", "shared", "network")
CHECKS = ("first", "always", "never")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run."""

    timeout: float = 60.0
    """The longest wait without a sign of life from the rank waited for, in seconds."""
    deadline: float | None = None
    """The longest that the whole call may take."""
    transport: str = "auto"
    """``auto``, or one that is forced: ``peer`` memory, ``shared`` memory, ``network``."""
    check: Literal["first", "always", "never"] = "first"
    """When ranks compare what they were given. ``never`` is for moves in which nothing travels and
    which not all ranks make: they are neither compared nor counted."""
    atomic: bool = False
    donate: bool = False
    device: torch.device | str | None = None
    """Where new destination tensors are made; with the sources, if nobody says."""
    progress: bool | None = None
    """Whether the lowest rank shows a bar; None: where somebody watches a terminal."""
    grad: bool | None = None
    """Whether this rank's source requires gradients; None on a rank that cannot know."""
    tag: int | str | None = None
    """What the user calls this call, such as the training step. Ranks that are in calls with
    different tags raise, so a rank that left out a call is noticed."""
    tell_grad: bool = False
    """Whether every rank that gets something is told by one that knows."""
    sync: bool = False
    """Whether a move between GPUs waits until all messages have come, and raises what failed.
    Otherwise it gives its work to the GPU and goes on; what fails later is raised by the next call
    of the same ranks, by `rs.check`, or by the handle."""

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
        self._check_device()
        if self.tag is not None:
            Tag.of(self.tag, 0)  # says what is wrong with it

    @property
    def shared(self) -> dict[str, object]:
        """The settings that must be equal on all ranks of a call."""
        return {"transport": self.transport, "atomic": self.atomic}

    @property
    def name(self) -> str:
        """The same as one text."""
        return f"{self.transport}, atomic" if self.atomic else self.transport

    def _check_device(self) -> None:
        try:
            torch.device(self.device or "cpu")
        except (RuntimeError, TypeError):
            raise LiveError(
                f'device={self.device!r}: give "cpu", "cuda", "cuda:1" or a torch.device'
            ) from None


def options_of(given: Mapping[str, Any]) -> Options:
    """The options that a caller gave by name."""
    known = sorted(field.name for field in fields(Options))
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
            raise LiveError(f"a move has no option {name}=: {hint}")
    return Options(**given)
