"""Pending reductions: which addends of the source make up which of the destination?

A destination without a pending reduction wants the value, made of all addends. One that keeps the
reduction pending, perhaps over fewer ranks, wants addends that make up the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import PlanError
from reshard.layout.grid import addend_of, num_addends
from reshard.planning.stacks import Stack

__all__ = ["Addends", "addends_of"]


@dataclass(frozen=True, slots=True)
class Addends:
    """Which addends of the source make up one addend of the destination."""

    have: tuple[int, ...]
    want: int | None
    """None where the destination wants the value itself."""


def addends_of(stack: Stack) -> list[Addends]:
    """Which source addends each destination addend is made of."""
    have, want = stack.have.layout, stack.want.layout
    num, kept = num_addends(have), num_addends(want)
    if want.reduce is None:
        return [Addends(tuple(range(num)), None)]
    if num % kept:
        raise PlanError(
            f'{stack.label}: the destination "{want}" has {kept} addends and the source "{have}" '
            f"has {num}: the source's number must be a multiple of the destination's"
        )
    owner = _owners_of_addends(stack, num, kept)
    return [
        Addends(tuple(a for a in range(num) if owner[a] == number), number)
        for number in range(kept)
    ]


def _owners_of_addends(stack: Stack, num: int, kept: int) -> list[int]:
    """The destination addend of each source addend: where it already is, if that comes out even."""
    if num == kept:
        return list(range(num))
    have, want = addend_of(stack.have.layout), addend_of(stack.want.layout)
    here = {have[rank]: want[rank] for rank in sorted(have, reverse=True) if rank in want}
    owner = [here.get(addend, -1) for addend in range(num)]
    if all(owner.count(number) == num // kept for number in range(kept)):
        return owner
    return [addend * kept // num for addend in range(num)]
