"""Calls of one team that go on at the same time, each in a thread, and the order among them.

Messages between GPUs find each other by the order in which they are given to the GPU, so all ranks
must give them in the same order: that of the calls. A call waits until those before it have given
all they have, or are found not to use GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Turns"]

FIRST_PAUSE = 0.00005
LOOK_EVERY = 0.05


class Turns:
    """The calls of a team that may still give something to the GPU."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def enter(self, call: int) -> None:
        """A call begins."""
        self._open.add(call)

    def leave(self, call: int) -> None:
        """A call gives nothing more; it may say so twice."""
        self._open.discard(call)

    def wait(self, call: int, look_up: Callable[[], None]) -> None:
        """Wait for all calls before this one, calling ``look_up`` now and then."""
        pause, since = FIRST_PAUSE, time.monotonic()
        while any(other < call for other in tuple(self._open)):
            time.sleep(pause)
            pause = min(pause * 1.5, LOOK_EVERY)
            if time.monotonic() - since > LOOK_EVERY:
                since = time.monotonic()
                look_up()
