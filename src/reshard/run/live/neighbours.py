"""Exchange with the ranks of this host, through memory alone.

A message is three things at most: what was written straight into the receiver's tensors, what lies
packed in memory that both map, and what the receiver reads straight out of the sender's tensors.
The 80 bytes that say so go over a socket. A small message is all packed, before its sender even
says hello: whoever has heard all hellos then has all the data, and nobody waits a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reshard.columns import Ints
from reshard.errors import LiveError
from reshard.run.live.addresses import (
    MOST_RUNS,
    num_runs,
    own_offsets,
    own_views,
    portions,
    route_of,
)
from reshard.run.live.arena import Arena
from reshard.run.live.copying import Copies, Spot, packed_strides
from reshard.run.live.faults import Watch
from reshard.run.live.holding import Held
from reshard.run.live.lots import HAVE, WANT, End, Lot, Program
from reshard.run.live.mailbox import Kind, Message
from reshard.run.live.memory import Route
from reshard.run.live.passage import Passage
from reshard.run.live.reach import Act, Reach, short_table
from reshard.run.live.ways import Way

__all__ = ["Neighbours", "is_lent"]

SMALL = 7 << 19
"""A message of at most so many bytes is packed: one wait less is worth more than one copy."""


def is_lent(size: int, lends: bool) -> bool:
    """Whether a packed message of so many bytes is not waited for, in a program that lends."""
    return lends and size <= SMALL


class Neighbours:
    """This rank's exchange with its host mates, in one call."""

    def __init__(
        self,
        watch: Watch,
        program: Program,
        held: tuple[Held, Held],
        peers: frozenset[int],
        transport: str,
    ) -> None:
        self.watch = watch
        self.team = watch.team
        self.program = program
        self.held = held
        self.peers = peers
        self.forced = transport == "peer"
        """Whether everything that can goes straight, small or not."""
        allowed = transport != "shared"
        self.direct = {peer: allowed and self.team.links[peer].direct for peer in peers}
        self._check_forced()
        self.table = np.concatenate([side.published for side in held])
        self.tables: dict[int, Ints] = {}
        self.arena: Arena | None = None
        self.places: dict[int, int] = {}
        """Where in the arena the message to each peer begins."""
        self._end = 0
        self._known_ways: dict[tuple[int, bool], list[tuple[Lot, Way]]] = {}
        """How the lots of each message of this round go, by peer and whether it is sent."""
        self.early: set[int] = set()
        """Peers that have been given their message of the first round already."""
        self.staged = 0
        self.reach = Reach(self.team, watch.call, watch.inbox, lambda: watch)

    def name(self, peer: int) -> str:
        """How a peer is reached, for the report."""
        return "peer memory" if self.direct[peer] else "shared memory"

    def _check_forced(self) -> None:
        shut = sorted(peer for peer, direct in self.direct.items() if not direct)
        if self.forced and shut:
            raise LiveError(
                f"peer memory was forced and rank {self.team.rank} may not read that of ranks "
                f"{shut}: allow ptrace between them, or leave out transport="
            )

    def greet(self) -> None:
        """Say that this rank has entered the call, where its tensors are, and small things."""
        address, count, told = int(self.table.ctypes.data), len(self.table), short_table(self.table)
        sends = self.program.round(0).sends if self.program.num_rounds else {}
        mine = {peer: lots for peer, lots in sends.items() if peer in self.peers}
        early = {peer: lots for peer, lots in mine.items() if self._is_early(peer, lots)}
        self._make_room(mine, 0)
        self.early = set(early)
        for peer in self.peers:
            arena = at = 0
            if peer in early:
                self._put(0, peer, early[peer])
                arena, at = 1 + self._arena_number(), self.places[peer]
            over = self.team.mailbox.num_over
            more = (self.watch.word, address, count, arena, at, over, self.watch.tag_code)
            fd = self.arena.fd_for(peer) if self.arena is not None and arena > 1 else None
            self._send(peer, Kind.HELLO, *more, fd=fd, text=told)

    def has_greeted(self, early: frozenset[int]) -> None:
        """Go on after greetings that were said elsewhere; early peers have their message."""
        sends = self.program.round(0).sends
        self._make_room({peer: lots for peer, lots in sends.items() if peer in self.peers}, 0)
        self.early = set(early)

    def _is_early(self, peer: int, lots: Sequence[Lot]) -> bool:
        """Whether a message can be made without knowing where the peer's tensors are."""
        return all(
            lot.hop == 0 and self._first_way(peer, lot, lots) is not Way.PUSH for lot in lots
        )

    def unmet(self) -> list[int]:
        """Peers that have not entered the call."""
        return [peer for peer in self.peers if peer not in self.watch.inbox.hellos]

    def learn(self) -> None:
        """Where tensors of peers are is read when it is needed."""

    def _table(self, peer: int) -> Ints:
        """Where the tensors of a peer are: read out of its own memory, once a call."""
        if peer not in self.tables:
            said = self.reach.table(peer, len(self.table))
            self.tables[peer] = np.frombuffer(said, dtype=np.int64)
        return self.tables[peer]

    def put(self, number: int, sends: dict[int, list[Lot]]) -> int:
        """Write and pack what this rank has for its neighbours, and say so; gives bytes staged."""
        mine = {peer: lots for peer, lots in sends.items() if peer in self.peers}
        if number:
            self._known_ways.clear()
            self._make_room(mine, number)
        for peer, lots in mine.items():
            if number or peer not in self.early:
                self._put(number, peer, lots)
                self._announce(number, peer)
        return self.staged

    def _make_room(self, sends: dict[int, list[Lot]], number: int) -> None:
        """Where in the arena each message of a round lies; the arena grows if it must."""
        self.staged = 0
        at = self._end if self.program.lends else 0
        for peer, lots in sends.items():
            packed = [lot for lot in lots if self._may_be_packed(peer, lot, lots)]
            # As much as the widest elements need, and no more: what is staged counts.
            at += -at % max((lot.itemsize for lot in packed), default=1)
            self.places[peer] = at
            at += sum(lot.num_bytes for lot in packed)
        self._end = at
        if self.arena is not None and self.arena.num_bytes < at:
            small, self.arena = self.arena, None
            self.team.arenas.give_back(small)
        if at and self.arena is None:
            rounds = self.program.num_rounds if self.program.lends else 1
            self.arena = self.team.arenas.take(max(at, rounds * self.program.peak_bytes))

    def _may_be_packed(self, peer: int, lot: Lot, lots: Sequence[Lot]) -> bool:
        """Also what is to be pushed, until it is known that the peer's tensor can be written."""
        way = self._first_way(peer, lot, lots)
        return way is not Way.PULL or not self._reaches(peer, lot, way, sending=True)

    def _base(self, peer: int) -> int:
        return 0 if self.arena is None else self.arena.address + self.places[peer]

    def _put(self, number: int, peer: int, lots: Sequence[Lot]) -> None:
        at = self._base(peer)
        for lot, way in self._ways(peer, lots, sending=True):
            if way is Way.PACKED:
                self._pass(lot, at, packing=True)
                self.staged += lot.num_bytes
                at += lot.num_bytes
            elif way is Way.PUSH:
                self._straight(lot, lot.source, lot.target, peer, self.reach.write)

    def _pass(self, lot: Lot, at: int, packing: bool) -> None:
        """Copy a lot into a message, or out of it."""
        end = lot.source if packing else lot.target
        held = self.held[end.side]
        bases = held.address[end.tensor]
        if not bases.all():
            views, message = own_views(end, lot.width, self.held), _in_message(lot, at)
            Copies(lot.width, *((message, views) if packing else (views, message))).run()
            return
        passage: Passage | None = self.program.recall(lot, "packed", held.strided)
        if passage is None:
            tensors, message = own_offsets(end, held), _in_message(lot, 0)
            passage = Passage(lot.width, *((message, tensors) if packing else (tensors, message)))
            self.program.remember(lot, "packed", held.strided, passage, len(passage))
        passage.run(*((at, bases) if packing else (bases, at)))

    def expect(self, number: int, receives: dict[int, list[Lot]]) -> int:
        """Neighbours stage on the sender's side: there is nothing to make room for."""
        return 0

    def take(
        self, number: int, peer: int, lots: Sequence[Lot], summed: Callable[[Lot, int], None]
    ) -> None:
        """Read and unpack a neighbour's message; addends are handed on with their address."""
        at = self._where(peer, number, lots)
        for lot, way in self._ways(peer, lots, sending=False):
            if way is Way.PACKED:
                if lot.addend >= 0:
                    summed(lot, at)
                else:
                    self._pass(lot, at, packing=False)
                at += lot.num_bytes
            elif way is Way.PULL:
                self._straight(lot, lot.target, lot.source, peer, self.reach.read)

    def _where(self, peer: int, number: int, lots: Sequence[Lot]) -> int:
        """The address of what a neighbour has packed for this rank; 0 if it has nothing."""
        ways = self._ways(peer, lots, sending=False)
        size = sum(lot.num_bytes for lot, way in ways if way is Way.PACKED)
        return self.watch.inbox.address_of(peer, number, size) if size else 0

    def _straight(self, lot: Lot, own: End, theirs: End, peer: int, act: Act) -> None:
        """Copy a lot between the tensors of two processes."""
        part = f'its part of "{lot.name}"'
        held, start = self.held[own.side], self._count if theirs.side == WANT else 0
        table = self._table(peer)[start:]
        route: Route | None = self.program.recall(lot, "route", held.strided)
        if route is None:
            runs = num_runs(lot.width, own.strides, theirs.strides)
            if int(runs.sum()) > MOST_RUNS:
                for portion in portions(lot, own, theirs, held, table):
                    act(peer, portion, part)
                return
            route = route_of(lot, own, theirs, held)
            self.program.remember(lot, "route", held.strided, route, len(route) // 4)
        for portion in route.calls(held.address, table):
            act(peer, portion, part)

    def taken(self, number: int, peer: int, lots: Sequence[Lot]) -> None:
        """Tell a neighbour that its message was read, if it waits for that."""
        ways = {way for _, way in self._ways(peer, lots, sending=False)}
        if Way.PULL in ways or (Way.PACKED in ways and not self._is_lent(lots)):
            self._send(peer, Kind.TAKEN, number)

    def unread(self, number: int, sends: dict[int, list[Lot]]) -> list[int]:
        """Neighbours whose reading this rank must wait for: its tensors are read, or much is."""
        taken, found = self.watch.inbox.taken, []
        for peer, lots in sends.items():
            if peer not in self.peers or (peer, number) in taken:
                continue
            ways = {way for _, way in self._ways(peer, lots, sending=True)}
            if Way.PULL in ways or (Way.PACKED in ways and not self._is_lent(lots)):
                found.append(peer)
            elif Way.PACKED in ways and self.arena is not None:
                self.team.mailbox.lend(self.arena, peer, self.watch.call)
        return found

    def _is_lent(self, lots: Sequence[Lot]) -> bool:
        """Whether a packed message may be read after its sender has gone on.

        Not where the receiver has to look up in the sender's memory that it is packed.
        """
        size = sum(lot.num_bytes for lot in lots)
        return is_lent(size, self.program.lends) and not self.forced

    def _first_way(self, peer: int, lot: Lot, lots: Sequence[Lot]) -> Way:
        """How a lot of a message would go if all tensors of both were ordinary memory."""
        if not self.direct[peer] or not lot.as_is:
            return Way.PACKED
        if self.forced:
            return Way.PULL if lot.way is Way.PACKED else lot.way
        small = sum(other.num_bytes for other in lots) <= SMALL
        return Way.PACKED if small else lot.way

    def _ways(self, peer: int, lots: Sequence[Lot], sending: bool) -> list[tuple[Lot, Way]]:
        """How each lot of a message goes; both ends say the same."""
        key = (peer, sending)
        if key not in self._known_ways:
            found = []
            for lot in lots:
                way = self._first_way(peer, lot, lots)
                found.append((lot, way if self._reaches(peer, lot, way, sending) else Way.PACKED))
            self._known_ways[key] = found
        return self._known_ways[key]

    def _reaches(self, peer: int, lot: Lot, way: Way, sending: bool) -> bool:
        """Whether the tensors that another process would touch are ordinary memory."""
        if way is Way.PACKED:
            return True
        end = lot.source if way is Way.PULL else lot.target
        mine = (way is Way.PULL) == sending
        table = self.table if mine else self._table(peer)
        return bool(table[end.tensor + (self._count if end.side == WANT else 0)].all())

    @property
    def _count(self) -> int:
        """Tensors of the source side: destination tensors follow them in a table."""
        return len(self.held[HAVE].address)

    def _announce(self, number: int, peer: int) -> None:
        arena = self._arena_number()
        fd = None if self.arena is None else self.arena.fd_for(peer)
        self._send(peer, Kind.READY, number, arena, self.places[peer], fd=fd)

    def _arena_number(self) -> int:
        return 0 if self.arena is None else self.arena.number

    def _send(
        self, peer: int, kind: Kind, *numbers: int, fd: int | None = None, text: bytes = b""
    ) -> None:
        watch = self.watch
        self.team.mailbox.send(peer, Message(kind, watch.call, watch.digest, *numbers), fd, text)

    def close(self, well: bool) -> None:
        """Keep the arena for the next call; after a failure peers may still read what is in it."""
        arena, self.arena = self.arena, None
        if arena is not None and well:
            self.team.arenas.give_back(arena)
        elif arena is not None:
            self.team.arenas.retire(arena)


def _in_message(lot: Lot, address: int) -> Spot:
    """Where the blocks of a lot lie in a message, of which they begin at an address."""
    return Spot(address + lot.at * lot.itemsize, packed_strides(lot.width), lot.dtype)
