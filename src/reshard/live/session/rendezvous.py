"""Rendezvous: connect the ranks of a session, all of them or none.

Every rank announces itself in the store of the caller's group, under the number of the call that
needs the session. When all have come, they connect to a store of the session's own, which its
lowest rank serves, and the ranks of one host to each other. The last rank that is connected writes
into the store that the session is connected. A rank that gives up writes why. Both go to the same
key, of which only the first value stands, so all ranks come to the same conclusion.

A store that does not answer leaves the outcome open: the process that serves it may be stopped and
go on later. Then the call raises an `UndecidedError`, and a thread of the session proposes to give
up, which the store answers when it can; until then no later call of the session connects.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from reshard.errors import MoveTimeoutError, PeerLostError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.live.session.control import Calls, Cause, Retired, ranks_with
from reshard.live.session.listener import (
    CONNECT_SECONDS,
    HostPeer,
    Listener,
    connected_store,
    host_identity,
    is_closed,
    serve_store,
)
from reshard.live.session.mailbox import Mailbox
from reshard.live.session.shared_memory import AbortFlags, BufferPool, SharedBuffer
from reshard.live.session.store import (
    REQUEST_SECONDS,
    GroupStore,
    Member,
    Store,
    StoreClient,
    StoreGoneError,
    TCPStore,
    UndecidedError,
    Worker,
    poll_until,
)
from reshard.live.session.wait_graph import WaitGraph
from reshard.text import first_line

CONNECTED = "connected"
"""The outcome of a rendezvous that succeeded."""

LOOK_EVERY = 0.1
"""Seconds between two checks for ranks that have exited, and two looks at the store."""

_failed_stores: deque[TCPStore] = deque(maxlen=4)
"""Stores of sessions that failed to connect: other ranks may still wait for an answer of them."""


class Resource(Protocol):
    """What a transport keeps for a session between calls, such as a process group."""

    def release(self) -> None:
        """Free the buffers that are kept for the next call."""

    def end_threads(self) -> None:
        """End all threads that wait for work."""

    def close(self) -> None:
        """Free everything: the session is over."""


R = TypeVar("R", bound=Resource)


@dataclass(eq=False)
class Connections:
    """The connections of one rank to the other ranks of its session."""

    rank: int
    ranks: tuple[int, ...]
    store: TCPStore
    client: StoreClient
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
    """Tensors of failed calls into which a stopped process might still write."""

    def __post_init__(self) -> None:
        sockets = {rank: peer.socket for rank, peer in self.peers.items()}
        self.mailbox = Mailbox(sockets, self.first_call)
        self.leader = leader = self.ranks[0]
        """The rank that serves the store."""
        lost = self.mailbox.lost
        self.client.has_ended = lambda: leader in lost
        self.buffers = BufferPool(self._retire, self.mailbox.have_read)
        self.direct = frozenset(rank for rank, peer in self.peers.items() if peer.direct)
        """The peers that read and write this rank's memory, and it theirs."""
        self.spans_hosts = len(set(self.hosts.values())) > 1
        self.resources: dict[object, Any] = {}
        """What transports keep, by what has made it."""

    def resource(self, make: Callable[[Connections], R]) -> R:
        """A transport's resource for this session, made at its first use."""
        resource: R | None = self.resources.get(make)
        return self.resources.setdefault(make, make(self)) if resource is None else resource

    def release(self) -> None:
        self.buffers.release()
        for resource in tuple(self.resources.values()):
            resource.release()

    def writers_after(self, seconds: float, call: int) -> set[int]:
        """The peers that may still write into this rank's memory in a call, after a wait.

        A peer that is seen not to write once checks this rank's flags before it writes again.
        """
        writers, end = set(self.peers), time.monotonic() + seconds
        while True:
            writers = {peer for peer in writers if self.peers[peer].flags.is_writing(call)}
            writers -= self.mailbox.lost
            if not writers or time.monotonic() > end:
                return writers
            self.mailbox.step(0.001)

    def _retire(self, buffer: SharedBuffer) -> None:
        for peer in buffer.known_to:
            self.mailbox.send(peer, Retired(0, buffer.number))
        buffer.close()

    def end_threads(self) -> None:
        for resource in tuple(self.resources.values()):
            resource.end_threads()
        self.client.close()

    def close(self) -> None:
        for resource in tuple(self.resources.values()):
            resource.close()
        self.mailbox.shut()
        self.buffers.release()
        self.end_threads()


def decide(store: Store, key: str, text: str) -> str:
    """Propose the outcome of a rendezvous; returns the first proposal: `CONNECTED`, or a cause."""
    outcome: bytes = store.compare_set(key, "", text)
    return outcome.decode()


