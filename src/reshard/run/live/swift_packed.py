"""A small move, or a sum: pack, say hello, hear the others' hellos, unpack.

A small message may be read after its sender has gone on: its memory is lent. For a large one the
sender waits until it was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.run.live.arena import Arena
from reshard.run.live.mailbox import Kind
from reshard.run.live.neighbours import is_lent
from reshard.run.live.swift_call import SwiftCall
from reshard.run.live.swift_steps import Addresses, Script

if TYPE_CHECKING:
    from reshard.run.live.session import Ticket
    from reshard.run.live.swift import Swift
    from reshard.run.live.team import Team

__all__ = ["PackedCall"]


class PackedCall(SwiftCall):
    """One call on one rank."""

    def __init__(
        self,
        swift: Swift,
        ticket: Ticket,
        team: Team,
        word: int,
        script: Script,
        addresses: Addresses,
    ) -> None:
        super().__init__(swift, ticket, team, word)
        self.script = script
        self.addresses = addresses
        self.arena: Arena | None = None

    def _greet(self) -> None:
        script, mailbox = self.script, self.team.mailbox
        self.arena = arena = self.team.arenas.take(script.num_bytes) if script.num_bytes else None
        if script.rounds and arena is not None:
            script.rounds[0].pack(self.addresses, arena.address)
        for peer in self.swift.peers:
            at = script.greeting.get(peer)
            about = (0, 0) if at is None or arena is None else (1 + arena.number, at)
            fd = arena.fd_for(peer) if arena and about[0] else None
            self._send(peer, Kind.HELLO, self.word, 0, 0, *about, mailbox.num_over, fd=fd)

    def _exchange(self) -> None:
        for number in range(len(self.script.rounds)):
            self.round = number
            self._round(number)
        self._lend()

    def _round(self, number: int) -> None:
        made, lends = self.script.rounds[number], self.script.lends
        if number:
            self._put(number)
        made.copy(self.addresses)
        self._await_ready(tuple(peer for peer, _, _ in made.receives), number)
        found = {p: self.inbox.address_of(p, number, size) for p, size, _ in made.receives}
        made.unpack(self.addresses, found)
        for peer, size, _ in made.receives:
            if not is_lent(size, lends):
                self._send(peer, Kind.TAKEN, number)
        readers = tuple(peer for peer, _, size in made.sends if not is_lent(size, lends))
        self._await_taken(readers, number)

    def _put(self, number: int) -> None:
        """Pack what this rank passes on, and say so."""
        made, arena = self.script.rounds[number], self.arena
        if arena is None or not made.sends:
            return
        made.pack(self.addresses, arena.address)
        for peer, at, _ in made.sends:
            self._send(peer, Kind.READY, number, arena.number, at, fd=arena.fd_for(peer))

    def _lend(self) -> None:
        """Leave small messages where they are: that they were read, the next hello tells."""
        if self.arena is None:
            return
        lends = self.script.lends
        for made in self.script.rounds:
            for peer, _, size in made.sends:
                if is_lent(size, lends):
                    self.team.mailbox.lend(self.arena, peer, self.number)
        # In this order: after an exception an arena must not be given back and retired.
        arena, self.arena = self.arena, None
        self.team.arenas.give_back(arena)

    def _give_up(self) -> None:
        arena, self.arena = self.arena, None
        if arena is not None:
            self.team.arenas.retire(arena)

    def _done(self) -> int:
        rounds = self.script.rounds[: max(self.round, 0)]
        return sum(size for made in rounds for _, size, _ in made.receives)
