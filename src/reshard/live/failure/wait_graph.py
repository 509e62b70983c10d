"""Who waits for whom: finds the rank that holds up all others, and deadlocks between sessions.

A rank that has waited for a while posts whom it waits for: to the ranks of its host by message, to
the others in the session's store. When its time is over it follows these records to the one rank
that waits for none: that one is named.

Ranks that were given different meshes never meet: each waits in a session that the others are not
in. So while a rank waits for others to call, it also posts its record in the store of the caller's
group, where all sessions see it. When records form a cycle through more than one call, and stay so,
none of these ranks will ever call: a deadlock. Only a call that the main thread waits for counts,
and only if it is the only one: a rank that goes on in another thread may still call.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from reshard.errors import PeerLostError
from reshard.layout.mesh import format_ranks
from reshard.live.session.cause import Calls
from reshard.live.session.control import Waiting
from reshard.live.session.mailbox import Inbox
from reshard.live.session.rendezvous import Connections
from reshard.live.session.session import Session
from reshard.live.session.store import REQUEST_SECONDS, PrefixStore, Store, StoreClient

__all__ = ["Root", "WaitGraph"]

LOOK_AFTER = 0.4
LOOK_EVERY = 0.25

SLOTS = 64
"""Calls in flight that may post in a session's store: few keys, used again by later calls."""

T = TypeVar("T")

