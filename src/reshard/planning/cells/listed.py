"""List all cells of a stack, by who holds them and who wants them.

Boxes with the same holders form a line that these share when they send; boxes that the same ranks
want form a line that these share when they receive. A cell is on one line of each kind. Cells that
all ranks of the second line hold do not travel. The work grows with the number of cells and of
ranks, not with pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    fed_lengths,
    in_want_coordinates,
    raise_uncovered,
    with_inserted,
)
from reshard.planning.classes import Stack, addends_of
from reshard.planning.sharing import LineSet, repeated


def listed_geometries(stack: Stack) -> list[ListedGeometry]:
    """The listed geometry of a stack, or one per addend that the destination keeps."""
    if stack.have.layout.reduce is None:
        return [_geometry(stack, _boxes_of(stack.have), _boxes_of(stack.want))]
    geometries = []
    for addends, kept in addends_of(stack):
        want = _boxes_of(stack.want, None if kept is None else (kept,))
        geometries.append(_geometry(stack, _boxes_of(stack.have, addends), want, addends))
    return geometries


def _boxes_of(spec: TensorSpec, addends: Sequence[int] | None = None) -> Listed:
    """The boxes of a spec, with only the holders of these addends."""
    listed = listed_of(spec.layout, spec.shape)
    if addends is None:
        return listed
    addend = addend_of(spec.layout)
    kept = np.array([addend[int(rank)] in addends for rank in listed.holders], dtype=bool)
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
    return number, LineSet(listed.first, listed.holders).take(firsts)


@dataclass(frozen=True, eq=False)
class ListedGeometry:
    """All cells of a stack and their lines, as columns."""

    cells: Cells
    senders: LineSet  # the ranks that share the sending of each line
    send_amounts: Ints  # the elements of each of these lines
    receivers: LineSet  # the ranks that share each line; with addends, those that add up
    receive_amounts: Ints
    wanting: LineSet  # the ranks that want each line; some may hold parts of it
    copies: tuple[Cells, Ints]  # cells that a rank both holds and wants, and the rank of each
    wanted: int = 0  # elements of one tensor that ranks want, once per such rank
    kinds: Kinds | None = None  # who holds what it wants; None where addends are added up
    addends: tuple[int, ...] = ()  # of the source; none where nothing is added up
    addend_holders: tuple[Ints, Ints] | None = None
    """With addends: the source box of each cell; and for each such box and each addend the ranks
    that hold it, filled up with -1."""
    listed = True

    @property
    def num_addends(self) -> int:
        return max(len(self.addends), 1)

    def all(self) -> Cells:
        return self.cells

    def copied_by(self, rank: int) -> Cells:
        return self.copies[0].take(np.flatnonzero(self.copies[1] == rank))

    def copied_elements(self) -> tuple[Ints, Ints]:
        return self.copies[1], self.copies[0].size

    def num_cells(self) -> int:
        return len(self.cells.size)

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """The sender of an addend of each cell: its receiver if it holds it, else all in turn."""
        assert self.addend_holders is not None
        box, table = self.addend_holders
        holders, rows = table[box[cells], addend], np.arange(len(cells))
        in_turn = holders[rows, rows % np.maximum((holders >= 0).sum(axis=1), 1)]
        return np.where((holders == receivers[:, None]).any(axis=1), receivers, in_turn)


def _geometry(
    stack: Stack, have: Listed, want: Listed, addends: tuple[int, ...] = ()
) -> ListedGeometry:
    """Join the boxes of both sides and put the cells on lines; several addends are added up."""
    cells, box = _cells(stack, have, want)
    (have_set, holding), (want_set, wanting) = _lines_of(have), _lines_of(want)
    cells = replace(cells, send_line=have_set[box], receive_line=want_set[cells.receive_line])
    keys, kind = numbered(cells.send_line * len(wanting.counts) + cells.receive_line)
    send, receive = np.divmod(keys, max(len(wanting.counts), 1))
    row, rank = holding.common(wanting, send, receive)
    holders = LineSet(np.searchsorted(row, np.arange(len(keys) + 1)), rank)
    if len(addends) > 1:
        receivers, wanting, line = _reducing(holders, wanting, receive)
        sent, _ = holding.lay_out(cells.send_line, cells.size)
        amounts, at = receivers.lay_out(line[kind], cells.size)
        cells = replace(cells, receive_line=line[kind], receive_at=at)
        return ListedGeometry(
            cells,
            holding,
            sent * len(addends),
            receivers,
            amounts,
            wanting,
            copies=(cells.take(box[:0]), box[:0]),
            addends=addends,
            addend_holders=(box, _addend_holders(stack, have, addends, distinct(box))),
        )
    copied, copier = repeated(holders.first, kind)
    copies = cells.take(copied), rank[copier]
    wanted = int(cells.size @ wanting.counts[cells.receive_line])
    travels = np.flatnonzero((holders.counts < wanting.counts[receive])[kind])
    cells = cells.take(travels)
    send_amounts, send_at = holding.lay_out(cells.send_line, cells.size)
    amounts, receive_at = wanting.lay_out(cells.receive_line, cells.size)
    cells = replace(cells, send_at=send_at, receive_at=receive_at)
    kinds = Kinds(kind[travels], send, receive, holders)
    return ListedGeometry(
        cells, holding, send_amounts, wanting, amounts, wanting, copies, wanted, kinds
    )


def _cells(stack: Stack, have: Listed, want: Listed) -> tuple[Cells, Ints]:
    """All cells, each on a line of its destination box alone, and the source box of each."""
    starts, stops, shift, box = in_want_coordinates(have, stack.feed)
    want_starts, want_stops = with_inserted(want, stack.feed.want_insert)
    mine, other = overlapping_pairs(starts, stops, want_starts, want_stops)
    low = np.maximum(starts[mine], want_starts[other])
    width = np.minimum(stops[mine], want_stops[other]) - low
    size, zero = width.prod(axis=1), np.zeros_like(mine)
    needed = want_stops - want_starts
    for dim, segments in enumerate(stack.feed.moves):
        needed[:, dim] = fed_lengths(want_starts[:, dim], want_stops[:, dim], segments)
    if size.sum() != needed.prod(axis=1).sum():
        raise_uncovered(stack)
    order = np.lexsort([*low.T[::-1]]) if low.shape[1] else np.arange(len(low))
    cells = Cells(low - shift[mine], low, width, size, zero, zero, other, zero)
    return cells.take(order), box[mine][order]


def _addend_holders(stack: Stack, have: Listed, addends: Sequence[int], used: Ints) -> Ints:
    """For each box and each addend the ranks that hold it, filled up with -1; of the boxes that
    are used no addend may be lost."""
    addend, num = addend_of(stack.have.layout), len(addends)
    place = {number: at for at, number in enumerate(addends)}
    number = np.array([place[addend[rank]] for rank in have.holders.tolist()], np.int64)
    box = np.repeat(np.arange(len(have.starts)), np.diff(have.first))
    lines, _ = LineSet.sorted(box * num + number, have.holders, len(have.starts) * num)
    lost = np.argwhere(lines.counts.reshape(-1, num)[used] == 0)
    if len(lost):
        at = used[lost[0, 0]]
        where = Box(tuple(have.starts[at]), tuple(have.stops[at]))
        raise CoverageError(
            f"{stack.label}: no rank holds addend {addends[lost[0, 1]]} of box {where}: a lost "
            "addend cannot be rebuilt"
        )
    table = np.full((len(lines.counts), lines.counts.max(initial=1)), -1, dtype=np.int64)
    table[lines.line_of, np.arange(len(lines.members)) - lines.first[lines.line_of]] = lines.members
    return table.reshape(-1, num, table.shape[1])


def _reducing(holders: LineSet, wanting: LineSet, wanted: Ints) -> tuple[LineSet, LineSet, Ints]:
    """The ranks that add up addends of each kind, if possible some that have one: lines of them,
    of all that want the value there, and the line of each kind."""
    lines: dict[tuple[bytes, int], int] = {}
    reducers: list[Ints] = []
    of_kind = np.empty(len(wanted), dtype=np.int64)
    for kind, want in enumerate(wanted.tolist()):
        some = holders.of(kind)
        chosen = some if len(some) else wanting.of(want)
        of_kind[kind] = lines.setdefault((chosen.tobytes(), want), len(lines))
        if of_kind[kind] == len(reducers):
            reducers.append(chosen)
    first = offsets(np.array([len(ranks) for ranks in reducers], dtype=np.int64))
    adding = LineSet(first, np.concatenate([*reducers, np.zeros(0, np.int64)]))
    return adding, wanting.take(np.array([want for _, want in lines], dtype=np.int64)), of_kind


Home = Callable[[Ints], Ints]  # the hosts of ranks


@dataclass(frozen=True, eq=False)
class Stations(LineSet):
    """The ranks of lines, host by host: a station is the ranks of a line on one host."""

    lines: LineSet  # the hosts of each line, in the order of the stations
    whole: LineSet  # the ranks of each line, in the order of the stations

    @classmethod
    def by_host(cls, lines: LineSet, home: Home) -> Stations:
        line, host = lines.line_of, home(lines.members)
        order = np.lexsort((lines.members, host, line))
        line, host = line[order], host[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (host[1:] != host[:-1])
        first = np.append(np.flatnonzero(new), len(order))
        of_line = np.searchsorted(line[new], np.arange(len(lines.counts) + 1))
        ranks = lines.members[order]
        return cls(first, ranks, LineSet(of_line, host[new]), LineSet(lines.first, ranks))


@dataclass(frozen=True, eq=False)
class HostLines:
    """Both kinds of lines of a geometry, and the hosts where a line is wanted and held."""

    wanting: Stations  # the ranks that want each line
    holding: Stations  # the ranks that hold each line of senders
    kinds: Kinds
    common: LineSet  # the hosts that hold and want each kind
    wanted_at: Ints  # the station of ranks that want the kind on each of these hosts
    held_at: Ints  # the station of ranks that hold it there
    lacking: LineSet  # the ranks there that want it and do not hold it

    @classmethod
    def of(cls, geometry: ListedGeometry, home: Home) -> HostLines | None:
        """The hosts that each kind of cells has in common on both sides; None for addends."""
        kinds = geometry.kinds
        if kinds is None:
            return None
        wanting = Stations.by_host(geometry.wanting, home)
        holding = Stations.by_host(geometry.senders, home)
        row, host = holding.lines.common(wanting.lines, kinds.send, kinds.receive)
        common = LineSet(np.searchsorted(row, np.arange(len(kinds.send) + 1)), host)
        wanted_at = wanting.lines.find(kinds.receive[row], host)
        held_at = holding.lines.find(kinds.send[row], host)
        wants = wanting.take(wanted_at)
        lacks = geometry.senders.find(kinds.send[row][wants.line_of], wants.members) < 0
        return cls(wanting, holding, kinds, common, wanted_at, held_at, wants.only(lacks))

    @cached_property
    def after_held(self) -> Ints:
        """For each such host the station after those of its line from there on that hold it."""
        at, common = self.wanted_at, self.common
        ends = np.append(at[1:] != at[:-1] + 1, True)[: len(at)]
        ends[common.first[1:][common.counts > 0] - 1] = True
        last = np.flatnonzero(ends)
        return at[last[np.searchsorted(last, np.arange(len(ends)))]] + 1
