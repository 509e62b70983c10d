"""GPU work that is in flight when its call has returned, and the thread that watches it.

A move between GPUs only enqueues work. One thread per session watches it: it polls every exchange,
detects lost peers, failed calls and timeouts. When an exchange fails, the thread aborts it, so that
no GPU waits forever, and all ranks of the call. The error is raised by whichever comes first: the
handle of the call, the next call of the session, or `rs.check`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from reshard.errors import LiveError, PeerLostError, ReshardError
from reshard.live.failure.watch import FIRST_PAUSE, LOOK_EVERY, PAUSE_GROWTH, Watch
from reshard.live.session.control import Cause
from reshard.live.session.rendezvous import Connections, Resource
from reshard.live.session.session import Ticket
from reshard.live.session.store import Worker

PATIENCE = 0.02
"""Seconds after which the thread looks at work for the first time: most is complete by then, and a
thread that runs meanwhile would slow the caller down."""

SUSPECT_AFTER = 1.2
"""Seconds after which only peers that do not themselves wait for others are suspected."""

NAME_SECONDS = 0.3
"""Seconds in which a socket may show which peer is lost, after NCCL has reported that one is."""


TURN_PAUSE = 0.0002  # seconds between two checks whether earlier calls have enqueued all their work


class Abortable(Protocol):
    """What exchanges run on, such as a NCCL group."""

    aborted: bool

    def abort(self) -> None:
        """End all exchanges in flight within a second; what they received is undefined."""


class Work(Protocol):
    """An exchange in flight."""

    @property
    def group(self) -> Abortable: ...

    def begun(self) -> bool:
        """Whether this rank's GPU has reached it."""

    def done(self) -> bool:
        """Whether it is complete; raises a `LiveError` once it has failed."""

    def late(self, peers: Collection[int]) -> Collection[int] | None:
        """The peers for whose GPU it waits; None if that cannot be seen."""


class InFlightCall:
    """The exchanges of one call that are in flight."""

    error: LiveError | None = None
    raised = False  # whether the error was raised to the user

    def __init__(self, watch: Watch, ticket: Ticket) -> None:
        self.watch, self._ticket = watch, ticket
        self._calls = watch.connections.resource(InFlight)
        self._groups: list[Abortable] = []
        self.complete = False  # whether all exchanges have ended, or one has failed

    def await_turn(self) -> None:
        """Wait until earlier calls of the session have enqueued all their work."""
        while not self.watch.session.may_enqueue(self._ticket):
            self.watch.check()
            time.sleep(TURN_PAUSE)

    def end_turn(self) -> None:
        """Let the next call enqueue."""
        self._ticket.enqueues = False

    def add(self, work: Work, peers: Collection[int], what: Callable[[int], str]) -> None:
        """Watch one more exchange; ``what`` describes what a peer is waited for."""
        self._groups.append(work.group)
        self._calls.submit(lambda: self._watch(work, peers, what))

    def wait(self) -> None:
        """Wait until all exchanges have ended, and raise the error of one that failed."""
        self._calls.settle()
        if self.error is not None:
            self.raised = True
            raise self.error

    def fail(self, error: LiveError) -> None:
        """Record that the call has failed, and stop its exchanges."""
        if self.error is None:
            self.error = error
        for group in self._groups:
            group.abort()

    def give_up(self) -> None:
        """Stop the exchanges of a call that raises its error itself."""
        self.raised = True
        cause = self.watch.cause or Cause("error", "a move was aborted")
        error = cause.error("")
        self.fail(error if isinstance(error, LiveError) else LiveError(str(error)))

    @property
    def any(self) -> bool:
        return bool(self._groups)

    def close(self) -> None:
        """Complete the call once the exchanges in flight have ended; no others follow."""

        def complete() -> None:
            self.watch.close()
            if self.error is not None and not self.raised:
                self._calls.unraised.append(self)
            self.complete = True

        self._calls.submit(complete)

    def _watch(self, work: Work, peers: Collection[int], what: Callable[[int], str]) -> None:
        if self.error is not None or _is_done(work):
            return
        self._calls.hurry.wait(PATIENCE)
        if _is_done(work):
            return
        self.watch.poll_seconds = 0.0  # this thread must not slow the caller's down
        try:
            try:
                self._await_begin(work, peers)
                self.watch.wait(self._missing(work, peers), what, FIRST_PAUSE)
            except ReshardError as error:
                self.watch.fail_with(error)
            except Exception as error:  # of CUDA
                self.watch.fail(Cause.of(error, self.watch.connections.rank))
        except Exception as error:
            # The call is marked as failed by now: peers whose streams are released know of it.
            known = error if isinstance(error, LiveError) else LiveError(repr(error))
            self._calls.broken = work.group, known
            self.fail(known)

    def _step(self, peers: Collection[int], pause: float) -> None:
        """Let the mailbox work, and fail if the call has failed, or one of these peers is lost."""
        self.watch.check_lost(peers, lambda peer: "its part")
        self.watch.check()
        self.watch.mailbox.step(pause)

    def _await_begin(self, work: Work, peers: Collection[int]) -> None:
        """Wait until this rank's own GPU has reached the exchange: no peer is late until then."""
        pause = FIRST_PAUSE
        while not work.begun() and not work.group.aborted:
            self._step(peers, pause)
            pause = min(pause * PAUSE_GROWTH, LOOK_EVERY)

    def _missing(self, work: Work, peers: Collection[int]) -> Callable[[], Collection[int]]:
        """A function that gives the peers that an exchange may wait for; none once it is done."""
        watch, suspects, began, asked = self.watch, peers, time.monotonic(), 0.0

        def missing() -> Collection[int]:
            nonlocal suspects, asked
            now = time.monotonic()
            try:
                if work.done():
                    return ()
            except PeerLostError as error:
                # A socket shows which rank is lost, if it is on this host.
                while time.monotonic() < now + NAME_SECONDS:
                    self._step(peers, 0.02)
                watch.fail(Cause("lost", f"{error}: one of {sorted(peers)} is gone"))
            except LiveError as error:
                watch.fail(self._calls.cause_of(work.group, error, watch.connections.rank))
            if now - began > SUSPECT_AFTER and now - asked > SUSPECT_AFTER / 2:
                asked = now
                silent = [peer for peer in peers if watch.waits.record_of(peer) is None]
                suspects = silent or peers
            late = work.late(peers)
            if late is None:
                return suspects
            # Where nothing is missing, only this rank's GPU has to finish: peers may have exited.
            here = [peer for peer in suspects if peer not in watch.mailbox.lost]
            return late or here or suspects

        return missing


