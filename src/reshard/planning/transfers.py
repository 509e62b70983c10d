"""Who sends what to whom, for one stack: cells become transfers.

First-hand transfers are where a sender's slot meets a receiver's. What a rank received it passes on
to the other ranks that want it: to one rank of each further host, and to the ranks of its own line.
Where that makes no sender busier, or all is small, senders serve all of these directly: one round,
not two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard.dtypes import accumulator, itemsize
from reshard.layout.columns import Ints
from reshard.planning.cells.geometry import Cells, Geometry, Lined
from reshard.planning.classes import Stack
from reshard.planning.sharing import LineSet, Runs, Slots

__all__ = ["Flow", "Transfers"]


@dataclass(frozen=True, eq=False, slots=True)
class Transfers:
    """Rows of a plan for one stack, as columns: which run of which cell goes from whom to whom."""

    cells: Cells
    runs: Runs
    source: Ints
    destination: Ints
    line: Ints
    """The line of ranks that share the receiving, by which rows are passed on."""
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
            line=self.line[rows],
            part=self.part[rows],
        )


@dataclass(frozen=True, eq=False)
class Flow:
    """One stack with its cells and the cuts that balancing found."""

    stack: Stack
    geometry: Geometry
    sending: Slots
    receiving: Slots
    relaying: Slots | None
    unit: int
    """Cuts fall between whole parts of a cell of at most so many elements."""
    direct: bool = False
    """Whether senders serve all ranks that want a line, so that receivers pass nothing on."""

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of one element while addends are added up."""
        return itemsize(accumulator(self.stack.have.dtype))

    def for_rank(self, rank: int) -> Iterator[Transfers]:
        """Every row that a rank has to do with: sent, received, or copied by itself."""
        yield from self._copies(rank)
        for rows in self.first_hand(self._parts(self.geometry.sent_by(rank))):
            yield rows.take(np.flatnonzero((rows.source == rank) & (rows.destination != rank)))
        parts = self._parts(self.geometry.wanted_by(rank))
        for rows in self.first_hand(parts):
            yield rows.take(np.flatnonzero(rows.destination == rank))
        yield from self._passed_on(parts, rank)

    def everything(self) -> Iterator[Transfers]:
        """Every row of every rank; what stays on a rank may have that rank on both sides."""
        parts = self.parts()
        yield from self.first_hand(parts)
        yield from self._passed_on(parts, None)

    def parts(self) -> Transfers:
        """What every first receiver receives, of all ranks."""
        return self._all_parts if self.geometry.listed else self._cut(self.geometry.all())

    @cached_property
    def _all_parts(self) -> Transfers:
        return self._cut(self.geometry.all())

    def _parts(self, lined: Lined) -> Transfers:
        """What the first receivers of some cells receive; of listed cells it is always all."""
        return self._all_parts if self.geometry.listed else self._cut(lined)

    def accumulated(self) -> Iterator[Transfers]:
        """The parts in which receivers add up addends, if they do."""
        if self.geometry.num_addends > 1:
            yield self._for_all(self.parts())

    def _for_all(self, parts: Transfers) -> Transfers:
        """What every rank adds up that does: first receivers, or all that want the value."""
        return _spread(parts, self.geometry.wanting)[0] if self.direct else parts

    def _copies(self, rank: int) -> Iterator[Transfers]:
        cells = self.geometry.copied_by(rank)
        here = np.full(len(cells.size), rank, dtype=np.int64)
        runs = Runs.whole(cells.size * len(self.stack.names))
        if len(cells.size):
            yield Transfers(cells, runs, here, here, here, here * 0, 0)

    def units(self, cells: Cells, most: int) -> Ints:
        """The largest whole part (a row, a plane, a tensor) of each cell of at most this size."""
        unit = np.ones(len(cells.size), dtype=np.int64)
        block = unit
        for dim in reversed(range(cells.width.shape[1])):
            block = block * cells.width[:, dim]
            unit = np.where(block <= most, block, unit)
        return unit

    def _cut(self, lined: Lined) -> Transfers:
        """Cut cells where slots of senders begin, then where slots of receivers begin.

        Where addends are added up, every holder sends, and only receivers' slots count.
        """
        times, unit = len(self.stack.names), self.units(lined.cells, self.unit)
        runs = Runs.whole(lined.cells.size * times)
        source = np.full(len(runs.cell), -1, dtype=np.int64)
        if self.geometry.num_addends == 1:
            runs, _, slot = runs.split(self.sending, lined.send_line, lined.send_at * times, unit)
            source = self.sending.ranks[slot]
        runs, old, slot = runs.split(
            self.receiving, lined.receive_line, lined.receive_at * times, unit
        )
        receiver, line = self.receiving.ranks[slot], lined.receive_line[runs.cell]
        return Transfers(lined.cells, runs, source[old], receiver, line, np.arange(len(line)), 0)

    def first_hand(self, parts: Transfers) -> Iterator[Transfers]:
        """Rows from source ranks: one list, or one per addend."""
        if self.geometry.num_addends == 1:
            yield parts
            if self.direct:
                rows, old = _spread(parts, self.geometry.wanting)
                others = np.flatnonzero(rows.destination != parts.destination[old])
                yield replace(rows.take(others), again=True)
            return
        wanted = self._for_all(parts)
        for addend in range(self.geometry.num_addends):
            senders = self.geometry.addend_senders(wanted.runs.cell, wanted.destination, addend)
            yield replace(wanted, source=senders, addend=addend)

    def _passed_on(self, rows: Transfers, rank: int | None) -> Iterator[Transfers]:
        """First receivers to the rest of their line, and to other hosts, which do the same."""
        if self.direct:
            return
        if int(np.diff(self.geometry.wanting.first).max(initial=0)) > 1:
            yield from _to_line(rows, self.geometry.wanting, rank)
        for entered, lines in self.entering(rows):
            mine = (entered.source == rank) | (entered.destination == rank)
            yield entered if rank is None else entered.take(np.flatnonzero(mine))
            yield from _to_line(entered, lines, rank)

    def entering(self, rows: Transfers) -> Iterator[tuple[Transfers, LineSet]]:
        """Rows from first receivers to ranks of other hosts, and the lines of these."""
        relays = self.geometry.relays
        if relays is None:
            return
        for line, parent in enumerate(relays.parent):
            fed = rows.take(np.flatnonzero(rows.line == parent))
            yield self._entering(fed, line), relays.lines

    def _entering(self, rows: Transfers, line: int) -> Transfers:
        """Rows of first receivers cut where slots of another host's ranks begin."""
        assert self.relaying is not None
        lined, times = self.geometry.all(), len(self.stack.names)
        cells = len(lined.cells.size)
        runs, old, slot = rows.runs.split(
            self.relaying,
            np.full(cells, line, dtype=np.int64),
            lined.receive_at * times,
            self.units(lined.cells, self.unit),
        )
        return Transfers(
            rows.cells,
            runs,
            rows.destination[old],
            self.relaying.ranks[slot],
            np.full(len(old), line, dtype=np.int64),
            rows.part[old],
            1,
        )


def _to_line(rows: Transfers, wanting: LineSet, rank: int | None) -> Iterator[Transfers]:
    """Rows from their receivers to all other ranks of the line; of one rank only, if given."""
    if rank is not None:
        inside = rows.take(np.flatnonzero(wanting.has(rank)[rows.line]))
        others = inside.take(np.flatnonzero(inside.destination != rank))
        here = np.full(len(others), rank, dtype=np.int64)
        yield replace(others, source=others.destination, destination=here, hop=rows.hop + 1)
        rows = inside.take(np.flatnonzero(inside.destination == rank))
    sent, old = _spread(rows, wanting)
    sent = replace(sent, source=rows.destination[old], hop=rows.hop + 1)
    yield sent.take(np.flatnonzero(sent.source != sent.destination))


def _spread(rows: Transfers, wanting: LineSet) -> tuple[Transfers, Ints]:
    """Rows once for every rank of their line, and which row each was."""
    counts = np.diff(wanting.first)[rows.line]
    old = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(old)) - np.repeat(np.cumsum(counts) - counts, counts)
    member = wanting.members[wanting.first[rows.line][old] + within]
    return replace(rows.take(old), destination=member), old
