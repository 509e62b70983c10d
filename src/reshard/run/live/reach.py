"""Copies between the tensors of two processes, while one call lasts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reshard.columns import Ints
from reshard.run.live.faults import Watch
from reshard.run.live.memory import Portion, read_from, whole_at, write_to

__all__ = ["Act", "Reach"]

Act = Callable[[int, Portion, str], None]
"""Copy a portion from or to a peer; the text says what of it, for errors."""


class Reach:
    """Copies between the tensors of two processes; a peer that has failed meanwhile is named."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.links = watch.team.links
        self.board = watch.team.door.board

    def write(self, peer: int, portion: Portion, part: str) -> None:
        """Copy into a peer's tensors, unless the call is over for it."""
        watch = self.watch
        watch.breathe()
        link, closed = self.links[peer], False
        try:
            with self.board.writing(watch.call):
                closed = link.board.is_closed(watch.call)
                if not closed:
                    write_to(link.pid, portion)
        except OSError as error:
            watch.blame(peer, error, f"it to take {part}")
        if closed:
            watch.failed_at(peer, f"it to take {part}")

    def read(self, peer: int, portion: Portion, part: str) -> None:
        """Copy out of a peer's tensors."""
        watch = self.watch
        watch.breathe()
        link = self.links[peer]
        try:
            read_from(link.pid, portion)
        except OSError as error:
            watch.blame(peer, error, part)
        if link.board.is_closed(watch.call):
            # It may have freed what was just read.
            watch.failed_at(peer, part)

    def table(self, peer: int, count: int) -> Ints:
        """Where a peer's tensors are, as its greeting says; 0 for what is not to be touched."""
        found = np.zeros(count, dtype=np.int64)
        self.read(peer, whole_at(self.watch.inbox.hellos[peer].a, found), "its part")
        return found
