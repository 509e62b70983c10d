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

import numpy as np

from reshard.bytesize import format_bytes
from reshard.errors import MemoryCapError
from reshard.regions import Ints

__all__ = ["Load", "Schedule", "Slot", "TooTightError", "Uses", "schedule", "slice_edges"]


@dataclass(frozen=True, eq=False, slots=True)
class Uses:
    """Every end of every row of a listed stack: at which rank, of which part, how many bytes."""

    rank: Ints
    part: Ints
    num_bytes: Ints
    elements: Ints
    """How many elements each counts when a slice holds one element of its row."""
    num_ranks: int

    def per_phase(self, phases: int) -> tuple[int, int]:
        """The most bytes and the most elements that any rank has in any of so many phases."""
        key = self.rank * phases + self.part % phases
        places = self.num_ranks * phases
        num_bytes = np.bincount(key, weights=self.num_bytes, minlength=places)
        rows = np.bincount(key, weights=self.elements, minlength=places)
        return int(num_bytes.max(initial=0)), int(rows.max(initial=0))


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one stack makes every rank stage, if it moves in one round."""

    label: str
    kin: object
    """Equal for stacks that differ only in who holds the source, such as pipeline stages."""
    staged: Ints
    """Bytes of each rank."""
    rows: int
    """The most transfers that any rank takes part in."""
    itemsize: int
    hops: int
    """The rounds that passing on takes after the first."""
    longest: int
    """The elements of the longest transfer."""
    uses: Callable[[], Uses] | None
    """Who has to do with which part, worked out on demand; None where that is not listed."""


@dataclass(frozen=True, slots=True)
class Slot:
    """When a stack moves: in ``slices`` rounds from ``first`` on, and its hops after.

    With several phases that is repeated, each time for the parts whose turn it is.
    """

    first: int
    slices: int = 1
    unit: int = 1
    """Slices end between whole parts of a cell of at most so many elements."""
    hops: int = 0
    phases: int = 1

    @property
    def num_rounds(self) -> int:
        """The rounds from the first to the last."""
        return self.phases * (self.slices + self.hops)

    def turn(self, number: int, hop: int) -> tuple[int, int] | None:
        """The phase and the slice that move at a hop in a round, if any do."""
        phase, at = divmod(number - self.first, self.slices + self.hops)
        moves = 0 <= phase < self.phases and hop <= at < hop + self.slices
        return (phase, at - hop) if moves else None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The slot of each stack, the number of rounds, and the most bytes any rank stages."""

    slots: tuple[Slot, ...]
    num_rounds: int
    peak_bytes: int


class TooTightError(Exception):
    """A stack whose rows are not listed needs phases: list it and try again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def schedule(loads: Sequence[Load], cap: int) -> Schedule:
    """Put stacks into rounds, kin by kin, as many as fit into each."""
    slots: dict[int, Slot] = {}
    start = end = peak = 0
    shared = np.zeros(len(loads[0].staged) if loads else 0, dtype=np.int64)
    for numbers in _batches(loads, cap):
        batch = _together([loads[number] for number in numbers])
        together = shared + batch.staged
        if int(together.max(initial=0)) > cap:
            start, together = end, batch.staged
        staged = int(together.max(initial=0))
        slot = Slot(start, hops=batch.hops)
        if staged > cap:
            slot, staged = _cut(batch, numbers[0], start, cap)
            together = np.full_like(shared, cap)
        slots |= dict.fromkeys(numbers, slot)
        peak = max(peak, staged)
        end = max(end, start + slot.num_rounds)
        shared = together
    return Schedule(tuple(slots[number] for number in range(len(loads))), end, peak)


def _batches(loads: Sequence[Load], cap: int) -> list[list[int]]:
    """Numbers of stacks that are cut together; alone where one alone is too much for slices."""
    kin: dict[object, list[int]] = {}
    for number, load in enumerate(loads):
        kin.setdefault(load.kin, []).append(number)
    batches: list[list[int]] = []
    for numbers in kin.values():
        tight = sum(loads[n].rows * loads[n].itemsize for n in numbers) * 4 > cap
        batches += [[number] for number in numbers] if tight else [numbers]
    return batches


def _together(loads: Sequence[Load]) -> Load:
    """One load for stacks that move in the same rounds."""
    if len(loads) == 1:
        return loads[0]
    return replace(
        loads[0],
        staged=np.sum([load.staged for load in loads], axis=0),
        rows=sum(load.rows for load in loads),
        hops=max(load.hops for load in loads),
        longest=max(load.longest for load in loads),
        uses=None,
    )


def _cut(load: Load, number: int, start: int, cap: int) -> tuple[Slot, int]:
    """The slot of a stack that does not fit into one round."""
    phases, staged, rows = 1, int(load.staged.max(initial=0)), load.rows
    if rows * load.itemsize > cap:
        phases, staged, rows = _phases(load, number, cap)
    least = rows * load.itemsize
    unit = max((cap - least) // 16 // least, 1)
    room = cap - least * unit
    slices = min(-(-staged // room), load.longest) if room > 0 else load.longest
    stage = min(staged // slices + least * unit, cap)
    return Slot(start, slices, unit, load.hops, phases), stage


def _phases(load: Load, number: int, cap: int) -> tuple[int, int, int]:
    """How many phases it takes until an element of every transfer of a phase fits under the cap."""
    if load.uses is None:
        raise TooTightError(number)
    uses, phases = load.uses(), 1
    num_parts = int(uses.part.max(initial=0)) + 1
    staged, rows = uses.per_phase(phases)
    while rows * load.itemsize > cap:
        if phases >= num_parts:
            raise MemoryCapError(
                f"{load.label}: a memory cap of {format_bytes(cap)} ({cap} bytes) is too small: "
                f"the smallest that works is {rows * load.itemsize} bytes; raise memory="
            )
        phases = min(phases * 2, num_parts)
        staged, rows = uses.per_phase(phases)
    return phases, staged, rows


def slice_edges(start: Ints, stop: Ints, unit: Ints, slices: int, number: int) -> Ints:
    """Where slice ``number`` of each run begins; slice ``slices`` begins where the run ends."""
    if number == slices:
        return stop
    edge: Ints = np.maximum((start + (stop - start) * number // slices) // unit * unit, start)
    return edge
