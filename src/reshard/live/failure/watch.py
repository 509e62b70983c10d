"""No call waits for ever, and all ranks of a call learn the same cause.

A wait ends when a peer is lost, when a cause is posted, or when its time is over: then the rank
that holds up all others is named. A wait that takes a few milliseconds costs a few microseconds:
only longer ones look at the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from reshard.errors import PeerLostError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.live.failure.abort import CallAbort
from reshard.live.failure.wait_graph import WaitGraph
from reshard.live.session.cause import Cause
from reshard.live.session.control import Alive, Hello
from reshard.live.session.rendezvous import Connections, outcome_key
from reshard.live.session.session import Session
from reshard.live.session.store import REQUEST_SECONDS, missing_keys
from reshard.live.session.tags import CallAheadError, Tag, compare_codes

__all__ = ["FIRST_PAUSE", "LOOK_EVERY", "PAUSE_GROWTH", "Watch", "done_key"]

POST_AFTER = 1.0
"""Seconds of waiting after which a rank posts whom it waits for, and looks for a posted cause."""

LOOK_EVERY = 0.25
FIRST_PAUSE = 0.0002
PAUSE_GROWTH = 1.2
STORE_PAUSE = 0.02
"""The longest pause between two looks at the store for keys of other ranks."""

HEARTBEAT_EVERY = 1.0
"""Seconds of work after which a rank sends a heartbeat; sooner where the timeout is short."""

IN_FLIGHT_SECONDS = 0.5
"""How long messages over the network may take that were sent by a rank that has left."""

What = Callable[[int], str]
"""What a peer is waited for, in words that follow "waits for"."""


def done_key(name: str, rank: int) -> str:
    """The key that says that a rank needs the keys of this name no more."""
    return f"{name}/done/{rank}"


class Watch:
    """One call on one rank: its identity, its waits and its failure. Transports work with it."""

    handshaking = True
    """Whether it is still waited for that all peers have called."""
    compared = False
    """Whether ranks have compared what they were given in this call."""
    cut_by: Cause | None = None
    """Why another call had to cut the connections that this one uses."""
    by_network: frozenset[int] = frozenset()
    """Peers that are reached over the network."""
    suspect: Callable[[], None] | None = None
    """Looks, whenever the store is looked at, for what a missing peer does instead."""
    _graph: WaitGraph | None = None
    _looked = _heartbeat = 0.0

    def __init__(
        self,
        session: Session,
        connections: Connections,
        call: int,
        digest: bytes,
        *,
        timeout: float,
        deadline: float | None = None,
        what: str = "a move",
        tag: Tag | None = None,
        grad: int = 0,
    ) -> None:
        """``what`` says what the call does, ``grad`` what this rank's Hello says of gradients."""
        self.session, self.connections = session, connections
        self.call, self.digest, self.what, self.grad = call, digest, what, grad
        self.timeout, self.deadline = timeout, deadline
        self.ends = None if deadline is None else time.monotonic() + deadline
        self.tag_code = 0 if tag is None else tag.code
        self.mailbox = connections.mailbox
        self.inbox = self.mailbox.open(call)
        self.abort = CallAbort(connections, call, self.tag_code)
        self.status: Callable[[], str] = self._not_begun
        """How far this rank has come, for messages."""
        self.broken: dict[int, str] = {}
        """Peers whose connection over the network failed, and how."""
        self._left_at: dict[int, float] = {}
        self._impatient_after = min(LOOK_EVERY, timeout / 4)
        connections.client.seconds = timeout

    def _not_begun(self) -> str:
        return f"on rank {self.connections.rank}: no round begun"

    def hello(self, **more: Any) -> Hello:
        """This rank's Hello, with what a transport adds."""
        finished = self.mailbox.num_finished
        return Hello(self.call, self.digest, self.grad, self.tag_code, finished, **more)

    # Waiting -----------------------------------------------------------------------------------

    def wait(
        self,
        missing: Callable[[], Collection[int]],
        what: What,
        pause: float = LOOK_EVERY,
        longest: float = LOOK_EVERY,
    ) -> None:
        """Wait until no peer is missing.

        What no message tells is asked for again after a pause, which grows up to the longest.
        """
        inbox, mailbox, began = self.inbox, self.mailbox, 0.0
        while left := missing():
            now = time.monotonic()
            began = began or now
            waited = now - began > self._impatient_after
            if waited or mailbox.lost or self.broken or self._has_trouble(now):
                self.check_lost(left, what)
                self._check_aborted()
                self._grow_impatient(left, what, began)
            mailbox.step(min(pause, self._impatient_after))
            pause = min(pause * PAUSE_GROWTH, longest)
        if self.handshaking:
            self._check_flags()
        if inbox.abort is not None or self.abort.is_over:
            self._check_aborted()
        if self._graph is not None:
            self._graph.withdraw()

    def wait_keys(
        self, keys: Mapping[int, str], what: What, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until the keys of all ranks are in the session's store; ``check`` may raise."""
        client, names = self.connections.client, list(keys.values())
        left: Collection[int] = keys.keys() - {self.connections.rank}
        looked = time.monotonic()

        def missing() -> Collection[int]:
            nonlocal left, looked
            if check is not None:
                check()
            if client.check(names):
                return ()
            if time.monotonic() - looked > LOOK_EVERY:
                left, looked = missing_keys(client, keys), time.monotonic()
            return left

        self.wait(missing, what, FIRST_PAUSE, STORE_PAUSE)

    def barrier(self, name: str) -> None:
        """Wait until every rank of the session has come this far in the call."""
        ranks, client = self.connections.ranks, self.connections.client
        keys = {rank: f"{name}/{self.call}/{rank}" for rank in ranks}
        client.request(lambda store: store.set(keys[self.connections.rank], "1"))
        self.wait_keys(keys, lambda peer: "it to have all of its part")
        self.forget(f"{name}/{self.call}", list(keys.values()))

    def forget(self, name: str, keys: Sequence[str]) -> None:
        """Delete keys of the store once every rank has said that it needs them no more.

        The rank that serves the store waits for that: it may be about to leave.
        """
        connections = self.connections
        done = {rank: done_key(name, rank) for rank in connections.ranks}
        connections.client.request(lambda store: store.set(done[connections.rank], "1"))
        if connections.rank == connections.leader:
            self.wait_keys(done, lambda peer: f"it to have read what {self.what} is")
            used = (*keys, *done.values())
            connections.client.request(lambda store: [store.delete_key(key) for key in used])

    def _has_trouble(self, now: float) -> bool:
        over = self.ends is not None and now > self.ends
        return over or self.inbox.abort is not None or self.abort.is_over

    @property
    def waits(self) -> WaitGraph:
        """What this rank posts and reads about who waits for whom."""
        if self._graph is None:
            graph = WaitGraph(self.session, self.call, self.what)
            self._graph = graph.attach(self.connections, self.inbox, self.timeout)
            if self.handshaking:
                graph.observe()
        return self._graph

    def _grow_impatient(self, left: Collection[int], what: What, began: float) -> None:
        """Look for a cause, post whom this rank waits for, or give up, as time goes by."""
        now, heard = time.monotonic(), self.inbox.heard
        quiet = {peer: now - max(began, heard.get(peer, 0.0)) for peer in left}
        longest = max(quiet, key=lambda peer: quiet[peer])
        if self.handshaking and quiet[longest] > LOOK_EVERY:
            self._check_other_sessions(left)
        if self.ends is not None and now > self.ends:
            self._expire(longest, what, f"the deadline of {self.deadline:g} s")
        if quiet[longest] > self.timeout:
            self._expire(longest, what, f"{self.timeout:g} s", patient=True)
        elif quiet[longest] > min(POST_AFTER, self.timeout / 3):
            self.waits.post(longest, what(longest))
            self._look_for_cause()
            if self.handshaking:
                self._check_passed(left)
        elif quiet[longest] > LOOK_EVERY and not self._hears_all(left):
            self._look_for_cause()

    def _hears_all(self, left: Collection[int]) -> bool:
        """Whether an Abort of any of these comes by itself: of ranks of this host that called."""
        return not self.handshaking and self.connections.peers.keys() >= set(left)

    def _expire(self, peer: int, what: What, limit: str, patient: bool = False) -> None:
        """Time is over: name the rank that holds up all others.

        With patience, a rank that is at work may take longer, and so may those that wait for it.
        """
        root, alive = self.waits.root(peer, what(peer))
        if patient and alive:
            # Asked again in a moment: it may have come to the end just now.
            self.inbox.heard[peer] = time.monotonic() - self.timeout + LOOK_EVERY
            return
        state = "stopped answering" if root.met else "has not called"
        waits = f"rank {root.waiter} waits for {root.what}"
        self.fail(Cause("late", f"rank {root.rank} {state} within {limit} and {waits}"))

    def heartbeat(self) -> None:
        """Send a heartbeat during long work, and raise if the call was aborted."""
        now = time.monotonic()
        if now - self._heartbeat < min(HEARTBEAT_EVERY, self.timeout / 4):
            return
        self._heartbeat = now
        connections = self.connections
        for peer in connections.peers:
            self.mailbox.send(peer, Alive(self.call))
        if len(connections.peers) + 1 < len(connections.ranks):
            with contextlib.suppress(PeerLostError):
                key = f"alive/{connections.rank}"
                connections.client.request(lambda store: store.set(key, str(now)), REQUEST_SECONDS)
        self.mailbox.step(0.0)
        self.check()

    # Failing -----------------------------------------------------------------------------------

    def fail(self, cause: Cause) -> NoReturn:
        """Post a cause, tell all ranks, and raise what was posted first."""
        self._raise(self.abort.post(cause))

    def fail_with(self, error: ReshardError) -> NoReturn:
        """Tell the other ranks of an error of this one, and raise; an error of the call stays."""
        if self.abort.is_over:
            raise error
        cause = Cause.of(error, self.connections.rank)
        self.fail(Cause(cause.kind, f"{cause.text}, in {self.what}"))

    def _raise(self, cause: Cause) -> NoReturn:
        self.session.skip_calls(cause.calls)
        tagged = self.handshaking and self.tag_code
        if tagged and compare_codes(self.tag_code, cause.tag) == 1:
            raise CallAheadError(cause)  # this rank left out the call that failed
        self.abort.stop(cause)
        raise cause.error(self.status())

    def check(self) -> None:
        """Raise if the call has failed elsewhere; cheap enough for inner loops."""
        self._check_aborted()
        if self.ends is not None and time.monotonic() > self.ends:
            passed = f"the deadline of {self.deadline:g} s has passed on rank"
            self.fail(Cause("late", f"{passed} {self.connections.rank}"))

    def _check_aborted(self) -> None:
        if self.abort.is_over and self.abort.cause is not None:
            raise self.abort.cause.error(self.status())  # another thread has given the call up
        if self.inbox.abort is not None:
            self._raise(self.abort.received(self.inbox.abort))

    def check_lost(self, left: Collection[int], what: What) -> None:
        """Fail if one of these peers is gone; ``what`` says what each is waited for."""
        gone = sorted(peer for peer in set(left) & self.mailbox.lost if self._is_gone(peer))
        torn = sorted(set(left) & set(self.broken))
        if gone:
            self._look_for_cause(now=True)
            self._fail_without(gone[0], "its process ended", what)
        if torn and self.cut_by is not None:
            self.fail(self.cut_by.of_earlier_call())
        if torn:
            time.sleep(LOOK_EVERY)  # the rank that cut the connection may be about to say why
            self._look_for_cause(now=True)
            self._look_at_earlier_calls()
            self._fail_without(torn[0], self.broken[torn[0]], what)

    def _is_gone(self, peer: int) -> bool:
        """Whether nothing comes any more from a rank that has left.

        What it sent over the network before it left may come after the news that it has.
        """
        if peer not in self.by_network:
            return True
        now = time.monotonic()
        return now - self._left_at.setdefault(peer, now) > IN_FLIGHT_SECONDS

    def _fail_without(self, peer: int, how: str, what: What) -> NoReturn:
        waits = f"rank {self.connections.rank} waits for {what(peer)}"
        self.fail(Cause("lost", f"rank {peer} is gone ({how}) and {waits}"))

    def fail_because_of(self, peer: int, what: str, error: OSError | None = None) -> NoReturn:
        """A peer has given up the call, or its memory cannot be reached; it is about to say why."""
        end = time.monotonic() + REQUEST_SECONDS
        while time.monotonic() < end:
            self._check_aborted()
            self.check_lost([peer], lambda _: what)
            self.mailbox.step(0.05)
        if error is None:
            self.fail(Cause("error", f"rank {peer} has failed and did not say why"))
        reach = f"rank {self.connections.rank} cannot reach the memory of rank {peer} ({error})"
        self.fail(Cause("error", reach))

    def _look_for_cause(self, now: bool = False) -> None:
        """Look for a cause in the store, now and then; without a store there is none."""
        if not now and time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        posted = self.abort.posted()
        with contextlib.suppress(PeerLostError):
            if self.suspect is not None:
                self.suspect()
        if posted is not None:
            self._raise(posted)

    def _look_at_earlier_calls(self) -> None:
        """A peer that failed in a call that is over here has cut the connection then."""
        for call in range(max(self.call - 3, 0), self.call):
            found = self.abort.posted(call)
            if found is not None and call > self.connections.last_failed:
                self.fail(found.of_earlier_call())

    # The handshake -----------------------------------------------------------------------------

    def finish_handshake(self) -> None:
        """All peers have called: from now on they only wait for each other's parts."""
        self.handshaking = False
        self.suspect = None
        if self._graph is not None:
            self._graph.close()

    def _check_flags(self) -> None:
        """Fail if a rank of this host that called long ago has given up since.

        Its Abort may be unread, and its Hello, with all of its part, read.
        """
        for rank, peer in self.connections.peers.items():
            if peer.flags.has_failed(self.call):
                self.fail_because_of(rank, "its part")

    def _check_passed(self, left: Collection[int]) -> None:
        """Fail if a peer is through with this call without having sent us a Hello.

        A Hello over the network may come after one of a later call over a socket.
        """
        finished, hellos = self.mailbox.finished_by, self.inbox.hellos
        for peer in set(left) - self.by_network:
            if finished.get(peer, 0) > self.call and peer not in hellos:
                self._check_aborted()
                if self._graph is not None:
                    # It may have given up a deadlock in which it found this rank too.
                    self._fail_deadlocked(self._graph.verdict())
                self.fail(
                    Cause(
                        "disagree",
                        f"rank {peer} has made call {self.call} of ranks "
                        f"{format_ranks(self.connections.ranks)} without an exchange, and rank "
                        f"{self.connections.rank} waits for it to begin {self.what}: give all "
                        "ranks the same move",
                    )
                )

    def _check_other_sessions(self, left: Collection[int]) -> None:
        """Have ranks given this call up before they were connected, or wait in another session?"""
        graph = self.waits
        if graph.is_due and self.call != self.connections.first_call:
            refused = graph.refused(outcome_key(self.call))
            if refused is not None:
                self.fail(Cause.from_json(refused))
        self._fail_deadlocked(graph.find_deadlock(left))

    def _fail_deadlocked(self, found: str | None) -> None:
        if found is not None and self._graph is not None:
            self.fail(Cause("disagree", found, calls=self._graph.given_up))

    def close(self) -> None:
        """The call is over; nothing refers to its tensors any more."""
        self.finish_handshake()
        self.mailbox.close(self.call)
        over = f"on rank {self.connections.rank}: the call is over"
        self.status, self.abort.written = lambda: over, None
