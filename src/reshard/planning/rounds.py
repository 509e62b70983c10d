"""Rounds trade time for memory: what moves when, so that no rank stages more than the cap?

Staging is every byte a rank keeps beyond source and destination: what it has packed to send and
what it has received and not yet unpacked. Stacks that fit together share rounds; a stack that does
not fit alone is cut into slices, a slice being the same fraction of every one of its transfers, so
that all ranks stay busy in every round. Stacks that differ only in which ranks hold the source
(pipeline stages, experts) are cut together. Under a very small cap not even one element of every
transfer fits; then transfers take turns in phases. What is passed on travels one round after it was
received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from reshard.errors import MemoryCapError
from reshard.layout.columns import Ints
from reshard.planning.cells.regular import RegularGeometry
from reshard.planning.cells.transfers import Transfers
from reshard.planning.classes import Stack
from reshard.planning.flows import Flow
from reshard.text import format_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one stack makes every rank stage, if it moves in one round."""

    stack: Stack
    staged: Ints  # bytes of each rank
    rows: int  # the most transfers that any rank takes part in
    hops: int  # the rounds that passing on takes after the first
    longest: int  # the elements of the longest transfer
    uses: Callable[[], Ints] | None = None
    """Lists every end of every row, one column each: at which rank, of which part, how many bytes,
    and as how many elements an element of it counts. None where rows are not listed."""

    @property
    def most(self) -> int:
        """The most bytes that any rank stages."""
        return int(self.staged.max(initial=0))

    @property
    def least(self) -> int:
        """The bytes that a rank stages in a round of one element of every transfer, at most."""
        return self.rows * self.stack.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """When a stack moves: in ``slices`` rounds from ``first`` on, and its hops after.

    With several phases that is repeated, each time for the parts whose turn it is.
    """

    first: int
    slices: int = 1
    unit: int = 1  # slices end between whole parts of a cell of at most so many elements
    hops: int = 0
    phases: int = 1

    @property
    def num_rounds(self) -> int:
        return self.phases * (self.slices + self.hops)

    def turn(self, number: int, hop: int) -> tuple[int, int] | None:
        """The phase and the slice that move at a hop in a round, if any do."""
        phase, at = divmod(number - self.first, self.slices + self.hops)
        part = at - hop
        moves = 0 <= phase < self.phases and 0 <= part < self.slices
        return (phase, part) if moves else None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The slot of each stack, the number of rounds, and the most bytes any rank stages."""

    slots: tuple[Slot, ...]
    num_rounds: int
    peak_bytes: int


class TooTightError(Exception):
    """A stack whose rows are not listed needs phases: list it and try again."""


def schedule(loads: Sequence[Load], cap: int) -> Schedule:
    """Put stacks into rounds, family by family, as many as fit into each."""
    # Where not even one element of every transfer fits, transfers must take turns.
    tight = [load for load in loads if load.most > cap and load.least > cap]
    if tight and any(load.uses is None for load in loads):
        raise TooTightError
    _check_cap(tight, cap)
    slots: dict[int, Slot] = {}
    start = end = peak = 0
    shared: Ints = np.zeros(len(loads[0].staged) if loads else 0, dtype=np.int64)
    for numbers in _batches(loads, cap):
        some = [loads[number] for number in numbers]
        batch = some[0]
        if len(some) > 1:
            batch = Load(
                batch.stack,
                staged=np.sum([load.staged for load in some], axis=0),
                rows=sum(load.rows for load in some),
                hops=max(load.hops for load in some),
                longest=max(load.longest for load in some),
            )
        shared = shared + batch.staged
        if int(shared.max(initial=0)) > cap:
            start, shared = end, batch.staged
        staged = int(shared.max(initial=0))
        slot = Slot(start, hops=batch.hops)
        if staged > cap:
            slot, staged = _cut(batch, start, cap)
            shared = np.full_like(shared, cap)
        slots |= dict.fromkeys(numbers, slot)
        peak, end = max(peak, staged), max(end, start + slot.num_rounds)
    return Schedule(tuple(slots[number] for number in range(len(loads))), end, peak)


def _batches(loads: Sequence[Load], cap: int) -> list[list[int]]:
    """Numbers of stacks that are cut together; alone where one alone is too much for slices."""
    family: dict[object, list[int]] = {}
    for number, load in enumerate(loads):
        have, want, feed = load.stack.have, load.stack.want, load.stack.feed
        sides = (have.shape, have.dtype, have.layout.reduce is None, want.shape, want.dtype)
        # Stacks that differ only in who holds the source, such as pipeline stages.
        alike = (*sides, want.layout, feed.moves, feed.have_insert, feed.want_insert)
        family.setdefault(alike, []).append(number)
    batches: list[list[int]] = []
    for numbers in family.values():
        tight = sum(loads[number].least for number in numbers) * 4 > cap
        batches += [[number] for number in numbers] if tight else [numbers]
    return batches


def _cut(load: Load, start: int, cap: int) -> tuple[Slot, int]:
    """The slot of a stack that does not fit into one round.

    It has as many phases as it takes until an element of every transfer of a phase fits.
    """
    phases, staged, least = 1, load.most, load.least
    if least > cap:
        assert load.uses is not None
        uses = load.uses()
        staged, rows = _per_phase(uses, phases)
        while rows * load.stack.itemsize > cap:
            phases = min(phases * 2, _num_parts(uses))
            staged, rows = _per_phase(uses, phases)
        least = rows * load.stack.itemsize
    unit = max((cap - least) // 16 // least, 1)
    room = cap - least * unit
    slices = min(-(-staged // room), load.longest) if room > 0 else load.longest
    stage = min(staged // slices + least * unit, cap)
    return Slot(start, slices, unit, load.hops, phases), stage


def _per_phase(uses: Ints, phases: int) -> tuple[int, int]:
    """The most bytes and the most elements that any rank has in any of so many phases."""
    rank, part, num_bytes, elements = uses
    key = rank * phases + part % phases
    most, rows = (np.bincount(key, column).max(initial=0) for column in (num_bytes, elements))
    return int(most), int(rows)


def _num_parts(uses: Ints) -> int:
    return int(uses[1].max(initial=0)) + 1


def _check_cap(loads: Sequence[Load], cap: int) -> None:
    """Refuse a cap under which some stack does not fit even part by part; name the smallest."""
    least, label = 0, ""
    for load in loads:
        if load.uses is not None:
            uses = load.uses()
            needs = _per_phase(uses, _num_parts(uses))[1] * load.stack.itemsize
            least, label = max((least, label), (needs, load.stack.label))
    if least > cap:
        raise MemoryCapError(
            f"{label}: a memory cap of {format_bytes(cap)} ({cap} bytes) is too small: "
            f"the smallest that works is {least} bytes; raise memory="
        )


def slice_edges(start: Ints, stop: Ints, unit: Ints, slices: int, number: int) -> Ints:
    """Where slice ``number`` of each run begins; slice ``slices`` begins where the run ends."""
    if number == slices:
        return stop
    edge: Ints = np.maximum((start + (stop - start) * number // slices) // unit * unit, start)
    return edge


def load_of(flow: Flow, world: Ints) -> Load:
    if isinstance(flow.geometry, RegularGeometry):
        return _regular_load(flow, flow.geometry, world)
    return _listed_load(flow, world)


def _listed_load(flow: Flow, world: Ints) -> Load:
    """Count both ends of every row; what a rank sends to a whole line, without listing its pairs.

    A row of wider elements counts as more rows.
    """
    stack, hops = flow.stack, 0
    staged, count = np.zeros((2, len(world)), dtype=np.int64)
    for stream in flow.streams():
        if not stream.served.any():
            continue
        itemsize, hops = stack.itemsize_at(stream.rows.hop), max(hops, stream.rows.hop)
        once = np.ones(len(stream.rows), dtype=np.int64)
        for end in (stream.sent, stream.received):
            (ranks, elements), (_, rows) = end(stream.rows.sizes), end(once)
            place = np.searchsorted(world, ranks)
            np.add.at(staged, place, elements * itemsize)
            np.add.at(count, place, rows * _width(stack, itemsize))
    if flow.stack.adds:
        part, wide = flow.accumulated(), stack.accumulator_itemsize
        place = np.searchsorted(world, part.destination)
        np.add.at(staged, place, part.sizes * wide)
        np.add.at(count, place, _width(stack, wide))
    most, longest = int(count.max(initial=0)), int(flow.parts().sizes.max(initial=0))
    return Load(stack, staged, most, hops, longest, partial(_uses, flow, world))


def _width(stack: Stack, itemsize: int) -> int:
    """As how many elements that source ranks send an element of so many bytes counts."""
    return -(-itemsize // stack.itemsize)


def _uses(flow: Flow, world: Ints) -> Ints:
    """Both ends of every row of every rank, and the parts in which receivers add up."""
    stack, tables = flow.stack, list[Ints]()

    def use(ranks: Ints, rows: Transfers, itemsize: int) -> None:
        elements = np.full_like(ranks, _width(stack, itemsize))
        place = np.searchsorted(world, ranks)
        tables.append(np.stack([place, rows.part, rows.sizes * itemsize, elements]))

    for rows in flow.everything():
        moved = rows.moved()
        use(moved.source, moved, stack.itemsize_at(moved.hop))
        use(moved.destination, moved, stack.itemsize_at(moved.hop))
    if stack.adds:
        added = flow.accumulated()
        use(added.destination, added, stack.accumulator_itemsize)
    return np.concatenate(tables, axis=1)


def _regular_load(flow: Flow, geometry: RegularGeometry, world: Ints) -> Load:
    """Bound every rank by its slots and regions, without listing a row."""
    itemsize, times = flow.stack.itemsize, len(flow.stack.names)
    staged = np.zeros(len(world), dtype=np.int64)
    send, receive = flow.sending, flow.receiving
    most = int(np.diff(receive.first).max(initial=1))
    for slots, copies in ((send, 1), (receive, most - 1)):
        sizes = np.diff(np.append(slots.starts, slots.base[-1]))
        # A cut is rounded by at most half a unit, and a slot has two ends.
        sizes += np.minimum(flow.unit, sizes)
        np.add.at(staged, np.searchsorted(world, slots.ranks), sizes * itemsize * copies)
    lines = np.repeat(geometry.receive_amounts * times, np.diff(receive.first))
    np.add.at(staged, np.searchsorted(world, receive.ranks), lines * itemsize)
    ranks, elements = geometry.copied_elements()
    np.add.at(staged, np.searchsorted(world, ranks), elements * times * itemsize * -2)
    sent, wanted = geometry.cells_per_rank()
    senders = int(np.diff(send.first).max(initial=1))
    rows = sent * most + (wanted * senders + most) * most
    return Load(flow.stack, staged, rows, int(most > 1), int(lines.max(initial=1)))
