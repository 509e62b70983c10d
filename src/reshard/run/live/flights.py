"""Exchanges between GPUs that the host has not seen the end of, and the thread that watches them.

A move between GPUs only gives work to them. What becomes of it is seen by one thread per team: it
asks every exchange whether it is done, hears of lost peers and failed calls, and keeps the time.
When an exchange fails, the thread aborts the wire, so that no GPU waits for ever, and tells all
ranks of the call. The error is raised by whoever asks first: the handle of the call, the next call
of the team, or `rs.check`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection

from reshard.errors import LiveError, PeerLostError
from reshard.run.live.call import told
from reshard.run.live.cause import Cause
from reshard.run.live.faults import LOOK_EVERY, PAUSE_GROWTH, Watch
from reshard.run.live.nccl import DeviceWire, Exchange

__all__ = ["Flight", "Flights"]

FIRST_PAUSE = 0.0002
"""Seconds after which a new exchange is asked again whether it is done; then ever later."""

SUSPECT_AFTER = 1.2
"""Seconds after which only those are waited for who do not say that they wait, too."""

TELL_SECONDS = 0.3
"""How long NCCL's news of a lost peer waits for the socket's, which knows the name."""


class Flight:
    """The exchanges of one call that are under way."""

    def __init__(self, flights: Flights, watch: Watch, wire: DeviceWire) -> None:
        self._flights = flights
        self.watch = watch
        self.wire = wire
        self.error: LiveError | None = None
        self.landed = threading.Event()
        """Whether all is over, well or badly."""
        self._started = False
        self.raised = False
        """Whether somebody has been told of the error."""

    def add(self, exchange: Exchange, peers: Collection[int], what: Callable[[int], str]) -> None:
        """Watch one more exchange; ``what`` says what a peer is waited for."""
        self._started = True
        self._flights.give(lambda: self._await(_Leg(self.watch, exchange, peers), what))

    def wait(self) -> None:
        """Wait until all exchanges are over, and raise what went wrong."""
        over = threading.Event()
        self._flights.give(over.set)
        over.wait()
        if self.error is not None:
            self.raised = True
            raise self.error

    def fail(self, error: LiveError) -> None:
        """The call has failed: nothing of it is waited for any more."""
        if self.error is None:
            self.error = error
        if self._started:
            self.wire.abort()

    def close(self) -> None:
        """There are no more exchanges; once those under way are over, the call is."""
        self._flights.give(self._land)

    def _land(self) -> None:
        self.watch.close()
        if self.error is not None and not self.raised:
            self._flights.unraised.append(self)
        self.landed.set()

    def _await(self, leg: _Leg, what: Callable[[int], str]) -> None:
        if self.error is not None:
            return
        try:
            with told(self.watch):
                leg.begin()
                self.watch.wait(lambda: leg.missing(self._flights), what, FIRST_PAUSE)
        except Exception as error:
            known = error if isinstance(error, LiveError) else LiveError(repr(error))
            self._flights.broken = self.wire, known
            self.fail(known)


class _Leg:
    """One exchange, and who has to do with it."""

    def __init__(self, watch: Watch, exchange: Exchange, peers: Collection[int]) -> None:
        self._watch = watch
        self._exchange = exchange
        self._peers = peers
        self._began = 0.0
        self._asked = 0.0
        self._suspects = peers

    def begin(self) -> None:
        """Wait until this rank's own GPU has come that far: nobody else is late until then."""
        pause = FIRST_PAUSE
        while not self._exchange.begun() and not self._exchange.wire.aborted:
            self._watch.check_lost(self._peers, lambda peer: "its part")
            self._watch.check()
            self._watch.team.mailbox.step(pause)
            pause = min(pause * PAUSE_GROWTH, LOOK_EVERY)

    def missing(self, flights: Flights) -> Collection[int]:
        """Who may keep the exchange from its end; nobody once it has arrived."""
        now = time.monotonic()
        self._began = self._began or now
        try:
            if self._exchange.done():
                return ()
        except PeerLostError as error:
            self._lost(error)
        except LiveError as error:
            self._watch.fail(flights.cause_of(self._exchange.wire, error))
        if now - self._began > SUSPECT_AFTER and now - self._asked > SUSPECT_AFTER / 2:
            self._asked = now
            self._suspects = self._silent() or self._peers
        return self._suspects

    def _silent(self) -> list[int]:
        """Peers that have not said in the store that they wait as well: they hold it up."""
        return [peer for peer in self._peers if self._watch.waits.waits_for(peer) is None]

    def _lost(self, error: PeerLostError) -> None:
        """A connection broke; who is gone is known from the sockets, if it was on this host."""
        end = time.monotonic() + TELL_SECONDS
        while time.monotonic() < end:
            self._watch.check_lost(self._peers, lambda peer: "its part")
            self._watch.check()
            self._watch.team.mailbox.step(0.02)
        self._watch.fail(Cause("lost", f"{error}: one of {sorted(self._peers)} is gone"))


class Flights:
    """All that is under way in one team, in the order in which it was given to the GPU."""

    def __init__(self) -> None:
        self.unraised: list[Flight] = []
        """Failed calls whose error nobody has seen."""
        self.broken: tuple[DeviceWire, LiveError] | None = None
        """The wire that was aborted last, and why."""
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, task: Callable[[], object]) -> None:
        """Let the watching thread do something after all that it has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="reshard-gpu")
            self._thread.start()
        self._tasks.put(task)

    def begin(self, watch: Watch, wire: DeviceWire) -> Flight:
        """A call that is going to exchange something."""
        return Flight(self, watch, wire)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        if threading.current_thread() is self._thread:
            return  # garbage is collected in any thread, teams among it
        over = threading.Event()
        self.give(over.set)
        over.wait()

    def check(self) -> None:
        """Raise a failure that nobody has seen yet."""
        failed, self.unraised = [one for one in self.unraised if not one.raised], []
        for flight in failed:
            flight.raised = True
        for flight in failed:
            assert flight.error is not None
            raise flight.error

    def cause_of(self, wire: DeviceWire, error: LiveError) -> Cause:
        """Why a wire failed: what befell an exchange before on the same wire, if anything."""
        if self.broken is not None and self.broken[0] is wire:
            return Cause.after(self.broken[1])
        return Cause.of(error)

    def close(self) -> None:
        """Let the thread end."""
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
