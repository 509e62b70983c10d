"""A large move of one tensor: everything goes straight from tensor to tensor.

Who holds longer stretches of the two is written to, or read from, by the other, as `ways` says. A
peer whose tensor cannot be touched wants or has its message packed: then the ordinary call goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from reshard.run.live.memory import Route
from reshard.run.live.reach import Reach
from reshard.run.live.report import RunReport
from reshard.run.live.swift_call import SwiftCall
from reshard.run.live.swift_steps import Step, kept_steps, run_steps
from reshard.run.live.ways import Way

if TYPE_CHECKING:
    from reshard.run.live.swift import Swift
    from reshard.run.live.team import Team

__all__ = ["Direct", "DirectCall", "direct_of"]

MOST_BYTES = 512 << 20
"""Of more per rank, what is around the copies does not matter, and a progress bar does."""


@dataclass(frozen=True, eq=False, slots=True)
class Direct:
    """What one rank does."""

    program: Program
    copies: Sequence[Step]
    pushes: Sequence[tuple[int, Route]]
    """Whose tensors this rank writes to."""
    pulls: Sequence[tuple[int, Route]]
    """Whose tensors this rank reads."""
    writers: tuple[int, ...]
    """Who writes to this rank's."""
    readers: tuple[int, ...]
    """Who reads them."""

    def is_reachable(self, own: Ints, tables: dict[int, Ints]) -> bool:
        """Whether all tensors that another process touches are ordinary memory."""
        wants = all(tables[peer][WANT] for peer, _ in self.pushes)
        return wants and all(tables[peer][HAVE] for peer, _ in self.pulls)


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
    pushes = [(p, _route(made.sends[p][0], True)) for p, way in sent.items() if way is Way.PUSH]
    pulls = [(p, _route(made.receives[p][0], False)) for p, way in got.items() if way is Way.PULL]
    writers = tuple(peer for peer, way in got.items() if way is Way.PUSH)
    readers = tuple(peer for peer, way in sent.items() if way is Way.PULL)
    copies = [step for lot in made.copies for step in kept_steps(lot)]
    return Direct(program, copies, pushes, pulls, writers, readers)


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
        team: Team,
        word: int,
        direct: Direct,
        tensors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(swift, team, word)
        self.direct = direct
        self.tensors = tensors
        self.table = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        # Others may write into these until they know that the call has failed.
        self.watch.touched = (tensors, self.table)

    def _greet(self) -> None:
        address, over = int(self.table.ctypes.data), self.team.mailbox.num_over
        for peer in self.swift.peers:
            # What a peer reads for itself is there from the start.
            early = int(peer in self.direct.readers)
            self._send(peer, Kind.HELLO, self.word, address, len(self.table), early, 0, over)

    def _exchange(self) -> None:
        self.watch.has_met()
        self.round = 0
        direct, reach = self.direct, Reach(self.watch)
        touched = [peer for peer, _ in (*direct.pushes, *direct.pulls)]
        tables = {peer: reach.table(peer, len(self.table)) for peer in touched}
        if not direct.is_reachable(self.table, tables):
            self._go_on_slowly()
            return
        own, part = self.table, f'its part of "{self.swift.want.name}"'
        for peer, route in direct.pushes:
            for portion in route.calls(own[HAVE:], tables[peer][WANT:]):
                reach.write(peer, portion, part)
            self._send(peer, Kind.READY, 0)
        run_steps(direct.copies, int(own[WANT]), int(own[HAVE]))
        for peer, route in direct.pulls:
            self._await_ready((peer,), 0)
            for portion in route.calls(own[WANT:], tables[peer][HAVE:]):
                reach.read(peer, portion, part)
            self._send(peer, Kind.TAKEN, 0)
        self._await_ready(direct.writers, 0)
        self._await_taken()

    def _await_taken(self) -> None:
        """Wait until those who read this rank's tensor have read it."""
        taken, readers = self.inbox.taken, self.direct.readers

        def missing() -> list[int]:
            return [peer for peer in readers if (peer, 0) not in taken]

        what = f'it to take its part of "{self.swift.want.name}" in {self._which()}'
        self._wait(missing, lambda: self.watch.wait(missing, lambda peer: what))

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
