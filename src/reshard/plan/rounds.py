"""Rounds trade time for memory: what moves when, so that no rank stages more than the cap?

Staging is every byte a rank keeps beyond source and destination: what it has packed to send and
what it has received and not yet unpacked. Stacks that fit together share rounds; a stack that does
not fit alone is cut into slices, a slice being the same fraction of every one of its transfers, so
that all ranks stay busy in every round. What is passed on travels one round after it was received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.bytesize import format_bytes
from reshard.errors import MemoryCapError
from reshard.regions import Ints

__all__ = ["Load", "Schedule", "Slot", "schedule", "slice_edges"]


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one stack makes every rank stage, if it moves in one round."""

    label: str
    staged: Ints
    """Bytes of each rank."""
    rows: int
    """The most transfers that any rank takes part in."""
    itemsize: int
    hops: int
    """The rounds that passing on takes after the first."""
    longest: int
    """The elements of the longest transfer."""


@dataclass(frozen=True, slots=True)
class Slot:
    """When a stack moves: in ``slices`` rounds from ``first`` on, and its hops after."""

    first: int
    slices: int
    unit: int
    """Slices end between whole parts of a cell of at most so many elements."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The slot of each stack, the number of rounds, and the most bytes any rank stages."""

    slots: tuple[Slot, ...]
    num_rounds: int
    peak_bytes: int


def schedule(loads: Sequence[Load], cap: int) -> Schedule:
    """Put stacks into rounds, in order, as many as fit into each."""
    slots: list[Slot] = []
    start = end = peak = 0
    shared = np.zeros(len(loads[0].staged) if loads else 0, dtype=np.int64)
    for load in loads:
        together = shared + load.staged
        if int(together.max(initial=0)) > cap:
            start, together = end, load.staged
        slot, stage = _slot(load, start, cap)
        slots.append(slot)
        peak = max(peak, stage, int(together.max(initial=0)) if slot.slices == 1 else 0)
        end = max(end, start + slot.slices + load.hops)
        shared = together
        if slot.slices > 1:
            start, shared = end, np.zeros_like(shared)
    return Schedule(tuple(slots), end, peak)


def _slot(load: Load, start: int, cap: int) -> tuple[Slot, int]:
    staged = int(load.staged.max(initial=0))
    if staged <= cap:
        return Slot(start, 1, 1), staged
    least = load.rows * load.itemsize
    if cap < least:
        raise MemoryCapError(
            f"{load.label}: a memory cap of {format_bytes(cap)} ({cap} bytes) is too small for "
            f"{load.rows} transfers at once: the smallest that works is {least} bytes; "
            "raise memory="
        )
    unit = max((cap - least) // 4 // (load.rows * load.itemsize), 1)
    room = cap - load.rows * load.itemsize * unit
    slices = min(-(-staged // room), load.longest) if room > 0 else load.longest
    stage = min(staged // slices + load.rows * load.itemsize * unit, cap)
    return Slot(start, slices, unit), stage


def slice_edges(start: Ints, stop: Ints, unit: Ints, slices: int, number: Ints | int) -> Ints:
    """Where slice ``number`` of each run begins; slice ``slices`` begins where the run ends."""
    at = start + (stop - start) * number // slices
    edge: Ints = np.where(number == slices, stop, np.maximum(at // unit * unit, start))
    return edge
