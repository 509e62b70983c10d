"""Who waits for whom in one call: the rank at the end of the chain is the one to name.

A rank that has waited for a second says for whom, to the ranks of its host by message and to all
others in the store. When its time is over it follows what others say to the one rank that waits for
none.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, NamedTuple

from reshard.errors import PeerLostError
from reshard.run.live.mailbox import Inbox, Kind, Message
from reshard.run.live.team import ASK_SECONDS, Team

__all__ = ["Root", "WaitGraph"]

NOTES = 64
"""Calls in flight that may say in the store whom they wait for."""


class Root(NamedTuple):
    """The end of a chain of ranks that wait for each other."""

    waiter: int
    """The rank that waits for it."""
    rank: int
    what: str
    """What it is waited for, in words that follow "waits for"."""
    met: bool
    """Whether it has entered the call."""


class WaitGraph:
    """What one rank says and hears about who waits for whom, in one call."""

    def __init__(self, team: Team, call: int, digest: bytes, inbox: Inbox, timeout: float) -> None:
        self.team, self.call, self.digest, self.inbox = team, call, digest, inbox
        self.timeout = timeout
        self.posted = False
        self._heartbeats: dict[int, bytes] = {}
        """The last heartbeat in the store of each peer that was looked for."""

    def post(self, peer: int, what: str) -> None:
        """Say whom this rank waits for."""
        if self.posted:
            return
        self.posted = True
        met = peer in self.inbox.hellos
        self._say({"call": self.call, "peer": peer, "what": what, "met": met})
        with contextlib.suppress(PeerLostError):
            self._has_beaten(peer)

    def withdraw(self) -> None:
        """Say that this rank does not wait any more."""
        if self.posted:
            self.posted = False
            self._say({})

    def waits_for(self, rank: int) -> dict[str, Any] | None:
        """Whom another rank waits for in this call, if it says so."""
        if rank in self.team.links:
            text = self.inbox.texts.get((rank, Kind.WAITS))
        else:
            text = self.team.get(self._key(rank))
        found = json.loads(text or b"{}")
        return found if found.get("call") == self.call else None

    def lives(self, rank: int) -> bool:
        """Whether a rank has said anything lately."""
        recent = time.monotonic() - self.inbox.heard.get(rank, 0.0) < self.timeout
        return recent or self._has_beaten(rank)

    def root(self, peer: int, what: str) -> tuple[Root, bool]:
        """The rank that holds up this one, which waits for a peer; and whether it is at work."""
        found, alive = Root(self.team.rank, peer, what, peer in self.inbox.hellos), False
        seen = {self.team.rank}
        with contextlib.suppress(PeerLostError, ValueError, TypeError, KeyError, AttributeError):
            while found.rank not in seen:
                seen.add(found.rank)
                posted = self.waits_for(found.rank)
                if posted is None:
                    break
                more = str(posted["what"]), bool(posted["met"])
                found = Root(found.rank, int(posted["peer"]), *more)
            alive = found.rank not in {self.team.rank, found.waiter} and self.lives(found.rank)
        return found, alive

    def _key(self, rank: int) -> str:
        """Where a rank says whom it waits for: few keys, used again by later calls."""
        return f"wait/{self.call % NOTES}/{rank}"

    def _say(self, said: dict[str, object]) -> None:
        text, key = json.dumps(said), self._key(self.team.rank)
        message = Message(Kind.WAITS, self.call, self.digest)
        for peer in self.team.links:
            self.team.mailbox.send(peer, message, text=text.encode())
        with contextlib.suppress(PeerLostError):
            self.team.line.ask(lambda store: store.set(key, text), ASK_SECONDS)

    def _has_beaten(self, rank: int) -> bool:
        """Whether a rank that sends no messages has left a new heartbeat in the store."""
        found, before = self.team.get(f"alive/{rank}"), self._heartbeats.get(rank)
        if found is not None:
            self._heartbeats[rank] = found
        return found is not None and found != before
