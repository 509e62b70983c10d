"""A plan as plain text: what moves, what it costs, and why it costs that.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> have = Layout(Mesh(dp=2, tp=4), "(dp tp) -")
>>> want = Layout(Mesh(tp=2, ranks=[8, 9]), "- tp")
>>> print(describe(plan(have, want, shape=(8192, 4096), dtype="bfloat16")))
Plan of 1 tensor, 64.0 MiB of bfloat16, from mesh dp=2 tp=4 to mesh tp=2 @ 8-9
<BLANKLINE>
tensor  shape      from       to        size      wire  round
tensor  8192x4096  (dp tp) -  - tp  64.0 MiB  64.0 MiB      0
<BLANKLINE>
wire      64.0 MiB, the least possible
messages  16 in 1 round
staging   32.0 MiB at most on a rank, under a cap of 256.0 MiB
sources   8 send, the busiest 8.0 MiB, 1.00 x the mean
<BLANKLINE>
why
  Destinations want 64.0 MiB and hold none of it; each byte arrives once, so 64.0 MiB travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.dtypes import itemsize
from reshard.layout.grid import num_addends
from reshard.layout.mesh import format_ranks
from reshard.planning.classes import Stack
from reshard.planning.cost.summary import needs_of
from reshard.planning.plans import Plan
from reshard.show.name_patterns import named, named_pairs
from reshard.text import align, count, format_bytes, format_shape, printable, shorten

MAX_ROWS = 24
MAX_NAME = 64
MAX_LAYOUT = 36
IMBALANCE = 1.2
"""How far above the mean a rank or a link is called out of balance."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its label: a line of a text, or a card of a page."""

    label: str
    value: str
    note: str
    """What follows the value, with the space or comma before it."""
    part: float | None = None
    """How full a bar below the figure is, where a page draws one."""
    bad: bool = False


@dataclass(frozen=True, slots=True)
class StackRow:
    """One line of the table: tensors that move alike."""

    stack: Stack
    num_bytes: int
    """Bytes of the destination tensors that the stack fills, each counted once."""
    wire_bytes: int
    first_round: int
    last_round: int

    @property
    def name(self) -> str:
        return printable(named_pairs(self.stack.names, MAX_NAME))

    @property
    def shape(self) -> str:
        return _change(*(format_shape(side.shape) for side in (self.stack.have, self.stack.want)))

    @property
    def dtype(self) -> str:
        return _change(self.stack.have.dtype, self.stack.want.dtype)

    @property
    def rounds(self) -> str:
        if self.last_round > self.first_round:
            return f"{self.first_round}-{self.last_round}"
        return str(self.first_round)


