"""Rows of a plan: runs of cells that go from rank to rank, as columns.

What a rank sends to a whole line of ranks is one row of a `Fan`. Others may be described without
being listed, if what ranks send and receive can be added up (`Counted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints
from reshard.planning.cells.geometry import Cells
from reshard.planning.sharing import LineSet, Runs, repeated

__all__ = ["Counted", "Fan", "Mask", "Transfers"]

Mask = NDArray[np.bool_]


class Counted(Protocol):
    """Rows by which ranks send and receive; not all of them need be listed."""

    @property
    def rows(self) -> Transfers:
        """The rows; those to several ranks once, and their destinations do not count."""

    @property
    def last_hop(self) -> int:
        """The hop at which the last of them arrive."""

    @property
    def served(self) -> Ints:
        """To how many ranks each row travels."""

    def sent(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each sends to others, for an amount of each row."""

    def received(self, amounts: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Ranks and how much each gets from others, for an amount of each row."""


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
    def last_hop(self) -> int:
        """The hop at which rows arrive."""
        return self.hop

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

    @cached_property
    def _first_lacking(self) -> Ints:
        """For each kind the first rank of its line that gets rows of it."""
        line = np.zeros(len(self.held.counts), dtype=np.int64)
        line[self.kind] = self.rows.line
        kind = np.repeat(np.arange(len(line)), self.held.counts)
        place = self.wanting.find(line[kind], self.held.members) - self.wanting.first[line[kind]]
        leads = place == np.arange(len(kind)) - self.held.first[kind]
        at = self.wanting.first[line] + np.bincount(kind[leads], minlength=len(line))
        found: Ints = np.append(self.wanting.members, -1)[at]
        return found

    @property
    def last_hop(self) -> int:
        """The hop at which rows arrive."""
        return self.rows.hop

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
        if self.rows.hop:
            yield self.rows.source, -amounts

    @cached_property
    def served(self) -> Ints:
        """How many ranks get each row."""
        served: Ints = self.wanting.counts[self.rows.line] - self.held.counts[self.kind]
        return served - (self.rows.hop > 0)
