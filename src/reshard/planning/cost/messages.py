"""Who sends messages to whom, over all rounds: all from one rank to another in a round is one.

A row that goes to a whole line makes as many messages as the line has ranks, so these are counted
by *class*: ranks that pass on parts of the same lines, held by the same ranks, send to the same
others. Small fans are listed, and pairs of ranks of one host, each pair once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, contained, distinct, distinct_first, mixed, numbered
from reshard.planning.cells.transfers import AnyRows, Fan, HostFan, Transfers
from reshard.planning.rank import Rows
from reshard.planning.rounds import slice_edges
from reshard.planning.sharing import LineSet, Mask, repeated

MAX_LISTED = 1 << 12  # rows of a fan whose pairs are listed one by one
Places = Callable[[Ints], Ints]  # the places of ranks among all ranks of a plan
Turn = tuple[int, int]  # a phase and a slice; (-1, -1) stands for all of them


@dataclass(frozen=True, eq=False)
class Stream(Rows):
    """Rows of one flow and one hop, and to whom they go; those of fans have no destinations."""

    ends: AnyRows


class _Moving:
    """What a stream moves in each round: numbers (of pairs of ranks), each with a row behind it.

    If every row moves in every slice, the stream is steady and its rows are not kept: where every
    pair of ranks exchanges something, they are many.
    """

    def __init__(self, stream: Stream, keys: Ints, rows: Ints) -> None:
        self.slot, self.hop = stream.slot, stream.transfers.hop
        slices, runs, sizes = self.slot.slices, stream.transfers.runs, stream.transfers.sizes
        # No unit is larger than that of the slot, so long rows need no look at their cells.
        steady = slices == 1 or int(sizes.min()) >= slices * self.slot.unit
        self.steady = self.slot.phases == 1 and (
            steady or bool((sizes >= slices * stream.units).all())
        )
        if self.steady:
            self.keys = distinct(keys)
            return
        order = np.argsort(keys, kind="stable")
        self.keys, rows = keys[order], rows[order]
        columns = (runs.start, runs.stop, stream.units, stream.transfers.part)
        self._start, self._stop, self._unit, self._part = (column[rows] for column in columns)

    def spans(self) -> Iterator[tuple[int, int, Turn]]:
        """The rounds from one to before another in which a phase and a slice move, or, as (-1, -1),
        everything does."""
        slot, first = self.slot, self.slot.first + self.hop
        if self.steady:
            yield first, first + slot.slices, (-1, -1)
            return
        for phase in range(slot.phases):
            for part in range(slot.slices):
                yield first + part, first + part + 1, (phase, part)
            first += slot.slices + slot.hops

    def active(self, turn: Turn) -> Ints:
        """The numbers that move in a turn, in rising order."""
        if self.steady:
            return self.keys
        ends, (phase, part) = (self._start, self._stop, self._unit, self.slot.slices), turn
        moves = slice_edges(*ends, part) < slice_edges(*ends, part + 1)
        return _merged([self.keys[moves & (self._part % self.slot.phases == phase)]])


class _MovingInside(_Moving):
    """The same for what is passed on inside hosts: the pairs of ranks that have parts to move."""

    def __init__(self, stream: Stream, fan: HostFan, size: int, places: Places) -> None:
        every = np.arange(len(fan.rows))
        super().__init__(stream, every, every)
        self._fan = fan
        pairs = places(fan.sender)[:, None] * size + places(fan.receivers)
        self._pairs, number = numbered(pairs.reshape(-1))
        self._number = number.reshape(pairs.shape)

    def active(self, turn: Turn) -> Ints:
        moves, here = np.zeros(len(self._fan.rows), bool), np.zeros(len(self._pairs), bool)
        moves[super().active(turn)] = True
        here[self._number[self._fan.fan.by_member(moves) > 0]] = True
        pairs: Ints = self._pairs[here]
        return pairs


def _rounds(moving: Sequence[_Moving]) -> Iterator[tuple[list[tuple[int, Ints]], int]]:
    """What moves in a round, by its place in the list, and in how many rounds just that does."""
    begins: dict[int, list[tuple[int, Turn]]] = {}
    ends: dict[int, list[tuple[int, Turn]]] = {}
    for at, one in enumerate(moving):
        for first, last, turn in one.spans():
            begins.setdefault(first, []).append((at, turn))
            ends.setdefault(last, []).append((at, turn))
    active: set[tuple[int, Turn]] = set()
    counts: Counter[tuple[tuple[int, Turn], ...]] = Counter()
    for first, last in pairwise(sorted({*begins, *ends})):
        active.difference_update(ends.get(first, ()))
        active.update(begins.get(first, ()))
        counts[tuple(sorted(active))] += last - first
    for some, times in counts.items():
        yield [(at, moving[at].active(turn)) for at, turn in some], times


def messages_of(
    streams: Iterable[Stream], hosts: Ints, places: Places
) -> Iterator[tuple[int, Ints, Sends | None]]:
    """In how many rounds which pairs of ranks exchange something: those that are listed, one
    number each, and others by classes of ranks; no pair is among both.

    Ranks are their places; fans do not serve the host of their sender, which is the rank alone
    where hosts are not known.
    """
    many: list[Stream] = []
    moving: list[_Moving] = []
    for one in streams:
        if isinstance(one.ends, Fan) and one.ends.served.sum() > MAX_LISTED:
            many.append(one)
        elif isinstance(one.ends, HostFan):
            moving.append(_MovingInside(one, one.ends, len(hosts), places))
        else:
            moving.append(_Moving(one, *pairs_of(one.ends, len(hosts), places)))
    groups: list[_Moving] = []
    if many:
        classes = _Classes.of(
            [one.ends for one in many if isinstance(one.ends, Fan)], hosts, places
        )
        for one, keys in zip(many, classes.groups, strict=True):
            groups.append(_Moving(one, keys, np.arange(len(keys))))
    for active, times in _rounds([*moving, *groups]):
        pairs = _merged([keys for at, keys in active if at < len(moving)])
        some = _merged([keys for at, keys in active if at >= len(moving)])
        if not len(some):
            yield times, pairs, None
            continue
        sends = classes.sends(some)
        yield times, pairs[~sends.known(pairs)], sends


def pairs_of(ends: AnyRows, size: int, places: Places) -> tuple[Ints, Ints]:
    """One number for each pair of ranks, and its row; rows of fans repeat.

    Pairs inside hosts have many rows each, which are not listed.
    """
    row = np.arange(len(ends.rows))
    if isinstance(ends, Transfers):
        source, destination = ends.source, ends.destination
    elif isinstance(ends, Fan):
        row, destination = ends.pairs(row)
        source = ends.rows.source[row]
    else:
        source, destination, _ = ends.summed(row * 0 + 1)
    return places(source) * size + places(destination), row


def _merged(keys: Sequence[Ints]) -> Ints:
    """All numbers, each once, in rising order, as those of each list are."""
    every = np.concatenate([*keys, np.zeros(0, np.int64)])
    if len(keys) > 1:
        every.sort(kind="stable")  # merges lists that rise, in half the time of another sort
    once: Ints = every[np.append(every[1:] != every[:-1], True)[: len(every)]]
    return once


@dataclass(frozen=True, eq=False)
class _Classes:
    """Classes of senders that have to do with whole lines.

    A *kind* is a line and the ranks of it that hold what is sent. Senders of the same kinds are a
    class: the ranks that they send to are those of the lines of these kinds, except the ranks that
    hold all of it, and the sender. Sets are compared by sums of random numbers.
    """

    host: Ints  # the host of each rank, as a number below that of hosts
    hosts: LineSet  # the ranks of each host
    lines: LineSet  # different lines of all kinds
    line: Ints  # the line of each kind
    holders: LineSet  # the ranks of each kind that hold what is sent
    mark: NDArray[np.uint64]  # a random number for each kind; kinds of equal sets have equal ones
    groups: list[Ints]  # one number for the sender and the kind of each row of each fan

    @classmethod
    def of(cls, fans: Sequence[Fan], hosts: Ints, places: Places) -> _Classes:
        """The kinds of all fans, numbered one after the other."""
        chains = LineSet.chain([f.wanting for f in fans]), LineSet.chain([f.holders for f in fans])
        every, holders = (LineSet(one.first, places(one.members)) for one in chains)
        kinds = np.zeros(len(holders.counts), dtype=np.int64)
        groups, line, kind = [], 0, 0
        for fan in fans:
            kinds[fan.kind + kind] = fan.rows.line + line
            groups.append(places(fan.rows.source) * len(kinds) + fan.kind + kind)
            line, kind = line + len(fan.wanting.counts), kind + len(fan.holders.counts)
        of_line, of_held = _sums(every, len(hosts)), _sums(holders, len(hosts))
        _, chosen = distinct_first(of_line.view(np.int64))
        number = numbered(of_line.view(np.int64))[1]
        mark = mixed(of_line[kinds] * 3 + of_held)
        host = numbered(hosts)[1]
        ranks, _ = LineSet.sorted(host, np.arange(len(host)), int(host.max(initial=-1)) + 1)
        return cls(host, ranks, every.take(chosen), number[kinds], holders, mark, groups)

    def sends(self, groups: Ints) -> Sends:
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
        holders = self._exceptions(number, kind, line, np.bincount(count), begin)
        own = repeated(self.hosts.first, self.host[senders])
        own = own[0], self.hosts.members[own[1]]
        return Sends(senders, of, *self._members(line, begin), holders, self.host, own)

    def _members(self, line: Ints, begin: Ints) -> tuple[Mask, Ints]:
        """The ranks of different sets of lines, one row each, and the row of each class."""
        marks = np.add.reduceat(_random(len(self.lines.counts))[line], begin[:-1])
        sets, which = numbered(marks.view(np.int64))
        _, chosen = distinct_first(which)
        row, at = repeated(begin, chosen)
        one, member = repeated(self.lines.first, line[at])
        members = np.zeros((len(sets), len(self.host)), dtype=bool)
        members[row[one], self.lines.members[member]] = True
        return members, which

    def _exceptions(self, number: Ints, kind: Ints, line: Ints, count: Ints, begin: Ints) -> Ints:
        """The ranks that hold what a class sends by all kinds on lines that they are on."""
        row, at = repeated(self.holders.first, kind)
        keys, key = numbered(number[row] * len(self.host) + self.holders.members[at])
        of_class, rank = np.divmod(keys, len(self.host))
        row, at = repeated(begin, of_class)
        inside = self.lines.find(line[at], rank[row]) >= 0
        lines = np.bincount(row, count[at] * inside, len(keys))
        exceptions: Ints = keys[np.bincount(key, minlength=len(keys)) == lines]
        return exceptions


@dataclass(frozen=True, eq=False, slots=True)
class Sends:
    """The pairs of ranks that senders of some classes make."""

    senders: Ints
    of: Ints  # the class of each sender
    members: Mask  # the ranks of sets of lines, one row each
    which: Ints  # the set of each class
    holders: Ints  # ranks of its set that a class does not send to: a number for both, rising
    host: Ints  # the host of each rank
    own: tuple[Ints, Ints]  # ranks of the host of each sender: number of the sender, and rank

    def reach(self, sender: Ints, rank: Ints) -> Mask:
        """Whether the classes of senders (by number) send to ranks."""
        inside: Mask = self.members[self.which[self.of[sender]], rank]
        inside &= ~contained(self.of[sender] * self.members.shape[1] + rank, self.holders)
        return inside

    def known(self, pairs: Ints) -> Mask:
        """Which pairs, one number each, are among these."""
        source, destination = np.divmod(pairs, self.members.shape[1])
        at = np.minimum(np.searchsorted(self.senders, source), len(self.senders) - 1)
        known: Mask = (self.senders[at] == source) & self.reach(at, destination)
        known &= self.host[source] != self.host[destination]
        return known

    @property
    def sent(self) -> Ints:
        holders = np.bincount(self.holders // self.members.shape[1], minlength=len(self.which))
        sizes: Ints = self.members.sum(axis=1)[self.which] - holders
        return sizes[self.of] - np.bincount(self.own[0], self.reach(*self.own)).astype(np.int64)

    @property
    def received(self) -> Ints:
        size, senders = self.members.shape[1], np.bincount(self.of, minlength=len(self.which))
        of_set, (row, rank) = np.bincount(self.which, senders), np.nonzero(self.members)
        of_class, holders = np.divmod(self.holders, size)
        total = np.bincount(rank, of_set[row], size) - np.bincount(holders, senders[of_class], size)
        return (total - np.bincount(self.own[1], self.reach(*self.own), size)).astype(np.int64)


def _sums(lines: LineSet, num_ranks: int) -> NDArray[np.uint64]:
    """A number for the set of ranks of each line."""
    numbers = _random(num_ranks)[lines.members]
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers)])
    return mixed(ends[lines.first[1:]] - ends[lines.first[:-1]])


def _random(num: int) -> NDArray[np.uint64]:
    """Numbers that look random; numpy.random takes longer to load than a plan to be summed up."""
    return mixed(np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
