"""The wait-for graph: which rank holds up all others, and which ranks are in a deadlock.

A rank that has waited for a while posts a record of the peers that it waits for: to the ranks of
its host by message, to the others in the session's store. When its timeout is over it follows these
records to a rank that waits for none: if that one sends heartbeats it is waited for, otherwise the
error names it. Records are posted again and again: that of a rank that has been stopped grows old,
and an old record counts as none.

Ranks that were given different meshes never meet: each waits in a session to which the others do
not belong. So a rank that waits for others to call also posts its record in the store of the
caller's group, which all sessions share. Records that form a cycle through more than one call, and
stay so, are a deadlock: none of these ranks will ever call. Only a call in the main thread counts,
and only if it is the only one: a rank that waits in another thread may still call.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from reshard.errors import PeerLostError
from reshard.layout.mesh import format_ranks
from reshard.live.session.control import Calls, Cause, Waiting, ranks_with
from reshard.live.session.mailbox import Inbox, Mailbox
from reshard.live.session.store import END_SECONDS, REQUEST_SECONDS, Member, Store, StoreClient

LOOK_AFTER, LOOK_EVERY = 0.4, 0.25
PREFIX = "reshard/waits"
"""Of the keys in the store of the caller's group, which all sessions share."""
SLOTS = 64
"""Calls in flight that may post in a session's store: few keys, used again by later calls."""
MAX_AWAITED = 256
"""Peers in a record that one message carries."""
POST_EVERY = 0.5
"""Seconds after which a rank that still waits posts its record again."""
OLD_AFTER = 6 * POST_EVERY
"""Seconds without a new record after which a rank no longer counts as one that waits."""

_observing: set[int] = set()
"""The calls of this process that wait for other ranks to call, by identity."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank's record of the peers that it waits for."""

    ranks: tuple[int, ...]
    """The ranks of its session, in a record for other sessions."""
    call: int
    awaits: tuple[int, ...]
    """Within a session, the one that has been silent for longest comes first."""
    what: str
    """What it waits for from the first in words that follow "waits for", or what the call does."""
    met: bool = False
    """Whether the awaited rank has entered the call."""
    token: str = ""
    """Identifies the call of the rank."""
    beat: int = 0
    """How often it has posted this."""

    @classmethod
    def read(cls, text: bytes | None) -> Wait | None:
        """Decode a record; None for anything else."""
        try:
            ranks, call, awaits, what, met, token, beat = json.loads(text or b"")
            ends = tuple(map(int, ranks)), int(call), tuple(map(int, awaits))
            return cls(*ends, str(what), bool(met), str(token), int(beat))
        except (ValueError, TypeError):
            return None

    def to_json(self) -> str:
        return json.dumps(astuple(self))

    def repeats(self, earlier: Wait | None) -> bool:
        """Whether this is a later record of a rank that still waits for the same peers."""
        if earlier is None or self.beat <= earlier.beat:
            return False
        return (self.token, self.awaits) == (earlier.token, earlier.awaits)


