"""Who sends what to whom, for one stack: cells become transfers.

The ranks that want a line share it in slots. A *part* is where the slot of a sender meets the slot
of such a rank, its *relay*. The rule by which a part reaches all ranks that lack it knows hosts;
without a topology every rank is a host of its own:

- The relay gets the part from its sender and passes it on to an entry rank on every other host
  where no rank holds it, and to the other ranks of its own host.
- On a host where some rank holds the part, one of these serves the entry rank.
- An entry rank passes the part on to the other ranks of its host.
- Where a rank of the relay's own host holds the part, or all is small, the sender serves the
  entry ranks directly: a round less.

So a byte enters a host once, and not at all where it is held; and whoever sends a part to a rank
follows from the part and the rank by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import accumulator, itemsize
from reshard.layout.columns import Ints, numbered
from reshard.planning.cells.geometry import Cells, Geometry, Lined
from reshard.planning.classes import Stack
from reshard.planning.sharing import Home, LineSet, Runs, Slots, Stations, repeated

__all__ = ["Fan", "Flow", "Transfers"]

Mask = NDArray[np.bool_]

AT_ONCE = 1 << 20
"""Pairs of parts and hosts that are looked at together."""


@dataclass(frozen=True, eq=False, slots=True)
class Transfers:
    """Rows of a plan for one stack, as columns: which run of which cell goes from whom to whom."""

    cells: Cells
    runs: Runs
    source: Ints
    destination: Ints
    send_line: Ints
    """The line of ranks that hold each row."""
    line: Ints
    """The line of ranks that want each row."""
    part: Ints
    """A number that a row has in common with the rows that pass it on or add to it."""
    hop: int
    """0: from a source rank; 1 or more: passed on by a rank that received it one hop before."""
    addend: int = -1
    """Which addend of a pending reduction the rows carry; -1 where nothing is added up."""
    again: bool = False
    """Whether the sender has sent the same to another rank too, so that it is no first copy."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Ints:
        """Elements of each row."""
        return self.runs.stop - self.runs.start

    def take(self, rows: Ints) -> Transfers:
        """The rows at these places, or where a mask is true."""
        return replace(
            self,
            runs=self.runs.take(rows),
            source=self.source[rows],
            destination=self.destination[rows],
            send_line=self.send_line[rows],
            line=self.line[rows],
            part=self.part[rows],
        )