def describe(plan: Plan) -> str:
    """The table that ``str(plan)`` prints."""
    rows = stack_rows(plan)
    parts = [
        [headline(plan, rows)],
        _table(plan, rows),
        align([(one.label, one.value + one.note) for one in figures(plan)]),
        ["why", *(f"  {sentence}" for sentence in reasons(plan))],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def headline(plan: Plan, rows: Sequence[StackRow]) -> str:
    """How many tensors move from where to where."""
    number = len({name for row in rows for _, name in row.stack.names})
    total = format_bytes(sum(row.num_bytes for row in rows))
    dtypes, meshes = {row.dtype for row in rows}, _meshes(plan)
    kind = f" of {next(iter(dtypes))}" if len(dtypes) == 1 else ""
    where = f"between {len(meshes)} pairs of meshes" if meshes else "nothing to do"
    if len(meshes) == 1:
        have, want = next(iter(meshes))
        where = f"from mesh {have} to mesh {want}" if have != want else f"within mesh {have}"
    return f"Plan of {count(number, 'tensor')}, {total}{kind}, {where}"


def stack_rows(plan: Plan) -> list[StackRow]:
    wire = Counter[Stack]()
    spans: dict[Stack, list[int]] = {}
    for flow, slot in zip(plan.flows, plan.schedule.slots, strict=True):
        wire[flow.stack] += needs_of(flow)[0]
        last = slot.first + max(slot.num_rounds, 1) - 1
        spans.setdefault(flow.stack, []).extend((slot.first, last))
    rows = []
    for stack in plan.stacks:
        # A join or a crop fills parts of its tensors.
        lengths = [sum(length for _, _, length in runs) for runs in stack.feed.moves]
        size = prod(lengths or stack.want.shape) * itemsize(stack.want.dtype) * len(stack.names)
        rows.append(StackRow(stack, size, wire[stack], min(spans[stack]), max(spans[stack])))
    return rows


def figures(plan: Plan) -> Iterator[Figure]:
    """What the move costs."""
    cost = plan.summary()
    yield Figure("wire", *_against_least(cost.wire_bytes, cost.lower_bound_bytes))
    rounds = count(cost.num_rounds, "round")
    yield Figure("messages", f"{cost.num_messages:,}", f" in {rounds}")
    cap = f" at most on a rank, under a cap of {format_bytes(plan.memory)}"
    part = min(cost.peak_bytes / plan.memory, 1.0) if plan.memory else None
    yield Figure("staging", format_bytes(cost.peak_bytes), cap, part)
    if cost.mean_sender_bytes:
        senders = int(np.count_nonzero(plan.traffic.first_hand))
        ratio = cost.busiest_sender_bytes / cost.mean_sender_bytes
        busiest = f"the busiest {format_bytes(cost.busiest_sender_bytes)}, {ratio:.2f} x the mean"
        yield Figure("sources", f"{senders:,}", f" send, {busiest}")
    if cost.copied_bytes:
        yield Figure("copied", format_bytes(cost.copied_bytes), " stays on its rank")
    if cost.busiest_relay_bytes:
        whom = "rank" if any(flow.direct for flow in plan.flows) else "destination rank"
        mark = _imbalance(cost.busiest_relay_bytes / max(cost.mean_relay_bytes, 1))
        note = f" at most by one {whom}{mark}"
        yield Figure("passed on", format_bytes(cost.busiest_relay_bytes), note, bad=bool(mark))
    if cost.seconds is not None:
        least = cost.between_hosts_lower_bound_bytes
        yield Figure("between hosts", *_against_least(cost.between_hosts_bytes or 0, least))
        mark = _imbalance(cost.bottleneck_over_mean or 1.0)
        note = f" predicted; the bottleneck is {cost.bottleneck}{mark}"
        yield Figure("seconds", f"{cost.seconds:.3g}", note, bad=bool(mark))


def _imbalance(ratio: float) -> str:
    """A mark, if a rank passes on far more than the mean, or a link is far busier than its kind."""
    return f", OUT OF BALANCE: {ratio:.2f} x the mean" if ratio > IMBALANCE else ""


def _against_least(num_bytes: int, least: int | None) -> tuple[str, str]:
    if least is None:
        return format_bytes(num_bytes), ""
    if num_bytes == least:
        return format_bytes(num_bytes), ", the least possible"
    over = f"{num_bytes / least:.2f} x " if least else "above "
    return format_bytes(num_bytes), f", {over}the least possible {format_bytes(least)}"


def _table(plan: Plan, rows: Sequence[StackRow]) -> list[str]:
    """The largest stacks in the order in which they move, and how many are left out."""
    if not rows:
        return []
    with_mesh, with_dtype = len(_meshes(plan)) > 1, len({row.dtype for row in rows}) > 1
    largest = set(sorted(range(len(rows)), key=lambda i: -rows[i].num_bytes)[:MAX_ROWS])
    cells = [("tensor", "shape", "dtype", "from", "to", "size", "wire", "round")]
    for row in (row for i, row in enumerate(rows) if i in largest):
        have, want = (
            shorten(f"{one.mesh}: {one}" if with_mesh else str(one), MAX_LAYOUT)
            for one in (row.stack.have.layout, row.stack.want.layout)
        )
        size, wire = map(format_bytes, (row.num_bytes, row.wire_bytes))
        cells.append((row.name, row.shape, row.dtype, have, want, size, wire, row.rounds))
    right = {5, 6, 7} if with_dtype else {4, 5, 6}
    lines = align(cells if with_dtype else [row[:2] + row[3:] for row in cells], right=right)
    rest = [row for i, row in enumerate(rows) if i not in largest]
    if rest:
        tensors = sum(len(row.stack.names) for row in rest)
        size = format_bytes(sum(row.num_bytes for row in rest))
        groups = count(len(rest), "smaller group")
        lines.append(f"and {groups} of {count(tensors, 'tensor')}, {size}")
    return lines


def _meshes(plan: Plan) -> set[tuple[str, str]]:
    return {(str(stack.have.layout.mesh), str(stack.want.layout.mesh)) for stack in plan.stacks}


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def reasons(plan: Plan) -> list[str]:
    """Sentences that explain the figures of a plan, the most important first."""
    parts = (_bytes, _senders, _changes, _rounds, _hosts)
    sentences = [sentence for about in parts for sentence in about(plan)]
    padded = printable(named(sorted({fill.name for fill in plan.fills})))
    if padded:
        sentences.append(f"The padding of {padded} has no source and becomes zeros.")
    return sentences


def _bytes(plan: Plan) -> Iterator[str]:
    """What travels; pending reductions send their addends to where they are added up."""
    cost = plan.summary()
    copied, missing = format_bytes(cost.copied_bytes), "missing " if cost.copied_bytes else ""
    sums = [
        (stack.have.layout.reduce[0], num_addends(stack.have.layout))
        for stack in plan.stacks
        if stack.have.layout.reduce
    ]
    if not cost.wire_bytes:
        here = f"destinations hold all {copied} they want"
        yield f"Nothing travels: {here if missing else 'there are no bytes'}."
    elif len(sums) < len(plan.stacks):
        wanted = format_bytes(cost.lower_bound_bytes + cost.copied_bytes)
        have = f"{copied} of it already" if missing else "none of it"
        yield (
            f"Destinations want {wanted} and hold {have}; each {missing}byte arrives once, so "
            f"{format_bytes(cost.wire_bytes)} travels."
        )
    for kind, number in sorted({*sums}):
        yield (
            f"A pending {kind} of {number} addends is worked out where it is wanted: "
            "each receiver gets the addends it does not hold."
        )


def _senders(plan: Plan) -> Iterator[str]:
    """Destinations pass on what several of them want; some sources send more than others."""
    cost, first = plan.summary(), int(plan.traffic.first_hand.sum())
    passed = cost.wire_bytes - first
    if passed:
        takers = f"{(first + passed) / first:.3g} takers on average"
        if passed < first / 20:
            takers = "more than one taker in places"
        where = "is passed on between destinations"
        if any(flow.direct for flow in plan.flows):
            where = "are copies for further takers, sent straight where that saves a round"
        yield (
            f"A byte has {takers}, and they share the receiving: sources send "
            f"{format_bytes(first)}, the other {format_bytes(passed)} {where}."
        )
    if cost.busiest_sender_bytes > 1.1 * cost.mean_sender_bytes:
        rank = plan.ranks[int(plan.traffic.first_hand.argmax())]
        ratio = cost.busiest_sender_bytes / cost.mean_sender_bytes
        yield (
            f"Rank {rank} sends {format_bytes(cost.busiest_sender_bytes)}, {ratio:.2f} x the mean: "
            "it holds more of what others lack."
        )


def _changes(plan: Plan) -> Iterator[str]:
    """Tensors are cast, and lost ranks are replaced."""
    pairs = {(stack.have.dtype, stack.want.dtype, stack.wire_dtype) for stack in plan.stacks}
    for have, want, wire in sorted(pairs):
        if have != want:
            side = "before it travels" if wire == want else "after it arrived"
            yield f"{have} becomes {want} {side}, where that moves fewer bytes."
    lost = sorted({rank for stack in plan.stacks for rank in stack.have.layout.words.without})
    if lost:
        yield f"Lost ranks: {format_ranks(lost)}; those that hold the same boxes send instead."


def _rounds(plan: Plan) -> Iterator[str]:
    """Memory, or passing on, is why there is more than one round."""
    if plan.num_rounds < 2 or not plan.summary().wire_bytes:
        return
    traffic, cap = plan.traffic, format_bytes(plan.memory)
    staged = traffic.first_hand + traffic.passed_on + traffic.received
    rank, at_once = plan.ranks[int(staged.argmax())], int(staged.max())
    if at_once > plan.memory:
        yield (
            f"{plan.num_rounds:,} rounds: in a single one rank {rank} would stage "
            f"{format_bytes(at_once)}, and the cap is {cap}; a larger memory cap takes fewer."
        )
    elif plan.num_rounds <= 1 + max((slot.hops for slot in plan.schedule.slots), default=0):
        yield f"{plan.num_rounds} rounds: what a rank receives it passes on one round later."
    else:
        yield f"{plan.num_rounds:,} rounds keep the staging of every rank under {cap}."


def _hosts(plan: Plan) -> Iterator[str]:
    cost, enters = plan.summary(), ""
    if cost.between_hosts_bytes is None or not cost.wire_bytes:
        return
    least = cost.between_hosts_lower_bound_bytes
    if least == cost.between_hosts_bytes:
        enters = ": each byte enters a host once"
    elif least is not None:
        enters = f": at least {format_bytes(least)} must"
    bottleneck = f"The bottleneck is {cost.bottleneck}."
    yield f"{format_bytes(cost.between_hosts_bytes)} goes between hosts{enters}. {bottleneck}"
