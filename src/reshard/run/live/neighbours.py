"""Exchange with the ranks of this host, through memory alone.

A message is three things at most: what was written straight into the receiver's tensors, what lies
packed in memory that both map, and what the receiver reads straight out of the sender's tensors.
The 64 bytes that say so go over a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.columns import Ints
from reshard.run.live.addresses import (
    MOST_RUNS,
    num_runs,
    own_spot,
    own_views,
    portions,
    their_spot,
)
from reshard.run.live.arena import Arena
from reshard.run.live.copying import Copies, Spot, packed_strides
from reshard.run.live.faults import Watch
from reshard.run.live.holding import Held
from reshard.run.live.links import Link
from reshard.run.live.lots import HAVE, WANT, Lot, Program
from reshard.run.live.mailbox import Kind, Message
from reshard.run.live.memory import Portion, Stretches, pair_up, read_from, write_to
from reshard.run.live.ways import Way

__all__ = ["Neighbours", "Prepared"]


@dataclass(eq=False)
class Prepared:
    """The copies of one message, kept as long as no address changes."""

    pushes: list[Portion] = field(default_factory=list)
    pulls: list[Portion] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    @property
    def weight(self) -> int:
        """About how many objects it keeps."""
        pieces = sum(len(p.own) + len(p.theirs) for p in (*self.pushes, *self.pulls))
        return pieces // 8 + sum(map(len, self.copies))


class Neighbours:
    """This rank's exchange with its host mates, in one call."""

    def __init__(
        self,
        watch: Watch,
        program: Program,
        held: tuple[Held, Held],
        peers: frozenset[int],
        direct: bool,
    ) -> None:
        self.watch = watch
        self.team = watch.team
        self.program = program
        self.held = held
        self.peers = peers
        self.direct = {peer: direct and self.team.links[peer].direct for peer in peers}
        self.table = np.concatenate([side.published for side in held])
        self.stamp = program.stamp(-1, np.concatenate([side.address for side in held]))
        self.tables: dict[int, Ints] = {}
        self.stamps: dict[int, int] = {}
        self.arena: Arena | None = None

    def name(self, peer: int) -> str:
        """How a peer is reached, for the report."""
        return "peer memory" if self.direct[peer] else "shared memory"

    def greet(self) -> None:
        """Say that this rank has entered the call, and where its tensors are."""
        address, count = int(self.table.ctypes.data), len(self.table)
        for peer in self.peers:
            self._send(peer, Kind.HELLO, self.watch.word, address, count)

    def unmet(self) -> list[int]:
        """Peers that have not entered the call."""
        return [peer for peer in self.peers if peer not in self.watch.inbox.hellos]

    def learn(self) -> None:
        """Read where the tensors of peers are, in their own memory."""
        for peer in self.peers:
            if self.direct[peer]:
                self.tables[peer] = self._read_table(peer)
                self.stamps[peer] = self.program.stamp(peer, self.tables[peer])
            else:
                self.stamps[peer] = 0

    def _read_table(self, peer: int) -> Ints:
        hello = self.watch.inbox.hellos[peer]
        table = np.zeros_like(self.table)
        own = Stretches(np.array([table.ctypes.data]), np.array([table.nbytes]))
        theirs = Stretches(np.array([hello.a]), np.array([table.nbytes]))
        for portion in pair_up(own, theirs):
            self._read(peer, portion)
        return table

    def put(self, number: int, sends: dict[int, list[Lot]]) -> int:
        """Write and pack what this rank has for its neighbours, and say so; gives bytes staged."""
        mine = {peer: lots for peer, lots in sends.items() if peer in self.peers}
        sizes = {peer: _packed_bytes(self._ways(peer, lots, True)) for peer, lots in mine.items()}
        total = sum(_aligned(size) for size in sizes.values())
        if total:
            self._have_room(total)
        at = 0
        for peer, lots in mine.items():
            arena = self.arena
            base = 0 if arena is None else arena.address + at
            self._put(number, peer, lots, base)
            self._announce(peer, number, at)
            at += _aligned(sizes[peer])
        return total

    def _put(self, number: int, peer: int, lots: Sequence[Lot], base: int) -> None:
        stamp = (self.stamp, self.stamps[peer], base)
        kept: Prepared | None = self.program.recall((number, peer, 0), stamp)
        fresh = kept is None
        if kept is None:
            kept = Prepared()
        at = base
        for lot, way in self._ways(peer, lots, True):
            if way is Way.PACKED:
                if fresh:
                    into = _packed_spot(lot, at)
                    kept.copies.append(
                        Copies(lot.width, into, own_views(lot.source, lot.width, self.held))
                    )
                at += lot.num_bytes
            elif way is Way.PUSH and fresh:
                own = own_spot(lot.source, self.held[lot.source.side])
                theirs = their_spot(lot.target, self._table(peer, lot.target.side))
                self._direct(kept.pushes, lot, own, theirs, lambda p: self._write(peer, p))
        if fresh:
            self.program.remember((number, peer, 0), stamp, kept, kept.weight)
        for portion in kept.pushes:
            self._write(peer, portion)
        for copies in kept.copies:
            copies.run()

    def expect(self, number: int, receives: dict[int, list[Lot]]) -> int:
        """Neighbours stage on the sender's side: there is nothing to make room for."""
        return 0

    def take(
        self, number: int, peer: int, lots: Sequence[Lot], summed: Callable[[Lot, int], None]
    ) -> None:
        """Read and unpack a neighbour's message; addends are handed on with their address."""
        ready = self.watch.inbox.ready[peer, number]
        arena = self.team.mailbox.arenas.get((peer, ready.a))
        base = 0 if arena is None else arena.address + ready.b
        stamp = (self.stamp, self.stamps[peer], base)
        kept: Prepared | None = self.program.recall((number, peer, 1), stamp)
        fresh = kept is None
        if kept is None:
            kept = Prepared()
        at = base
        for lot, way in self._ways(peer, lots, False):
            if way is Way.PACKED:
                if lot.addend >= 0:
                    summed(lot, at)
                elif fresh:
                    source = _packed_spot(lot, at)
                    kept.copies.append(
                        Copies(lot.width, own_views(lot.target, lot.width, self.held), source)
                    )
                at += lot.num_bytes
            elif way is Way.PULL and fresh:
                own = own_spot(lot.target, self.held[WANT])
                theirs = their_spot(lot.source, self._table(peer, lot.source.side))
                self._direct(kept.pulls, lot, own, theirs, lambda p: self._read(peer, p))
        if fresh:
            self.program.remember((number, peer, 1), stamp, kept, kept.weight)
        for portion in kept.pulls:
            self._read(peer, portion)
        for copies in kept.copies:
            copies.run()

    def taken(self, number: int, peer: int, lots: Sequence[Lot]) -> None:
        """Tell a neighbour that its message was read, if it waits for that."""
        if self._is_answered(peer, lots, False):
            self._send(peer, Kind.TAKEN, number)

    def unread(self, number: int, sends: dict[int, list[Lot]]) -> list[int]:
        """Neighbours that have not yet read this rank's message of a round."""
        taken = self.watch.inbox.taken
        return [
            peer
            for peer, lots in sends.items()
            if peer in self.peers
            and (peer, number) not in taken
            and self._is_answered(peer, lots, True)
        ]

    def _is_answered(self, peer: int, lots: Sequence[Lot], sending: bool) -> bool:
        """Whether a message holds anything that was not written by its sender."""
        return any(way is not Way.PUSH for _, way in self._ways(peer, lots, sending))

    def _ways(self, peer: int, lots: Sequence[Lot], sending: bool) -> list[tuple[Lot, Way]]:
        """How each lot of a message goes; both ends say the same."""
        if not self.direct[peer]:
            return [(lot, Way.PACKED) for lot in lots]
        found = []
        for lot in lots:
            way = lot.way
            if way is not Way.PACKED:
                end = lot.source if way is Way.PULL else lot.target
                owner_is_me = (way is Way.PULL) == sending
                table = self.table if owner_is_me else self.tables[peer]
                if not table[end.tensor + (end.side * self._count)].all():
                    way = Way.PACKED
            found.append((lot, way))
        return found

    def _direct(
        self, kept: list[Portion], lot: Lot, own: Spot, theirs: Spot, act: Callable[[Portion], None]
    ) -> None:
        """List the calls of a lot; of one with very many runs, make them at once instead."""
        if int(num_runs(lot.width, own, theirs).sum()) > MOST_RUNS:
            for portion in portions(lot, own, theirs):
                act(portion)
        else:
            kept.extend(portions(lot, own, theirs))

    def _write(self, peer: int, portion: Portion) -> None:
        link = self._link(peer)
        if link.board.is_closed(self.watch.call):
            self.watch.failed_at(peer)
        try:
            write_to(link.pid, portion)
        except OSError as error:
            self.watch.blame(peer, error, "room to write its part into")

    def _read(self, peer: int, portion: Portion) -> None:
        try:
            read_from(self._link(peer).pid, portion)
        except OSError as error:
            self.watch.blame(peer, error, "its part")

    def _link(self, peer: int) -> Link:
        return self.team.links[peer]

    @property
    def _count(self) -> int:
        """Tensors of the source side: destination tensors follow them in a table."""
        return len(self.held[HAVE].address)

    def _table(self, peer: int, side: int) -> Ints:
        return self.tables[peer][self._count :] if side == WANT else self.tables[peer]

    def _have_room(self, num_bytes: int) -> None:
        if self.arena is not None and self.arena.num_bytes < num_bytes:
            self.team.arenas.give_back(self.arena)
            self.arena = None
        if self.arena is None:
            self.arena = self.team.arenas.take(num_bytes)

    def _announce(self, peer: int, number: int, at: int) -> None:
        arena = self.arena
        if arena is None:
            self._send(peer, Kind.READY, number)
            return
        fd = None if peer in arena.known_to else arena.fd
        arena.known_to.add(peer)
        self._send(peer, Kind.READY, number, arena.number, at, fd)

    def _send(
        self, peer: int, kind: Kind, number: int, a: int = 0, b: int = 0, fd: int | None = None
    ) -> None:
        watch = self.watch
        self.team.mailbox.send(peer, Message(kind, watch.call, watch.digest, number, a, b), fd)

    def close(self) -> None:
        """Give the arena back for the next call."""
        if self.arena is not None:
            self.team.arenas.give_back(self.arena)
            self.arena = None


def _packed_bytes(ways: Sequence[tuple[Lot, Way]]) -> int:
    return sum(lot.num_bytes for lot, way in ways if way is Way.PACKED)


def _aligned(num_bytes: int) -> int:
    """Room for a message such that the next begins where any element may."""
    return -(-num_bytes // 16) * 16


def _packed_spot(lot: Lot, address: int) -> Spot:
    """Where the blocks of a lot lie in a message."""
    return Spot(address + lot.at * lot.stack.itemsize, packed_strides(lot.width), lot.dtype)
