"""Cells of a stack, and the rows of a plan: runs of cells that go from rank to rank.

A cell is a box inside one box of the source and one box of the destination. The cells of a rank
follow from its own regions by arithmetic (``regular``), or all are worked out once (``listed``).

A row of `Transfers` goes from one rank to another. What a rank sends to a whole line of ranks is
one row of a `Fan`; what the ranks of a line pass on inside their hosts is a `HostFan`. All three
count what ranks send and receive without listing every pair of ranks: ``sent(amounts)`` and
``received(amounts)`` return ranks and amounts, given an amount for each row; ``served`` is the
number of ranks that get each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints, offsets
from reshard.layout.coverage import missing_boxes
from reshard.planning.classes import Stack
from reshard.planning.names import Feed, Segments
from reshard.planning.sharing import LineSet, Mask, Runs, repeated
from reshard.text import count


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Cells as columns; coordinates have one row per cell and one column per dim.

    Positions on lines count elements of one tensor; a stack of T tensors is T times as long.
    """

    have_low: Ints
    want_low: Ints
    width: Ints
    size: Ints  # elements of each cell
    send_line: Ints  # the line of ranks that hold each cell
    send_at: Ints  # how many elements of that line come before each cell
    receive_line: Ints  # the line of ranks that want each cell
    receive_at: Ints  # how many elements of that line come before each cell

    @classmethod
    def none(cls, num_dims: int) -> Cells:
        empty, flat = np.zeros(0, dtype=np.int64), np.zeros((0, num_dims), dtype=np.int64)
        return cls(flat, flat, flat, *[empty] * 5)

    @classmethod
    def chain(cls, parts: Sequence[Cells]) -> Cells:
        columns = ([getattr(part, each.name) for part in parts] for each in fields(cls))
        return cls(*map(np.concatenate, columns))

    def units(self, most: int) -> Ints:
        """The largest whole part (a row, a plane, a tensor) of each cell of at most this size."""
        unit = block = np.ones(len(self.size), dtype=np.int64)
        for width in self.width.T[::-1]:
            block = block * width
            unit = np.where(block <= most, block, unit)
        return unit

    def take(self, rows: Ints) -> Cells:
        return Cells(*(getattr(self, each.name)[rows] for each in fields(self)))

    def box(self, number: int) -> Box:
        """A cell in the destination."""
        low, width = self.want_low[number], self.width[number]
        return Box(tuple(low.tolist()), tuple((low + width).tolist()))


@dataclass(frozen=True, eq=False, slots=True)
class Kinds:
    """Cells of one kind are on the same two lines."""

    of: Ints  # the kind of each cell that travels
    send: Ints  # the line of ranks that hold each kind
    receive: Ints  # the line of ranks that want it
    holders: LineSet  # the ranks of each kind that hold what they want


@dataclass(frozen=True, eq=False, slots=True)
class Transfers:
    """Rows of a plan for one stack, as columns: which run of which cell goes from whom to whom."""

    cells: Cells
    runs: Runs
    source: Ints
    destination: Ints
    line: Ints  # the line of ranks that want each row
    part: Ints  # a number that a row has in common with the rows that pass it on or add to it
    hop: int = 0  # 0: from a source rank; 1 or more: passed on by a rank that got it one hop before
    addend: int = -1  # of a pending reduction, that the rows carry; -1 where nothing is added up
    again: bool = False  # whether the sender has sent the same before: this is no first copy

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Ints:
        return self.runs.stop - self.runs.start

    @property
    def send_line(self) -> Ints:
        """The line of ranks that hold each row."""
        return self.cells.send_line[self.runs.cell]

    def take(self, rows: Ints) -> Transfers:
        ends = (self.source[rows], self.destination[rows], self.line[rows], self.part[rows])
        runs = self.runs.take(rows)
        return Transfers(self.cells, runs, *ends, self.hop, self.addend, self.again)

    def moved(self) -> Transfers:
        """The rows that do not stay on their rank."""
        return self.take(np.flatnonzero(self.source != self.destination))

    def of_rank(self, rank: int) -> Iterator[Transfers]:
        yield self.take(np.flatnonzero((self.source == rank) | (self.destination == rank)))

    @property
    def rows(self) -> Transfers:
        return self

    @property
    def served(self) -> Ints:
        """0 for a row that stays on its rank."""
        served: Ints = (self.source != self.destination).astype(np.int64)
        return served

    def sent(self, amounts: Ints) -> tuple[Ints, Ints]:
        return self.source, amounts * self.served

    def received(self, amounts: Ints) -> tuple[Ints, Ints]:
        return self.destination, amounts * self.served

    def summed(self, amounts: Ints) -> tuple[Ints, Ints, Ints]:
        """Senders, receivers, and how much goes from each to each."""
        return self.source, self.destination, amounts


