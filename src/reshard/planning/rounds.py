"""Rounds trade time for memory: what moves when, so that no rank stages more than the cap?

Staging is every byte a rank keeps beyond source and destination: what it has packed to send and
what it has received and not yet unpacked. Stacks that fit together share rounds; a stack that does
not fit alone is cut into slices, a slice being the same fraction of every one of its transfers, so
that all ranks stay busy in every round. Stacks that differ only in which ranks hold the source
(pipeline stages, experts) are cut together, so that all of these send in every round. Under a very
small cap not even one element of every transfer fits; then transfers take turns in phases. What is
passed on travels one round after it was received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
class Uses:
    """Every end of every row of a listed stack: at which rank, of which part, how many bytes."""

    rank: Ints
    part: Ints
    num_bytes: Ints
    elements: Ints  # how many elements each counts when a slice holds one element of its row

    @property
    def num_parts(self) -> int:
        return int(self.part.max(initial=0)) + 1

    def per_phase(self, phases: int) -> tuple[int, int]:
        """The most bytes and the most elements that any rank has in any of so many phases."""
        key = self.rank * phases + self.part % phases
        num_bytes, rows = np.bincount(key, self.num_bytes), np.bincount(key, self.elements)
        return int(num_bytes.max(initial=0)), int(rows.max(initial=0))


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one stack makes every rank stage, if it moves in one round."""

    stack: Stack
    staged: Ints  # bytes of each rank
    rows: int  # the most transfers that any rank takes part in
    hops: int  # the rounds that passing on takes after the first
    longest: int  # the elements of the longest transfer
    uses: Callable[[], Uses] | None  # who has to do with which part; None where that is not listed


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
    tight = [
        load
        for load in loads
        if int(load.staged.max(initial=0)) > cap and load.rows * load.stack.itemsize > cap
    ]
    if tight and any(load.uses is None for load in loads):
        raise TooTightError
    _check_cap(tight, cap)
    slots: dict[int, Slot] = {}
    start = end = peak = 0
    shared = np.zeros(len(loads[0].staged) if loads else 0, dtype=np.int64)
    for numbers in _batches(loads, cap):
        some = [loads[number] for number in numbers]
        batch = some[0]
        if len(some) > 1:
            batch = replace(
                batch,
                staged=np.sum([load.staged for load in some], axis=0),
                rows=sum(load.rows for load in some),
                hops=max(load.hops for load in some),
                longest=max(load.longest for load in some),
                uses=None,
            )
        together = shared + batch.staged
        if int(together.max(initial=0)) > cap:
            start, together = end, batch.staged
        staged = int(together.max(initial=0))
        slot = Slot(start, hops=batch.hops)
        if staged > cap:
            slot, staged = _cut(batch, start, cap)
            together = np.full_like(shared, cap)
        slots |= dict.fromkeys(numbers, slot)
        peak = max(peak, staged)
        end = max(end, start + slot.num_rounds)
        shared = together
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
        tight = sum(loads[n].rows * loads[n].stack.itemsize for n in numbers) * 4 > cap
        batches += [[number] for number in numbers] if tight else [numbers]
    return batches


def _cut(load: Load, start: int, cap: int) -> tuple[Slot, int]:
    """The slot of a stack that does not fit into one round.

    It has as many phases as it takes until an element of every transfer of a phase fits.
    """
    phases, staged, rows = 1, int(load.staged.max(initial=0)), load.rows
    if rows * load.stack.itemsize > cap:
        assert load.uses is not None
        uses = load.uses()
        staged, rows = uses.per_phase(phases)
        while rows * load.stack.itemsize > cap:
            phases = min(phases * 2, uses.num_parts)
            staged, rows = uses.per_phase(phases)
    least = rows * load.stack.itemsize
    unit = max((cap - least) // 16 // least, 1)
    room = cap - least * unit
    slices = min(-(-staged // room), load.longest) if room > 0 else load.longest
    stage = min(staged // slices + least * unit, cap)
    return Slot(start, slices, unit, load.hops, phases), stage


def _check_cap(loads: Sequence[Load], cap: int) -> None:
    """Refuse a cap under which some stack does not fit even part by part; name the smallest."""
    least, label = 0, ""
    for load in loads:
        if load.uses is not None:
            uses = load.uses()
            needs = uses.per_phase(uses.num_parts)[1] * load.stack.itemsize
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
            counted = zip(end(stream.rows.sizes), end(once), strict=True)
            for (ranks, elements), (_, rows) in counted:
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


def _uses(flow: Flow, world: Ints) -> Uses:
    """Both ends of every row of every rank, and the parts in which receivers add up."""
    found: list[tuple[Ints, Ints, Ints, Ints]] = []

    def use(ranks: Ints, rows: Transfers, itemsize: int) -> None:
        elements = np.full_like(ranks, _width(flow.stack, itemsize))
        found.append((np.searchsorted(world, ranks), rows.part, rows.sizes * itemsize, elements))

    for rows in flow.everything():
        moved = rows.take(np.flatnonzero(rows.source != rows.destination))
        for ranks in (moved.source, moved.destination):
            use(ranks, moved, flow.stack.itemsize_at(moved.hop))
    if flow.stack.adds:
        added = flow.accumulated()
        use(added.destination, added, flow.stack.accumulator_itemsize)
    place, part, num_bytes, elements = map(np.concatenate, zip(*found, strict=True))
    return Uses(place, part, num_bytes, elements)


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
    lines = np.repeat(geometry.receivers.amounts * times, np.diff(receive.first))
    np.add.at(staged, np.searchsorted(world, receive.ranks), lines * itemsize)
    ranks, elements = geometry.copied_elements()
    np.add.at(staged, np.searchsorted(world, ranks), elements * times * itemsize * -2)
    sent, wanted = geometry.cells_per_rank()
    senders = int(np.diff(send.first).max(initial=1))
    rows = sent * most + (wanted * senders + most) * most
    return Load(flow.stack, staged, rows, int(most > 1), int(lines.max(initial=1)), None)
