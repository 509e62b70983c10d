"""Rendezvous: connect the ranks of a session, all of them or none.

Every rank announces itself in the store of the caller's group, under the number of the call that
needs the session. When all have come, they connect to a store of the session's own, which its
lowest rank serves, and the ranks of one host to each other. A rank that is connected says so; the
last one writes into the store that the session is made. A rank that gives up writes why. Both go to
the same key, of which only the first value stands, so all ranks come to the same conclusion.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch.distributed as dist

from reshard.errors import DisagreementError, MoveTimeoutError, PeerLostError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.live.session.cause import Calls, Cause
from reshard.live.session.control import Retired
from reshard.live.session.listener import HostPeer, Listener, closed_by, host_identity
from reshard.live.session.mailbox import Mailbox
from reshard.live.session.shared_memory import AbortFlags, BufferPool, SharedBuffer
from reshard.live.session.store import (
    Store,
    StoreClient,
    TCPStore,
    connect_store,
    missing_keys,
    poll_pauses,
    serve_store,
)

__all__ = [
    "MADE",
    "Connections",
    "Member",
    "Observe",
    "Rendezvous",
    "Resource",
    "WaitObserver",
    "decide",
    "outcome_key",
]


class Resource(Protocol):
    """What a transport keeps for a session between calls, such as a process group."""

    def release(self) -> None:
        """Free the buffers that are kept for the next call."""

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""

    def end_threads(self) -> None:
        """Let all threads end that wait for work."""

    def close(self) -> None:
        """The session is over."""


R = TypeVar("R", bound=Resource)


@dataclass(eq=False)
class Connections:
    """The connected ranks of a session, as one of them sees them."""

    rank: int
    ranks: tuple[int, ...]
    store: TCPStore
    client: StoreClient
    """Makes requests to the store."""
    hosts: dict[int, str]
    """The host identity of each rank."""
    flags: AbortFlags
    peers: dict[int, HostPeer]
    """The other ranks of this host."""
    first_call: int
    """The call that connected them."""
    last_failed: int = -1
    """The last call that this rank knows to have failed."""
    quarantine: list[object] = field(default_factory=list)
    """Tensors of failed calls that a stopped process might still write into."""

    def __post_init__(self) -> None:
        sockets = {rank: peer.socket for rank, peer in self.peers.items()}
        self.mailbox = Mailbox(sockets, self.first_call)
        leader, lost = self.leader, self.mailbox.lost
        self.client.has_ended = lambda: leader in lost
        self.buffers = BufferPool(self._retire, self.mailbox.has_read)
        self.direct = frozenset(rank for rank, peer in self.peers.items() if peer.direct)
        """The ranks whose memory this one may read and write, and the other way round."""
        self.spans_hosts = len(set(self.hosts.values())) > 1
        """Whether any two ranks can only talk over the network."""
        self._resources: dict[object, Resource] = {}

    @property
    def leader(self) -> int:
        """The rank that serves the store."""
        return self.ranks[0]

    def resource(self, make: Callable[[Connections], R]) -> R:
        """What a transport keeps for this session; made when it is first asked for."""
        found = self._resources.get(make)
        if found is None:
            found = self._resources.setdefault(make, make(self))
        return cast(R, found)

    def existing(self, make: Callable[[Connections], R]) -> R | None:
        """The same, if it was ever made."""
        return cast("R | None", self._resources.get(make))

    def release(self) -> None:
        """Free all buffers that are kept for the next call."""
        self.buffers.release()
        for resource in tuple(self._resources.values()):
            resource.release()

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""
        self.mailbox.release_for(thread)
        self.buffers.lock.release_for(thread)
        for resource in tuple(self._resources.values()):
            resource.release_for(thread)

    def _retire(self, buffer: SharedBuffer) -> None:
        for peer in buffer.known_to:
            self.mailbox.send(peer, Retired(0, buffer.number))
        buffer.close()

    def end_threads(self) -> None:
        """Let all threads end that wait for work."""
        for resource in tuple(self._resources.values()):
            resource.end_threads()
        self.client.close()

    def close(self) -> None:
        """Close sockets and free memory."""
        for resource in tuple(self._resources.values()):
            resource.close()
        self.mailbox.shut()
        self.buffers.release()
        self.end_threads()


MADE = "made"

LOOK_EVERY = 0.1
"""Seconds between two checks for ranks that are gone, while others are waited for."""

_given_up: deque[TCPStore] = deque(maxlen=4)
"""Stores of sessions that were not made: other ranks may still ask them for an answer."""


class WaitObserver(Protocol):
    """Finds out whether ranks wait for each other in different sessions (``wait_graph.py``)."""

    @property
    def given_up(self) -> Calls:
        """The calls of a deadlock that was found: all of them fail."""

    def find_deadlock(self, awaited: Collection[int]) -> str | None:
        """The deadlock that this rank is part of, in words; None if there is none."""

    def close(self) -> None:
        """The other ranks have called, or this rank has given up."""


class Member(Protocol):
    """What a rendezvous needs of its session."""

    rank: int
    ranks: tuple[int, ...]
    home: Store
    caller: Store
    candidate: Connections | None

    def skip_calls(self, calls: Calls) -> None:
        """Count calls of other sessions as made."""


Observe = Callable[[Any, int, str], WaitObserver]
"""Makes the observer of a session, a call number and what the call does."""


def outcome_key(call: int) -> str:
    """The key where it is decided whether a call has connected the session."""
    return f"{call}/outcome"


def decide(store: Store, number: int, text: str) -> str:
    """Propose the outcome of a rendezvous; gives what was decided first: `MADE`, or a cause."""
    found: bytes = store.compare_set(outcome_key(number), "", text)
    return found.decode()


class Rendezvous:
    """One attempt to connect a session, in the call with this number."""

    def __init__(
        self, session: Member, number: int, timeout: float, what: str, observe: Observe
    ) -> None:
        self.session, self.number, self.timeout, self.what = session, number, timeout, what
        self.rank, self.ranks, self.caller = session.rank, session.ranks, session.caller
        self.leader = self.ranks[0]
        self.store: TCPStore | None = None
        self.client: StoreClient | None = None
        self._observe = observe
        self.waits: WaitObserver | None = None
        """Made when other ranks are waited for."""
        self.listener = Listener(self.rank)
        self._looked = time.monotonic()

    def run(self) -> Connections:
        """Connect; raises the same error on all ranks if one of them cannot."""
        try:
            return self._connect_or_raise()
        except dist.DistNetworkError as error:
            self.give_up()
            reason = str(error).splitlines()[0]
            raise PeerLostError(
                f"the store of the process group does not answer ({reason}): the process that "
                f"serves it has ended, before {self.what}; end the job {self._status}"
            ) from None
        finally:
            if self.waits is not None:
                self.waits.close()
                self.session.skip_calls(self.waits.given_up)

    def _connect_or_raise(self) -> Connections:
        try:
            return self._connect()
        except ReshardError as error:
            calls = () if self.waits is None else self.waits.given_up
            cause = replace(Cause.of(error, self.rank), calls=calls)
            outcome = decide(self.caller, self.number, cause.to_json())
            candidate = self.session.candidate
            if outcome == MADE and candidate is not None:
                return candidate
            self.give_up()
            self._raise(Cause.from_json(outcome.encode()))

    def _raise(self, cause: Cause) -> NoReturn:
        self.session.skip_calls(cause.calls)
        has_status = "(on rank" in cause.text
        late = not has_status and cause.kind == "lost"
        text = f"{cause.text}, before {self.what}" if late else cause.text
        raise Cause(cause.kind, text).error("" if has_status else self._status[1:-1])

    def give_up(self) -> None:
        """Close what was opened. Not before the outcome is decided: a socket that is closed without
        an outcome means a process that has ended."""
        self.listener.close()
        if self.waits is not None:
            self.waits.close()
        candidate = self.session.candidate
        if candidate is not None and candidate.first_call == self.number:
            self.session.candidate = None
            candidate.close()
        if self.store is not None:
            _given_up.append(self.store)
        if self.client is not None:
            self.client.close()

    @property
    def _status(self) -> str:
        return f"(on rank {self.rank}: no round begun)"

    def _connect(self) -> Connections:
        listener = self.listener
        known = self._await_all()
        leader = known[self.leader]
        store = self.store = self.store or connect_store(
            leader["store"],
            str(leader["host"]),
            (self.rank, self.leader),
            self.timeout,
            self.what,
            self._check_outcome,
        )
        client = self.client = StoreClient(store, self.leader, self.timeout)
        hosts = {rank: str(who["host"]) for rank, who in known.items()}
        names = {r: str(known[r]["door"]) for r in self.ranks if hosts[r] == hosts[self.rank]}
        peers = listener.connect_all(names, self.timeout, self._check_outcome)
        found = Connections(
            self.rank, self.ranks, store, client, hosts, listener.flags, peers, self.number
        )
        self.session.candidate = found
        self._conclude(found)
        listener.close()
        return found

    def _announce(self) -> None:
        about: dict[str, Any] = {"host": host_identity(), "door": self.listener.name}
        if self.rank == self.leader:
            self.store, about["store"] = serve_store()
        self.caller.set(self._key(self.rank), json.dumps(about))

    def _key(self, rank: int) -> str:
        return f"{self.number}/who/{rank}"

    def _await_all(self) -> dict[int, dict[str, Any]]:
        """What every rank announces. A rank of this host that ends meanwhile is noticed."""
        self._announce()
        known: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + self.timeout
        for pause in poll_pauses():
            asked = {rank: self._key(rank) for rank in self.ranks if rank not in known}
            absent = missing_keys(self.caller, asked)
            for rank in asked.keys() - set(absent):
                known[rank] = json.loads(self.caller.get(self._key(rank)))
            if not absent:
                break
            if time.monotonic() > end:
                raise MoveTimeoutError(self._not_called(absent))
            if time.monotonic() - self._looked > LOOK_EVERY:
                self._check_outcome()
                self.waits = self.waits or self._observe(self.session, self.number, self.what)
                deadlock = self.waits.find_deadlock(absent)
                if deadlock is not None:
                    raise DisagreementError(deadlock)
                self.listener.check_alive(_names_here(known, self.rank))
                self._looked = time.monotonic()
            time.sleep(pause)
        return known

    def _not_called(self, absent: Sequence[int]) -> str:
        one = len(absent) == 1
        who = f"rank {absent[0]} has" if one else f"ranks {format_ranks(absent)} have"
        return (
            f"{who} not called within {self.timeout:g} s and rank {self.rank} waits for "
            f"{'it' if one else 'them'} to begin {self.what}: every rank of the two layouts calls "
            f"a move; if only late, give a longer timeout= {self._status}"
        )

    def _conclude(self, found: Connections) -> None:
        """Say that this rank is connected, and wait for the outcome."""
        if int(self.caller.add(f"{self.number}/done", 1)) == len(self.ranks):
            decide(self.caller, self.number, MADE)
        end = time.monotonic() + self.timeout
        for pause in poll_pauses():
            if self._check_outcome():
                break
            gone = closed_by(found.peers)
            if gone:
                raise PeerLostError(f"rank {gone[0]} is gone (its process ended)")
            if time.monotonic() > end:
                raise MoveTimeoutError(
                    f"not all ranks have connected within {self.timeout:g} s for {self.what}"
                )
            time.sleep(pause)
        if self.rank == self.leader:
            for rank in self.ranks:
                self.caller.delete_key(self._key(rank))
            self.caller.delete_key(f"{self.number}/done")

    def _check_outcome(self) -> bool:
        """Whether the session is made; raises why not, once that is decided."""
        key = outcome_key(self.number)
        if not self.caller.check([key]):
            return False
        outcome = self.caller.get(key)
        if outcome.decode() == MADE:
            return True
        raise Cause.from_json(outcome).error("")


def _names_here(known: Mapping[int, Mapping[str, Any]], rank: int) -> dict[int, str]:
    """The socket names of the other ranks of this host that have announced themselves."""
    here = host_identity()
    return {r: str(who["door"]) for r, who in known.items() if r != rank and who["host"] == here}
