"""Why does a plan cost what it costs? Sentences with the plan's own numbers.

    >>> from reshard.layout.layout import Layout
    >>> from reshard.layout.mesh import Mesh
    >>> from reshard.planning.plan import plan
    >>> have = Layout(Mesh(tp=2), "tp -")
    >>> want = Layout(Mesh(dp=2, tp=2, ranks=[8, 9, 10, 11]), "- tp")
    >>> for sentence in reasons(plan(have, want, shape=(512, 512), dtype="float32")):
    ...     print(sentence)
    Destinations want 2.0 MiB and hold none of it; each byte arrives once, so 2.0 MiB travels.
    A byte has 2 takers on average, and they share the receiving: sources send 1.0 MiB, the \
other 1.0 MiB is passed on between destinations.
    2 rounds: what a rank receives it passes on one round later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from reshard.layout.columns import numbered
from reshard.layout.grid import Ints, num_addends
from reshard.layout.mesh import format_ranks
from reshard.text import format_bytes

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

__all__ = ["reasons"]


def reasons(plan: Plan) -> list[str]:
    """Sentences that explain the figures of a plan, the most important first."""
    return [
        *_bytes(plan),
        *_sums(plan),
        *_fan_out(plan),
        *_senders(plan),
        *_casts(plan),
        *_lost(plan),
        *_rounds(plan),
        *_hosts(plan),
        *_zeros(plan),
    ]


def _bytes(plan: Plan) -> Iterator[str]:
    figures = plan.summary()
    copied = format_bytes(figures.copied_bytes)
    if not figures.wire_bytes:
        here = (
            f"destinations hold all {copied} they want"
            if figures.copied_bytes
            else "there are no bytes"
        )
        yield f"Nothing travels: {here}."
        return
    if all(stack.have.layout.reduce for stack in plan.stacks):
        return
    wanted = figures.lower_bound_bytes + figures.copied_bytes
    have = f"{copied} of it already" if figures.copied_bytes else "none of it"
    yield (
        f"Destinations want {format_bytes(wanted)} and hold {have}; each "
        f"{'missing ' if figures.copied_bytes else ''}byte arrives once, so "
        f"{format_bytes(figures.wire_bytes)} travels."
    )


def _sums(plan: Plan) -> Iterator[str]:
    """Pending reductions send their addends to where they are added up."""
    kinds = {
        (stack.have.layout.reduce[0], num_addends(stack.have.layout))
        for stack in plan.stacks
        if stack.have.layout.reduce
    }
    for kind, number in sorted(kinds):
        yield (
            f"A pending {kind} of {number} addends is worked out where it is wanted: "
            "each receiver gets the addends it does not hold."
        )


def _fan_out(plan: Plan) -> Iterator[str]:
    first = int(plan.traffic.first_hand.sum())
    passed = plan.summary().wire_bytes - first
    if passed:
        takers = f"{(first + passed) / first:.3g} takers on average"
        if passed < first / 20:
            takers = "more than one taker in places"
        where = "is passed on between destinations"
        if any(flow.straight for flow in plan.flows):
            where = "are copies for further takers, sent straight where that saves a round"
        yield (
            f"A byte has {takers}, and they share the receiving: sources send "
            f"{format_bytes(first)}, the other {format_bytes(passed)} {where}."
        )


def _senders(plan: Plan) -> Iterator[str]:
    figures = plan.summary()
    if figures.busiest_sender_bytes > 1.1 * figures.mean_sender_bytes:
        rank = _busiest(plan.traffic.source, plan.traffic.first_hand)[0]
        yield (
            f"Rank {rank} sends {format_bytes(figures.busiest_sender_bytes)}, "
            f"{figures.busiest_sender_bytes / figures.mean_sender_bytes:.2f} x the mean: it holds "
            "more of what others lack."
        )


def _casts(plan: Plan) -> Iterator[str]:
    pairs = {(stack.have.dtype, stack.want.dtype, stack.wire_dtype) for stack in plan.stacks}
    for have, want, wire in sorted(pairs):
        if have != want:
            side = "before it travels" if wire == want else "after it arrived"
            yield f"{have} becomes {want} {side}, where that moves fewer bytes."


def _lost(plan: Plan) -> Iterator[str]:
    lost = sorted({rank for stack in plan.stacks for rank in stack.have.layout.words.without})
    if lost:
        yield f"Lost ranks: {format_ranks(lost)}; those that hold the same boxes send instead."


def _rounds(plan: Plan) -> Iterator[str]:
    """Memory, or passing on, is why there is more than one round."""
    if plan.num_rounds < 2 or not plan.summary().wire_bytes:
        return
    traffic, cap = plan.traffic, format_bytes(plan.memory)
    ends = np.concatenate([traffic.source, traffic.destination])
    rank, at_once = _busiest(ends, np.concatenate([traffic.num_bytes, traffic.num_bytes]))
    if at_once > plan.memory:
        yield (
            f"{plan.num_rounds:,} rounds: in a single one rank {rank} would stage "
            f"{format_bytes(at_once)}, and the cap is {cap}; a larger memory= takes fewer."
        )
    elif plan.num_rounds <= 1 + max((slot.hops for slot in plan.schedule.slots), default=0):
        yield f"{plan.num_rounds} rounds: what a rank receives it passes on one round later."
    else:
        yield f"{plan.num_rounds:,} rounds keep the staging of every rank under {cap}."


def _busiest(ranks: Ints, num_bytes: Ints) -> tuple[int, int]:
    """The rank with the most bytes, and how many."""
    names, inverse = numbered(ranks)
    totals = np.bincount(inverse, weights=num_bytes)
    worst = int(totals.argmax())
    return int(names[worst]), int(totals[worst])


def _hosts(plan: Plan) -> Iterator[str]:
    figures = plan.summary()
    if figures.between_hosts_bytes is None or not figures.wire_bytes:
        return
    least = figures.between_hosts_lower_bound_bytes or 0
    enters = (
        "each byte enters a host once"
        if figures.between_hosts_bytes == least
        else (f"at least {format_bytes(least)} must")
    )
    yield (
        f"{format_bytes(figures.between_hosts_bytes)} goes between hosts: {enters}. "
        f"The bottleneck is {figures.bottleneck}."
    )


def _zeros(plan: Plan) -> Iterator[str]:
    names = sorted({fill.name for fill in plan.fills})
    if names:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield f"The padding of {names[0]}{more} has no source and becomes zeros."