@dataclass(frozen=True, eq=False)
class Fan:
    """Rows that each go to all ranks of their line that neither send nor hold them.

    A rank that passes rows on is one of their line; a source rank that wants them holds them.
    """

    rows: Transfers  # their destinations do not count
    wanting: LineSet
    kind: Ints  # rows of one kind have the same holders and are wanted by the same ranks
    holders: LineSet  # the ranks of each kind that hold what they want
    left_out: Ints  # a rank of each row's line that it does not go to, or -1

    def take(self, rows: Ints) -> Fan:
        columns = (self.kind[rows], self.holders, self.left_out[rows])
        return Fan(self.rows.take(rows), self.wanting, *columns)

    def of_rank(self, rank: int) -> Iterator[Transfers]:
        """The rows that a rank sends or receives."""
        sent = self.rows.source == rank
        yield from self.listed(np.flatnonzero(sent))
        gets = self.wanting.has(rank)[self.rows.line] & (self.left_out != rank)
        if len(self.holders.members):
            gets &= ~self.holders.has(rank)[self.kind]
        some = np.flatnonzero(gets)
        yield from self._to(some, np.full(len(some), rank))

    def listed(self, rows: Ints) -> Iterator[Transfers]:
        """Some rows once for every rank that gets them."""
        yield from self._to(*self.pairs(rows)) if len(rows) else ()

    def pairs(self, rows: Ints) -> tuple[Ints, Ints]:
        at, member = repeated(self.wanting.first, self.rows.line[rows])
        row, member = rows[at], self.wanting.members[member]
        gets = member != self.left_out[row]
        if len(self.holders.members):
            gets &= self.holders.find(self.kind[row], member) < 0
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
        line = np.zeros(len(self.holders.counts), dtype=np.int64)
        line[self.kind] = self.rows.line
        return line

    @cached_property
    def _first_lacking(self) -> Ints:
        """For each kind the first rank of its line that gets rows of it."""
        line, kind = self.line_of_kind, self.holders.line_of
        place = self.wanting.find(line[kind], self.holders.members) - self.wanting.first[line[kind]]
        leads = place == np.arange(len(kind)) - self.holders.first[kind]
        at = self.wanting.first[line] + np.bincount(kind[leads], minlength=len(line))
        first: Ints = np.append(self.wanting.members, -1)[at]
        return first

    def sent(self, amounts: Ints) -> tuple[Ints, Ints]:
        return self.rows.source, amounts * self.served

    def received(self, amounts: Ints) -> tuple[Ints, Ints]:
        """Ranks and how much each gets; negative amounts correct others.

        Every member of a line gets all of it, except what it sends itself or holds.
        """
        row = np.flatnonzero(self.left_out >= 0)
        wanted, holders = (
            np.repeat(
                np.bincount(number, amounts, len(lines.counts)).astype(np.int64), lines.counts
            )
            for lines, number in ((self.wanting, self.rows.line), (self.holders, self.kind))
        )
        ranks = np.concatenate([self.wanting.members, self.holders.members, self.left_out[row]])
        return ranks, np.concatenate([wanted, -holders, -amounts[row]])

    @cached_property
    def served(self) -> Ints:
        served: Ints = self.wanting.counts[self.rows.line] - self.holders.counts[self.kind]
        return served - (self.left_out >= 0)

    def by_member(self, amounts: Ints | Mask) -> Ints:
        """How much every member of every line gets, for an amount of each row."""
        lines, holders, row = self.wanting, self.holders, np.flatnonzero(self.left_out >= 0)
        total = np.repeat(np.bincount(self.rows.line, amounts, len(lines.counts)), lines.counts)
        kept = np.bincount(self.kind, amounts, len(holders.counts))[holders.line_of]
        total -= np.bincount(self._places[0], kept, len(total))
        total -= np.bincount(self._places[1], amounts[row], len(total))
        return total.astype(np.int64)

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """The entries in lines of ranks that hold rows, and of those left out."""
        holders, row = self.holders, np.flatnonzero(self.left_out >= 0)
        at = self.wanting.find(self.line_of_kind[holders.line_of], holders.members)
        # Kinds of which there are no rows are on no line.
        return np.maximum(at, 0), self.wanting.find(self.rows.line[row], self.left_out[row])