class Rendezvous:
    """One attempt to connect a session, in the call with this number."""

    def __init__(self, session: Member, number: int, timeout: float, what: str) -> None:
        self.session, self.number, self.timeout, self.what = session, number, timeout, what
        self.rank, self.ranks = session.rank, session.ranks
        self._status = f"on rank {self.rank}: no round begun"
        self.store = GroupStore(session.group_store, session.rank, timeout, what)
        self.leader = self.ranks[0]
        self.candidate: Connections | None = None
        """This rank's connections; whether all ranks are connected is decided in the store."""
        self.skipped: Calls = ()
        """Calls that fail together with this one, because ranks wait in different sessions."""
        self._key = partial(session.key, number)
        self._own_store: TCPStore | None = None
        self._client: StoreClient | None = None
        self._waits: WaitGraph | None = None
        self.listener = Listener(self.rank)
        self._looked = time.monotonic()

    def run(self) -> Connections:
        """Connect; raises the same error on all ranks if one of them cannot."""
        try:
            try:
                connections = self._connect()
            except ReshardError as error:
                connections = self._fail(error)
        except StoreGoneError as error:
            self.give_up()
            raise PeerLostError(
                f"the store of the process group does not answer ({error}): the process that "
                f"serves it has ended, before {self.what}; end the job ({self._status})"
            ) from None
        finally:
            if self._waits is not None:
                self._waits.close()
                self.skipped += self._waits.given_up
        self.listener.close()
        self.store.close()
        return connections

    def _fail(self, error: ReshardError) -> Connections:
        """Propose to give up; the other ranks may have decided otherwise before."""
        calls = () if self._waits is None else self._waits.given_up
        cause = replace(Cause.of(error, self.rank), calls=calls)
        key = self._key("outcome")
        outcome = self.store.request(lambda store: decide(store, key, cause.to_json()))
        if outcome == CONNECTED and self.candidate is not None:
            return self.candidate
        self.give_up()
        cause = Cause.from_json(outcome.encode())
        self.skipped += cause.calls
        has_status = "(on rank" in cause.text
        late = not has_status and cause.kind == "lost"
        text = f"{cause.text}, before {self.what}" if late else cause.text
        raise Cause(cause.kind, text).error("" if has_status else self._status)

    def give_up(self) -> None:
        """Close what was opened. Not before the outcome is decided: for other ranks, a socket that
        closes without an outcome means a process that has ended."""
        self.listener.close()
        if self._waits is not None:
            self._waits.close()
        candidate, self.candidate = self.candidate, None
        if candidate is not None:
            candidate.close()
        if self._own_store is not None:
            _failed_stores.append(self._own_store)
        if self._client is not None:
            self._client.close()
        self.store.close()

    def _connect(self) -> Connections:
        members = self._await_all()
        hosts = {rank: str(member["host"]) for rank, member in members.items()}
        store = self._own_store = self._own_store or self._reach_store(members)
        client = self._client = StoreClient(store, self.leader, self.timeout)
        here = {rank: one for rank, one in members.items() if hosts[rank] == hosts[self.rank]}
        listener, check = self.listener, self._check_outcome
        peers = listener.connect_all(here, self.timeout, check, self._reach, self._stalled)
        self.candidate = candidate = Connections(
            self.rank, self.ranks, store, client, hosts, listener.flags, peers, self.number
        )
        self._conclude(candidate)
        return candidate

    def _reach_store(self, members: Mapping[int, Mapping[str, Any]]) -> TCPStore:
        """Connect to the session's store at the first address that answers."""
        leader = members[self.leader]
        near, port = leader["host"] == members[self.rank]["host"], int(leader["store"]["port"])
        hosts = ["127.0.0.1"] if near else list(leader["store"]["addresses"])
        end, worker = time.monotonic() + self.timeout, Worker()
        try:
            while True:
                limit = min(max(end - time.monotonic(), 1.0), CONNECT_SECONDS) / len(hosts)
                errors: list[str] = []
                for host in hosts:
                    # torch waits without a limit for the first answer of a process that is stopped.
                    task = worker.submit(partial(connected_store, host, port, limit))
                    while not task.wait(LOOK_EVERY) and time.monotonic() < end:
                        self._check_outcome()
                    if not task.done:
                        errors.append(f"{host} port {port}: no answer within {self.timeout:g} s")
                    elif isinstance(task.error, OSError | RuntimeError):
                        errors.append(f"{host} port {port}: {first_line(task.error)}")
                    else:
                        return task.result()
                self._check_outcome()
                if time.monotonic() > end:
                    raise PeerLostError(
                        f"rank {self.rank} cannot reach the store that rank {self.leader} serves "
                        f"for {self.what} ({'; '.join(errors)}): if rank {self.leader} lives, name "
                        "the network interface that the hosts share in GLOO_SOCKET_IFNAME "
                        f"({self._status})"
                    )
                time.sleep(LOOK_EVERY)
        finally:
            worker.end()

    def _announce(self) -> None:
        about = {"host": host_identity(), **self.listener.announced}
        if self.rank == self.leader:
            self._own_store, about["store"] = serve_store()
        self.store.set(self._key(f"member/{self.rank}"), json.dumps(about))

    def _await_all(self) -> dict[int, dict[str, Any]]:
        """Wait for the announcements of all ranks; a rank of this host that exits is noticed."""
        self._announce()
        here, members = host_identity(), dict[int, dict[str, Any]]()
        for in_time in poll_until(self.timeout):
            left = [rank for rank in self.ranks if rank not in members]
            keys = {rank: self._key(f"member/{rank}") for rank in left}
            members |= {rank: json.loads(text) for rank, text in self.store.values(keys).items()}
            absent = [rank for rank in keys if rank not in members]
            if not absent:
                break
            if not in_time:
                them = "them" if len(absent) > 1 else "it"
                raise MoveTimeoutError(
                    f"{ranks_with(absent, 'has', 'have')} not called within {self.timeout:g} s and "
                    f"rank {self.rank} waits for {them} to begin {self.what}: every rank of the "
                    "two layouts calls a move; if only late, give a longer timeout= "
                    f"({self._status})"
                )
            if time.monotonic() - self._looked > LOOK_EVERY:
                self._check_outcome()
                if self._waits is None:
                    # Known before it observes: after an exception `give_up` ends the observation.
                    self._waits = WaitGraph(self.session, self.number, self.what, self.store)
                    self._waits.observe()
                deadlock = self._waits.find_deadlock(absent)
                if deadlock is not None:
                    raise deadlock.error("")
                near = [rank for rank, one in members.items() if one["host"] == here]
                self.listener.check_alive(
                    {rank: members[rank]["socket"] for rank in near if rank != self.rank}
                )
                self._looked = time.monotonic()
        return members

    def _reach(self, step: int) -> None:
        """Post how far this rank has come with connecting."""
        self.store.set(self._key(f"step/{self.rank}"), str(step))

    def _stalled(self, awaited: Collection[int]) -> MoveTimeoutError:
        """Name the rank that holds up all others: of those that have come least far with
        connecting, one that this rank waits for, if it waits for one of them."""
        keys = {rank: self._key(f"step/{rank}") for rank in self.ranks if rank != self.rank}
        limit = min(REQUEST_SECONDS, self.timeout / 2)  # this rank has waited its whole timeout
        try:
            posted = self.store.values(keys, limit)
        except PeerLostError:
            raise UndecidedError(self.rank, limit, self.what) from None
        steps = {rank: int(posted.get(rank, 0)) for rank in keys}
        last = [rank for rank, step in steps.items() if step == min(steps.values())]
        last = [rank for rank in last if rank in awaited] or last
        who = f"rank {last[0]} has" if len(last) == 1 else f"one of ranks {format_ranks(last)} has"
        return MoveTimeoutError(
            f"{who} stopped answering within {self.timeout:g} s and rank {self.rank} waits for it "
            f"to connect for {self.what} ({self._status})"
        )

    def _conclude(self, candidate: Connections) -> None:
        """Count this rank as connected, and wait for the outcome."""

        def count(store: Store) -> None:
            if int(store.add(self._key("done"), 1)) == len(self.ranks):
                decide(store, self._key("outcome"), CONNECTED)

        def forget(store: Store) -> None:
            # Not the steps: another rank may be about to read them.
            for name in ("done", *(f"member/{rank}" for rank in self.ranks)):
                store.delete_key(self._key(name))

        self._reach(4)
        self.store.request(count)
        for in_time in poll_until(self.timeout):
            if self._check_outcome():
                break
            exited = [rank for rank, peer in candidate.peers.items() if is_closed(peer.socket)]
            if exited:
                raise PeerLostError(f"rank {exited[0]} is gone (its process ended)")
            if not in_time:
                raise self._stalled(self.ranks)
        if self.rank == self.leader:
            with contextlib.suppress(PeerLostError, StoreGoneError):  # connected all the same
                self.store.request(forget, min(REQUEST_SECONDS, self.timeout / 2))

    def _check_outcome(self) -> bool:
        """Whether the session is connected; raises why not, once that is decided."""
        outcome = self.store.values({0: self._key("outcome")}).get(0)
        if outcome is None:
            return False
        if outcome.decode() == CONNECTED:
            return True
        raise Cause.from_json(outcome).error("")