@dataclass(frozen=True, eq=False)
class Fan:
    """Rows that each go to all ranks of their line that neither send nor hold them."""

    rows: Transfers
    """Their destinations do not count."""
    wanting: LineSet
    kind: Ints
    """Rows of one kind have the same holders and are wanted by the same ranks."""
    first: Ints
    """Where the ranks of each kind that hold what they want begin; one more entry ends the last."""
    held: Ints
    """These ranks, in rising order for each kind."""

    def take(self, rows: Ints) -> Fan:
        """Some of the rows."""
        return replace(self, rows=self.rows.take(rows), kind=self.kind[rows])

    def holds(self, rows: Ints, ranks: Ints) -> Mask:
        """Whether ranks hold rows."""
        return LineSet(self.first[:-1], self.first, self.held).find(self.kind[rows], ranks) >= 0

    @cached_property
    def sends_to_itself(self) -> Mask:
        """Rows whose senders are ranks of the line that do not hold them."""
        inside = self.wanting.find(self.rows.line, self.rows.source) >= 0
        return inside & (self.rows.hop > 0)

    def received(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each gets, for an amount of each row; negative amounts correct others.

        Every member of a line gets all of it, except what it sends itself or holds.
        """
        for ranks, first, number, sign in (
            (self.wanting.members, self.wanting.first, self.rows.line, 1),
            (self.held, self.first, self.kind, -1),
        ):
            total = np.bincount(number, weights=amounts, minlength=len(first) - 1)
            yield ranks, np.repeat(total.astype(np.int64), np.diff(first)) * sign
        mine = np.flatnonzero(self.sends_to_itself)
        yield self.rows.source[mine], -amounts[mine]

    @cached_property
    def served(self) -> Ints:
        """How many ranks get each row."""
        served: Ints = self.wanting.counts[self.rows.line] - np.diff(self.first)[self.kind]
        return served - self.sends_to_itself


@dataclass(frozen=True, eq=False)
class Flow:
    """One stack with its cells and the cuts that balancing found."""

    stack: Stack
    geometry: Geometry
    home: Home
    sending: Slots
    receiving: Slots
    unit: int
    """Cuts fall between whole parts of a cell of at most so many elements."""
    direct: bool = False
    """Whether senders serve all ranks that want a line, so that relays pass nothing on."""

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of one element while addends are added up."""
        return itemsize(accumulator(self.stack.have.dtype))

    @cached_property
    def wanting(self) -> Stations:
        """The ranks that want each line, host by host."""
        return Stations.of(self.geometry.wanting, self.home)

    @cached_property
    def holding(self) -> Stations:
        """The ranks that hold each line of senders, host by host."""
        return Stations.of(self.geometry.senders, self.home)

    @property
    def adds(self) -> bool:
        """Whether addends are added up."""
        return self.geometry.num_addends > 1

    @property
    def most(self) -> int:
        """The most ranks that want a line."""
        return int(self.geometry.wanting.counts.max(initial=0))

    def for_rank(self, rank: int) -> Iterator[Transfers]:
        """Every row that a rank has to do with: sent, received, or copied by itself."""
        yield from self._copies(rank)
        if self.adds:
            yield from self._sums_of(rank)
            return
        if self.geometry.listed:
            parts, pairs = self.parts(), self._pairs_of(self.parts(), rank, True, True)
            yield from self._deliver(parts, *pairs, rank)
            return
        sent, wanted = (
            self._cut(self.geometry.sent_by(rank)),
            self._cut(self.geometry.wanted_by(rank)),
        )
        yield from self._deliver(sent, *self._pairs_of(sent, rank, True, False), rank)
        yield from self._deliver(wanted, *self._pairs_of(wanted, rank, False, True), rank)

    def everything(self) -> Iterator[Transfers]:
        """Every row of every rank; what is added up may have one rank on both sides."""
        parts = self.parts()
        if self.adds:
            yield from self.first_sums()
            yield from () if self.direct else _to_line(parts, self.geometry.wanting, None)
            return
        counts = np.diff(self.wanting.of_line)[parts.line]
        ends = np.cumsum(counts)
        first = 0
        while first < len(parts):
            done = int(ends[first] - counts[first])
            last = max(first + 1, int(np.searchsorted(ends, done + AT_ONCE, side="right")))
            row, station = repeated(self.wanting.of_line, parts.line[first:last])
            yield from self._deliver(parts, row + first, station, None)
            first = last

    def streams(self) -> Iterator[Transfers | Fan]:
        """The same rows, with those that a rank sends to all of a line together, where they are."""
        parts = self.parts()
        if self.adds:
            yield from self.first_sums()
            if not self.direct:
                passed = replace(parts, source=parts.destination, hop=1)
                none = np.zeros(2, np.int64)
                yield Fan(passed, self.geometry.wanting, 0 * parts.line, none, none[:0])
            return
        if self.home is not None:
            yield from self.everything()
            return
        direct = self.is_direct(parts)
        kinds, kind = numbered(parts.send_line * len(self.geometry.wanting.counts) + parts.line)
        lines = np.divmod(kinds, max(len(self.geometry.wanting.counts), 1))
        at, held = self.geometry.senders.common(self.geometry.wanting, *lines)
        first = np.searchsorted(at, np.arange(len(kinds) + 1))
        some, rest = np.flatnonzero(direct), np.flatnonzero(~direct)
        yield parts.take(rest)
        yield Fan(parts.take(some), self.geometry.wanting, kind[some], first, held)
        passed = replace(parts, source=parts.destination, hop=1).take(rest)
        yield Fan(passed, self.geometry.wanting, kind[rest], first, held)

    def parts(self) -> Transfers:
        """What every relay is responsible for, of all ranks."""
        return self._all_parts if self.geometry.listed else self._cut(self.geometry.all())

    @cached_property
    def _all_parts(self) -> Transfers:
        return self._cut(self.geometry.all())

    def _copies(self, rank: int) -> Iterator[Transfers]:
        cells = self.geometry.copied_by(rank)
        here = np.full(len(cells.size), rank, dtype=np.int64)
        runs = Runs.whole(cells.size * len(self.stack.names))
        if len(cells.size):
            yield Transfers(cells, runs, here, here, here * 0, here * 0, here * 0, 0)

    def units(self, cells: Cells, most: int) -> Ints:
        """The largest whole part (a row, a plane, a tensor) of each cell of at most this size."""
        unit = np.ones(len(cells.size), dtype=np.int64)
        block = unit
        for dim in reversed(range(cells.width.shape[1])):
            block = block * cells.width[:, dim]
            unit = np.where(block <= most, block, unit)
        return unit

    def _cut(self, lined: Lined) -> Transfers:
        """Cut cells where slots of senders begin, then where slots of relays begin.

        Where addends are added up, every holder sends, and only relays' slots count.
        """
        times, unit = len(self.stack.names), self.units(lined.cells, self.unit)
        runs = Runs.whole(lined.cells.size * times)
        source = np.full(len(runs.cell), -1, dtype=np.int64)
        if not self.adds:
            runs, _, slot = runs.split(self.sending, lined.send_line, lined.send_at * times, unit)
            source = self.sending.ranks[slot]
        runs, old, slot = runs.split(
            self.receiving, lined.receive_line, lined.receive_at * times, unit
        )
        ends = (lined.send_line[runs.cell], lined.receive_line[runs.cell])
        relay, part = self.receiving.ranks[slot], np.arange(len(slot))
        return Transfers(lined.cells, runs, source[old], relay, *ends, part, 0)

    def hosts_of(self, ranks: Ints) -> Ints:
        """The host of each rank."""
        return ranks if self.home is None else self.home(ranks)

    def is_direct(self, parts: Transfers) -> Mask:
        """Where the sender serves all entry ranks itself."""
        held = self.holding.find(parts.send_line, self.hosts_of(parts.destination)) >= 0
        return held | self.direct

    def _pairs_of(self, parts: Transfers, rank: int, sends: bool, wants: bool) -> tuple[Ints, Ints]:
        """The parts and the stations that a rank has to do with, in the order of the parts."""
        here = self.hosts_of(np.array([rank]))[0]
        rows, stations = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        if wants:
            found = self.wanting.find(parts.line, np.full(len(parts), here))
            rows.append(np.flatnonzero(found >= 0))
            stations.append(found[rows[-1]])
        direct = self.is_direct(parts)
        mine = np.zeros(len(parts), dtype=bool)
        if sends:
            mine |= (parts.source == rank) & direct
            plain = np.flatnonzero((parts.source == rank) & ~direct)
            at = self.wanting.find(parts.line[plain], self.hosts_of(parts.destination[plain]))
            away = np.flatnonzero(self.wanting.host[at] != here)
            rows.append(plain[away])
            stations.append(at[away])
        if wants:
            mine |= (parts.destination == rank) & ~direct
        chosen = np.flatnonzero(mine)
        row, station = repeated(self.wanting.of_line, parts.line[chosen])
        away = np.flatnonzero(self.wanting.host[station] != here)
        rows.append(chosen[row[away]])
        stations.append(station[away])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        return row[order], np.concatenate(stations)[order]

    def _deliver(
        self, parts: Transfers, at: Ints, station: Ints, rank: int | None
    ) -> Iterator[Transfers]:
        """The rows by which parts reach the ranks of stations; those of one rank, if given."""
        if not len(at):
            return
        pair, member = repeated(self.wanting.first, station)
        member = self.wanting.members[member]
        lacks = self.geometry.senders.find(parts.send_line[at][pair], member) < 0
        pair, member = pair[lacks], member[lacks]
        feeder, hop, enters, first = self._feeders(parts, at, station, pair, member)
        entry = np.full(len(at), -1, dtype=np.int64)
        entry[pair[enters]] = member[enters]
        fed = enters | (entry[pair] < 0)
        source = np.where(fed, feeder[pair], entry[pair])
        hop = hop[pair] + ~fed
        again = (hop == 0) & ~first
        mine = np.ones(len(pair), dtype=bool)
        if rank is not None:
            mine = (source == rank) | (member == rank)
        for number in range(3):
            for repeats in (False, True):
                rows = np.flatnonzero(mine & (hop == number) & (again == repeats))
                if len(rows):
                    yield replace(
                        parts.take(at[pair[rows]]),
                        source=source[rows],
                        destination=member[rows],
                        hop=number,
                        again=repeats,
                    )

    def _feeders(
        self, parts: Transfers, at: Ints, station: Ints, pair: Ints, member: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Who sends a part to a station, at which hop; and for every lacking member of it, whether
        it is the entry rank, and whether its copy is the first that leaves a source rank."""
        relay, line, send = parts.destination[at], parts.line[at], parts.send_line[at]
        turn = self.geometry.wanting.find(line, relay) - self.geometry.wanting.first[line]
        own = self.hosts_of(relay) == self.wanting.host[station]
        held = self.holding.find(send, self.wanting.host[station])
        direct = (
            self.is_direct(parts)[at] if len(parts) < len(at) else self.is_direct(parts.take(at))
        )
        count = np.bincount(pair, minlength=len(at))
        place = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
        chosen = place == (turn % np.maximum(count, 1))[pair]
        enters = np.where(own[pair], member == relay[pair], chosen)
        inside = np.maximum(held, 0)
        local = self.holding.members[
            self.holding.first[inside] + turn % self.holding.counts[inside]
        ]
        holds = self.geometry.senders.find(send, relay) >= 0
        local = np.where(own & holds, relay, local)
        outside = np.where(own | direct, parts.source[at], relay)
        feeder = np.where(held >= 0, local, outside)
        hop = np.where((held >= 0) | own | direct, 0, 1)
        begins = station == self._first_needy(parts, at) if direct.any() else own
        once = np.where((own & holds)[pair], place == 0, enters)
        first = np.where(held[pair] >= 0, once, begins[pair])
        return feeder, hop, enters, first

    def _first_needy(self, parts: Transfers, at: Ints) -> Ints:
        """For each part the first station, from its relay's on, where no rank holds it."""
        which, number = numbered(at)
        line, send = parts.line[which], parts.send_line[which]
        begin, end = self.wanting.of_line[line], self.wanting.of_line[line + 1]
        station = self.wanting.find(line, self.hosts_of(parts.destination[which]))
        open_ = np.arange(len(which))
        for _ in range(int((end - begin).max(initial=0))):
            held = self.holding.find(send[open_], self.wanting.host[station[open_]]) >= 0
            open_ = open_[held]
            if not len(open_):
                break
            after = station[open_] + 1
            station[open_] = np.where(after == end[open_], begin[open_], after)
        return station[number]

    def first_sums(self) -> Iterator[Transfers]:
        """Rows from the holders of addends to the ranks that add them up, one list per addend."""
        wanted = self.accumulated()
        for addend in range(self.geometry.num_addends):
            senders = self.geometry.addend_senders(wanted.runs.cell, wanted.destination, addend)
            yield replace(wanted, source=senders, addend=addend)

    def accumulated(self) -> Transfers:
        """The parts in which ranks add up addends: relays, or all that want the value."""
        parts = self.parts()
        return _spread(parts, self.geometry.wanting)[0] if self.direct else parts

    def _sums_of(self, rank: int) -> Iterator[Transfers]:
        parts = self.parts()
        for rows in self.first_sums():
            yield rows.take(np.flatnonzero((rows.source == rank) | (rows.destination == rank)))
        if not self.direct:
            yield from _to_line(parts, self.geometry.wanting, rank)


def _to_line(rows: Transfers, wanting: LineSet, rank: int | None) -> Iterator[Transfers]:
    """Rows from their relays to all other ranks of the line; of one rank only, if given."""
    if rank is not None:
        inside = rows.take(np.flatnonzero(wanting.find(rows.line, np.full(len(rows), rank)) >= 0))
        others = inside.take(np.flatnonzero(inside.destination != rank))
        here = np.full(len(others), rank, dtype=np.int64)
        yield replace(others, source=others.destination, destination=here, hop=rows.hop + 1)
        rows = inside.take(np.flatnonzero(inside.destination == rank))
    sent, old = _spread(rows, wanting)
    sent = replace(sent, source=rows.destination[old], hop=rows.hop + 1)
    yield sent.take(np.flatnonzero(sent.source != sent.destination))


def _spread(rows: Transfers, wanting: LineSet) -> tuple[Transfers, Ints]:
    """Rows once for every rank of their line, and which row each was."""
    old, at = repeated(wanting.first, rows.line)
    return replace(rows.take(old), destination=wanting.members[at]), old
