"""The ranks of a move that know each other: one store, and sockets between those on one host.

A team is made the first time that a set of ranks of a process group moves anything, and lives as
long as the group. Ranks outside the set have no part in it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from reshard.errors import PeerLostError
from reshard.run.live.arena import Arena, Arenas
from reshard.run.live.c10d import PrefixStore, Store, TCPStore, clone_of
from reshard.run.live.cause import Cause
from reshard.run.live.line import Line
from reshard.run.live.links import Door, Link
from reshard.run.live.mailbox import FAR, Kind, Mailbox, Message
from reshard.run.live.meeting import await_keys
from reshard.run.live.turns import Turns
from reshard.run.live.wire import Wire, in_short

if TYPE_CHECKING:
    from reshard.run.live.device_wires import DeviceWires
    from reshard.run.live.faults import Watch

__all__ = ["ASK_SECONDS", "INTERRUPTED", "Team", "skip_calls"]

INTERRUPTED = "interrupted"
"""The key that says which rank was interrupted last, and in which call."""

ASK_SECONDS = 1.0
"""How long the store may take to answer while a call fails, or waits."""

ASK_FOR_SECONDS = 0.2
"""How long the store is asked for keys before whoever waits for them looks up."""

KEPT = 64
"""Calls of which the store still knows which process groups they use."""


def skip_calls(
    calls: Iterable[tuple[tuple[int, ...], int]], teams: Mapping[tuple[int, ...], Team]
) -> None:
    """Calls, by the ranks of their moves, that were given up because a rank was in another move."""
    for ranks, call in calls:
        if ranks in teams:
            teams[ranks].skip(call)


@dataclass(eq=False)
class Team:
    """This rank's view of its team."""

    rank: int
    ranks: tuple[int, ...]
    store: TCPStore
    line: Line
    """The way to the store."""
    hosts: dict[int, str]
    """The host identity of each rank."""
    door: Door
    links: dict[int, Link]
    """The other ranks of this host."""
    home: Store
    """The store of the caller's group."""
    others: Mapping[tuple[int, ...], Team]
    """The teams of the group, by their ranks."""
    unmade: Callable[[], Cause | None]
    """Why others could not make the team, if they could not."""

    def __post_init__(self) -> None:
        self.mailbox = Mailbox({peer: link.socket for peer, link in self.links.items()})
        leader, lost = self.leader, self.mailbox.lost
        self.line.has_ended = lambda: leader in lost
        self.arenas = Arenas(self._retire)
        self.agreed: set[tuple[bytes, str]] = set()
        """Plans that all ranks have compared or are comparing, by digest and transport."""
        self.routes: dict[tuple[bytes, str], bool] = {}
        """Whether such a plan goes from GPU to GPU, for those that were compared."""
        self.turns = Turns()
        self.gpus: DeviceWires | None = None
        """What is kept for moves between GPUs."""
        self._making: dict[int, threading.Lock] = {}
        self._wires: dict[int, Wire] = {}
        """Groups for the network, by epoch."""
        self.num_calls = 0
        self.last_failed = -1
        """The last call that this rank knows to have failed."""
        self.lock = threading.Lock()
        self.guilty = -1
        """The rank whose interrupt made the last call fail, if that is so."""
        self.kept: list[object] = []
        """Tensors of failed calls that a stopped process might still write into."""

    @property
    def leader(self) -> int:
        """The rank that serves the store."""
        return self.ranks[0]

    def next_call(self) -> int:
        """The number of a call that begins; all ranks count alike."""
        self.line.renew()
        if self.guilty >= 0:
            self._come_back(self.guilty)
        with self.lock:
            self.num_calls += 1
            return self.num_calls - 1

    def note_interrupt(self, call: int) -> None:
        """This rank was interrupted, in a call or after it: others may wait for it in the next."""
        self.guilty = self.rank
        word = json.dumps({"rank": self.rank, "call": call})
        with contextlib.suppress(PeerLostError):
            self.line.ask(lambda store: store.set(INTERRUPTED, word), ASK_SECONDS)

    def _come_back(self, guilty: int) -> None:
        """After an interrupt: ranks that were further gave up the next call because of it as well.

        Whoever has failed with it once does not fail again.
        """
        self.guilty = -1

        def over(store: Store) -> bool:
            key = f"abort/{self.num_calls}"
            cause = Cause.from_json(store.get(key)) if store.check([key]) else None
            return cause is not None and cause.guilty == guilty

        with contextlib.suppress(PeerLostError):
            if guilty == self.rank:
                self.line.ask(lambda store: store.set(INTERRUPTED, "{}"))
            while self.line.ask(over):
                self.skip(self.num_calls)

    def skip(self, call: int) -> None:
        """Others have given up a call that this rank may never make: it counts as made."""
        if call > self.num_calls + FAR:
            return  # nobody can be that far: whoever says so is broken
        with self.lock:
            for skipped in range(self.num_calls, call + 1):
                self.mailbox.open(skipped)
                self.mailbox.close(skipped)
            self.num_calls = max(self.num_calls, call + 1)
            self.last_failed = max(self.last_failed, call)

    def is_new(self, key: tuple[bytes, str]) -> bool:
        """Whether a plan is to be compared: it never was, and no call before is doing so."""
        with self.lock:
            new = key not in self.agreed
            self.agreed.add(key)
            return new

    def forget(self, name: str, keys: Sequence[str], seconds: float) -> None:
        """Delete keys of the store once every rank has said that it needs them no more.

        The rank that serves the store waits for that: it may be about to leave.
        """
        count = int(self.line.ask(lambda store: store.add(name, 1)))
        if self.rank != self.leader:
            return
        end, pause = time.monotonic() + seconds, 0.0002
        while count < len(self.ranks) and time.monotonic() < end and not self.mailbox.lost:
            self.mailbox.step(pause)
            pause = min(pause * 1.5, 0.02)
            count = int(self.line.ask(lambda store: store.add(name, 0)))
        if count == len(self.ranks):
            self.line.ask(lambda store: [store.delete_key(key) for key in (*keys, name)])

    @property
    def spans_hosts(self) -> bool:
        """Whether any two ranks can only talk over the network."""
        return len(set(self.hosts.values())) > 1

    def wire(self, watch: Watch, forced: bool) -> Wire | None:
        """The team's process group for the network, made anew after a failure; None on one host.

        All ranks make it together, also those that have nothing to send. Those from before are kept
        for the calls that are still in flight on them.
        """
        if not (self.spans_hosts or forced):
            return None
        epoch = self.epoch(watch)
        with self.lock:
            making = self._making.setdefault(epoch, threading.Lock())
        with making:
            if epoch not in self._wires:
                self._refuse_old(watch, epoch)
                self._wires[epoch] = self._make_wire(watch, f"wire/{epoch}")
                self.drop_wires(before=epoch)
            return self._wires[epoch]

    def _refuse_old(self, watch: Watch, epoch: int) -> None:
        """Others use connections in this call that this rank has given up."""
        if epoch < max(self._wires, default=0):
            watch.fail(Cause("lost", f"rank {self.rank} gave up its connections in a move before"))

    def _make_wire(self, watch: Watch, key: str) -> Wire:
        self.meet(watch, key, f"it to make a connection for {watch.move}")
        wire = self._connect(watch, PrefixStore(key, clone_of(self.store)))
        self.forget(f"{key}/made", [f"{key}/{rank}" for rank in self.ranks], watch.timeout)
        return wire

    def _connect(self, watch: Watch, store: Store) -> Wire:
        """Let a thread connect: gloo hears of nobody's death meanwhile, and goes on trying."""
        made: Future[Wire] = Future()

        def connect() -> None:
            try:
                index, size = self.ranks.index(self.rank), len(self.ranks)
                made.set_result(Wire(store, index, size, watch.timeout))
            except BaseException as error:
                made.set_exception(error)
            self.mailbox.wake()

        threading.Thread(target=connect, daemon=True, name="reshard-connect").start()
        others = frozenset(self.ranks) - {self.rank}
        watch.wait(
            lambda: () if made.done() else others, lambda peer: f"it to connect for {watch.move}"
        )
        try:
            return made.result()
        except RuntimeError as error:
            reason = in_short(error)
            watch.fail(Cause("lost", f"rank {self.rank} cannot connect to all others ({reason})"))

    def meet(self, watch: Watch, key: str, what: str) -> None:
        """Wait in the store for all ranks; the key is of this meeting alone."""
        self.line.ask(lambda store: store.set(f"{key}/{self.rank}", "here"))
        keys = {rank: f"{key}/{rank}" for rank in self.ranks}
        watch.wait(lambda: self.missing(keys), lambda peer: what)

    def missing(self, keys: Mapping[int, str]) -> list[int]:
        """The ranks whose keys are not in the store; waits a moment for them."""
        left = set(await_keys(self.line, keys.values(), ASK_FOR_SECONDS))
        return [rank for rank, key in keys.items() if key in left]

    def epoch(self, watch: Watch) -> int:
        """Which process groups a call uses: those made after the last failure, or to be made.

        A failure may become known to some ranks before they come this far, and to others only
        after. So the first to come decides, for all ranks of the call.
        """
        call, leads = watch.call, self.rank == self.leader

        def decide(store: Store) -> tuple[int, bytes | None]:
            decided: Any = store.compare_set(f"epoch/{call}", "", str(store.add("epoch", 0)))
            if leads:
                store.delete_key(f"epoch/{call - KEPT}")
            failed = f"abort/{call}"
            return int(decided), store.get(failed) if store.check([failed]) else None

        try:
            found, failed = self.line.ask(decide)
        except PeerLostError:  # who serves the store may have left, all done
            return max(self._wires, default=0)
        if failed is not None:
            watch.fail(Cause.from_json(failed))
        return found

    def drop_wires(self, before: float = inf) -> None:
        """Throw network groups away that no call uses."""
        with self.lock:
            old = [e for e, wire in self._wires.items() if e < before and not wire.num_calls]
            wires = [self._wires.pop(epoch) for epoch in old]
        for wire in wires:
            wire.close()

    def _retire(self, arena: Arena) -> None:
        for peer in arena.known_to:
            self.mailbox.send(peer, Message(Kind.GONE, 0, b"", a=arena.number))
        arena.close()

    def end_threads(self) -> None:
        """Let all threads end that wait for something to do."""
        self.drop_wires()
        self.line.close()

    def close(self) -> None:
        """Close sockets and free memory."""
        if self.gpus is not None:
            self.gpus.close()
        self.mailbox.shut()
        self.arenas.release()
        self.end_threads()
