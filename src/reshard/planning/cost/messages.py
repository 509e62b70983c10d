"""Who sends messages to whom, over all rounds: all from one rank to another in a round is one.

Messages are pairs of ranks, and rows that a rank sends to a whole line make as many of these as the
line has ranks, so they are counted by *class*: ranks that pass on parts of the same lines, held by
the same ranks, have to do with the same others. Small fans are listed; so are pairs of ranks of one
host, each once, however many parts go from the one to the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, distinct, distinct_first, mixed, numbered
from reshard.planning.cells.transfers import AnyRows, Fan, HostFan, Mask, Transfers
from reshard.planning.rank import Rows
from reshard.planning.rounds import Slot, slice_edges
from reshard.planning.sharing import LineSet, repeated

MAX_LISTED = 1 << 12  # rows of a fan whose pairs are listed one by one
Places = Callable[[Ints], Ints]  # the places of ranks among all ranks of a plan
Columns = tuple[Ints, ...]
Turn = tuple[int, int]  # a phase and a slice; (-1, -1) stands for all of them
Turns = dict[tuple[Slot, int, bool], list[Columns]]
"""Numbers, and what must be known of the rows behind them, by when they move. Rows are not kept:
where every pair of ranks exchanges something, they are many."""


@dataclass(frozen=True, eq=False)
class Stream(Rows):
    """Rows of one flow and one hop, and to whom they go; those of fans have no destinations."""

    ends: AnyRows


class _Moving:
    """What moves in the rounds of one slot at one hop: numbers, each with the rows behind it."""

    def __init__(self, slot: Slot, hop: int, steady: bool, columns: Sequence[Columns]) -> None:
        self.slot, self.hop, self.steady = slot, hop, steady
        keys, *runs = (np.concatenate(column) for column in zip(*columns, strict=True))
        if steady:
            self.keys = distinct(keys)
            return
        order = np.argsort(keys, kind="stable")
        self._start, self._stop, self._unit, self._part = (column[order] for column in runs)
        self.keys, self._first = distinct_first(keys[order])

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

    def moves(self, turn: Turn) -> Mask:
        """The rows that move in a turn, in the order of their numbers."""
        phase, part = turn
        ends = (self._start, self._stop, self._unit, self.slot.slices)
        moves: Mask = slice_edges(*ends, part) < slice_edges(*ends, part + 1)
        moves &= self._part % self.slot.phases == phase
        return moves

    def active(self, turn: Turn) -> Ints:
        if self.steady:
            return self.keys
        found: Ints = self.keys[np.logical_or.reduceat(self.moves(turn), self._first)]
        return found


class _MovingInside:
    """The same for what is passed on inside hosts: the pairs of ranks that have parts to move."""

    def __init__(self, stream: Stream, fan: HostFan, size: int, places: Places) -> None:
        turns: Turns = {}
        _add(turns, stream, np.arange(len(fan.rows)), np.arange(len(fan.rows)))
        self._fan, self._rows = fan, _moving(turns)[0]
        self.spans = self._rows.spans
        every = places(fan.sender)[:, None] * size + places(fan.receivers)
        self._keys, number = numbered(every.reshape(-1))
        self._number = number.reshape(every.shape)

    def active(self, turn: Turn) -> Ints:
        moves = np.ones(len(self._fan.rows), bool) if self._rows.steady else self._rows.moves(turn)
        here = np.zeros(len(self._keys), dtype=bool)
        here[self._number[self._fan.fan.by_member(moves) > 0]] = True
        found: Ints = self._keys[here]
        return found


AnyMoving = _Moving | _MovingInside


def _rounds(
    moving: Sequence[AnyMoving],
) -> Iterator[tuple[list[tuple[int, Ints]], int]]:
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


def _add(found: Turns, stream: Stream, keys: Ints, rows: Ints) -> None:
    """Add numbers of rows of a stream; steady ones move in every round."""
    if not len(keys):
        return
    slot, slices, runs = stream.slot, stream.slot.slices, stream.transfers.runs
    sizes: Ints = runs.stop - runs.start
    columns: Columns = (keys,)
    # No unit is larger than that of the slot, so long rows need no look at their cells.
    steady = slices == 1 or int(sizes.min()) >= slices * slot.unit
    if not steady or slot.phases > 1:
        units = stream.units
        steady = slot.phases == 1 and bool((sizes >= slices * units).all())
        known = () if steady else (runs.start, runs.stop, units, stream.transfers.part)
        columns += tuple(column[rows] for column in known)
    found.setdefault((slot, stream.transfers.hop, steady), []).append(columns)


def _moving(found: Turns) -> list[_Moving]:
    return [_Moving(*when, columns) for when, columns in found.items()]


def messages_of(
    streams: Iterable[Stream], hosts: Ints, places: Places
) -> Iterator[tuple[int, Ints, Sends | None]]:
    """In how many rounds which pairs of ranks exchange something: those that are listed, one
    number each, and others by classes of ranks; no pair is among both.

    Ranks are their places; fans do not serve the host of their sender, which is the rank alone
    where hosts are not known.
    """
    size = len(hosts)
    many: list[Stream] = []
    listed, groups = Turns(), Turns()
    inside: list[_MovingInside] = []
    for one in streams:
        if isinstance(one.ends, Fan) and one.ends.served.sum() > MAX_LISTED:
            many.append(one)
        elif isinstance(one.ends, HostFan):
            inside.append(_MovingInside(one, one.ends, size, places))
        else:
            _add(listed, one, *pairs_of(one.ends, size, places))
    moving: list[AnyMoving] = [*_moving(listed), *inside]
    if many:
        fans = [one.ends for one in many if isinstance(one.ends, Fan)]
        classes = _Classes.of(fans, hosts, places)
        for one, keys in zip(many, classes.groups(fans), strict=True):
            _add(groups, one, keys, np.arange(len(keys)))
    for active, times in _rounds([*moving, *_moving(groups)]):
        pairs = _joined([keys for at, keys in active if at < len(moving)])
        some = _joined([keys for at, keys in active if at >= len(moving)])
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


def _joined(keys: Sequence[Ints]) -> Ints:
    """All numbers, each once, in rising order, as those of each list are."""
    if len(keys) == 1:
        return keys[0]
    every = np.concatenate([*keys, np.zeros(0, np.int64)])
    every.sort(kind="stable")  # merges lists that rise, in half the time of another sort
    found: Ints = every[np.append(every[1:] != every[:-1], True)[: len(every)]]
    return found


@dataclass(frozen=True, eq=False)
class _Classes:
    """Classes of senders that have to do with whole lines.

    A *kind* is a line and the ranks of it that hold what is sent. Senders of the same kinds are a
    class: the ranks that they send to are those of the lines of these kinds, except the ranks that
    hold all of it, and the sender. Sets are compared by sums of random numbers.
    """

    host: Ints  # the host of each rank, as a number below that of hosts
    hosts: LineSet  # the ranks of each host
    places: Places
    lines: LineSet  # different lines of all kinds
    line: Ints  # the line of each kind
    held: LineSet  # the ranks of each kind that hold what is sent
    mark: NDArray[np.uint64]  # a random number for each kind; kinds of equal sets have equal ones

    @classmethod
    def of(cls, fans: Sequence[Fan], hosts: Ints, places: Places) -> _Classes:
        """The kinds of all fans, numbered one after the other."""
        chains = LineSet.chain([f.wanting for f in fans]), LineSet.chain([f.held for f in fans])
        every, held = (LineSet.plain(one.first, places(one.members)) for one in chains)
        kinds = np.zeros(len(held.counts), dtype=np.int64)
        base = np.cumsum([[0, 0], *([len(f.wanting.counts), len(f.held.counts)] for f in fans)], 0)
        for fan, (line, kind) in zip(fans, base.tolist(), strict=False):
            kinds[fan.kind + kind] = fan.rows.line + line
        of_line, of_held = _sums(every, len(hosts)), _sums(held, len(hosts))
        _, chosen = distinct_first(of_line.view(np.int64))
        number = numbered(of_line.view(np.int64))[1]
        mark = mixed(of_line[kinds] * 3 + of_held)
        host = numbered(hosts)[1]
        ranks, _ = LineSet.sorted(host, np.arange(len(host)), int(host.max(initial=-1)) + 1)
        return cls(host, ranks, places, every.take(chosen), number[kinds], held, mark)

    def groups(self, fans: Sequence[Fan]) -> Iterator[Ints]:
        """One number for the sender and the kind of each row of each fan."""
        base = 0
        for fan in fans:
            yield self.places(fan.rows.source) * len(self.line) + fan.kind + base
            base += len(fan.held.counts)

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
        held = self._exceptions(number, kind, line, np.bincount(count), begin)
        own = repeated(self.hosts.first, self.host[senders])
        own = own[0], self.hosts.members[own[1]]
        return Sends(senders, of, *self._members(line, begin), held, self.host, own)

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
        row, at = repeated(self.held.first, kind)
        keys, key = numbered(number[row] * len(self.host) + self.held.members[at])
        of_class, rank = np.divmod(keys, len(self.host))
        row, at = repeated(begin, of_class)
        inside = self.lines.find(line[at], rank[row]) >= 0
        lines = np.bincount(row, count[at] * inside, len(keys))
        found: Ints = keys[np.bincount(key, minlength=len(keys)) == lines]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Sends:
    """The pairs of ranks that senders of some classes make."""

    senders: Ints
    of: Ints  # the class of each sender
    members: Mask  # the ranks of sets of lines, one row each
    which: Ints  # the set of each class
    held: Ints  # ranks of the set of a class that it does not send to; one number for both, rising
    host: Ints  # the host of each rank
    own: tuple[Ints, Ints]  # ranks of the host of each sender: number of the sender, and rank

    def reach(self, sender: Ints, rank: Ints) -> Mask:
        """Whether the classes of senders (by number) send to ranks."""
        inside: Mask = self.members[self.which[self.of[sender]], rank]
        if not len(self.held):
            return inside
        key = self.of[sender] * self.members.shape[1] + rank
        at = np.minimum(np.searchsorted(self.held, key), len(self.held) - 1)
        inside &= self.held[at] != key
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
        held = np.bincount(self.held // self.members.shape[1], minlength=len(self.which))
        sizes: Ints = self.members.sum(axis=1)[self.which] - held
        return sizes[self.of] - np.bincount(self.own[0], self.reach(*self.own)).astype(np.int64)

    @property
    def received(self) -> Ints:
        size, senders = self.members.shape[1], np.bincount(self.of, minlength=len(self.which))
        of_set, (row, rank) = np.bincount(self.which, senders), np.nonzero(self.members)
        of_class, held = np.divmod(self.held, size)
        found = np.bincount(rank, of_set[row], size) - np.bincount(held, senders[of_class], size)
        found -= np.bincount(self.own[1], self.reach(*self.own), size)
        return found.astype(np.int64)


def _sums(lines: LineSet, num_ranks: int) -> NDArray[np.uint64]:
    """A number for the set of ranks of each line."""
    numbers = _random(num_ranks)[lines.members]
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers)])
    return mixed(ends[lines.first[1:]] - ends[lines.first[:-1]])


def _random(num: int) -> NDArray[np.uint64]:
    """Numbers that look random; numpy.random takes longer to load than a plan to be summed up."""
    return mixed(np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