_observing: set[int] = set()
"""The calls of this process that wait for other ranks to call, by identity."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank's record of whom it waits for."""

    ranks: tuple[int, ...]
    """The ranks of its session."""
    call: int
    awaits: tuple[int, ...]
    what: str
    """What it waits for in words that follow "waits for", or what the call does."""
    met: bool = False
    """Whether the awaited rank has entered the call."""
    token: str = ""
    """Identifies the call of the rank."""
    beat: int = 0
    """How often it has posted this."""

    @classmethod
    def read(cls, text: bytes | None) -> Wait | None:
        """None for anything that is not such a record."""
        try:
            data = json.loads(text or b"")
            ranks, awaits = (tuple(int(rank) for rank in data[key]) for key in ("ranks", "awaits"))
            rest = str(data["what"]), bool(data["met"]), str(data["token"]), int(data["beat"])
            return cls(ranks, int(data["call"]), awaits, *rest)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_json(self) -> str:
        """The record as it is posted."""
        return json.dumps(asdict(self))

    def repeats(self, earlier: Wait | None) -> bool:
        """Whether this is a later record of a rank that still waits for the same ranks."""
        if earlier is None or self.beat <= earlier.beat:
            return False
        return (self.token, self.awaits) == (earlier.token, earlier.awaits)


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
    """What one rank posts and reads about who waits for whom, in one call."""

    def __init__(self, session: Session, call: int, what: str) -> None:
        self._session, self.call, self._what = session, call, what
        self._connections: Connections | None = None
        self._inbox = Inbox()
        self._timeout = 0.0
        self.posted = False
        self._heartbeats: dict[int, bytes] = {}
        """The last heartbeat in the store of each peer that was looked for."""
        self._token = secrets.token_hex(8)
        self._began = self._looked = time.monotonic()
        self._client: StoreClient | None = None
        """Makes requests to the store of the caller's group; made when one is needed."""
        self._beat = 0
        self._records: dict[int, Wait] = {}
        """What ranks of any session posted last."""
        self.given_up: Calls = ()
        """The calls of a deadlock that was found: all of them fail."""
        self._counts = threading.current_thread() is threading.main_thread()

    def attach(self, connections: Connections, inbox: Inbox, timeout: float) -> WaitGraph:
        """The session is connected: records are posted there as well."""
        self._connections, self._inbox, self._timeout = connections, inbox, timeout
        return self

    # Within the session ------------------------------------------------------------------------

    def post(self, peer: int, what: str) -> None:
        """Post whom this rank waits for."""
        if self.posted:
            return
        self.posted = True
        met = peer in self._inbox.hellos
        self._post(Wait(self._session.ranks, self.call, (peer,), what, met).to_json())
        with contextlib.suppress(PeerLostError):
            self._has_beaten(peer)

    def withdraw(self) -> None:
        """Post that this rank does not wait any more."""
        if self.posted:
            self.posted = False
            self._post("")

    def waits_for(self, rank: int) -> Wait | None:
        """Whom another rank waits for in this call, if it posted that."""
        assert self._connections is not None
        if rank in self._connections.peers:
            found = Wait.read(self._inbox.waiting.get(rank))
        else:
            found = Wait.read(self._connections.client.get(self._key(rank)))
        return found if found is not None and found.call == self.call else None

    def root(self, peer: int, what: str) -> tuple[Root, bool]:
        """The rank that holds up this one, which waits for a peer; and whether it is at work."""
        me = self._session.rank
        found, alive = Root(me, peer, what, peer in self._inbox.hellos), False
        seen = {me}
        with contextlib.suppress(PeerLostError, IndexError):
            while found.rank not in seen:
                seen.add(found.rank)
                posted = self.waits_for(found.rank)
                if posted is None:
                    break
                found = Root(found.rank, posted.awaits[0], posted.what, posted.met)
            alive = found.rank not in {me, found.waiter} and self._is_alive(found.rank)
        return found, alive

    def _is_alive(self, rank: int) -> bool:
        """Whether a rank has sent anything lately."""
        recent = time.monotonic() - self._inbox.heard.get(rank, 0.0) < self._timeout
        return recent or self._has_beaten(rank)

    def _has_beaten(self, rank: int) -> bool:
        """Whether a rank that sends no messages has left a new heartbeat in the store."""
        assert self._connections is not None
        found = self._connections.client.get(f"alive/{rank}")
        before = self._heartbeats.get(rank)
        if found is not None:
            self._heartbeats[rank] = found
        return found is not None and found != before

    def _key(self, rank: int) -> str:
        return f"wait/{self.call % SLOTS}/{rank}"

    def _post(self, text: str) -> None:
        connections = self._connections
        assert connections is not None
        for peer in connections.peers:
            connections.mailbox.send(peer, Waiting(self.call, text.encode()))
        key = self._key(self._session.rank)
        with contextlib.suppress(PeerLostError):
            connections.client.request(lambda store: store.set(key, text), REQUEST_SECONDS)

    # Between sessions --------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether it is time to look for a deadlock."""
        now = time.monotonic()
        return now - self._began > LOOK_AFTER and now - self._looked > LOOK_EVERY

    def observe(self) -> WaitGraph:
        """This rank begins to wait for others to call."""
        _observing.add(id(self))
        return self

    def find_deadlock(self, awaited: Collection[int]) -> str | None:
        """The deadlock that this rank is part of, in words; None if there is none."""
        if not self.is_due:
            return None
        self._looked = time.monotonic()
        if not self._counts or len(_observing) > 1:
            return None
        with contextlib.suppress(PeerLostError):
            self._beat += 1
            more = (tuple(sorted(awaited)), self._what, False, self._token, self._beat)
            record = Wait(self._session.ranks, self.call, *more).to_json()
            self._request(lambda store: store.set(f"word/{self._session.rank}", record))
            return self._read_verdict() or self._judge()
        return None

    def refused(self, key: str) -> bytes | None:
        """What stands under a key of this session in the store of the caller's group."""
        store = self._session.caller
        with contextlib.suppress(PeerLostError):
            return self._request(lambda _: store.get(key) if store.check([key]) else None)
        return None

    def verdict(self) -> str | None:
        """The deadlock that another rank has found, if it has told this one."""
        if self._client is None:
            return None
        with contextlib.suppress(PeerLostError):
            return self._read_verdict()
        return None

    def _judge(self) -> str | None:
        """Look for a cycle; the rank that finds it tells all ranks in it."""
        before, records = self._records, self._collect()
        self._records = records
        sure = {r: wait for r, wait in records.items() if wait.repeats(before.get(r))}
        if not _leads_to_cycle(self._session.rank, sure):
            return None
        first = records[min(records)].token
        calls = [(wait.ranks, wait.call) for wait in records.values()]
        # Of one session, the others come to the later call when they have given up the first one.
        doomed = sorted({(ranks, min(c for r, c in calls if r == ranks)) for ranks, _ in calls})
        text = json.dumps({"text": _describe(records), "calls": doomed})

        def tell(store: Store) -> None:
            found: Any = store.compare_set(f"first/{first}", "", text)
            for wait in records.values():
                if (wait.ranks, wait.call) in doomed:
                    store.set(f"verdict/{wait.token}", found)

        self._request(tell)
        return self._read_verdict()

    def _read_verdict(self) -> str | None:
        key = f"verdict/{self._token}"

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        found = self._request(look)
        if found is None:
            return None
        try:
            data = json.loads(found)
            self.given_up = tuple((tuple(ranks), int(call)) for ranks, call in data["calls"])
            return str(data["text"])
        except (ValueError, TypeError, KeyError):
            return "ranks were given different moves and wait for each other"

    def _collect(self) -> dict[int, Wait]:
        """The records of all ranks that are connected with this one's, from session to session."""
        found: dict[int, Wait] = {}
        left, asked = set(self._session.ranks), set[int]()
        while left:
            asked |= left
            keys = {rank: f"word/{rank}" for rank in left}

            def read(store: Store, keys: Mapping[int, str] = keys) -> dict[int, bytes]:
                return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

            records = {rank: Wait.read(text) for rank, text in self._request(read).items()}
            new = {rank: wait for rank, wait in records.items() if wait is not None}
            found |= new
            left = {rank for wait in new.values() for rank in wait.ranks} - asked
        return found

    def _request(self, action: Callable[[Store], T]) -> T:
        if self._client is None:
            store = PrefixStore("reshard/waits", self._session.home)
            self._client = StoreClient(store, self._session.ranks[0], REQUEST_SECONDS)
        return self._client.request(action, REQUEST_SECONDS)

    def close(self) -> None:
        """The other ranks have called, or this rank has given up."""
        _observing.discard(id(self))
        client = self._client
        if client is not None:
            with contextlib.suppress(PeerLostError):
                self._request(lambda store: store.set(f"word/{self._session.rank}", ""))
                self._request(lambda store: store.delete_key(f"verdict/{self._token}"))
            self._client = None
            client.close()


