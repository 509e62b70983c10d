"""List all cells of a stack, by who holds them and who wants them.

Boxes with the same holders form a line that these share when they send; boxes that the same ranks
want form a line that these share when they receive. A cell is on one line of each kind. Cells that
all ranks of the second line hold do not travel. The work grows with the number of cells and of
ranks, not with pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints, distinct, numbered, offsets
from reshard.layout.coverage import overlapping_pairs
from reshard.layout.grid import addend_of
from reshard.layout.spec import TensorSpec
from reshard.planning.cells.transfers import (
    Cells,
    Kinds,
    Lined,
    check_coverage,
    in_want_coordinates,
    insert_columns,
)
from reshard.planning.classes import Addends, Stack, addends_of
from reshard.planning.sharing import LineSet, repeated

__all__ = ["Home", "HostLines", "ListedGeometry", "Stations", "before", "listed_geometries"]


def listed_geometries(stack: Stack) -> list[ListedGeometry]:
    """The listed geometry of a stack, or one per addend that the destination keeps."""
    if stack.have.layout.reduce is None:
        return [_Builder(stack, _of_addends(stack.have), _of_addends(stack.want), None).build()]
    found = []
    for addends in addends_of(stack):
        kept = None if addends.want is None else (addends.want,)
        have, want = _of_addends(stack.have, addends.have), _of_addends(stack.want, kept)
        found.append(_Builder(stack, have, want, addends).build())
    return found


def _of_addends(spec: TensorSpec, chosen: Sequence[int] | None = None) -> Listed:
    """The boxes of a spec, with only the holders of these addends."""
    listed = listed_of(spec.layout, spec.shape)
    if chosen is None:
        return listed
    addend = addend_of(spec.layout)
    kept = np.array([addend[int(rank)] in chosen for rank in listed.holders], dtype=bool)
    counts = np.diff(offsets(kept)[listed.first])
    some = np.flatnonzero(counts)
    first = offsets(counts[some])
    return Listed(listed.starts[some], listed.stops[some], first, listed.holders[kept])


def _lines_of(listed: Listed) -> tuple[Ints, LineSet]:
    """The number of the set of ranks that holds each box, and the sets, in order of appearance."""
    counts = np.diff(listed.first)
    seen = np.empty(len(counts), dtype=np.int64)
    for num in distinct(counts).tolist():
        boxes = np.flatnonzero(counts == num)
        ranks = listed.holders[listed.first[boxes][:, None] + np.arange(num)]
        keys = ranks[:, 0] if num == 1 else ranks.view(f"S{8 * num}")[:, 0]
        order = np.argsort(keys, kind="stable")
        new = np.ones(len(order), dtype=bool)
        new[1:] = keys[order][1:] != keys[order][:-1]
        # Sets are told apart by the first box that has them.
        seen[boxes[order]] = boxes[order][new][np.cumsum(new) - 1]
    firsts, number = numbered(seen)
    return number, LineSet.plain(listed.first, listed.holders).take(firsts)


@dataclass(frozen=True, eq=False)
class ListedGeometry:
    """All cells of a stack and their lines, as columns."""

    cells: Lined
    senders: LineSet
    """The ranks that share the sending of each line."""
    receivers: LineSet
    """The ranks that share each line; those that add up addends, where there are any."""
    wanting: LineSet
    """The ranks that want each line; some may hold parts of it."""
    copies: tuple[Cells, Ints]
    """Cells that some rank both holds and wants, once per such rank, and these ranks."""
    wanted: int
    """Elements of one tensor that ranks want, once per such rank."""
    kinds: Kinds | None = None
    """Who holds what it wants; None where addends are added up."""
    addends: tuple[int, ...] = ()
    """Which addends of the source these are; none where nothing is added up."""
    addend_holders: tuple[Ints, ...] = ()
    listed = True

    @property
    def num_addends(self) -> int:
        """How many addends make a value; 1 where nothing is added up."""
        return max(len(self.addend_holders), 1)

    def all(self) -> Lined:
        """All cells that travel."""
        return self.cells

    def copied_by(self, rank: int) -> Cells:
        """The cells that a rank both holds and wants."""
        return _take(self.copies[0], np.flatnonzero(self.copies[1] == rank))

    def copied_elements(self) -> tuple[Ints, Ints]:
        """Ranks that hold what they want, and how many elements of it."""
        return self.copies[1], self.copies[0].size

    def num_cells(self) -> int:
        """How many cells there are."""
        return len(self.cells.cells.size)

    def wanted_elements(self) -> int:
        """Elements of one tensor that ranks want, once per such rank."""
        return self.wanted

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """Who sends an addend of a cell to a receiver: itself if it holds it, else all in turn."""
        holders = self.addend_holders[addend][self.cells.cells.have_region[cells]]
        rows = np.arange(len(cells))
        in_turn = holders[rows, rows % np.maximum((holders >= 0).sum(axis=1), 1)]
        own = (holders == receivers[:, None]).any(axis=1)
        found: Ints = np.where(own, receivers, in_turn)
        return found


class _Builder:
    """Joins the boxes of both sides and puts the cells on lines."""

    def __init__(self, stack: Stack, have: Listed, want: Listed, addends: Addends | None) -> None:
        self.stack, self.have, self.want = stack, have, want
        self.addends = addends if addends and len(addends.have) > 1 else None

    def build(self) -> ListedGeometry:
        """Everything about a stack, worked out once."""
        cells = self._cells()
        check_coverage(self.stack, self.want, cells)
        (have_set, holding), (want_set, wanting) = _lines_of(self.have), _lines_of(self.want)
        send, receive = have_set[cells.have_region], want_set[cells.want_region]
        kinds, kind = numbered(send * len(wanting.counts) + receive)
        ends = np.divmod(kinds, max(len(wanting.counts), 1))
        at, rank = holding.common(wanting, *ends)
        if self.addends is not None:
            return self._summed(cells, kind, holding, wanting, ends, (at, rank))
        held = LineSet.plain(np.searchsorted(at, np.arange(len(kinds) + 1)), rank)
        lacking = held.counts < wanting.counts[ends[1]]
        copied, copier = repeated(held.first, kind)
        wanted = int(cells.size @ wanting.counts[receive])
        chosen = np.flatnonzero(lacking[kind])
        moved, send, receive = _take(cells, chosen), send[chosen], receive[chosen]
        lined = Lined(
            moved,
            send,
            before(send, moved.size, len(holding.counts)),
            receive,
            before(receive, moved.size, len(wanting.counts)),
        )
        wanting = _amounting(wanting, receive, moved.size)
        senders = _amounting(holding, send, moved.size)
        copies = _take(cells, copied), rank[copier]
        sets = Kinds(kind[chosen], *ends, held)
        return ListedGeometry(lined, senders, wanting, wanting, copies, wanted, sets)

    def _summed(
        self,
        cells: Cells,
        kind: Ints,
        holding: LineSet,
        wanting: LineSet,
        ends: tuple[Ints, ...],
        common: tuple[Ints, Ints],
    ) -> ListedGeometry:
        """Addends are added up by ranks that want the value, if possible by some that have one."""
        assert self.addends is not None
        at, rank = common
        first = np.searchsorted(at, np.arange(len(ends[0]) + 1))
        lines: dict[tuple[bytes, int], int] = {}
        reducers: list[Ints] = []
        of_kind = np.empty(len(ends[0]), dtype=np.int64)
        for number, want in enumerate(ends[1].tolist()):
            all_of_it = wanting.members[wanting.first[want] : wanting.first[want + 1]]
            some = rank[first[number] : first[number + 1]]
            chosen = some if len(some) else all_of_it
            of_kind[number] = lines.setdefault((chosen.tobytes(), want), len(lines))
            if of_kind[number] == len(reducers):
                reducers.append(chosen)
        receive, nothing = of_kind[kind], cells.size * 0
        wants = np.array([want for _, want in lines], dtype=np.int64)
        sharing = offsets(np.array([len(r) for r in reducers], dtype=np.int64))
        ranks = np.concatenate([*reducers, np.zeros(0, np.int64)])
        return ListedGeometry(
            Lined(cells, ends[0][kind], nothing, receive, before(receive, cells.size, len(lines))),
            holding,
            _amounting(LineSet.plain(sharing, ranks), receive, cells.size),
            _amounting(wanting.take(wants), receive, cells.size),
            (_take(cells, []), np.zeros(0, np.int64)),
            0,
            None,
            self.addends.have,
            self._addend_holders(cells.have_region),
        )

    def _cells(self) -> Cells:
        starts, stops, shift, box = in_want_coordinates(self.have, self.stack.feed)
        want_starts = insert_columns(self.want.starts, self.stack.feed.want_insert, 0)
        want_stops = insert_columns(self.want.stops, self.stack.feed.want_insert, 1)
        mine, other = overlapping_pairs(starts, stops, want_starts, want_stops)
        low = np.maximum(starts[mine], want_starts[other])
        width = np.minimum(stops[mine], want_stops[other]) - low
        order = np.lexsort([*low.T[::-1]]) if low.shape[1] else np.arange(len(low))
        zero = np.zeros(len(mine), dtype=np.int64)
        cells = Cells(
            box[mine], other, low - shift[mine], low, width, width.prod(axis=1), zero, zero
        )
        return _take(cells, order)

    def _addend_holders(self, boxes: Ints) -> tuple[Ints, ...]:
        """For each addend the ranks that hold it, one row per source box, filled up with -1."""
        assert self.addends is not None
        addend = addend_of(self.stack.have.layout)
        held: list[dict[int, list[int]]] = [{} for _ in self.addends.have]
        place = {number: at for at, number in enumerate(self.addends.have)}
        for box in range(len(self.have.starts)):
            for rank in self.have.of(box).tolist():
                held[place[addend[rank]]].setdefault(box, []).append(rank)
        for box in distinct(boxes).tolist():
            lost = [a for a, sets in zip(self.addends.have, held, strict=True) if box not in sets]
            if lost:
                where = Box(tuple(self.have.starts[box]), tuple(self.have.stops[box]))
                raise CoverageError(
                    f"{self.stack.label}: no rank holds addend {lost[0]} of box {where}: "
                    "a lost addend cannot be rebuilt"
                )
        tables = []
        for sets in held:
            widest = max(map(len, sets.values()), default=1)
            tables.append(np.full((len(self.have.starts), widest), -1, dtype=np.int64))
            for row, ranks in sets.items():
                tables[-1][row, : len(ranks)] = ranks
        return tuple(tables)


def _take(cells: Cells, rows: Sequence[int] | Ints) -> Cells:
    index = np.array(rows, dtype=np.int64)
    return Cells(*(getattr(cells, column)[index] for column in Cells.__dataclass_fields__))


def before(line: Ints, sizes: Ints, num_lines: int) -> Ints:
    """How many elements of the same line come before each cell."""
    order = np.argsort(line, kind="stable")
    ends = np.cumsum(sizes[order])
    totals = np.bincount(line, weights=sizes, minlength=num_lines).astype(np.int64)
    base = np.cumsum(totals) - totals
    before = np.empty_like(sizes)
    before[order] = ends - sizes[order] - base[line[order]]
    return before


def _amounting(lines: LineSet, line: Ints, sizes: Ints) -> LineSet:
    """The lines with the elements of all cells that are on each."""
    amounts = np.bincount(line, weights=sizes, minlength=len(lines.counts)).astype(np.int64)
    return LineSet(amounts, lines.first, lines.members)


Home = Callable[[Ints], Ints]
"""The hosts of ranks."""


@dataclass(frozen=True, eq=False)
class Stations:
    """The ranks of lines, host by host: a station is the ranks of a line on one host."""

    members: Ints
    """Ranks in the order of lines, then hosts, then ranks."""
    first: Ints
    """Where the members of each station begin; one more entry ends the last."""
    host: Ints
    of_line: Ints
    """Where the stations of each line begin; one more entry ends the last."""

    @classmethod
    def of(cls, lines: LineSet, home: Home) -> Stations:
        """Group the members of each line by host."""
        line, host = lines.line_of, home(lines.members)
        order = np.lexsort((lines.members, host, line))
        line, host = line[order], host[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (host[1:] != host[:-1])
        first = np.append(np.flatnonzero(new), len(order))
        of_line = np.searchsorted(line[new], np.arange(len(lines.counts) + 1))
        return cls(lines.members[order], first, host[new], of_line)

    @cached_property
    def counts(self) -> Ints:
        """How many members each station has."""
        return np.diff(self.first)

    @cached_property
    def lines(self) -> LineSet:
        """The hosts of each line."""
        return LineSet.plain(self.of_line, self.host)

    def find(self, lines: Ints, hosts: Ints) -> Ints:
        """The station of each line on each host; -1 where there is none."""
        return self.lines.find(lines, hosts)


@dataclass(frozen=True, eq=False)
class HostLines:
    """Both kinds of lines of a geometry, and the hosts where a line is wanted and held."""

    wanting: Stations
    """The ranks that want each line."""
    holding: Stations
    """The ranks that hold each line of senders."""
    kinds: Kinds
    first: Ints
    """Where the hosts begin that hold and want each kind; one more entry ends the last."""
    host: Ints
    wanted_at: Ints
    """The station of ranks that want the kind on each of these hosts."""
    held_at: Ints
    """The station of ranks that hold it there."""
    lacking: LineSet
    """The ranks there that want it and do not hold it."""

    @classmethod
    def of(cls, geometry: ListedGeometry, home: Home) -> HostLines | None:
        """The hosts that each kind of cells has in common on both sides; None for addends."""
        kinds = geometry.kinds
        if kinds is None:
            return None
        wanting, holding = Stations.of(geometry.wanting, home), Stations.of(geometry.senders, home)
        row, host = holding.lines.common(wanting.lines, kinds.send, kinds.receive)
        first = np.searchsorted(row, np.arange(len(kinds.send) + 1))
        ends = wanting.find(kinds.receive[row], host), holding.find(kinds.send[row], host)
        wants = LineSet.plain(wanting.first, wanting.members).take(ends[0])
        lacks = geometry.senders.find(kinds.send[row][wants.line_of], wants.members) < 0
        return cls(wanting, holding, kinds, first, host, *ends, wants.only(lacks))

    @cached_property
    def common(self) -> LineSet:
        """The hosts that hold and want each kind."""
        return LineSet.plain(self.first, self.host)

    @property
    def counts(self) -> Ints:
        """On how many hosts each kind is both held and wanted."""
        return self.common.counts

    @cached_property
    def after_held(self) -> Ints:
        """For each such host the station after those of its line from there on that hold it."""
        ends = np.append(self.wanted_at[1:] != self.wanted_at[:-1] + 1, True)[: len(self.host)]
        ends[self.first[1:][self.counts > 0] - 1] = True
        last = np.flatnonzero(ends)
        found: Ints = self.wanted_at[last[np.searchsorted(last, np.arange(len(ends)))]] + 1
        return found
