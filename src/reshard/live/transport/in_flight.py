"""GPU work that is in flight when a call has returned, and the thread that watches it.

A move between GPUs only enqueues work. What becomes of it is seen by one thread per session: it
asks every exchange whether it is done, hears of lost peers and failed calls, and keeps the time.
When an exchange fails, the thread aborts the NCCL group, so that no GPU waits for ever, and tells
all ranks of the call. The error is raised by whichever comes first: the handle of the call, the
next call of the session, or `rs.check`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from reshard.errors import LiveError, PeerLostError, ReshardError
from reshard.live.failure.watch import FIRST_PAUSE, LOOK_EVERY, PAUSE_GROWTH, Watch
from reshard.live.session.cause import Cause
from reshard.live.session.worker import Worker
from reshard.live.transport.nccl_group import NcclGroup, NcclWork

__all__ = ["InFlight", "InFlightCall"]

SUSPECT_AFTER = 1.2
"""Seconds after which only those peers are waited for that do not post that they wait, too."""

NAME_SECONDS = 0.3
"""How long NCCL's news of a lost peer waits for the socket's, which knows the rank."""


class InFlightCall:
    """The exchanges of one call that are in flight."""

    def __init__(self, calls: InFlight, watch: Watch, group: NcclGroup) -> None:
        self._calls, self.watch, self.group = calls, watch, group
        self.error: LiveError | None = None
        self.complete = threading.Event()
        """Set when all is over, well or badly."""
        self._started = False
        self.raised = False
        """Whether the error was raised anywhere."""

    def add(self, work: NcclWork, peers: Collection[int], what: Callable[[int], str]) -> None:
        """Watch one more exchange; ``what`` says what a peer is waited for."""
        self._started = True
        self._calls.submit(lambda: self._watch(_WatchedExchange(self.watch, work, peers), what))

    def wait(self) -> None:
        """Wait until all exchanges are over, and raise what went wrong."""
        self._calls.settle()
        if self.error is not None:
            self.raised = True
            raise self.error

    def fail(self, error: LiveError) -> None:
        """The call has failed: nothing of it is waited for any more."""
        if self.error is None:
            self.error = error
        if self._started:
            self.group.abort()

    def close(self) -> None:
        """There are no more exchanges; once those in flight are over, the call is."""
        self._calls.submit(self._complete)

    def _complete(self) -> None:
        self.watch.close()
        if self.error is not None and not self.raised:
            self._calls.unraised.append(self)
        self.complete.set()

    def _watch(self, exchange: _WatchedExchange, what: Callable[[int], str]) -> None:
        if self.error is not None:
            return
        try:
            try:
                exchange.await_begin()
                missing = exchange.missing
                self.watch.wait(lambda: missing(self._calls), what, FIRST_PAUSE)
            except ReshardError as error:
                self.watch.fail_with(error)
        except Exception as error:
            known = error if isinstance(error, LiveError) else LiveError(repr(error))
            self._calls.broken = self.group, known
            self.fail(known)


class _WatchedExchange:
    """One exchange, and the peers that take part in it."""

    def __init__(self, watch: Watch, work: NcclWork, peers: Collection[int]) -> None:
        self._watch, self._work, self._peers = watch, work, peers
        self._began = self._asked = 0.0
        self._suspects = peers

    def await_begin(self) -> None:
        """Wait until this rank's own GPU has come that far: no peer is late until then."""
        pause = FIRST_PAUSE
        while not self._work.begun() and not self._work.group.aborted:
            self._watch.check_lost(self._peers, lambda peer: "its part")
            self._watch.check()
            self._watch.mailbox.step(pause)
            pause = min(pause * PAUSE_GROWTH, LOOK_EVERY)

    def missing(self, calls: InFlight) -> Collection[int]:
        """The peers that may hold up the exchange; none once it has arrived."""
        now = time.monotonic()
        self._began = self._began or now
        try:
            if self._work.done():
                return ()
        except PeerLostError as error:
            self._lost(error)
        except LiveError as error:
            self._watch.fail(calls.cause_of(self._work.group, error, self._watch.connections.rank))
        if now - self._began > SUSPECT_AFTER and now - self._asked > SUSPECT_AFTER / 2:
            self._asked = now
            silent = [peer for peer in self._peers if self._watch.waits.record_of(peer) is None]
            self._suspects = silent or self._peers
        return self._suspects

    def _lost(self, error: PeerLostError) -> None:
        """A connection broke; which rank is gone the sockets tell, if it was on this host."""
        end = time.monotonic() + NAME_SECONDS
        while time.monotonic() < end:
            self._watch.check_lost(self._peers, lambda peer: "its part")
            self._watch.check()
            self._watch.mailbox.step(0.02)
        self._watch.fail(Cause("lost", f"{error}: one of {sorted(self._peers)} is gone"))


class InFlight:
    """All that is in flight in one session, in the order in which it was enqueued."""

    def __init__(self) -> None:
        self.unraised: list[InFlightCall] = []
        """Failed calls whose error was not raised yet."""
        self.broken: tuple[NcclGroup, LiveError] | None = None
        """The group that was aborted last, and why."""
        self._worker: Worker | None = None

    def submit(self, action: Callable[[], None]) -> None:
        """Let the watching thread do something after all that it has."""
        self._worker = self._worker or Worker()
        self._worker.submit(action)

    def begin(self, watch: Watch, group: NcclGroup) -> InFlightCall:
        """A call that is going to exchange something."""
        return InFlightCall(self, watch, group)

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        if self._worker is None or self._worker.is_current:
            return  # garbage is collected in any thread, sessions among it
        over = threading.Event()
        self.submit(over.set)
        over.wait()

    def check(self) -> None:
        """Raise a failure that was not raised yet."""
        failed, self.unraised = [one for one in self.unraised if not one.raised], []
        for call in failed:
            call.raised = True
        for call in failed:
            assert call.error is not None
            raise call.error

    def cause_of(self, group: NcclGroup, error: LiveError, rank: int) -> Cause:
        """Why a group failed: what befell an earlier exchange on the same group, if anything."""
        if self.broken is not None and self.broken[0] is group:
            return Cause.of(self.broken[1], rank).of_earlier_call()
        return Cause.of(error, rank)

    def close(self) -> None:
        """Let the thread end."""
        if self._worker is not None:
            self._worker.end()