@dataclass(frozen=True, eq=False)
class HostFan:
    """What goes on inside hosts as a fan reaches them: for every member of its lines a rank sends
    what that member gets to others."""

    fan: Fan
    sender: Ints  # one for every member of every line of the fan
    receivers: Ints  # to whom each sends, one row for every member
    hop: int

    @cached_property
    def rows(self) -> Transfers:
        return replace(self.fan.rows, hop=self.hop)

    @cached_property
    def served(self) -> Ints:
        served: Ints = self.fan.served * self.receivers.shape[1]
        return served

    def sent(self, amounts: Ints) -> tuple[Ints, Ints]:
        return self.sender, self.fan.by_member(amounts) * self.receivers.shape[1]

    def received(self, amounts: Ints) -> tuple[Ints, Ints]:
        each = np.repeat(self.fan.by_member(amounts), self.receivers.shape[1])
        return self.receivers.reshape(-1), each

    def summed(self, amounts: Ints) -> tuple[Ints, Ints, Ints]:
        """Senders, receivers, and how much goes from each to each; pairs with nothing are not
        among them, some are there twice."""
        each, times = self.fan.by_member(amounts), self.receivers.shape[1]
        some = np.flatnonzero(each)
        ends = np.repeat(self.sender[some], times), self.receivers[some].reshape(-1)
        return *ends, np.repeat(each[some], times)


AnyRows = Transfers | Fan | HostFan


def raise_uncovered(stack: Stack) -> NoReturn:
    """Find the first wanted box that no source rank holds, and say so."""
    have = listed_of(stack.have.layout, stack.have.shape)
    starts, stops, *_ = in_want_coordinates(have, stack.feed)
    boxes = [Box(tuple(a), tuple(b)) for a, b in zip(starts, stops, strict=True)]
    want = listed_of(stack.want.layout, stack.want.shape)
    moves = stack.feed.moves
    fed = Box(
        tuple(min((start for _, start, _ in runs), default=0) for runs in moves),
        tuple(max((start + length for _, start, length in runs), default=0) for runs in moves),
    )
    for number, edges in enumerate(zip(*with_inserted(want, stack.feed.want_insert), strict=True)):
        box = Box(*map(tuple, edges))
        missing = missing_boxes(box & fed if moves else box, boxes)
        if missing:
            ranks = ", ".join(map(str, want.of(number)[:4]))
            lost = stack.have.layout.words.without
            elements = count(sum(each.size for each in missing), "element")
            hint = f"ranks {list(lost)} are lost" if lost else "let some source rank hold it"
            raise CoverageError(
                f"{stack.label}: destination rank {ranks} wants box {missing[0]} of shape "
                f'{stack.want.shape} and no source rank of "{stack.have.layout}" holds it '
                f"({count(len(missing), 'box', 'boxes')}, {elements} missing): {hint}"
            )
    raise CoverageError(f"{stack.label}: some wanted box has no source; please report this case")


def in_want_coordinates(have: Listed, feed: Feed) -> tuple[Ints, Ints, Ints, Ints]:
    """The source boxes in the destination: starts, stops, how far they moved, and which box."""
    starts, stops = with_inserted(have, feed.have_insert)
    shift, box = np.zeros_like(starts), np.arange(len(starts))
    for dim, runs in enumerate(map(run_columns, feed.moves)):
        low = np.maximum(starts[:, dim, None], runs[:, 0])
        high = np.minimum(stops[:, dim, None], runs[:, 0] + runs[:, 2])
        at, run = np.nonzero(low < high)
        starts, stops, shift, box = starts[at], stops[at], shift[at], box[at]
        shift[:, dim] = (runs[:, 1] - runs[:, 0])[run]
        starts[:, dim], stops[:, dim] = low[at, run] + shift[:, dim], high[at, run] + shift[:, dim]
    return starts, stops, shift, box


def fed_lengths(starts: Ints, stops: Ints, segments: Segments) -> Ints:
    """How much of each interval of a destination dim the runs of a feed fill."""
    runs = run_columns(sorted(segments, key=lambda run: run[1]))
    before, ends = offsets(runs[:, 2]), np.append(0, runs[:, 1] + runs[:, 2])
    counts = [np.searchsorted(runs[:, 1], at, side="right") for at in (starts, stops)]
    low, high = (
        before[num] - np.maximum(ends[num] - at, 0)
        for num, at in zip(counts, (starts, stops), strict=True)
    )
    return high - low


def run_columns(segments: Sequence[tuple[int, int, int]]) -> Ints:
    """The runs of a dim of a feed, one row each: source start, destination start, length."""
    return np.array(segments, dtype=np.int64).reshape(-1, 3)


def with_inserted(boxes: Listed, dims: Sequence[int]) -> tuple[Ints, Ints]:
    """The starts and the stops of boxes, with these dims, of size 1, inserted."""
    return insert_columns(boxes.starts, dims, 0), insert_columns(boxes.stops, dims, 1)


def insert_columns(columns: Ints, at: Sequence[int], value: int) -> Ints:
    for dim in at:
        columns = np.insert(columns, dim, value, axis=1)
    return columns
