"""Who exchanges how much with whom, over a whole plan.

Rows that a rank sends to a whole line are looked at once: bytes are multiplied, and the pairs they
make are bits of a table, so that thousands of replicas that pass on to each other take no longer
than their ranks are many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, distinct, numbered
from reshard.planning.rounds import Slot, slice_edges
from reshard.planning.sharing import LineSet, repeated
from reshard.planning.transfers import Fan, Flow, Transfers

__all__ = ["Traffic"]

FEW = 64
"""Members of lines whose pairs are listed one by one."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows of one flow and one hop, or rows that go to whole lines, and when they move."""

    flow: Flow
    slot: Slot
    rows: Transfers
    fan: Fan | None
    world: Ints

    @cached_property
    def groups(self) -> _Groups:
        """The groups of all rows that go to many ranks."""
        assert self.fan is not None
        many = np.flatnonzero(self.fan.wanting.counts[self.rows.line] > FEW)
        return _Groups.of(self.fan, many, self.world)

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each row, once."""
        return self.rows.sizes * self.flow.stack.itemsize_at(self.rows.hop)

    @cached_property
    def is_steady(self) -> bool:
        """Whether every row is long enough for every slice."""
        cells, unit = self.rows.cells, self.slot.unit
        units = self.flow.units(cells, unit)[self.rows.runs.cell]
        full = bool((self.rows.sizes >= self.slot.slices * units).all())
        return self.slot.phases == 1 and (self.slot.slices == 1 or full)

    def turn(self, number: int) -> tuple[int, int] | None:
        """What moves in a round: all rows, as (-1, -1), or those of a phase and a slice."""
        turn = self.slot.turn(number, self.rows.hop)
        return (-1, -1) if turn and self.is_steady else turn

    def active(self, turn: tuple[int, int]) -> Ints:
        """The places of the rows that move in a turn."""
        phase, part = turn
        if part < 0:
            return np.arange(len(self.rows))
        runs = self.rows.runs
        units = self.flow.units(self.rows.cells, self.slot.unit)[runs.cell]
        low = slice_edges(runs.start, runs.stop, units, self.slot.slices, part)
        high = slice_edges(runs.start, runs.stop, units, self.slot.slices, part + 1)
        return np.flatnonzero((low < high) & (self.rows.part % self.slot.phases == phase))


@dataclass(frozen=True, eq=False, slots=True)
class Pairs:
    """Pairs of ranks as columns: bytes, and the rounds in which they exchange something."""

    source: Ints
    destination: Ints
    num_bytes: Ints
    messages: Ints


class Traffic:
    """Bytes and messages of a plan."""

    def __init__(self, flows: Sequence[Flow], slots: Sequence[Slot], world: Ints) -> None:
        self.world = world
        self._ends = list(zip(flows, slots, strict=True))
        self.first_hand, self.passed_on, self.received = np.zeros((3, len(world)), dtype=np.int64)
        for stream in self._streams():
            self._count(stream)

    def _streams(self) -> Iterator[Stream]:
        for flow, slot in self._ends:
            for rows in flow.streams():
                if isinstance(rows, Fan):
                    some = np.flatnonzero(rows.served)
                    if len(some):
                        fan = rows.take(some)
                        yield Stream(flow, slot, fan.rows, fan, self.world)
                    continue
                moved = rows.take(np.flatnonzero(rows.source != rows.destination))
                if len(moved):
                    yield Stream(flow, slot, moved, None, self.world)

    def _places(self, ranks: Ints) -> Ints:
        return np.searchsorted(self.world, ranks)

    def _sum(self, ranks: Ints, num_bytes: Ints) -> Ints:
        weights = num_bytes.astype(np.float64)
        return np.bincount(self._places(ranks), weights, len(self.world)).astype(np.int64)

    def _count(self, stream: Stream) -> None:
        rows, num_bytes, fan = stream.rows, stream.num_bytes, stream.fan
        first = rows.hop == 0 and not rows.again
        times = np.ones(len(rows), np.int64) if fan is None else fan.served
        once = self._sum(rows.source, num_bytes) if first else 0
        self.first_hand += once
        self.passed_on += self._sum(rows.source, num_bytes * times) - once
        ends = [(rows.destination, num_bytes)] if fan is None else fan.received(num_bytes)
        for ranks, received in ends:
            self.received += self._sum(ranks, received)

    @cached_property
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
                times = _members(
                    fan.wanting.first, destinations[self._places(fan.wanting.members)], size
                )[rows.line]
                times -= _members(fan.first, destinations[self._places(fan.held)], size)[fan.kind]
                mine = np.flatnonzero(fan.sends_to_itself)
                times[mine, destinations[self._places(rows.source[mine])]] -= 1
            for number in (0, 1) if rows.hop == 0 else (0,):
                np.add.at(found[number], group, times * stream.num_bytes[:, None])
        return found[0], found[1]

    @cached_property
    def messages(self) -> int:
        """All that goes from one rank to another in one round is one message."""
        return sum(_num_pairs(active, self.world) * times for active, times in self._rounds())

    def _rounds(self) -> Iterator[tuple[list[tuple[Stream, Ints]], int]]:
        """The rows that move in a round, and in how many rounds just these do."""
        streams = list(self._streams())
        moving: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for at, stream in enumerate(streams):
            for number in range(stream.slot.first, stream.slot.first + stream.slot.num_rounds):
                turn = stream.turn(number)
                if turn is not None:
                    moving.setdefault(number, []).append((at, turn))
        for some, times in Counter(map(tuple, moving.values())).items():
            yield [(streams[at], streams[at].active(turn)) for at, turn in some], times

    @cached_property
    def pairs(self) -> Pairs:
        """Every pair of ranks that exchange anything: as many as there are, so not for thousands
        of ranks that all pass on to each other."""
        size = max(len(self.world), 1)
        rounds = [(_listed(active, self.world), times) for active, times in self._rounds()]
        keys = distinct(np.concatenate([*(found for found, _ in rounds), np.zeros(0, np.int64)]))
        messages, num_bytes = np.zeros((2, len(keys)), dtype=np.int64)
        for found, times in rounds:
            messages[np.searchsorted(keys, found)] += times
        for stream in self._streams():
            ends, row = _ends(stream, np.arange(len(stream.rows)), self.world)
            at = np.searchsorted(keys, ends)
            num_bytes += np.bincount(at, stream.num_bytes[row], len(keys)).astype(np.int64)
        return Pairs(self.world[keys // size], self.world[keys % size], num_bytes, messages)

    @property
    def source(self) -> Ints:
        """The sender of every pair of ranks that exchange anything."""
        return self.pairs.source

    @property
    def destination(self) -> Ints:
        """The receiver of every pair of ranks that exchange anything."""
        return self.pairs.destination


def _members(first: Ints, groups: Ints, size: int) -> Ints:
    """How many entries of each row of a ragged table are of each group."""
    row = np.repeat(np.arange(len(first) - 1), np.diff(first))
    return np.bincount(row * size + groups, minlength=(len(first) - 1) * size).reshape(-1, size)


def _listed(active: Sequence[tuple[Stream, Ints]], world: Ints) -> Ints:
    """One number for each pair of ranks that exchange some of these rows."""
    keys = [_ends(stream, rows, world)[0] for stream, rows in active]
    return distinct(np.concatenate([*keys, np.zeros(0, np.int64)]))


def _ends(stream: Stream, rows: Ints, world: Ints) -> tuple[Ints, Ints]:
    """One number for the pair of ranks of each of these rows, and the row; rows of fans repeat."""
    source, destination = stream.rows.source[rows], stream.rows.destination[rows]
    if stream.fan is not None:
        row, at = repeated(stream.fan.wanting.first, stream.rows.line[rows])
        rows, source, destination = rows[row], source[row], stream.fan.wanting.members[at]
        apart = (source != destination) & ~stream.fan.holds(rows, destination)
        rows, source, destination = rows[apart], source[apart], destination[apart]
    places = np.searchsorted(world, source), np.searchsorted(world, destination)
    return places[0] * len(world) + places[1], rows


def _num_pairs(active: Sequence[tuple[Stream, Ints]], world: Ints) -> int:
    """How many pairs of ranks exchange some of these rows."""
    narrow, wide = [], []
    for stream, rows in active:
        fan = stream.fan
        many = np.zeros(len(rows), dtype=bool)
        if fan is not None:
            many = fan.wanting.counts[stream.rows.line[rows]] > FEW
        narrow.append((stream, rows[~many]))
        if fan is not None and many.any():
            whole = len(rows) == len(stream.rows)
            wide.append(stream.groups if whole else _Groups.of(fan, rows[many], world))
    keys = _listed(narrow, world)
    times = np.zeros(len(world), dtype=np.int64)
    for groups in wide:
        times += np.bincount(groups.sender, minlength=len(world))
    sender, receiver = np.divmod(keys, max(len(world), 1))
    several = distinct(np.flatnonzero(times > 1))
    bits = np.zeros((len(several), -(-len(world) // 8)), dtype=np.uint8)
    row = np.searchsorted(several, np.arange(len(world)))
    mine = np.flatnonzero(times[sender] > 1)
    at = (row[sender[mine]], receiver[mine] >> 3)
    np.bitwise_or.at(bits, at, _BIT[receiver[mine] & 7])
    found = int(np.count_nonzero(times[sender] == 0))
    once = np.flatnonzero(times[sender] == 1)
    known = np.zeros(len(once), dtype=bool)
    for groups in wide:
        alone = times[groups.sender] == 1
        found += int(groups.size[alone].sum())
        if len(once):
            known |= groups.contain(sender[once], receiver[once], world)
        groups.mark(bits, row, ~alone, world)
    return found + int(np.count_nonzero(~known)) + int(_COUNT[bits].sum(dtype=np.int64))


_BIT = np.array([128, 64, 32, 16, 8, 4, 2, 1], dtype=np.uint8)
_COUNT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


@dataclass(frozen=True, eq=False, slots=True)
class _Groups:
    """Senders that each have to do with a whole line, except some of its ranks; by their places."""

    lines: LineSet
    sender: Ints
    line: Ints
    size: Ints
    """With how many ranks each sender has to do."""
    but: LineSet
    """The exceptions of each group."""

    @classmethod
    def of(cls, fan: Fan, rows: Ints, world: Ints) -> _Groups:
        """The groups of some rows of a fan."""
        place = np.searchsorted(world, fan.rows.source[rows])
        keys, group = numbered(place * len(fan.wanting.counts) + fan.rows.line[rows])
        sender, line = np.divmod(keys, len(fan.wanting.counts))
        # A rank that holds all that a sender has for its line gets nothing from it.
        order = np.argsort(group, kind="stable")
        first = np.searchsorted(group[order], np.arange(len(keys) + 1))
        head = rows[order[first[:-1]]]
        some, at = repeated(fan.first, fan.kind[head])
        held = fan.held[at]
        case, at = repeated(first, some)
        lacks = ~fan.holds(rows[order[at]], held[case])
        all_of_it = np.bincount(case, weights=lacks, minlength=len(some)) == 0
        itself = np.flatnonzero(fan.sends_to_itself[head])
        but = (
            np.concatenate([some[all_of_it], itself]),
            np.concatenate([np.searchsorted(world, held[all_of_it]), sender[itself]]),
        )
        rising = np.lexsort(but[::-1])
        ends = np.searchsorted(but[0][rising], np.arange(len(keys) + 1))
        size = fan.wanting.counts[line] - np.diff(ends)
        return cls(fan.wanting, sender, line, size, LineSet(ends, ends, but[1][rising]))

    def contain(self, sender: Ints, receiver: Ints, world: Ints) -> NDArray[np.bool_]:
        """Which pairs are among those of senders that have one group."""
        group = np.minimum(np.searchsorted(self.sender, sender), len(self.sender) - 1)
        inside = self.lines.find(self.line[group], world[receiver]) >= 0
        inside &= self.but.find(group, receiver) < 0
        found: NDArray[np.bool_] = inside & (self.sender[group] == sender)
        return found

    def mark(
        self, bits: NDArray[np.uint8], row: Ints, some: NDArray[np.bool_], world: Ints
    ) -> None:
        """Set the bits of all pairs of some groups in the rows of their senders."""
        chosen = np.flatnonzero(some)
        for line in distinct(self.line[chosen]).tolist():
            groups = chosen[self.line[chosen] == line]
            members = np.zeros(len(world), dtype=bool)
            ranks = self.lines.members[self.lines.first[line] : self.lines.first[line + 1]]
            members[np.searchsorted(world, ranks)] = True
            pairs = np.repeat(np.packbits(members)[None], len(groups), axis=0)
            group, at = repeated(self.but.first, groups)
            but = self.but.members[at]
            np.bitwise_and.at(pairs, (group, but >> 3), ~_BIT[but & 7])
            bits[row[self.sender[groups]]] |= pairs
