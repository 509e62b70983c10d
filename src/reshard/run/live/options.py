"""How a plan is run: what `plan.run`, `plan.start` and `rs.move` take besides tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from reshard.errors import LiveError

__all__ = ["GRAD_CODES", "TRANSPORTS", "Options"]

GRAD_CODES = {None: 0, False: 1, True: 2}
"""How a greeting says whether gradients are wanted."""

TRANSPORTS = ("auto", "peer", "shared", "network")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run."""

    timeout: float = 60.0
    """The longest wait without a sign of life from the rank waited for, in seconds."""
    deadline: float | None = None
    """The longest that the whole call may take."""
    transport: str = "auto"
    """``auto``, or one that is forced: ``peer`` memory, ``shared`` memory, ``network``."""
    check: Literal["first", "always"] = "first"
    """When ranks compare what they were given."""
    atomic: bool = False
    donate: bool = False
    device: torch.device | str | None = None
    """Where new destination tensors are made; with the sources, if nobody says."""
    progress: bool | None = None
    """Whether the lowest rank shows a bar; None: where somebody watches a terminal."""
    grad: bool | None = None
    """Whether this rank's source requires gradients; None on a rank that cannot know."""
    tell_grad: bool = False
    """Whether every rank that gets something is told by one that knows."""
    sync: bool = False
    """Whether a move between GPUs waits until all messages have come, and raises what failed.
    Otherwise it gives its work to the GPU and goes on; what fails later is raised by the next call
    of the same ranks, by `rs.check`, or by the handle."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise LiveError(f'transport "{self.transport}" is none of {", ".join(TRANSPORTS)}')
        if not self.timeout > 0:
            raise LiveError(f"a timeout of {self.timeout} s: give more than 0 seconds")
