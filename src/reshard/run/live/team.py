"""The ranks of a move that know each other: one store, and sockets between those on one host.

A team is made the first time that a set of ranks of a process group moves anything, and lives as
long as the group. Ranks outside the set have no part in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from reshard.errors import PeerLostError
from reshard.run.live.arena import Arena, Arenas
from reshard.run.live.c10d import PrefixStore, Store, TCPStore, clone_of
from reshard.run.live.cause import Cause
from reshard.run.live.gate import Gate
from reshard.run.live.line import Line
from reshard.run.live.links import Door, Link
from reshard.run.live.mailbox import Kind, Mailbox, Message
from reshard.run.live.meeting import await_keys
from reshard.run.live.turns import Turns
from reshard.run.live.wire import Wire, in_short

if TYPE_CHECKING:
    from reshard.run.live.device_wires import DeviceWires
    from reshard.run.live.faults import Watch

__all__ = ["ASK_SECONDS", "Calls", "Team", "done_key", "outcome_key"]

ASK_SECONDS = 1.0
"""How long the store may take to answer while a call fails, or waits."""

ASK_FOR_SECONDS = 0.2
"""How long the store is asked for keys before whoever waits for them looks up."""

KEPT = 64
"""Calls of which the store still knows which process groups they use."""


Calls = Iterable[tuple[tuple[int, ...], int]]
"""Calls by the ranks of their sessions, and their numbers there."""


def outcome_key(call: int) -> str:
    """The key where it is decided whether a call has connected the session."""
    return f"{call}/outcome"


def done_key(name: str, rank: int) -> str:
    """The key that says that a rank needs the keys of this name no more."""
    return f"{name}/done/{rank}"


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
    skip_calls: Callable[[Calls], None]
    """Counts calls as made that were given up because ranks waited for each other in different
    sessions."""
    first_call: int
    """The call that connected them."""
    caller: Store
    """Our part of the store of the caller's group."""

    def __post_init__(self) -> None:
        sockets = {peer: link.socket for peer, link in self.links.items()}
        self.mailbox = Mailbox(sockets, self.first_call)
        leader, lost = self.leader, self.mailbox.lost
        self.line.has_ended = lambda: leader in lost
        self.arenas = Arenas(self._retire)
        self.turns = Turns()
        self.gpus: DeviceWires | None = None
        """What is kept for moves between GPUs."""
        self._making: dict[int, Gate] = {}
        self._wires: dict[int, Wire] = {}
        """Groups for the network, by epoch."""
        self.last_failed = -1
        """The last call that this rank knows to have failed."""
        self.lock = Gate()
        self.kept: list[object] = []
        """Tensors of failed calls that a stopped process might still write into."""

    def release_for(self, thread: int | None) -> None:
        """A thread has left its call by an exception: others may do what it was at."""
        self.mailbox.release(thread)
        self.arenas.release_for(thread)
        for gate in (self.lock, *tuple(self._making.values())):
            gate.open_for(thread)
        for wire in tuple(self._wires.values()):
            wire.lock.open_for(thread)

    def get(self, key: str) -> bytes | None:
        """What stands in the store; keys that are asked for this way are never deleted."""

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        return self.line.ask(look, ASK_SECONDS)

    @property
    def leader(self) -> int:
        """The rank that serves the store."""
        return self.ranks[0]

    def forget(self, watch: Watch, name: str, keys: Sequence[str]) -> None:
        """Delete keys of the store once every rank has said that it needs them no more.

        The rank that serves the store waits for that: it may be about to leave.
        """
        done = {rank: done_key(name, rank) for rank in self.ranks}
        self.line.ask(lambda store: store.set(done[self.rank], "1"))
        if self.rank != self.leader:
            return
        watch.wait(lambda: self.missing(done), lambda peer: f"it to have read what {watch.move} is")
        used = (*keys, *done.values())
        self.line.ask(lambda store: [store.delete_key(key) for key in used])

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
            making = self._making.setdefault(epoch, Gate())
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
        self.forget(watch, f"{key}/made", [f"{key}/{rank}" for rank in self.ranks])
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
        """Close the network groups of earlier epochs that no call uses; or all, at the end."""
        with self.lock:
            unused = {e for e, wire in self._wires.items() if not wire.num_calls and e < before}
            old = list(self._wires) if before == inf else unused
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