def _is_done(work: Work) -> bool:
    try:
        return work.done()
    except Exception:  # also an error of CUDA
        return False  # the wait for it finds out why


class InFlight(Resource):
    """All exchanges in flight of one session, in the order in which they were enqueued."""

    def __init__(self, connections: Connections) -> None:
        self.unraised: list[InFlightCall] = []  # failed calls whose error was not raised yet
        self.broken: tuple[Abortable, LiveError] | None = None
        """What was aborted last, and its error."""
        self.hurry = threading.Event()  # set while a thread waits for work in flight
        self._worker: Worker | None = None

    def submit(self, action: Callable[[], None]) -> None:
        self._worker = self._worker or Worker()
        self._worker.submit(action)

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        if self._worker is None or self._worker.is_current:
            return  # this thread may be the one that collects an unused session
        over = threading.Event()
        self.hurry.set()
        self.submit(over.set)
        over.wait()
        self.hurry.clear()

    def check(self) -> None:
        """Raise the first failure that was not raised yet; later ones follow from it."""
        failed, self.unraised = [one for one in self.unraised if not one.raised], []
        for call in failed:
            call.raised = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def cause_of(self, group: Abortable, error: LiveError, rank: int) -> Cause:
        """Why a group failed: the error of an earlier exchange on it, if there was one."""
        if self.broken is not None and self.broken[0] is group:
            return Cause.of(self.broken[1], rank).of_earlier_call()
        return Cause.of(error, rank)

    def end_threads(self) -> None:
        """Wait until nothing is in flight: peers need this process until then."""
        self.settle()

    def close(self) -> None:
        """End the thread, once nothing is in flight any more."""
        self.settle()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


def check_earlier_calls(watch: Watch) -> None:
    """Fail this call if an earlier one failed on a GPU after it had returned."""
    calls = watch.connections.resources.get(InFlight)
    if calls is not None:
        try:
            calls.check()
        except LiveError as error:
            watch.fail(Cause.of(error, watch.connections.rank).of_earlier_call())
