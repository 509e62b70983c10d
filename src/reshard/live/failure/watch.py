"""One call on one rank: every wait ends, and all ranks of the call raise the same cause.

A wait ends when a peer is lost, when a cause is posted, or at its timeout: then the error names the
rank that holds up all others. A wait of a few milliseconds costs a few microseconds: only longer
ones look at the store. The first cause that is posted for a call stands.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from reshard.errors import PeerLostError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.live.session.control import Abort, Alive, CallAheadError, Cause, Hello, compare_codes
from reshard.live.session.session import Ticket
from reshard.live.session.shared_memory import SLOTS
from reshard.live.session.store import REQUEST_SECONDS, Store
from reshard.live.session.wait_graph import WaitGraph

POST_AFTER = HEARTBEAT_EVERY = 1.0
"""Seconds of waiting after which a rank posts which peer it waits for, and of work after which it
sends a heartbeat; sooner where the timeout is short."""
LOOK_EVERY, FIRST_PAUSE, PAUSE_GROWTH = 0.25, 0.0002, 1.2
IN_FLIGHT_SECONDS = 0.5
"""How long messages over the network may take that a rank has sent before it exited."""
WRITER_SECONDS = 1.0
"""How long to wait for a peer that was about to write into our memory when a call failed."""

What = Callable[[int], str]
"""What this rank waits for from a peer, in words that follow "waits for"."""


def abort_key(call: int) -> str:
    """The key of the session's store under which the cause of a call's failure is posted."""
    return f"abort/{call}"


class Watch:
    """One call on one rank: its identity, its waits and its failure. Transports work with it."""

    handshaking = True
    """Whether this rank still waits for peers to call."""
    is_closed = False
    compared = False
    """Whether the ranks have compared their plans in this call."""
    cause: Cause | None = None
    """Why the call has failed, which the other ranks know; None if it has not."""
    cut_by: Cause | None = None
    """Why another call had to cut the connections that this one uses."""
    by_network: frozenset[int] = frozenset()
    """Peers that are reached over the network."""
    written: object = None
    """The tensors into which other processes may write."""
    poll_seconds = 0.0
    """How long to poll for messages in a wait before this rank sleeps until one comes."""
    progress: Callable[[], str] | None = None
    """How far this rank has come, for error messages."""
    suspect: Callable[[], None] | None = None
    """Raises if a missing peer is in another call; called whenever the store is looked at."""
    _graph: WaitGraph | None = None
    _silent = False
    """Whether the rank that holds up this one was silent when the timeout was over."""
    _expires = _looked = _heartbeat = 0.0

    def __init__(
        self,
        ticket: Ticket,
        digest: bytes,
        what: str = "a move",
        timeout: float = 1.0,
        deadline: float | None = None,
        grad: int = 0,
    ) -> None:
        """``what`` says what the call does, ``grad`` is a field of this rank's Hello."""
        session = ticket.session
        assert session is not None
        connections = session.connections
        assert connections is not None
        self.session, self.connections, self.call = session, connections, ticket.number
        self.digest, self.what, self.timeout, self.deadline = digest, what, timeout, deadline
        self.ends = None if deadline is None else time.monotonic() + deadline
        self.grad, self.tag_code = grad, 0 if ticket.tag is None else ticket.tag.code
        self.mailbox = connections.mailbox
        self.inbox = self.mailbox.open(self.call)
        self.broken: dict[int, str] = {}
        """Peers whose connection over the network failed, and how."""
        self._left_at: dict[int, float] = {}
        self._impatient_after = min(LOOK_EVERY, timeout / 4)
        connections.client.seconds = self.mailbox.seconds = timeout
        ticket.watch = self

    @property
    def hello_fields(self) -> tuple[int, bytes, int, int, int]:
        """The first fields of this rank's Hello."""
        return self.call, self.digest, self.grad, self.tag_code, self.mailbox.num_finished

    def hello(self, **more: Any) -> Hello:
        """This rank's Hello, with the fields that a transport adds."""
        return Hello(*self.hello_fields, **more)

    def status(self) -> str:
        """How far this rank has come, for error messages."""
        nothing = f"on rank {self.connections.rank}: no round begun"
        if self.is_closed:
            return f"on rank {self.connections.rank}: the call is over"
        return nothing if self.progress is None else self.progress()

    # Waiting -----------------------------------------------------------------------------------

    def wait(
        self,
        missing: Callable[[], Collection[int]],
        what: What,
        pause: float = LOOK_EVERY,
        longest: float = LOOK_EVERY,
    ) -> None:
        """Wait until no peer is missing.

        Events that come without a message are polled with a pause, which grows up to the longest.
        """
        inbox, mailbox, began, waited = self.inbox, self.mailbox, 0.0, False
        impatient = self._impatient_after
        while left := missing():
            now = time.monotonic()
            began = began or now
            waited = now - began > impatient
            over = self.ends is not None and now > self.ends
            if waited or over or mailbox.lost or self.broken or inbox.abort or self.cause:
                self.check_lost(left, what)
                self._check_aborted()
                self._grow_impatient(left, what, began)
            if now - began < self.poll_seconds:
                mailbox.step(0.0)
                continue
            mailbox.step(pause if pause < impatient else impatient)
            if pause < longest:
                pause = min(pause * PAUSE_GROWTH, longest)
        if self.handshaking:
            slot, mark = self.call % SLOTS, self.call + 1
            for rank, peer in self.connections.peers.items():
                if peer.flags.failed[slot] == mark:  # its Abort may still be unread
                    self.fail_because_of(rank, "its part")
        if inbox.abort is not None or self.cause is not None:
            self._check_aborted()
        if self._graph is not None:
            self._graph.withdraw()
            self._silent = False
        if waited:
            self.heartbeat()  # this rank goes on, and its next wait is not posted yet

    @property
    def waits(self) -> WaitGraph:
        """The records of which rank waits for which."""
        if self._graph is None:
            graph, connections = WaitGraph(self.session, self.call, self.what), self.connections
            graph.attach(self.mailbox, connections.client, self.inbox, self.timeout)
            self._graph = graph
            if self.handshaking:
                graph.observe()
        return self._graph

    def _grow_impatient(self, left: Collection[int], what: What, began: float) -> None:
        """Look for a cause, post which peer this rank waits for, or give up, as time goes by."""
        now, heard, client = time.monotonic(), self.inbox.heard, self.connections.client
        quiet = {peer: now - max(began, heard.get(peer, 0.0)) for peer in left}
        peers = sorted(quiet, key=lambda peer: -quiet[peer])
        longest = quiet[peers[0]]
        # The store of the group is often served by the same process as that of the session.
        if self.handshaking and not client.is_stuck and longest > LOOK_EVERY:
            self._check_other_sessions(left)
        if self.ends is not None and now > self.ends:
            self._suspect()  # a short deadline passes before the next look
            self._expire(peers, what, f"the deadline of {self.deadline:g} s")
        waits_long = now - began > min(POST_AFTER, self.timeout / 3)
        if waits_long:
            # Also if the peer works, so that ranks that wait for this one know whom it waits for.
            self.waits.post(peers, what(peers[0]))
        # Peers of this host that have called send their Abort themselves.
        sends_aborts = not self.handshaking and self.connections.peers.keys() >= set(left)
        if longest > self.timeout and now > self._expires:
            self._expire(peers, what, f"{self.timeout:g} s", patient=True)
        elif waits_long or (longest > LOOK_EVERY and not sends_aborts):
            self._look_for_cause()
            if waits_long and self.handshaking:
                self._check_passed(left)

    def _expire(self, peers: Sequence[int], what: What, limit: str, patient: bool = False) -> None:
        """Fail at the end of a timeout, and name the rank that holds up all others.

        With ``patient``, a rank that sends heartbeats is given more time.
        """
        waiter, wait, alive = self.waits.last_wait(peers, what(peers[0]))
        last, leader = wait.awaits[0], self.connections.leader
        is_stuck = self.connections.client.is_stuck
        sure, self._silent = self._silent or is_stuck, not alive
        if patient and (alive or not sure):
            # Checked again soon: the rank may have finished just now, or be about to post for whom
            # it waits, and on a busy machine this rank may be the first that runs again.
            self._expires = time.monotonic() + self._impatient_after
            return
        state = "stopped answering" if wait.met else "has not called"
        text = f"rank {last} {state} within {limit} and rank {waiter} waits for {wait.what}"
        if is_stuck and leader not in (self.connections.rank, last) and not wait.met:
            text = (
                f"rank {leader} stopped answering within {limit}: it serves the store of the "
                f"session, and rank {waiter} waits for rank {last}, which may wait for the store"
            )
        self.fail(Cause("late", text))

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
                connections.client.post(f"alive/{connections.rank}", str(now))
        self.mailbox.step(0.0)
        self.check()

    # Failing -----------------------------------------------------------------------------------

    def fail(self, cause: Cause) -> NoReturn:
        """Post a cause, abort the call on all ranks, and raise the cause that was posted first."""
        self._raise(self.post(cause))

    def fail_with(self, error: ReshardError) -> NoReturn:
        """Abort the call on all ranks because of an error of this one, unless it has failed."""
        if self.cause is not None:
            raise error
        cause = Cause.of(error, self.connections.rank)
        self.fail(Cause(cause.kind, f"{cause.text}, in {self.what}"))

    def post(self, cause: Cause) -> Cause:
        """Post why the call fails; returns the cause that was posted first."""
        if not cause.tag:
            cause = replace(cause, tag=self.tag_code)
        call, text = self.call, cause.to_json()

        def post(store: Store) -> Any:
            # The epoch moves on before any rank can know of the failure, so that no rank begins a
            # new call without knowing. Process groups of earlier epochs are not used again.
            if store.add("epoch", 0) <= call:
                store.set("epoch", str(call + 1))
            return store.compare_set(abort_key(call), "", text)

        with contextlib.suppress(PeerLostError):
            return Cause.from_json(self.connections.client.request(post, REQUEST_SECONDS))
        return cause

    def _posted(self, call: int) -> Cause | None:
        """The cause that is posted for a call; None if there is none, or no store."""
        text = None
        with contextlib.suppress(PeerLostError):
            text = self.connections.client.get(abort_key(call))
        return None if text is None else Cause.from_json(text)

    def _raise(self, cause: Cause) -> NoReturn:
        self.session.skip_calls(cause.calls)
        if self.handshaking and compare_codes(self.tag_code, cause.tag) == 1:
            raise CallAheadError(cause)  # this rank left out the call that failed
        self._stop(cause)
        raise cause.error(self.status())

    def _stop(self, cause: Cause) -> None:
        """Send an Abort to the ranks of this host, and keep them from writing into our memory."""
        connections, call = self.connections, self.call
        self.cause = cause
        connections.flags.mark_failed(call)
        connections.last_failed = max(connections.last_failed, call)
        for peer in connections.peers:
            self.mailbox.send(peer, Abort(call, cause.to_json().encode()))
        if connections.writers_after(WRITER_SECONDS, call):
            # One was stopped between checking our flags and writing. It may go on at any time, so
            # the memory into which it writes must never be used for anything else.
            connections.quarantine.append(self.written)

    def check(self) -> None:
        """Raise if the call has failed elsewhere; cheap enough for inner loops."""
        self._check_aborted()
        if self.ends is not None and time.monotonic() > self.ends:
            passed = f"the deadline of {self.deadline:g} s has passed on rank"
            self.fail(Cause("late", f"{passed} {self.connections.rank}"))

    def _check_aborted(self) -> None:
        if self.cause is not None:
            raise self.cause.error(self.status())  # another thread has given the call up
        if self.inbox.abort is not None:
            self._raise(Cause.from_json(self.inbox.abort.text))

    def check_lost(self, left: Collection[int], what: What) -> None:
        """Fail if one of these peers is lost; ``what`` says what this rank waits for."""
        now, lost = time.monotonic(), set(left) & self.mailbox.lost
        for peer in lost & self.by_network:
            # Messages over the network may come after the news of its exit.
            if now - self._left_at.setdefault(peer, now) <= IN_FLIGHT_SECONDS:
                lost.discard(peer)
        torn = set(left) & self.broken.keys()
        if lost:
            peer, how = min(lost), "its process ended"
            self._look_for_cause(now=True)
        elif torn:
            peer, how = min(torn), self.broken[min(torn)]
            if self.cut_by is not None:
                self.fail(self.cut_by.of_earlier_call())
            time.sleep(LOOK_EVERY)  # the rank that cut the connection may be about to post why
            self._look_for_cause(now=True)
            for call in range(max(self.call - 3, 0), self.call):
                # A peer that failed in a call that is over here has cut the connection then.
                cause = self._posted(call)
                if cause is not None and call > self.connections.last_failed:
                    self.fail(cause.of_earlier_call())
        else:
            return
        waits = f"rank {self.connections.rank} waits for {what(peer)}"
        self.fail(Cause("lost", f"rank {peer} is gone ({how}) and {waits}"))

    def fail_because_of(self, peer: int, what: str, error: OSError | None = None) -> NoReturn:
        """Fail because a peer has given up the call, or its memory cannot be reached.

        The peer's own cause is raised if it arrives within a second.
        """
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
        """Look for a posted cause, at most every quarter of a second unless ``now``."""
        if not now and time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        posted = self._posted(self.call)
        self._suspect()
        if posted is not None:
            self._raise(posted)

    def _suspect(self) -> None:
        if self.suspect is not None:
            with contextlib.suppress(PeerLostError):
                self.suspect()

    # The handshake -----------------------------------------------------------------------------

    def finish_handshake(self) -> None:
        """All peers have called: from now on they only wait for each other's parts."""
        self.handshaking, self.suspect = False, None
        if self._graph is not None:
            self._graph.close()

    def _check_passed(self, left: Collection[int]) -> None:
        """Fail if a peer has finished this call without having sent us a Hello.

        Not over the network, where a Hello may come after a later one over a socket.
        """
        finished, hellos, ranks = self.mailbox.finished_by, self.inbox.hellos, self.session.ranks
        for peer in set(left) - self.by_network:
            if finished.get(peer, 0) > self.call and peer not in hellos:
                self._check_aborted()
                # The peer may have given up a deadlock of which this rank is a part.
                text = (
                    f"rank {peer} has made call {self.call} of ranks {format_ranks(ranks)} without "
                    f"an exchange, and rank {self.connections.rank} waits for it to begin "
                    f"{self.what}: give all ranks the same move"
                )
                self.fail(self.waits.verdict() or Cause("disagree", text))

    def _check_other_sessions(self, left: Collection[int]) -> None:
        """Fail if ranks gave up this call before they were connected, or wait in other sessions."""
        graph, cause = self.waits, None
        if graph.is_due and self.call != self.connections.first_call:
            cause = graph.outcome()
        cause = cause or graph.find_deadlock(left)
        if cause is not None:
            self.fail(cause)

    def close(self) -> None:
        """End the call; from now on the watch refers to no tensors."""
        if self.handshaking or self._graph is not None:
            self.finish_handshake()
        self.mailbox.close(self.call)
        self.is_closed, self.progress, self.written = True, None, None
