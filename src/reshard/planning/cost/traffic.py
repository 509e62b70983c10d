"""Who exchanges how much with whom, over a whole plan.

First-hand rows are counted one by one. What is passed on is counted by sender: a rank passes the
same rows to every other rank that wants them, so its rows are looked at once and its pairs are
listed once, also when hundreds of replicas pass on to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.layout.columns import Ints, distinct, numbered
from reshard.planning.rounds import Slot, slice_edges
from reshard.planning.sharing import LineSet
from reshard.planning.transfers import Flow, Transfers

__all__ = ["Traffic", "traffic_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """Pairs of ranks that exchange anything, as columns."""

    source: Ints
    destination: Ints
    num_bytes: Ints
    first_hand: Ints
    """Bytes that a source rank sends for the first time; others are passed on, or sent again."""
    messages: Ints
    """Rounds in which the pair exchanges something."""


@dataclass(frozen=True, eq=False, slots=True)
class _Stream:
    """Rows of one hop, in groups; every pair of a group exchanges all rows of the group."""

    flow: Flow
    slot: Slot
    hop: int
    rows: Transfers
    group: Ints
    """The group of each row."""
    first: Ints
    """Where the pairs of each group begin; one more entry ends the last."""
    pairs: Ints
    """One number per pair of ranks."""

    def sizes(self) -> Ints:
        """Bytes of each pair."""
        total = np.bincount(self.group, weights=self.rows.sizes, minlength=len(self.first) - 1)
        itemsize = self.flow.stack.itemsize_at(self.hop)
        return np.repeat(total.astype(np.int64) * itemsize, np.diff(self.first))

    def units(self) -> Ints:
        """Slices of each row end between whole parts of this many elements."""
        return self.flow.units(self.rows.cells, self.slot.unit)[self.rows.runs.cell]

    def is_steady(self) -> bool:
        """Whether every group has a row that is long enough for every slice."""
        full = self.rows.sizes >= self.slot.slices * self.units()
        groups = np.zeros(len(self.first) - 1, dtype=bool)
        groups[self.group[full]] = True
        return self.slot.phases == self.slot.lag == 1 and bool(groups.all())

    def active(self, number: int) -> Ints | slice:
        """The places of the pairs that exchange something in a round."""
        turn = self.slot.turn(number, self.hop)
        if turn is None:
            return slice(0, 0)
        if self.slot.slices * self.slot.phases == 1:
            return slice(None)
        runs, (phase, part), units = self.rows.runs, turn, self.units()
        low = slice_edges(runs.start, runs.stop, units, self.slot.slices, part)
        high = slice_edges(runs.start, runs.stop, units, self.slot.slices, part + 1)
        moves = (low < high) & (self.rows.part % self.slot.phases == phase)
        groups = np.zeros(len(self.first) - 1, dtype=bool)
        groups[self.group[moves]] = True
        if groups.all():
            return slice(None)
        return np.flatnonzero(np.repeat(groups, np.diff(self.first)))


def traffic_of(flows: Sequence[Flow], slots: Sequence[Slot], world: Ints) -> Traffic:
    """Add up all rows by pair of ranks."""
    known: dict[bytes, Ints] = {}
    streams = [
        stream
        for flow, slot in zip(flows, slots, strict=True)
        for stream in _streams(flow, slot, world, known)
    ]
    lists = {id(stream.pairs): stream.pairs for stream in streams}
    pairs = distinct(np.concatenate([*lists.values(), np.zeros(0, np.int64)]))
    places = {key: np.searchsorted(pairs, keys) for key, keys in lists.items()}
    num_bytes, first_hand = np.zeros_like(pairs), np.zeros_like(pairs)
    for stream in streams:
        # The pairs of one stream may repeat, so plain indexing would lose some.
        place, sizes = places[id(stream.pairs)], stream.sizes()
        added = np.bincount(place, weights=sizes, minlength=len(pairs)).astype(np.int64)
        num_bytes += added
        first_hand += added if stream.hop == 0 and not stream.rows.again else 0
    return Traffic(
        world[pairs // max(len(world), 1)],
        world[pairs % max(len(world), 1)],
        num_bytes,
        first_hand,
        _messages(streams, places, len(pairs)),
    )


def _messages(streams: Sequence[_Stream], places: dict[int, Ints], num_pairs: int) -> Ints:
    """How many rounds each pair exchanges something in; what shares a round shares a message."""
    counts = np.zeros(num_pairs, dtype=np.int64)
    by_round: dict[int, list[_Stream]] = {}
    for together in _by_slot(streams):
        slot = together[0].slot
        if slot.slices > 1 and all(stream.is_steady() for stream in together):
            counts += _steady_messages(together, places, num_pairs)
            continue
        for at in range(slot.first, slot.first + slot.num_rounds):
            by_round.setdefault(at, []).extend(together)
    for at, together in by_round.items():
        here = np.zeros(num_pairs, dtype=bool)
        for stream in together:
            here[places[id(stream.pairs)][stream.active(at)]] = True
        counts += here
    return counts


def _by_slot(streams: Sequence[_Stream]) -> list[list[_Stream]]:
    """Streams that move in the same rounds."""
    found: dict[Slot, list[_Stream]] = {}
    for stream in streams:
        found.setdefault(stream.slot, []).append(stream)
    return list(found.values())


def _steady_messages(streams: Sequence[_Stream], places: dict[int, Ints], num_pairs: int) -> Ints:
    """The rounds of sliced stacks, which have them to themselves, if all pairs are always busy.

    A pair of one hop exchanges a message per slice; one of two hops is busy one round longer.
    """
    first = np.full(num_pairs, len(streams) + 8, dtype=np.int64)
    last = np.full(num_pairs, -1, dtype=np.int64)
    for stream in streams:
        place = places[id(stream.pairs)]
        first[place] = np.minimum(first[place], stream.hop)
        last[place] = np.maximum(last[place], stream.hop)
    counts: Ints = np.where(last >= 0, streams[0].slot.slices + last - first, 0)
    return counts


def _streams(flow: Flow, slot: Slot, world: Ints, known: dict[bytes, Ints]) -> Iterator[_Stream]:
    """The rows of a flow by hop; equal lists of pairs are kept once, in ``known``."""
    parts = flow.parts()
    for rows in flow.first_hand(parts):
        yield from _one_by_one(flow, slot, rows, world)
    if not flow.direct:
        yield from _by_sender(flow, slot, parts, flow.geometry.wanting, world, known)
    for entered, lines in flow.entering(parts):
        yield from _one_by_one(flow, slot, entered, world)
        yield from _by_sender(flow, slot, entered, lines, world, known)


def _one_by_one(flow: Flow, slot: Slot, rows: Transfers, world: Ints) -> Iterator[_Stream]:
    rows = rows.take(np.flatnonzero(rows.source != rows.destination))
    if len(rows):
        keys = _places(rows.source, world) * len(world) + _places(rows.destination, world)
        pairs, group = numbered(keys)
        yield _Stream(flow, slot, rows.hop, rows, group, np.arange(len(pairs) + 1), pairs)


def _by_sender(
    flow: Flow,
    slot: Slot,
    rows: Transfers,
    wanting: LineSet,
    world: Ints,
    known: dict[bytes, Ints],
) -> Iterator[_Stream]:
    """Every first receiver of a line, and the pairs it makes with the others of the line."""
    rows = rows.take(np.flatnonzero(np.diff(wanting.first)[rows.line] > 1))
    if not len(rows):
        return
    size = len(world)
    keys = rows.line * size + _places(rows.destination, world)
    senders, group = numbered(keys)
    counts = np.diff(wanting.first)[senders // size] - 1
    first = np.concatenate([[0], np.cumsum(counts)])
    name = b"".join((senders.tobytes(), wanting.first.tobytes(), wanting.members.tobytes()))
    if name not in known:
        known[name] = _pairs_of(senders // size, senders % size, wanting, world)
    yield _Stream(flow, slot, rows.hop + 1, rows, group, first, known[name])


def _pairs_of(lines: Ints, senders: Ints, wanting: LineSet, world: Ints) -> Ints:
    """Each sender with every other member of its line."""
    counts = np.diff(wanting.first)[lines]
    of = np.repeat(np.arange(len(lines)), counts)
    within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    others = _places(wanting.members, world)[wanting.first[lines][of] + within]
    apart = others != senders[of]
    pairs: Ints = (senders[of] * len(world) + others)[apart]
    return pairs


def _places(ranks: Ints, world: Ints) -> Ints:
    return np.searchsorted(world, ranks)
