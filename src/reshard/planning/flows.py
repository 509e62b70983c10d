"""Who sends what to whom: the cells of a stack become transfers, shared by the ranks that can.

Work is shared over all stacks together. The holders of each line share the sending; then the ranks
that want it share the passing on, the less the more they send already. A *part* is where the slot
of a sender meets the slot of such a rank, its *relay*. The relay gets the part from its sender and
passes it on to all ranks of the line that lack it. Where the relay holds the part itself, or all is
small, the sender serves these ranks directly: a round less. So whoever sends a part to a rank
follows from the part and the rank by arithmetic. With a topology, ``hosts`` has another rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard.layout.columns import Ints, blocks
from reshard.planning.cells.listed import ListedGeometry, listed_geometries
from reshard.planning.cells.regular import RegularGeometry, regular_geometry
from reshard.planning.cells.transfers import AnyRows, Cells, Fan, Transfers, raise_uncovered
from reshard.planning.classes import Stack
from reshard.planning.sharing import Job, LineSet, Loads, Mask, Runs, Slots, repeated, share_slots

Geometry = ListedGeometry | RegularGeometry
Parts = Sequence[tuple[Stack, Geometry]]
AT_ONCE = 1 << 20  # rows of fans that are listed together
SMALL = 64 * 1024  # bytes below which cutting a transfer costs more than it balances
MAX_DIRECT = 256 * 1024
"""Bytes up to which a rank sends copies of the same to all that want it: a round less is worth
more. Where that makes no rank busier than passing on would, it does so with any number of bytes."""

MAX_DIRECT_ROWS = 4096  # rows of a stack of which that is tried out


@dataclass(frozen=True, eq=False)
class Flow:
    """One stack with its cells and the cuts that balancing found."""

    stack: Stack
    geometry: Geometry
    sending: Slots
    receiving: Slots
    unit: int  # cuts fall between whole parts of a cell of at most so many elements
    direct: bool = False  # whether senders serve all that want a line; relays pass nothing on

    @property
    def most(self) -> int:
        return int(self.geometry.wanting.counts.max(initial=0))

    def for_rank(self, rank: int) -> Iterator[Transfers]:
        """Every row that a rank has to do with: sent, received, or copied by itself."""
        yield from self._copies(rank)
        if isinstance(self.geometry, ListedGeometry):
            for rows in self._all_streams:
                yield from rows.of_rank(rank)
            return
        sent = self._cut(self.geometry.cells_of(sender=rank))
        yield sent.take(np.flatnonzero((sent.source == rank) & (sent.destination != rank)))
        parts = self._cut(self.geometry.cells_of(receiver=rank))
        yield parts.take(np.flatnonzero((parts.destination == rank) & (parts.source != rank)))
        if self.most > 1:
            yield from self._passed_on(parts).of_rank(rank)

    def everything(self) -> Iterator[Transfers]:
        """Every row of every rank; some may have one rank on both sides."""
        for rows in self.streams():
            if isinstance(rows, Transfers):
                yield rows
            if isinstance(rows, Fan):
                for some in blocks(rows.wanting.counts[rows.rows.line], AT_ONCE):
                    yield from rows.listed(np.arange(some.start, some.stop))

    def streams(self) -> Iterator[AnyRows]:
        """The same rows, with those that a rank sends to all of a line together."""
        yield from self._all_streams if self.geometry.listed else self._streams()

    @cached_property
    def _all_streams(self) -> list[Transfers | Fan]:
        return [*self._streams()]

    def _streams(self) -> Iterator[Transfers | Fan]:
        if isinstance(self.geometry, RegularGeometry):
            for cells in self.geometry.blocks(AT_ONCE):
                parts = self._cut(cells)
                yield parts
                if self.most > 1:
                    yield self._passed_on(parts)
            return
        parts, kinds = self.parts(), self.geometry.kinds
        if kinds is None:
            wanted = self.accumulated()
            for addend in range(self.geometry.num_addends):
                who = self.geometry.addend_senders(wanted.runs.cell, wanted.destination, addend)
                yield replace(wanted, source=who, addend=addend)
            if self.most > 1 and not self.direct:
                yield self._passed_on(parts)
            return
        kind, holders = kinds.of[parts.runs.cell], kinds.holders
        direct = (holders.find(kind, parts.destination) >= 0) | self.direct
        some, rest = np.flatnonzero(direct), np.flatnonzero(~direct)
        if len(some):
            none = np.full_like(some, -1)
            yield Fan(parts.take(some), self.geometry.wanting, kind[some], holders, none)
        if len(rest):
            parts = parts.take(rest)
            yield parts
            yield replace(self._passed_on(parts), kind=kind[rest], holders=holders)

    def _passed_on(self, parts: Transfers) -> Fan:
        """What relays pass on to ranks that hold none of it."""
        passed, wanting = replace(parts, source=parts.destination, hop=1), self.geometry.wanting
        no_holders = LineSet(0 * wanting.first, wanting.first[:0])
        return Fan(passed, wanting, parts.line, no_holders, passed.source)

    def parts(self) -> Transfers:
        """What every relay is responsible for, of all ranks."""
        return self._all_parts if self.geometry.listed else self._cut(self.geometry.all())

    @cached_property
    def _all_parts(self) -> Transfers:
        return self._cut(self.geometry.all())

    def _copies(self, rank: int) -> Iterator[Transfers]:
        cells = self.geometry.copied_by(rank)
        if len(cells.size):
            here = np.full(len(cells.size), rank, dtype=np.int64)
            runs = Runs.whole(cells.size * len(self.stack.names))
            yield Transfers(cells, runs, here, here, here * 0, here * 0)

    def _cut(self, cells: Cells) -> Transfers:
        """Cut cells where slots of senders begin, then where slots of relays begin.

        Where addends are added up, every holder sends, and only relays' slots count.
        """
        times, unit = len(self.stack.names), cells.units(self.unit)
        runs = Runs.whole(cells.size * times)
        source = np.full(len(runs.cell), -1, dtype=np.int64)
        if not self.stack.adds:
            runs, _, slot = runs.split(self.sending, cells.send_line, cells.send_at * times, unit)
            source = self.sending.ranks[slot]
        lines = cells.receive_line
        runs, old, slot = runs.split(self.receiving, lines, cells.receive_at * times, unit)
        relay, part = self.receiving.ranks[slot], np.arange(len(slot))
        return Transfers(cells, runs, source[old], relay, lines[runs.cell], part)

    def accumulated(self) -> Transfers:
        """The parts in which ranks add up addends: relays, or all that want the value."""
        parts = self.parts()
        if not self.direct:
            return parts
        old, at = repeated(self.geometry.wanting.first, parts.line)
        return replace(parts.take(old), destination=self.geometry.wanting.members[at])


def flows_of(stacks: Sequence[Stack], world: Ints, listed: bool) -> list[Flow]:
    """The flows of all stacks; with ``listed`` all cells are listed, also where a rank could do
    without."""
    parts: list[tuple[Stack, Geometry]] = []
    for stack in stacks:
        regular = None if listed else regular_geometry(stack)
        if regular is not None and not regular.is_covered:
            raise_uncovered(stack)
        parts += [(stack, one) for one in ([regular] if regular else listed_geometries(stack))]
    grain, ranks = grain_of(parts), Loads.none(world)
    slots = [share_plainly(parts, passes, ranks, grain) for passes in (False, True)]
    return _with_direct(
        [
            Flow(stack, geometry, send, receive, max(grain // stack.itemsize, 1))
            for (stack, geometry), send, receive in zip(parts, *slots, strict=True)
        ]
    )


def grain_of(parts: Parts) -> int:
    """The smallest share worth cutting: small next to what a sender has to send anyway."""
    total = sum(int(g.send_amounts.sum()) * len(s.names) * s.itemsize for s, g in parts)
    senders = max((len(g.senders.members) for _, g in parts), default=1)
    return min(max(total // max(senders, 1) // 128, 1), SMALL)


def share_plainly(parts: Parts, passes: bool, ranks: Loads, grain: int) -> list[Slots]:
    """Share the sending, or the passing on, of every line over its ranks."""
    jobs: list[Job] = []
    for stack, geometry in parts:
        lines, some = geometry.receivers if passes else geometry.senders, None
        amounts = geometry.receive_amounts if passes else geometry.send_amounts
        if passes and geometry.kinds is not None:
            some = lacking(geometry, geometry.kinds.holders, geometry.wanting)
        times = lines.counts - 1 if passes else 1
        jobs.append(Job(lines, amounts * len(stack.names), some, stack.itemsize, times))
    return share_slots(jobs, ranks, grain)


def lacking(geometry: Geometry, holders: LineSet, wanting: LineSet) -> Mask:
    """The members of lines that do not hold all of their line; all members where all hold it.

    Given those that hold what they want, by kind, and all that want it: ranks, or hosts.
    """
    assert geometry.kinds is not None
    sizes = np.bincount(geometry.kinds.of, geometry.all().size, len(holders.counts))
    some = np.flatnonzero(sizes[holders.line_of])
    of = holders.line_of[some]
    at = wanting.find(geometry.kinds.receive[of], holders.members[some])
    has = np.bincount(at, sizes[of], len(wanting.members))
    lacks: Mask = has < geometry.receive_amounts[wanting.line_of]
    all_hold: Mask = np.bincount(wanting.line_of, lacks, len(wanting.counts)) == 0
    return lacks | all_hold[wanting.line_of]


def _with_direct(flows: list[Flow]) -> list[Flow]:
    """Let senders serve all that want the same directly, where that is small or makes none busier.

    Addends are passed on as a sum, which is less, unless they are two: then it is the same.
    """
    direct: dict[int, Flow] = {}
    for at, flow in enumerate(flows):
        geometry = flow.geometry
        if geometry.listed and flow.most > 1:
            rows = int(geometry.wanting.counts[flow.parts().line].sum())
            if rows * geometry.num_addends <= MAX_DIRECT_ROWS:
                direct[at] = replace(flow, direct=True)
                if flow.stack.adds:  # all that want the sum add it up: there is nothing to share
                    direct[at] = replace(direct[at], receiving=flow.receiving.undivided())
    sent = {at: _sent(flow) for at, flow in direct.items()}
    small = sum(int(each.max(initial=0)) for each in sent.values()) <= MAX_DIRECT
    for at, flow in direct.items():
        if not small or flow.stack.adds:
            passed_on = _sent(flows[at])
            if sent[at].sum() > passed_on.sum() or sent[at].max() > passed_on.max():
                continue
        flows[at] = flow
    return flows


def _sent(flow: Flow) -> Ints:
    """The bytes that each rank sends."""
    ranks = np.append(flow.geometry.senders.members, flow.geometry.wanting.members)
    total = np.zeros(int(ranks.max(initial=0)) + 1, dtype=np.int64)
    for stream in flow.streams():
        sizes = stream.rows.sizes * flow.stack.itemsize_at(stream.rows.hop)
        np.add.at(total, *stream.sent(sizes))
    return total