class WaitGraph:
    """The records that one rank posts and reads in one call."""

    _mailbox: Mailbox
    _session_client: StoreClient

    def __init__(
        self, session: Member, call: int, what: str, client: StoreClient | None = None
    ) -> None:
        self._session, self.call, self._what = session, call, what
        self._inbox, self._timeout = Inbox(), 0.0
        self._posted: frozenset[int] = frozenset()
        """The peers in this rank's record in the session."""
        self._posted_at, self._beat = 0.0, 0
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        """Call and number of the last record of each peer, and when this rank first saw it."""
        self._circle_since = 0.0
        """When this rank first found that all ranks wait for each other."""
        self._heartbeats: dict[int, tuple[bytes | None, float]] = {}
        """The last heartbeat of each peer in the store, and until when it counts."""
        self._token = secrets.token_hex(8)
        self._began = self._looked = time.monotonic()
        self._client, self._owns_client = client, client is None
        """Makes requests to the store of the caller's group."""
        self._records: dict[int, Wait] = {}
        """The last records of ranks of all sessions."""
        self.given_up: Calls = ()
        """The calls of a deadlock that was found: all of them fail."""
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def attach(self, mailbox: Mailbox, client: StoreClient, inbox: Inbox, timeout: float) -> None:
        """Use the connections of a session that is connected."""
        self._mailbox, self._session_client = mailbox, client
        self._inbox, self._timeout = inbox, timeout

    # Within the session ------------------------------------------------------------------------

    def post(self, peers: Sequence[int], what: str) -> None:
        """Post that this rank waits for peers; ``what`` is said of the first of them."""
        awaited, now = frozenset(peers), time.monotonic()
        pause = POST_EVERY if awaited == self._posted else LOOK_EVERY
        if self._posted and now - self._posted_at < pause:
            return
        self._posted, self._posted_at = awaited, now
        self._beat += 1
        self._post(self._own_record(peers, what).to_json())
        with contextlib.suppress(PeerLostError):  # how old these are counts from now on
            self._has_beaten(peers[0])
            self.record_of(peers[0])

    def _own_record(self, peers: Sequence[int], what: str) -> Wait:
        met, awaited = peers[0] in self._inbox.hellos, tuple(peers[:MAX_AWAITED])
        return Wait((), self.call, awaited, what, met, beat=self._beat)

    def withdraw(self) -> None:
        """Post that this rank has stopped waiting."""
        if self._posted:
            self._posted = frozenset()
            self._post("")

    def _post(self, text: str) -> None:
        for peer in self._mailbox.sockets:
            self._mailbox.send(peer, Waiting(self.call, text.encode()))
        key = f"wait/{self.call % SLOTS}/{self._session.rank}"
        with contextlib.suppress(PeerLostError):
            self._session_client.post(key, text)

    def record_of(self, rank: int) -> Wait | None:
        """The record that another rank has posted, if any; None if it is old."""
        # A rank that has sent no Hello may not be done with the call before.
        for call in (self.call,) if rank in self._inbox.hellos else (self.call, self.call - 1):
            if rank not in self._mailbox.sockets:
                text = self._session_client.get(f"wait/{call % SLOTS}/{rank}")
            else:
                waiting = self._inbox.waiting if call == self.call else self._mailbox.waiting
                text = waiting.get(rank)
            record = Wait.read(text)
            if record is not None and record.call == call and record.awaits:
                now, seen, beat = time.monotonic(), self._seen.get(rank), (call, record.beat)
                if seen is None or seen[0] != beat:
                    self._seen[rank] = seen = beat, now
                return record if now - seen[1] < OLD_AFTER else None
        return None

    def last_wait(self, peers: Sequence[int], what: str) -> tuple[int, Wait, bool]:
        """Follow the records from this rank, which waits for peers, to a rank that waits for none.

        That one holds up all ranks on the way. Returns the rank that waits for it, the record of
        that wait with the awaited rank first, and whether the awaited rank works.
        """
        me = self._session.rank
        waiter, wait = me, self._own_record(peers, what)
        records: dict[int, Wait] = {me: wait}
        with contextlib.suppress(PeerLostError):
            while (last := wait.awaits[0]) not in records:
                record = self.record_of(last)
                if record is None:
                    return waiter, wait, self._is_alive(last)
                waiter, wait, records[last] = last, record, record
            # These ranks wait for each other, as those do that also wait for one that is not ready.
            holders: dict[int, int] = {}
            """Ranks that wait for none, and for each of them a rank that waits for it."""
            left = list(records)
            for one in left:
                for rank in records[one].awaits:
                    if rank in records or rank in holders:
                        continue
                    record = self.record_of(rank)
                    if record is None:
                        holders[rank] = one
                    else:
                        records[rank] = record
                        left.append(rank)
            if holders:
                alive = {holder: self._is_alive(holder) for holder in holders}
                last = max(alive, key=alive.__getitem__)
                waiter, met = holders[last], last in self._inbox.hellos
                wait = replace(records[waiter], awaits=(last,), what="it", met=met)
                return waiter, wait, alive[last]
            # None of them works; if one is stopped, its record is about to grow old.
            now = time.monotonic()
            self._circle_since = self._circle_since or now
            return waiter, wait, now - self._circle_since < OLD_AFTER
        return waiter, wait, False

    def _is_alive(self, rank: int) -> bool:
        """Whether a rank has sent a message or left a heartbeat within the timeout."""
        silence = time.monotonic() - self._inbox.heard.get(rank, 0.0)
        return silence < self._timeout or self._has_beaten(rank)

    def _has_beaten(self, rank: int) -> bool:
        """Whether a rank that sends no messages has left a heartbeat in the store."""
        beat, known = self._session_client.get(f"alive/{rank}"), self._heartbeats.get(rank)
        now = time.monotonic()
        if known is None:  # it may be of an earlier call: the next one must come soon
            self._heartbeats[rank] = known = beat, now + min(self._timeout, OLD_AFTER)
        elif known[0] != beat:
            self._heartbeats[rank] = known = beat, now + self._timeout
        return beat is not None and now < known[1]

    # Between sessions --------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        now = time.monotonic()
        return now - self._began > LOOK_AFTER and now - self._looked > LOOK_EVERY

    def observe(self) -> None:
        """This rank begins to wait for others to call."""
        _observing.add(id(self))

    def find_deadlock(self, awaited: Collection[int]) -> Cause | None:
        """Describe the deadlock that this rank is part of; None if there is none."""
        if not self.is_due:
            return None
        self._looked = time.monotonic()
        if not self._in_main_thread or len(_observing) > 1:
            return None
        with contextlib.suppress(PeerLostError):
            self._beat += 1
            more = (tuple(sorted(awaited)), self._what, False, self._token, self._beat)
            record = Wait(self._session.ranks, self.call, *more).to_json()
            key = f"{PREFIX}/record/{self._session.rank}"
            self._group_client().post(key, record)
            return self.verdict() or self._judge()
        return None

    def outcome(self) -> Cause | None:
        """Why ranks have given up the rendezvous of this call, if it was one."""
        refused = self._posted_for_all(self._session.key(self.call, "outcome"))
        return None if refused is None else Cause.from_json(refused)

    def _posted_for_all(self, key: str) -> bytes | None:
        with contextlib.suppress(PeerLostError):
            return self._group_client().get(key)
        return None

    def _judge(self) -> Cause | None:
        """Look for a cycle; the rank that finds it posts a verdict for all ranks in it."""
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

        def post(store: Store) -> None:
            verdict: Any = store.compare_set(f"{PREFIX}/first/{first}", "", text)
            for wait in records.values():
                if (wait.ranks, wait.call) in doomed:
                    store.set(f"{PREFIX}/verdict/{wait.token}", verdict)

        self._group_client().request(post, REQUEST_SECONDS)
        return self.verdict()

    def verdict(self) -> Cause | None:
        """The deadlock that a rank has found and posted for this one."""
        text = self._posted_for_all(f"{PREFIX}/verdict/{self._token}") if self._client else None
        if text is None:
            return None
        try:
            data = json.loads(text)
            self.given_up = tuple((tuple(ranks), int(call)) for ranks, call in data["calls"])
            return Cause("disagree", str(data["text"]), calls=self.given_up)
        except (ValueError, TypeError, KeyError):
            return Cause("disagree", "ranks were given different moves and wait for each other")

    def _collect(self) -> dict[int, Wait]:
        """The records of this session's ranks, of the sessions of those ranks, and so on."""
        records: dict[int, Wait] = {}
        left, asked = set(self._session.ranks), set[int]()
        while left:
            asked |= left
            keys = {rank: f"{PREFIX}/record/{rank}" for rank in left}
            left = set()
            for rank, text in self._group_client().values(keys, REQUEST_SECONDS).items():
                wait = Wait.read(text)
                if wait is not None:
                    records[rank] = wait
                    left.update(set(wait.ranks) - asked)
        return records

    def _group_client(self) -> StoreClient:
        if self._client is None:
            store = self._session.group_store
            self._client = StoreClient(store, self._session.ranks[0], REQUEST_SECONDS)
        return self._client

    def close(self) -> None:
        """Stop observing: the other ranks have called, or this rank has given up."""
        _observing.discard(id(self))
        client = self._client
        if client is not None:
            with contextlib.suppress(Exception):  # without the store no rank reads the record
                client.post(f"{PREFIX}/record/{self._session.rank}", "")
                verdict = f"{PREFIX}/verdict/{self._token}"
                client.begin(lambda store: store.delete_key(verdict), REQUEST_SECONDS)
            self._client = None
            if self._owns_client:
                # The call may have all of its data: it does not wait for a silent store.
                client.close(0.0 if client.is_stuck else END_SECONDS)


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
        leads = any(follow(other) for other in records[at].awaits)
        path.pop()
        done.add(at)
        return leads

    return follow(rank)


def _describe(records: Mapping[int, Wait]) -> str:
    """Name the call in which each rank waits; ranks of one call together."""
    calls: dict[tuple[tuple[int, ...], int, str], list[int]] = {}
    for rank in sorted(records):
        wait = records[rank]
        calls.setdefault((wait.ranks, wait.call, wait.what), []).append(rank)
    parts = [
        f"{ranks_with(waiting, 'is', 'are')} in call {call} among ranks {format_ranks(ranks)}, "
        f"{what}"
        for (ranks, call, what), waiting in calls.items()
    ]
    return "ranks were given different moves and wait for each other: " + "; ".join(parts)
