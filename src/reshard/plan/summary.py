"""The figures of a whole plan: bytes, messages, memory, the busiest rank, and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.plan.flow import Flow, Transfers
from reshard.plan.open_geometry import OpenGeometry
from reshard.plan.rounds import Schedule, Slot, slice_edges
from reshard.plan.topology import Topology
from reshard.regions import Ints

__all__ = ["Summary", "Traffic", "summarize", "traffic"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a plan costs."""

    wire_bytes: int
    """Bytes that travel between ranks."""
    lower_bound_bytes: int
    """Bytes that destination ranks need and do not hold."""
    copied_bytes: int
    """Bytes that ranks copy from their own source tensors."""
    num_messages: int
    """Messages: all that goes from one rank to another in one round is one."""
    num_rounds: int
    peak_bytes: int
    """The most bytes that any rank stages beyond source and destination."""
    busiest_sender_bytes: int
    """First-hand bytes of the source rank that sends the most."""
    mean_sender_bytes: float
    """First-hand bytes per rank that sends any."""
    busiest_relay_bytes: int
    """The most bytes that any destination rank passes on."""
    between_hosts_bytes: int | None
    """Bytes that travel between hosts; None without a topology."""
    between_hosts_lower_bound_bytes: int | None
    """Bytes that must enter a host because nobody on it holds them; None without a topology."""
    seconds: float | None
    """Predicted seconds; None without a topology."""
    bottleneck: str | None
    """The link that takes longest; None without a topology."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """Bytes from each rank to each other, as rows: source, destination, bytes, first-hand bytes."""

    source: Ints
    destination: Ints
    num_bytes: Ints
    first_hand: Ints
    messages: Ints
    """Rounds in which the pair exchanges a message."""


def traffic(flows: Sequence[Flow], slots: Sequence[Slot], world: Ints) -> Traffic:
    """Add up all rows by pair of ranks."""
    keys, sizes, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for flow in flows:
        for transfers in _moving(flow):
            key, inverse = np.unique(_pair_keys(transfers, world), return_inverse=True)
            total = np.bincount(inverse, weights=transfers.sizes).astype(np.int64)
            keys.append(key)
            sizes.append(total * flow.stack.itemsize)
            first.append(total * flow.stack.itemsize * (transfers.hop == 0))
    pairs, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    counted = _messages(flows, slots, world, pairs)
    return Traffic(
        world[pairs // len(world)] if len(pairs) else pairs,
        world[pairs % len(world)] if len(pairs) else pairs,
        np.bincount(inverse, weights=np.concatenate(sizes), minlength=len(pairs)).astype(np.int64),
        np.bincount(inverse, weights=np.concatenate(first), minlength=len(pairs)).astype(np.int64),
        counted,
    )


def _moving(flow: Flow) -> Iterator[Transfers]:
    """Rows that go from one rank to another."""
    for transfers in flow.everything():
        rows = np.flatnonzero(transfers.source != transfers.destination)
        if len(rows) == len(transfers):
            yield transfers
        elif len(rows):
            yield transfers.take(rows)


def _pair_keys(transfers: Transfers, world: Ints) -> Ints:
    if len(world) and world[-1] == len(world) - 1:
        return transfers.source * len(world) + transfers.destination
    source = np.searchsorted(world, transfers.source)
    return source * len(world) + np.searchsorted(world, transfers.destination)


def _messages(
    flows: Sequence[Flow], slots: Sequence[Slot], world: Ints, pairs: Ints
) -> Ints:
    """How many rounds each pair exchanges something in.

    Stacks of one slice share rounds, so their pairs are united round by round; a sliced stack has
    its rounds to itself, apart from passing on, which only ever meets its own slices.
    """
    counts = np.zeros(len(pairs), dtype=np.int64)
    by_round: dict[int, list[Ints]] = {}
    for flow, slot in zip(flows, slots, strict=True):
        for transfers in _moving(flow):
            keys = _pair_keys(transfers, world)
            for number, at in _rounds(flow, slot, transfers):
                by_round.setdefault(number, []).append(keys if at is None else keys[at])
    for found in by_round.values():
        counts[np.searchsorted(pairs, np.unique(np.concatenate(found)))] += 1
    return counts


def _rounds(
    flow: Flow, slot: Slot, transfers: Transfers
) -> Iterator[tuple[int, Ints | None]]:
    """Each round in which rows move, and which rows; None for all."""
    first, runs = slot.first + transfers.hop, transfers.runs
    if slot.slices == 1:
        yield first, None
        return
    units = flow.units(transfers.cells, slot.unit)[runs.cell]
    low = runs.start
    for part in range(slot.slices):
        high = slice_edges(runs.start, runs.stop, units, slot.slices, part + 1)
        yield first + part, np.flatnonzero(low < high)
        low = high


def summarize(
    flows: Sequence[Flow], schedule: Schedule, world: Ints, topology: Topology | None
) -> Summary:
    """Work out the figures of a plan from all its rows."""
    table = traffic(flows, schedule.slots, world)
    sent = _per_rank(table.source, table.first_hand, world)
    passed = _per_rank(table.source, table.num_bytes - table.first_hand, world)
    senders = np.count_nonzero(sent)
    needs = [lower_bound(flow) for flow in flows]
    hosts = None if topology is None else _host_figures(table, world, topology, schedule)
    return Summary(
        wire_bytes=int(table.num_bytes.sum()),
        lower_bound_bytes=sum(need for need, _ in needs),
        copied_bytes=sum(copied for _, copied in needs),
        num_messages=int(table.messages.sum()),
        num_rounds=schedule.num_rounds,
        peak_bytes=schedule.peak_bytes,
        busiest_sender_bytes=int(sent.max(initial=0)),
        mean_sender_bytes=float(sent.sum() / senders) if senders else 0.0,
        busiest_relay_bytes=int(passed.max(initial=0)),
        between_hosts_bytes=hosts and hosts[0],
        between_hosts_lower_bound_bytes=None if hosts is None else sum(map(_entering, flows)),
        seconds=hosts and hosts[1],
        bottleneck=hosts and hosts[2],
    )
