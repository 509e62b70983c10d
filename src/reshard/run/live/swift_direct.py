"""A large move of one tensor: everything goes straight from tensor to tensor.

Who holds longer stretches of the two is written to, or read from, by the other, as `ways` says. A
peer whose tensor cannot be touched wants or has its message packed: then the ordinary call goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from reshard.columns import Ints
from reshard.run.live import neighbours
from reshard.run.live.addresses import MOST_RUNS, num_runs, route_of
from reshard.run.live.call import Call
from reshard.run.live.holding import Held
from reshard.run.live.lots import HAVE, WANT, Lot, Program
from reshard.run.live.mailbox import Kind
from reshard.run.live.memory import Portion, Route
from reshard.run.live.reach import Reach
from reshard.run.live.report import RunReport
from reshard.run.live.swift_call import SwiftCall
from reshard.run.live.swift_steps import Step, kept_steps, run_steps
from reshard.run.live.ways import Way

if TYPE_CHECKING:
    from reshard.run.live.session import Ticket
    from reshard.run.live.swift import Swift
    from reshard.run.live.team import Team

__all__ = ["Direct", "DirectCall", "direct_of"]

TABLE = struct.Struct("=2q")
"""Where this rank's two tensors begin."""

MOST_BYTES = 512 << 20
"""Of more per rank, what is around the copies does not matter, and a progress bar does."""


Calls = Sequence[tuple[int, Sequence[Portion]]]
"""By peer, the copies between its memory and this rank's."""


@dataclass(eq=False, slots=True)
class Direct:
    """What one rank does."""

    program: Program
    copies: Sequence[Step]
    pushes: Sequence[tuple[int, Route]]
    """Whose tensors this rank writes to."""
    pulls: Sequence[tuple[int, Route]]
    """Whose tensors this rank reads."""
    touched: tuple[int, ...]
    """All of these."""
    writers: tuple[int, ...]
    """Who writes to this rank's."""
    readers: tuple[int, ...]
    """Who reads them."""
    made: tuple[object, tuple[Calls, Calls] | None] = (None, None)
    """The copies of the last call, and where tensors were then."""

    def calls(self, own: bytes, theirs: Sequence[bytes]) -> tuple[Calls, Calls] | None:
        """What is written and what is read, for tensors where these tables say.

        None unless all that another process touches is ordinary memory.
        """
        where, made = (own, theirs), self.made  # another thread may replace it meanwhile
        if made[0] != where:
            tables = dict(zip(self.touched, map(_addresses, theirs), strict=True))
            made = self.made = where, self._calls(_addresses(own), tables)
        return made[1]

    def _calls(self, own: Ints, tables: Mapping[int, Ints]) -> tuple[Calls, Calls] | None:
        found = []
        for mine, theirs, routes in ((HAVE, WANT, self.pushes), (WANT, HAVE, self.pulls)):
            if not all(tables[peer][theirs] for peer, _ in routes):
                return None
            found.append([(p, r.calls_at(own[mine:], tables[p][theirs:])) for p, r in routes])
        return found[0], found[1]


def _addresses(table: bytes) -> Ints:
    return np.frombuffer(table, dtype=np.int64)


def direct_of(program: Program, direct: Iterable[int]) -> Direct | None:
    """What one rank does with peers that can be reached; None if it is another kind of move."""
    if program.num_rounds != 1 or program.num_bytes > MOST_BYTES:
        return None
    made, reached = program.round(0), frozenset(direct)
    sides = (made.sends, made.receives)
    ways = [{peer: _way(lots) for peer, lots in side.items()} for side in sides]
    usable = {Way.PUSH, Way.PULL}
    if not all(peer in reached and way in usable for side in ways for peer, way in side.items()):
        return None
    if not all(lot.as_is for lot in made.copies):
        return None
    sent, got = ways
    # Each begins with another peer: several that write to one get in each other's way.
    turn = sorted(sent, key=lambda peer: (peer < program.rank, peer))
    pushes = [(p, _route(made.sends[p][0], True)) for p in turn if sent[p] is Way.PUSH]
    pulls = [(p, _route(made.receives[p][0], False)) for p, way in got.items() if way is Way.PULL]
    writers = tuple(peer for peer, way in got.items() if way is Way.PUSH)
    readers = tuple(peer for peer, way in sent.items() if way is Way.PULL)
    copies = [step for lot in made.copies for step in kept_steps(lot)]
    touched = tuple(peer for peer, _ in (*pushes, *pulls))
    return Direct(program, copies, pushes, pulls, touched, writers, readers)


def _way(lots: Sequence[Lot]) -> Way:
    """How a message of one lot goes; any other counts as packed."""
    lot = lots[0]
    if len(lots) > 1 or lot.hop or not lot.as_is or lot.num_bytes <= neighbours.SMALL:
        return Way.PACKED
    runs = num_runs(lot.width, lot.source.strides, lot.target.strides)
    return lot.way if int(runs.sum()) <= MOST_RUNS else Way.PACKED


def _route(lot: Lot, pushing: bool) -> Route:
    ends = (lot.source, lot.target) if pushing else (lot.target, lot.source)
    return route_of(lot, *ends, Held(1))


class DirectCall(SwiftCall):
    """One call on one rank."""

    def __init__(
        self,
        swift: Swift,
        ticket: Ticket,
        team: Team,
        word: int,
        direct: Direct,
        tensors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(swift, ticket, team, word)
        self.direct = direct
        self.tensors = tensors
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self.table = TABLE.pack(*self.addresses)
        self.touched = tensors

    def _greet(self) -> None:
        readers, over = self.direct.readers, self.team.mailbox.num_over
        for peer in self.swift.peers:
            # What a peer reads for itself is there from the start.
            early = int(peer in readers)
            self._send(peer, Kind.HELLO, self.word, 0, 2, early, 0, over, text=self.table)

    def _exchange(self) -> None:
        self.round = 0
        direct = self.direct
        reach = Reach(self.team, self.number, self.inbox, lambda: self.watch)
        part = f'its part of "{self.swift.want.name}"'
        calls = direct.calls(self.table, [reach.table(peer, 2) for peer in direct.touched])
        if calls is None:
            self._go_on_slowly()
            return
        pushes, pulls = calls
        for peer, portions in pushes:
            for portion in portions:
                reach.write(peer, portion, part)
        # In a row: between copies, which empty the caches, a message costs twice as much.
        for peer, _ in pushes:
            self._send(peer, Kind.READY, 0)
        run_steps(direct.copies, self.addresses[WANT], self.addresses[HAVE])
        for peer, portions in pulls:
            self._await_ready((peer,), 0)
            for portion in portions:
                reach.read(peer, portion, part)
            self._send(peer, Kind.TAKEN, 0)
        self._await_ready(direct.writers, 0)
        self._await_taken(direct.readers, 0)

    def _go_on_slowly(self) -> None:
        """As any other call, of which the greetings are said."""
        program = self.direct.program
        held = (Held(1), Held(1))
        for side, tensor in zip(held, self.tensors, strict=True):
            side.add(0, tensor)
        peers = frozenset(self.swift.peers)
        carrier = neighbours.Neighbours(self.watch, program, held, peers, "auto")
        carrier.has_greeted(frozenset(self.direct.readers))
        report = RunReport(self.swift.rank, self.number, self.swift.digest.hex())
        terms = self.swift.terms(self.word)
        Call(program, held, self.watch, terms, [carrier], report, lambda *_: None).go_on()

    def _give_up(self) -> None:
        """Nothing is kept but the tensors, which the watch keeps."""

    def _done(self) -> int:
        return 0