def _leads_to_cycle(rank: int, records: Mapping[int, Wait]) -> bool:
    """Whether following the records from a rank leads to a cycle through more than one call."""
    path: list[int] = []
    done: set[int] = set()

    def follow(at: int) -> bool:
        if at in path:
            cycle = [records[other] for other in path[path.index(at) :]]
            return len({(wait.ranks, wait.call) for wait in cycle}) > 1
        if at in done or at not in records:
            return False
        path.append(at)
        found = any(follow(other) for other in records[at].awaits)
        path.pop()
        done.add(at)
        return found

    return follow(rank)


def _describe(records: Mapping[int, Wait]) -> str:
    """Who waits for whom, those in one call together."""
    calls: dict[tuple[tuple[int, ...], int, str], list[int]] = {}
    for rank in sorted(records):
        wait = records[rank]
        calls.setdefault((wait.ranks, wait.call, wait.what), []).append(rank)
    parts = [
        f"rank{'s' if len(waiting) > 1 else ''} {format_ranks(waiting)} "
        f"{'are' if len(waiting) > 1 else 'is'} in call {call} among ranks {format_ranks(ranks)}, "
        f"{what}"
        for (ranks, call, what), waiting in calls.items()
    ]
    return "ranks were given different moves and wait for each other: " + "; ".join(parts)
