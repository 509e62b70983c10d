"""Rows of a plan: runs of cells that go from rank to rank, as columns.

What a rank sends to a whole line of ranks is one row of a `Fan`; what the ranks of a line pass on
inside their hosts is a `HostFan`. All three give what ranks send and receive, for any amount of
each row, without listing every pair of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints
from reshard.planning.cells.geometry import Cells
from reshard.planning.sharing import LineSet, Runs, repeated

__all__ = ["AnyRows", "Fan", "HostFan", "Mask", "Transfers"]

Mask = NDArray[np.bool_]


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
        """The rows at these places."""
        return Transfers(
            self.cells,
            self.runs.take(rows),
            self.source[rows],
            self.destination[rows],
            self.send_line[rows],
            self.line[rows],
            self.part[rows],
            self.hop,
            self.addend,
            self.again,
        )

    def of_rank(self, rank: int) -> Iterator[Transfers]:
        """The rows that a rank sends or receives."""
        yield self.take(np.flatnonzero((self.source == rank) | (self.destination == rank)))

    @property
    def rows(self) -> Transfers:
        """All of them."""
        return self

    @property
    def served(self) -> Ints:
        """To how many ranks each row travels: 0 where it stays on its rank."""
        served: Ints = (self.source != self.destination).astype(np.int64)
        return served

    def sent(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each sends to others, for an amount of each row."""
        yield self.source, amounts * self.served

    def received(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each gets from others, for an amount of each row."""
        yield self.destination, amounts * self.served

    def summed(self, amounts: Ints) -> tuple[Ints, Ints, Ints]:
        """Senders, receivers, and how much goes from each to each."""
        return self.source, self.destination, amounts


@dataclass(frozen=True, eq=False)
class Fan:
    """Rows that each go to all ranks of their line that neither send nor hold them.

    A rank that passes rows on is one of their line; a source rank that wants them holds them.
    """

    rows: Transfers
    """Their destinations do not count."""
    wanting: LineSet
    kind: Ints
    """Rows of one kind have the same holders and are wanted by the same ranks."""
    held: LineSet
    """The ranks of each kind that hold what they want."""
    apart: bool = False
    """Whether ranks that pass on are not of the lines that they serve, as between hosts."""

    @property
    def by_members(self) -> bool:
        """Whether a sender is one of the line that it serves."""
        return self.rows.hop > 0 and not self.apart

    def take(self, rows: Ints) -> Fan:
        """Some of the rows."""
        return replace(self, rows=self.rows.take(rows), kind=self.kind[rows])

    def of_rank(self, rank: int) -> Iterator[Transfers]:
        """The rows that a rank sends or receives."""
        sent = self.rows.source == rank
        yield from self.listed(np.flatnonzero(sent))
        gets = self.wanting.has(rank)[self.rows.line] & ~sent
        if len(self.held.members):
            gets &= ~self.held.has(rank)[self.kind]
        some = np.flatnonzero(gets)
        yield from self._to(some, np.full(len(some), rank))

    def listed(self, rows: Ints) -> Iterator[Transfers]:
        """Some rows once for every rank that gets them."""
        if len(rows):
            yield from self._to(*self.pairs(rows))

    def pairs(self, rows: Ints) -> tuple[Ints, Ints]:
        """Some rows, each with every rank that gets it."""
        at, member = repeated(self.wanting.first, self.rows.line[rows])
        row, member = rows[at], self.wanting.members[member]
        gets = member != self.rows.source[row]
        if len(self.held.members):
            gets &= self.held.find(self.kind[row], member) < 0
        return row[gets], member[gets]

    def _to(self, row: Ints, member: Ints) -> Iterator[Transfers]:
        """Rows to these ranks; where source ranks send several copies, first ones come first."""
        sent = replace(self.rows.take(row), destination=member)
        if self.rows.hop:
            yield sent
            return
        first = member == self._first_lacking[self.kind[row]]
        for again in (False, True):
            yield replace(sent.take(np.flatnonzero(first != again)), again=again)

    @property
    def line_of_kind(self) -> Ints:
        """The line that wants each kind."""
        line = np.zeros(len(self.held.counts), dtype=np.int64)
        line[self.kind] = self.rows.line
        return line

    @cached_property
    def _first_lacking(self) -> Ints:
        """For each kind the first rank of its line that gets rows of it."""
        line, kind = self.line_of_kind, self.held.line_of
        place = self.wanting.find(line[kind], self.held.members) - self.wanting.first[line[kind]]
        leads = place == np.arange(len(kind)) - self.held.first[kind]
        at = self.wanting.first[line] + np.bincount(kind[leads], minlength=len(line))
        found: Ints = np.append(self.wanting.members, -1)[at]
        return found

    def sent(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each sends, for an amount of each row."""
        yield self.rows.source, amounts * self.served

    def received(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each gets, for an amount of each row; negative amounts correct others.

        Every member of a line gets all of it, except what it sends itself or holds.
        """
        for lines, number, sign in ((self.wanting, self.rows.line, 1), (self.held, self.kind, -1)):
            if len(lines.members):
                total = np.bincount(number, weights=amounts, minlength=len(lines.counts))
                yield lines.members, np.repeat(total.astype(np.int64), lines.counts) * sign
        if self.by_members:
            yield self.rows.source, -amounts

    @cached_property
    def served(self) -> Ints:
        """How many ranks get each row."""
        served: Ints = self.wanting.counts[self.rows.line] - self.held.counts[self.kind]
        return served - self.by_members


@dataclass(frozen=True, eq=False)
class HostFan:
    """What the ranks that rows of a fan go to pass on, each to the other ranks of its host."""

    fan: Fan
    others: Ints
    """These other ranks, one row for every member of every line of the fan."""

    @cached_property
    def rows(self) -> Transfers:
        """The rows of the fan, one hop later."""
        return replace(self.fan.rows, hop=self.fan.rows.hop + 1)

    @cached_property
    def served(self) -> Ints:
        """How many ranks get each row."""
        served: Ints = self.fan.served * self.others.shape[1]
        return served

    def entering(self, amounts: Ints | Mask) -> Ints:
        """How much every member of every line gets from the fan, for an amount of each row."""
        lines, held = self.fan.wanting, self.fan.held
        total = np.bincount(self.fan.rows.line, amounts, len(lines.counts))
        kept = np.bincount(self.fan.kind, amounts, len(held.counts))[held.line_of]
        less = np.bincount(self._held_at, kept, len(lines.members))
        found: Ints = (np.repeat(total, lines.counts) - less).astype(np.int64)
        return found

    @cached_property
    def _held_at(self) -> Ints:
        """Where ranks that hold what they want stand among the members of lines."""
        held = self.fan.held
        return self.fan.wanting.find(self.fan.line_of_kind[held.line_of], held.members)

    def sent(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each sends, for an amount of each row."""
        yield self.fan.wanting.members, self.entering(amounts) * self.others.shape[1]

    def received(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each gets, for an amount of each row."""
        yield self.others.reshape(-1), np.repeat(self.entering(amounts), self.others.shape[1])

    def summed(self, amounts: Ints) -> tuple[Ints, Ints, Ints]:
        """Senders, receivers, and how much goes from each to each; pairs with nothing are not
        among them, some are there twice."""
        entering, times = self.entering(amounts), self.others.shape[1]
        some = np.flatnonzero(entering)
        ends = np.repeat(self.fan.wanting.members[some], times), self.others[some].reshape(-1)
        return *ends, np.repeat(entering[some], times)


AnyRows = Transfers | Fan | HostFan
