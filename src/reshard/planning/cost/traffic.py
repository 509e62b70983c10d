"""Who exchanges how much with whom, over a whole plan.

Bytes are added up by rank. Messages are pairs of ranks, and rows that a rank sends to a whole line
make as many of these as the line has ranks, so they are counted by *class*: ranks that pass on
parts of the same lines, held by the same ranks, have to do with the same others. With a topology
rows are listed host by host of the receivers, because links count messages as well as bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, distinct, distinct_first, mixed, numbered
from reshard.planning.cells.stations import Home
from reshard.planning.cells.transfers import Fan, Mask, Transfers
from reshard.planning.flows import Flow
from reshard.planning.hosts import HostFlow, host_blocks
from reshard.planning.rounds import Slot, slice_edges
from reshard.planning.sharing import LineSet, repeated

__all__ = ["Traffic"]

MAX_LISTED = 1 << 12
"""Rows of a fan whose pairs are listed one by one."""


@dataclass(frozen=True, eq=False, slots=True)
class Stream:
    """Rows of one flow and one hop, or rows that go to whole lines, and when they move."""

    flow: Flow
    slot: Slot
    ends: Transfers | Fan

    @property
    def rows(self) -> Transfers:
        """The rows; those of a fan have no destinations."""
        return self.ends.rows

    @property
    def fan(self) -> Fan | None:
        """Rows that go to whole lines."""
        return self.ends if isinstance(self.ends, Fan) else None

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each row, once."""
        return self.rows.sizes * self.flow.stack.itemsize_at(self.rows.hop)

    def units(self) -> Ints:
        """Slices of each row end between whole parts of this many elements."""
        return self.flow.units(self.rows.cells, self.slot.unit)[self.rows.runs.cell]

    def fills(self, slices: int) -> bool:
        """Whether every row is long enough to be in every slice."""
        sizes = self.rows.sizes
        # No unit is larger than that of the slot, so long rows need no look at their cells.
        if int(sizes.min(initial=0)) >= slices * self.slot.unit:
            return True
        return bool((sizes >= slices * self.units()).all())


