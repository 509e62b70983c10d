"""Read and write the tensors of another process of this host, unless the call has failed there.

When a call has raised, no process writes into its destinations any more. So a rank marks that it
writes before it checks whether the peer has aborted; a peer that aborts waits while it is marked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from reshard.layout.columns import Ints
from reshard.live.copy.host import read_memory, write_memory
from reshard.live.failure.watch import Watch
from reshard.live.program.messages import IovecCall

__all__ = ["PeerMemory"]

HEARTBEAT_EVERY = 0.02
"""Seconds of copying after which the watch is asked whether a heartbeat is due."""


class PeerMemory:
    """Copies between the tensors of two processes; the error names a peer that has failed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._peers, self._flags = watch.connections.peers, watch.connections.flags
        self._heartbeat_at = 0.0
        self._tables: dict[int, Ints] = {}

    def write(self, peer: int, calls: Iterable[IovecCall], name: str) -> None:
        """Copy into a peer's tensors."""
        call, there, failed = self._watch.call, self._peers[peer], False
        error: OSError | None = None
        for one in calls:
            self._heartbeat()
            self._flags.begin_writing(call)
            try:
                failed = there.flags.has_failed(call)
                if not failed:
                    write_memory(there.pid, one)
            except OSError as raised:
                error = raised
            finally:
                self._flags.end_writing(call)
            if failed or error is not None:
                self._watch.fail_because_of(peer, f'it to take its part of "{name}"', error)

    def read(self, peer: int, calls: Iterable[IovecCall], name: str) -> None:
        """Copy out of a peer's tensors; fails if the peer may have freed them meanwhile."""
        call, there = self._watch.call, self._peers[peer]
        error: OSError | None = None
        for one in calls:
            self._heartbeat()
            try:
                read_memory(there.pid, one)
            except OSError as raised:
                error = raised
            if error is not None or there.flags.has_failed(call):
                self._watch.fail_because_of(peer, f'its part of "{name}"', error)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now > self._heartbeat_at:
            if self._heartbeat_at:
                self._watch.heartbeat()
            self._heartbeat_at = now + HEARTBEAT_EVERY

    def table(self, peer: int, count: int) -> Ints:
        """The base addresses of a peer's tensors; 0 for those that must not be touched."""
        found = self._tables.get(peer)
        if found is None:
            found = np.zeros(count, dtype=np.int64)
            at = self._watch.inbox.hellos[peer].table_at
            own = found.__array_interface__["data"][0]
            call = IovecCall.single(own, at, found.nbytes)
            self.read(peer, [call], "the move")
            self._tables[peer] = found
        return found
