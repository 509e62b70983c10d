"""Copies between the tensors of two processes, while one call lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from reshard.columns import Ints
from reshard.run.live.links import Link
from reshard.run.live.mailbox import Inbox, Kind
from reshard.run.live.memory import Portion, read_from, whole_at, write_to

if TYPE_CHECKING:
    from reshard.run.live.faults import Watch
    from reshard.run.live.team import Team

__all__ = ["Act", "Reach", "short_table"]

BREATHE_EVERY = 0.02
"""Seconds of work after which the watch is asked whether it is time for a sign of life."""

MOST_ROWS = 64
"""Of a table that is told in a greeting; a longer one is read where it lies."""

Act = Callable[[int, Portion, str], None]
"""Copy a portion from or to a peer; the text says what of it, for errors."""


def short_table(table: Ints) -> bytes:
    """A table of addresses as a greeting tells it; empty if it is too long for that."""
    return table.tobytes() if len(table) <= MOST_ROWS else b""


class Reach:
    """Copies between the tensors of two processes; a peer that has failed meanwhile is named."""

    def __init__(self, team: Team, call: int, inbox: Inbox, watch: Callable[[], Watch]) -> None:
        self.call = call
        self.links = team.links
        self.board = team.door.board
        self.inbox = inbox
        self.watch = watch
        """Who looks after the call, for when something takes long or goes wrong."""
        self._breathes_at = time.monotonic() + BREATHE_EVERY

    def write(self, peer: int, portion: Portion, part: str) -> None:
        """Copy into a peer's tensors, unless the call is over for it."""
        self._breathe()
        try:
            written = self._write_unless_closed(self.links[peer], portion)
        except OSError as error:
            self.watch().blame(peer, error, f"it to take {part}")
        if not written:
            self.watch().failed_at(peer, f"it to take {part}")

    def _write_unless_closed(self, link: Link, portion: Portion) -> bool:
        """Copy, saying meanwhile that this rank does; whether the call was not over there."""
        call = self.call
        self.board.begin_writing(call)
        try:
            if link.board.is_closed(call):
                return False
            write_to(link.pid, portion)
            return True
        finally:
            self.board.end_writing(call)

    def read(self, peer: int, portion: Portion, part: str) -> None:
        """Copy out of a peer's tensors."""
        self._breathe()
        link = self.links[peer]
        try:
            read_from(link.pid, portion)
        except OSError as error:
            self.watch().blame(peer, error, part)
        if link.board.is_closed(self.call):
            # It may have freed what was just read.
            self.watch().failed_at(peer, part)

    def _breathe(self) -> None:
        now = time.monotonic()
        if now > self._breathes_at:
            self._breathes_at = now + BREATHE_EVERY
            self.watch().breathe()

    def table(self, peer: int, count: int) -> bytes:
        """The addresses of a peer's tensors, of 8 bytes each, as its greeting says.

        It is 0 for what is not to be touched.
        """
        said = self.inbox.texts.get((peer, Kind.HELLO), b"")
        if len(said) == 8 * count:
            return said
        found = np.zeros(count, dtype=np.int64)
        self.read(peer, whole_at(self.inbox.hellos[peer].a, found), "its part")
        return found.tobytes()