class _Moving:
    """What moves in the rounds of one slot at one hop: numbers, each with the rows behind it."""

    def __init__(
        self, streams: Sequence[Stream], keys: Sequence[Ints], rows: Sequence[Ints]
    ) -> None:
        self.slot, self.hop = streams[0].slot, streams[0].rows.hop
        every, slices = np.concatenate(keys), self.slot.slices
        self._steady = self.slot.phases == slices == 1
        if not self._steady:
            self._steady = self.slot.phases == 1 and all(s.fills(slices) for s in streams)
        if self._steady:
            self.keys = distinct(every)
            return
        order = np.argsort(every, kind="stable")
        columns = [(s.rows.runs.start, s.rows.runs.stop, s.units(), s.rows.part) for s in streams]
        self._start, self._stop, self._unit, self._part = (
            np.concatenate([c[row] for c, row in zip(column, rows, strict=True)])[order]
            for column in zip(*columns, strict=True)
        )
        self.keys, self._first = distinct_first(every[order])

    def spans(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """The rounds from one to before another in which a phase and a slice move, or, as (-1, -1),
        everything does."""
        slot, first = self.slot, self.slot.first + self.hop
        if self._steady:
            yield first, first + slot.slices, (-1, -1)
            return
        for phase in range(slot.phases):
            for part in range(slot.slices):
                yield first + part, first + part + 1, (phase, part)
            first += slot.slices + slot.hops

    def active(self, turn: tuple[int, int]) -> Ints:
        """The numbers that move in a turn, in rising order."""
        phase, part = turn
        if self._steady:
            return self.keys
        ends = (self._start, self._stop, self._unit, self.slot.slices)
        moves = slice_edges(*ends, part) < slice_edges(*ends, part + 1)
        moves &= self._part % self.slot.phases == phase
        found: Ints = self.keys[np.logical_or.reduceat(moves, self._first)]
        return found


def _rounds(moving: Sequence[_Moving]) -> Iterator[tuple[list[tuple[_Moving, Ints]], int]]:
    """What moves in a round, and in how many rounds just that does."""
    begins: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    ends: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for at, one in enumerate(moving):
        for first, last, turn in one.spans():
            begins.setdefault(first, []).append((at, turn))
            ends.setdefault(last, []).append((at, turn))
    active: set[tuple[int, tuple[int, int]]] = set()
    counts: Counter[tuple[tuple[int, tuple[int, int]], ...]] = Counter()
    for first, last in pairwise(sorted({*begins, *ends})):
        active.difference_update(ends.get(first, ()))
        active.update(begins.get(first, ()))
        counts[tuple(sorted(active))] += last - first
    for some, times in counts.items():
        yield [(moving[at], moving[at].active(turn)) for at, turn in some], times


def _by_turn(ends: Iterable[tuple[Stream, Ints, Ints]]) -> list[_Moving]:
    """Numbers of rows, and these rows, by the slot and the hop in which they move."""
    found: dict[tuple[Slot, int], list[tuple[Stream, Ints, Ints]]] = {}
    for stream, keys, rows in ends:
        if len(keys):
            found.setdefault((stream.slot, stream.rows.hop), []).append((stream, keys, rows))
    return [_Moving(*zip(*some, strict=True)) for some in found.values()]


class Traffic:
    """Bytes and messages of a plan; those of links too, if the hosts of ranks are known."""

    def __init__(
        self, flows: Sequence[Flow], slots: Sequence[Slot], world: Ints, home: Home | None = None
    ) -> None:
        self.world = world
        self._counts_up = bool(len(world)) and int(world[-1]) == len(world) - 1
        self._ends = list(zip(flows, slots, strict=True))
        self.first_hand, self.passed_on, self.received = np.zeros((3, len(world)), dtype=np.int64)
        self.links = np.zeros((2, 2, 2, len(world) if home else 0), dtype=np.int64)
        """With a topology: inside hosts and between them, sent and received, bytes and messages."""
        self.messages = 0
        """All that goes from one rank to another in one round is one message."""
        self.hosts: Ints = home(world) if home else world
        """The host of each rank; without a topology each rank is one."""
        if home is None:
            streams = [*self._streams()]
            for stream in streams:
                self._count(stream)
            self.messages = self._count_messages(streams)
            return
        for block in host_blocks(flows, int(self.hosts.max(initial=-1)) + 1):
            self._count_links([*self._into(block)])

    def _streams(self) -> Iterator[Stream]:
        for flow, slot in self._ends:
            for rows in flow.streams():
                some = np.flatnonzero(rows.served)
                if len(some):
                    yield Stream(
                        flow, slot, rows if len(some) == len(rows.rows) else rows.take(some)
                    )

    def _into(self, block: range) -> Iterator[Stream]:
        """All rows to ranks of some hosts."""
        for flow, slot in self._ends:
            if isinstance(flow, HostFlow):
                yield from (Stream(flow, slot, rows) for rows in flow.into(block))
                continue
            for rows in flow.everything():
                host = self.hosts[self._places(rows.destination)]
                inside = (host >= block.start) & (host < block.stop)
                some = np.flatnonzero(inside & (rows.source != rows.destination))
                if len(some):
                    yield Stream(flow, slot, rows.take(some))

    def _places(self, ranks: Ints) -> Ints:
        # Ranks are nearly always 0 to n - 1; to look them up took a tenth of a summary.
        return ranks if self._counts_up else self.world.searchsorted(ranks)

    def _sum(self, ranks: Ints, num_bytes: Ints) -> Ints:
        return np.bincount(self._places(ranks), num_bytes, len(self.world)).astype(np.int64)

    def _count(self, stream: Stream) -> None:
        rows, num_bytes = stream.rows, stream.num_bytes
        first = rows.hop == 0 and not rows.again
        if first:
            self.first_hand += self._sum(rows.source, num_bytes)
        if stream.fan or not first:
            again = num_bytes * (stream.ends.served - first)
            self.passed_on += self._sum(rows.source, again)
        for ranks, received in stream.ends.received(num_bytes):
            self.received += self._sum(ranks, received)

    def _count_links(self, streams: Sequence[Stream]) -> None:
        """Count rows, all of those to some hosts."""
        size = max(len(self.world), 1)
        for stream in streams:
            self._count(stream)
            ends = self._places(stream.rows.source), self._places(stream.rows.destination)
            self._add_links(0, ends, stream.num_bytes)
        pairs, times = _messages(_by_turn((one, *self._pairs(one)) for one in streams))
        self.messages += int(times.sum())
        self._add_links(1, np.divmod(pairs, size), times)

    def _add_links(self, what: int, ends: tuple[Ints, Ints], amounts: Ints) -> None:
        """Count bytes (0) or messages (1) between places of ranks."""
        away = self.hosts[ends[0]] != self.hosts[ends[1]]
        for between, side in product((0, 1), (0, 1)):
            some = np.flatnonzero(away == between)
            added = np.bincount(ends[side][some], amounts[some], len(self.world))
            self.links[between, side, what] += added.astype(np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel between ranks."""
        return int(self.received.sum())

    def between(self, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
        """All bytes between groups of ranks, and those from source tensors.

        Given the group of each rank of the plan as a sender, and its group as a receiver.
        """
        size = int(destinations.max(initial=-1)) + 1
        found = np.zeros((2, int(sources.max(initial=-1)) + 1, size), dtype=np.int64)
        for stream in self._streams():
            rows, fan = stream.rows, stream.fan
            group = sources[self._places(rows.source)]
            if fan is None:
                times = np.zeros((len(rows), size), dtype=np.int64)
                times[np.arange(len(rows)), destinations[self._places(rows.destination)]] = 1
            else:
                gets, has = (
                    np.bincount(
                        lines.line_of * size + destinations[self._places(lines.members)],
                        minlength=len(lines.counts) * size,
                    ).reshape(-1, size)
                    for lines in (fan.wanting, fan.held)
                )
                times = gets[rows.line] - has[fan.kind]
                if rows.hop:
                    times[np.arange(len(rows)), destinations[self._places(rows.source)]] -= 1
            for number in (0, 1) if rows.hop == 0 else (0,):
                np.add.at(found[number], group, times * stream.num_bytes[:, None])
        return found[0], found[1]

    def _count_messages(self, streams: Sequence[Stream]) -> int:
        """Pairs of ranks that exchange something, over all rounds."""
        many = [one for one in streams if one.fan and one.fan.served.sum() > MAX_LISTED]
        pairs = _by_turn((one, *self._pairs(one)) for one in streams if one not in many)
        if not many:
            return sum(times * len(_joined(active)) for active, times in _rounds(pairs))
        classes = _Classes.of(many, self.world)
        rows = [np.arange(len(one.rows)) for one in many]
        groups = _by_turn(zip(many, classes.groups(many), rows, strict=True))
        total = 0
        for active, times in _rounds([*pairs, *groups]):
            keys = _joined([one for one in active if one[0] in pairs])
            lines = _joined([one for one in active if one[0] in groups])
            total += times * (classes.num_pairs(lines, keys) if len(lines) else len(keys))
        return total

    def _pairs(self, stream: Stream) -> tuple[Ints, Ints]:
        """One number for the pair of ranks of each row, and the row; rows of fans repeat."""
        size, row = len(self.world), np.arange(len(stream.rows))
        if stream.fan is None:
            ends = (stream.rows.source, stream.rows.destination)
        else:
            row, destination = stream.fan.pairs(row)
            ends = (stream.rows.source[row], destination)
        return self._places(ends[0]) * size + self._places(ends[1]), row

    @cached_property
    def _ends_of_pairs(self) -> tuple[Ints, Ints]:
        """Every pair of ranks that exchange anything: as many as there are, so not for thousands
        of ranks that all pass on to each other."""
        keys = np.zeros(0, dtype=np.int64)
        for stream in self._streams():
            keys = distinct(np.concatenate([keys, self._pairs(stream)[0]]))
        source, destination = np.divmod(keys, max(len(self.world), 1))
        return self.world[source], self.world[destination]

    @property
    def source(self) -> Ints:
        """The sender of every pair of ranks that exchange anything."""
        return self._ends_of_pairs[0]

    @property
    def destination(self) -> Ints:
        """The receiver of every pair of ranks that exchange anything."""
        return self._ends_of_pairs[1]


def _messages(moving: Sequence[_Moving]) -> tuple[Ints, Ints]:
    """All numbers that move, in rising order, and in how many rounds each does."""
    keys = distinct(np.concatenate([np.zeros(0, np.int64), *(one.keys for one in moving)]))
    for one in moving:
        one.keys = keys.searchsorted(one.keys)
    counts = np.zeros(len(keys), dtype=np.int64)
    for active, times in _rounds(moving):
        here = np.zeros(len(keys), dtype=bool)
        for _, places in active:
            here[places] = True
        counts += here * times
    return keys, counts


def _joined(active: Sequence[tuple[_Moving, Ints]]) -> Ints:
    """The numbers of all that moves, each once, in rising order."""
    if len(active) == 1:
        return active[0][1]
    return distinct(np.concatenate([*(keys for _, keys in active), np.zeros(0, np.int64)]))


@dataclass(frozen=True, eq=False)
class _Classes:
    """Counts the pairs of senders that have to do with whole lines; ranks are places.

    A *kind* is a line and the ranks of it that hold what is sent. Senders of the same kinds are a
    class: the ranks that they send to are those of the lines of these kinds, except the ranks that
    hold all of it, and the sender. Sets are compared by sums of random numbers.
    """

    world: Ints
    lines: LineSet
    """Different lines of all kinds."""
    line: Ints
    """The line of each kind."""
    held: LineSet
    """The ranks of each kind that hold what is sent."""
    mark: NDArray[np.uint64]
    """A random number for each kind; kinds of equal sets have equal ones."""

    @classmethod
    def of(cls, streams: Sequence[Stream], world: Ints) -> _Classes:
        """The kinds of all fans, numbered one after the other."""
        fans = [one.fan for one in streams if one.fan is not None]
        every = _chained([fan.wanting for fan in fans], world)
        held = _chained([fan.held for fan in fans], world)
        kinds = np.zeros(len(held.counts), dtype=np.int64)
        base = np.cumsum([[0, 0], *([len(f.wanting.counts), len(f.held.counts)] for f in fans)], 0)
        for fan, (line, kind) in zip(fans, base.tolist(), strict=False):
            kinds[fan.kind + kind] = fan.rows.line + line
        of_line, of_held = _sums(every, len(world)), _sums(held, len(world))
        _, chosen = distinct_first(of_line.view(np.int64))
        number = numbered(of_line.view(np.int64))[1]
        mark = mixed(of_line[kinds] * 3 + of_held)
        return cls(world, every.take(chosen), number[kinds], held, mark)

    def groups(self, streams: Sequence[Stream]) -> list[Ints]:
        """One number for the sender and the kind of each row of each stream."""
        found, base = [], 0
        for fan in (one.fan for one in streams if one.fan is not None):
            place = np.searchsorted(self.world, fan.rows.source)
            found.append(place * len(self.line) + fan.kind + base)
            base += len(fan.held.counts)
        return found

    def num_pairs(self, groups: Ints, pairs: Ints) -> int:
        """How many pairs of ranks some groups make together with other pairs."""
        size = len(self.world)
        sender, kind = np.divmod(groups, len(self.line))
        senders, first = distinct_first(sender)
        marks = np.add.reduceat(self.mark[kind], first)
        classes, of = numbered(marks.view(np.int64))
        _, chosen = distinct_first(of)
        number, at = repeated(np.append(first, len(sender)), chosen)
        kind = kind[at]
        table, count = numbered(number * len(self.lines.counts) + self.line[kind])
        of_class, line = np.divmod(table, len(self.lines.counts))
        begin = np.searchsorted(of_class, np.arange(len(classes) + 1))
        members, which = self._members(line, begin)
        but = self._exceptions(number, kind, line, np.bincount(count), begin)
        sizes = members.sum(axis=1)[which] - np.bincount(but // size, minlength=len(classes))

        def sends(sender: Ints, rank: Ints) -> Mask:
            """Whether senders (by number) send to the class of ranks that these are in."""
            inside: Mask = members[which[of[sender]], rank]
            key = of[sender] * size + rank
            at = np.minimum(np.searchsorted(but, key), max(len(but) - 1, 0))
            return inside & (but[at] != key) if len(but) else inside

        itself = sends(np.arange(len(senders)), senders)
        source, destination = np.divmod(pairs, size)
        at = np.minimum(np.searchsorted(senders, source), len(senders) - 1)
        known = (senders[at] == source) & sends(at, destination)
        return int(sizes[of].sum() - itself.sum() + np.count_nonzero(~known))

    def _members(self, line: Ints, begin: Ints) -> tuple[Mask, Ints]:
        """The ranks of different sets of lines, one row each, and the row of each class."""
        marks = np.add.reduceat(_random(len(self.lines.counts))[line], begin[:-1])
        sets, which = numbered(marks.view(np.int64))
        _, chosen = distinct_first(which)
        row, at = repeated(begin, chosen)
        one, member = repeated(self.lines.first, line[at])
        members = np.zeros((len(sets), len(self.world)), dtype=bool)
        members[row[one], self.lines.members[member]] = True
        return members, which

    def _exceptions(self, number: Ints, kind: Ints, line: Ints, count: Ints, begin: Ints) -> Ints:
        """The ranks that hold what a class sends by all kinds on lines that they are on."""
        size = len(self.world)
        row, at = repeated(self.held.first, kind)
        keys, key = numbered(number[row] * size + self.held.members[at])
        of_class, rank = np.divmod(keys, size)
        row, at = repeated(begin, of_class)
        inside = self.lines.find(line[at], rank[row]) >= 0
        lines = np.bincount(row, count[at] * inside, len(keys))
        found: Ints = keys[np.bincount(key, minlength=len(keys)) == lines]
        return found


def _chained(sets: Sequence[LineSet], world: Ints) -> LineSet:
    """Lines one after the other, with the places of their ranks."""
    lines = LineSet.chain(sets)
    return LineSet.plain(lines.first, np.searchsorted(world, lines.members))


def _sums(lines: LineSet, num_ranks: int) -> NDArray[np.uint64]:
    """A number for the set of ranks of each line."""
    numbers = _random(num_ranks)[lines.members]
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers)])
    return mixed(ends[lines.first[1:]] - ends[lines.first[:-1]])


def _random(num: int) -> NDArray[np.uint64]:
    """Numbers that look random; numpy.random takes longer to load than a plan to be summed up."""
    return mixed(np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
