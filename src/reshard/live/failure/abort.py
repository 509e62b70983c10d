"""How a call fails: the first cause that is posted stands, and all ranks of the call raise it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from reshard.errors import PeerLostError
from reshard.live.session import control
from reshard.live.session.cause import Cause
from reshard.live.session.rendezvous import Connections
from reshard.live.session.store import REQUEST_SECONDS, Store

__all__ = ["CallAbort", "abort_key"]

WRITER_SECONDS = 1.0
"""How long to wait for a process that was about to write into our memory when a call failed."""


def abort_key(call: int) -> str:
    """The key of the session's store under which the cause of a call's failure is posted."""
    return f"abort/{call}"


class CallAbort:
    """The failure of one call, as one rank knows of it."""

    __slots__ = ("_call", "_connections", "_tag", "cause", "is_over", "written")

    def __init__(self, connections: Connections, call: int, tag: int) -> None:
        self._connections, self._call, self._tag = connections, call, tag
        self.cause: Cause | None = None
        """Why the call has failed."""
        self.is_over = False
        """Whether the call has failed, and the other ranks know."""
        self.written: object = None
        """What other processes may write into."""

    def post(self, cause: Cause) -> Cause:
        """Post why the call fails; gives the cause that was posted first."""
        if not cause.tag:
            cause = replace(cause, tag=self._tag)
        call, text = self._call, cause.to_json()

        def post(store: Store) -> Any:
            # The epoch moves on before any rank can know of the failure, so that no rank begins
            # anew without knowing. Process groups of earlier epochs are not used again.
            if store.add("epoch", 0) <= call:
                store.set("epoch", str(call + 1))
            return store.compare_set(abort_key(call), "", text)

        found = cause
        with contextlib.suppress(PeerLostError):
            found = Cause.from_json(self._connections.client.request(post, REQUEST_SECONDS))
        return found

    def posted(self, call: int | None = None) -> Cause | None:
        """The cause that is posted for this call, or an earlier one; None without a store."""
        found = None
        with contextlib.suppress(PeerLostError):
            key = abort_key(self._call if call is None else call)
            found = self._connections.client.get(key)
        return None if found is None else Cause.from_json(found)

    def received(self, message: control.Abort) -> Cause:
        """The cause that a peer sent."""
        return Cause.from_json(message.text)

    def stop(self, cause: Cause) -> None:
        """Tell the ranks of this host that the call is over, and keep them from our memory."""
        connections, call = self._connections, self._call
        self.cause = cause
        self.is_over = True
        connections.flags.mark_failed(call)
        connections.last_failed = max(connections.last_failed, call)
        for peer in connections.peers:
            connections.mailbox.send(peer, control.Abort(call, cause.to_json().encode()))
        if self._writers_after(WRITER_SECONDS):
            # One was stopped between looking at our flags and writing. Nobody can tell when it goes
            # on; what it writes into must never be anything else.
            connections.quarantine.append(self.written)

    def _writers_after(self, seconds: float) -> set[int]:
        """The peers that may still be writing into our memory, after at most so long.

        A peer that is seen not to write once looks at our flags before it writes again.
        """
        peers, end = self._connections.peers, time.monotonic() + seconds
        left = set(peers)
        while True:
            left = {peer for peer in left if peers[peer].flags.is_writing(self._call)}
            left -= self._connections.mailbox.lost
            if not left or time.monotonic() > end:
                return left
            self._connections.mailbox.step(0.001)
