"""List all cells of a stack, and sort them by who holds, who wants and who lacks them.

Each cell has the set of ranks that hold it and the set that wants it. Those that want it and do not
hold it lack it, and cells with the same lacking ranks form a line that these ranks share. With a
topology each host that lacks a cell and has a holder is served from inside; of the other hosts one
receives from outside and passes on to one rank of each of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints, contained, distinct, distinct_first, numbered
from reshard.layout.coverage import overlapping_pairs
from reshard.layout.grid import addend_of
from reshard.layout.spec import TensorSpec
from reshard.planning.cells.coverage import check_coverage, in_want_coordinates, insert_columns
from reshard.planning.cells.geometry import Cells, Lined, Relays
from reshard.planning.classes import Addends, Stack, addends_of
from reshard.planning.sharing import LineSet

__all__ = ["listed_geometries"]


def listed_geometries(stack: Stack, hosts: dict[int, int] | None) -> list[ListedGeometry]:
    """The listed geometry of a stack, or one per addend that the destination keeps."""
    if stack.have.layout.reduce is None:
        return [_listed_geometry(stack, hosts, None)]
    return [_listed_geometry(stack, hosts, addends) for addends in addends_of(stack)]


def _listed_geometry(
    stack: Stack, hosts: dict[int, int] | None, addends: Addends | None
) -> ListedGeometry:
    """List all cells of a stack; of some addends only, if these are given."""
    have = _of_addends(stack.have, addends.have if addends else None)
    kept = addends.want if addends else None
    want = _of_addends(stack.want, None if kept is None else (kept,))
    return _Builder(stack, have, want, hosts, addends).build()


def _of_addends(spec: TensorSpec, chosen: Sequence[int] | None) -> Listed:
    """The boxes of a spec, with only the holders of these addends."""
    listed = listed_of(spec.layout, spec.shape)
    if chosen is None:
        return listed
    addend = addend_of(spec.layout)
    kept = np.array([addend[int(rank)] in chosen for rank in listed.holders], dtype=bool)
    ends = np.concatenate([[0], np.cumsum(kept)])[listed.first]
    some = np.flatnonzero(np.diff(ends))
    first = np.concatenate([ends[:1], ends[1:][some]])
    return Listed(listed.starts[some], listed.stops[some], first, listed.holders[kept])


@dataclass(frozen=True, eq=False, slots=True)
class _Sets:
    """Boxes with the number of their set of ranks, and the sets."""

    of_box: Ints
    ranks: list[Ints]

    @classmethod
    def of(cls, listed: Listed) -> _Sets:
        numbers: dict[bytes, int] = {}
        ranks: list[Ints] = []
        of_box = np.empty(len(listed.starts), dtype=np.int64)
        for box in range(len(of_box)):
            held = listed.of(box)
            number = numbers.setdefault(held.tobytes(), len(ranks))
            if number == len(ranks):
                ranks.append(held)
            of_box[box] = number
        return cls(of_box, ranks)

    def members(self) -> tuple[Ints, Ints]:
        """Every rank of every set, and the number of the set, in rising order of ranks."""
        ranks = np.concatenate([*self.ranks, np.zeros(0, np.int64)])
        numbers = np.repeat(np.arange(len(self.ranks)), [len(r) for r in self.ranks])
        order = np.argsort(ranks, kind="stable")
        return ranks[order], numbers[order]


class ListedGeometry:
    """All cells of a stack and their lines, as columns."""

    listed = True

    def __init__(
        self,
        cells: Lined,
        senders: LineSet,
        receivers: LineSet,
        wanting: LineSet,
        relays: Relays | None,
        copies: tuple[Cells, Ints],
        addends: tuple[int, ...],
        addend_holders: list[Ints],
    ) -> None:
        self.cells = cells
        self.senders = senders
        self.receivers = receivers
        self.wanting = wanting
        self.relays = relays
        self._copies, self._copiers = copies
        self.addends = addends
        self._addend_holders = addend_holders
        self.num_addends = max(len(addend_holders), 1)

    def sent_by(self, rank: int) -> Lined:
        """All cells: they are listed anyway."""
        return self.cells

    def wanted_by(self, rank: int) -> Lined:
        """All cells: they are listed anyway."""
        return self.cells

    def all(self) -> Lined:
        """All cells that travel."""
        return self.cells

    def copied_by(self, rank: int) -> Cells:
        """The cells that a rank both holds and wants."""
        mine = self._copiers == rank
        columns = (getattr(self._copies, c)[mine] for c in Cells.__dataclass_fields__)
        return Cells(*columns)

    def copied_elements(self) -> int:
        """Elements of one tensor that ranks both hold and want."""
        return int(self._copies.size.sum())

    def addend_senders(self, cells: Ints, receivers: Ints, addend: int) -> Ints:
        """The receiver where it holds the addend, else the holders in turn."""
        holders = self._addend_holders[addend][self.cells.cells.have_region[cells]]
        rows = np.arange(len(cells))
        in_turn = holders[rows, rows % np.maximum((holders >= 0).sum(axis=1), 1)]
        own = (holders == receivers[:, None]).any(axis=1)
        found: Ints = np.where(own, receivers, in_turn)
        return found


class _Builder:
    """Joins the boxes of both sides and sorts the cells into lines."""

    def __init__(
        self,
        stack: Stack,
        have: Listed,
        want: Listed,
        hosts: dict[int, int] | None,
        addends: Addends | None,
    ) -> None:
        self.stack, self.have, self.want, self.hosts = stack, have, want, hosts
        self.addends = addends if addends and len(addends.have) > 1 else None
        self.have_sets, self.want_sets = _Sets.of(have), _Sets.of(want)
        self.lines: dict[object, int] = {}
        self.receivers: list[Ints] = []
        self.wanting: list[Ints] = []
        self.relays: list[tuple[Ints, int]] = []
        self.sender_lines: dict[tuple[int, int | None], int] = {}
        self.senders: list[Ints] = []

    def build(self) -> ListedGeometry:
        """Everything about a stack, worked out once."""
        cells = self._cells()
        check_coverage(self.stack, self.want, cells)
        has = self.have_sets.of_box[cells.have_region]
        wants = self.want_sets.of_box[cells.want_region]
        common = self._common(has, wants)
        chosen, send, receive = self._demands(has, wants, common)
        travelling = _take(cells, chosen)
        sizes = travelling.size
        lined = Lined(
            travelling,
            send,
            _before(send, sizes, len(self.senders)),
            receive,
            _before(receive, sizes, len(self.receivers)),
        )
        return ListedGeometry(
            lined,
            _line_set(self.senders, send, sizes if self.addends is None else sizes * 0),
            _line_set(self.receivers, receive, sizes),
            _line_set(self.wanting, receive, sizes),
            self._relays(receive, sizes),
            self._copies(cells, has, wants, common),
            self.addends.have if self.addends else (),
            self._addend_holders(travelling.have_region),
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

    def _kind(self, has: Ints, wants: Ints) -> Ints:
        """One number for each pair of a set that holds and a set that wants."""
        return has * len(self.want_sets.ranks) + wants

    def _common(self, has: Ints, wants: Ints) -> dict[int, Ints]:
        """The ranks that both hold and want, by kind of cell, for kinds that have any."""
        holder, have_set = self.have_sets.members()
        wanter, want_set = self.want_sets.members()
        first = np.searchsorted(wanter, holder, side="left")
        counts = np.searchsorted(wanter, holder, side="right") - first
        at = np.repeat(np.arange(len(holder)), counts)
        other = np.arange(len(at)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        kinds = self._kind(have_set[at], want_set[other])
        met = np.flatnonzero(contained(kinds, self._kind(has, wants)))
        met = met[np.argsort(kinds[met], kind="stable")]
        found, begin = distinct_first(kinds[met])
        ranks = np.split(holder[at][met], begin[1:]) if len(found) else []
        return dict(zip(found.tolist(), ranks, strict=True))

    def _demands(self, has: Ints, wants: Ints, common: dict[int, Ints]) -> tuple[Ints, Ints, Ints]:
        """Which cells travel, and along which line of senders and which of receivers."""
        kinds = self._kind(has, wants)
        special = contained(kinds, np.array([*common], dtype=np.int64))
        if self.hosts is not None:
            special[:] = True
        plain = np.flatnonzero(~special)
        rows, sends, receives = (
            [plain],
            [self._plain_senders(has[plain])],
            [self._plain_receivers(wants[plain])],
        )
        cells = np.flatnonzero(special)
        order = cells[np.argsort(kinds[cells], kind="stable")]
        names, begin = distinct_first(kinds[order])
        for kind, alike in zip(names.tolist(), np.split(order, begin[1:]), strict=bool(len(names))):
            for send, receive in self._lines_of(int(kind), common.get(kind)):
                rows.append(alike)
                sends.append(np.full(len(alike), send))
                receives.append(np.full(len(alike), receive))
        chosen = np.concatenate(rows)
        in_order = np.argsort(chosen, kind="stable")
        return (
            chosen[in_order],
            np.concatenate(sends)[in_order],
            np.concatenate(receives)[in_order],
        )

    def _plain_senders(self, has: Ints) -> Ints:
        """The lines of all holders of each of these sets."""
        sets, inverse = numbered(has)
        lines = [self._sender_line(number, None) for number in sets.tolist()]
        return np.array(lines, dtype=np.int64)[inverse]

    def _plain_receivers(self, wants: Ints) -> Ints:
        """The lines of ranks that want each of these sets, of which none holds anything of it."""
        sets, inverse = numbered(wants)
        ranks = [self.want_sets.ranks[number] for number in sets.tolist()]
        return np.array([self._line(r, r, []) for r in ranks], dtype=np.int64)[inverse]

    def _lines_of(self, kind: int, common: Ints | None) -> Iterator[tuple[int, int]]:
        """The demands of one kind of cell: a line of senders and a line of receivers each."""
        has, wants = divmod(kind, len(self.want_sets.ranks))
        holders, wanting = self.have_sets.ranks[has], self.want_sets.ranks[wants]
        if self.addends is not None:
            reducers = wanting if common is None else common
            yield self._sender_line(has, None), self._line(reducers, wanting, [])
            return
        lacking = wanting if common is None else _except(wanting, common)
        if not len(lacking):
            return
        if self.hosts is None:
            yield self._sender_line(has, None), self._line(lacking, lacking, [])
            return
        yield from self._lines_by_host(has, holders, lacking)

    def _lines_by_host(self, has: int, holders: Ints, lacking: Ints) -> Iterator[tuple[int, int]]:
        hosts = self.hosts or {}
        held_at = {hosts[int(rank)] for rank in holders}
        by_host: dict[int, list[int]] = {}
        for rank in lacking:
            by_host.setdefault(hosts[int(rank)], []).append(int(rank))
        needy = [np.array(r) for host, r in sorted(by_host.items()) if host not in held_at]
        for host, ranks in by_host.items():
            if host in held_at:
                local = np.array(ranks)
                yield self._sender_line(has, host), self._line(local, local, [])
        if needy:
            entry = len(self.receivers) % len(needy)
            others = needy[:entry] + needy[entry + 1 :]
            yield self._sender_line(has, None), self._line(needy[entry], needy[entry], others)

    def _line(self, receivers: Ints, wanting: Ints, others: Sequence[Ints]) -> int:
        """The number of the line of these receivers, made at first use."""
        key: object = (receivers.tobytes(), wanting.tobytes())
        if others:
            key = frozenset([receivers.tobytes(), *(ranks.tobytes() for ranks in others)])
        if key not in self.lines:
            self.lines[key] = len(self.receivers)
            self.relays += [(ranks, len(self.receivers)) for ranks in others]
            self.receivers.append(receivers)
            self.wanting.append(wanting)
        return self.lines[key]

    def _sender_line(self, has: int, host: int | None) -> int:
        if (has, host) not in self.sender_lines:
            self.sender_lines[has, host] = len(self.senders)
            ranks = self.have_sets.ranks[has]
            if host is not None:
                here = [(self.hosts or {})[int(rank)] == host for rank in ranks]
                ranks = ranks[np.array(here, dtype=bool)]
            self.senders.append(ranks)
        return self.sender_lines[has, host]

    def _relays(self, receive: Ints, sizes: Ints) -> Relays | None:
        if not self.relays:
            return None
        parent = np.array([line for _, line in self.relays], dtype=np.int64)
        amounts = np.bincount(receive, weights=sizes, minlength=len(self.receivers))
        ranks = [ranks for ranks, _ in self.relays]
        first = np.cumsum([0, *map(len, ranks)])
        lines = LineSet(amounts.astype(np.int64)[parent], first, np.concatenate(ranks))
        return Relays(lines, parent)

    def _copies(
        self, cells: Cells, has: Ints, wants: Ints, common: dict[int, Ints]
    ) -> tuple[Cells, Ints]:
        """The cells that some rank both holds and wants, once per such rank."""
        if self.addends is not None:
            return _take(cells, []), np.zeros(0, np.int64)
        kinds = self._kind(has, wants)
        rows = np.flatnonzero(contained(kinds, np.array([*common], dtype=np.int64)))
        ranks = [common[kind] for kind in kinds[rows].tolist()]
        copied = np.repeat(rows, [len(r) for r in ranks])
        return _take(cells, copied), np.concatenate([*ranks, np.zeros(0, np.int64)])

    def _addend_holders(self, boxes: Ints) -> list[Ints]:
        """For each addend the ranks that hold it, one row per source box, filled up with -1."""
        if self.addends is None:
            return []
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
        return [_padded(sets, len(self.have.starts)) for sets in held]


def _padded(sets: dict[int, list[int]], num_rows: int) -> Ints:
    table = np.full((num_rows, max(map(len, sets.values()), default=1)), -1, dtype=np.int64)
    for row, ranks in sets.items():
        table[row, : len(ranks)] = ranks
    return table


def _except(ranks: Ints, some: Ints) -> Ints:
    """Ranks without some of them; both in rising order."""
    kept = np.ones(len(ranks), dtype=bool)
    kept[np.searchsorted(ranks, some)] = False
    return ranks[kept]


def _take(cells: Cells, rows: Sequence[int] | Ints) -> Cells:
    index = np.array(rows, dtype=np.int64)
    return Cells(*(getattr(cells, column)[index] for column in Cells.__dataclass_fields__))


def _before(line: Ints, sizes: Ints, num_lines: int) -> Ints:
    """How many elements of the same line come before each cell."""
    order = np.argsort(line, kind="stable")
    ends = np.cumsum(sizes[order])
    totals = np.bincount(line, weights=sizes, minlength=num_lines).astype(np.int64)
    base = np.cumsum(totals) - totals
    before = np.empty_like(sizes)
    before[order] = ends - sizes[order] - base[line[order]]
    return before


def _line_set(members: Sequence[Ints], line: Ints, sizes: Ints) -> LineSet:
    amounts = np.bincount(line, weights=sizes, minlength=len(members)).astype(np.int64)
    first = np.cumsum([0, *map(len, members)]).astype(np.int64)
    return LineSet(amounts, first, np.concatenate([*members, np.zeros(0, np.int64)]))
