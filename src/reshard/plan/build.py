"""From stacks to flows: list what must be listed, share the work, put it into rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.errors import PlanError
from reshard.plan.balance import balance
from reshard.plan.coverage import raise_uncovered
from reshard.plan.flow import Flow
from reshard.plan.geometry import Geometry
from reshard.plan.lines import LineSet, Slots
from reshard.plan.listed_geometry import Addends, ListedGeometry, listed_geometry
from reshard.plan.open_geometry import OpenGeometry, open_geometry
from reshard.plan.rounds import Load
from reshard.plan.stacks import Stack
from reshard.plan.topology import Topology
from reshard.regions import Ints, addend_of, num_addends

__all__ = ["flows_of", "loads_of", "world_of"]

SMALL = 64 * 1024
"""Bytes below which cutting a transfer costs more than it balances."""


def world_of(stacks: Sequence[Stack]) -> Ints:
    """All ranks that any layout speaks of, in rising order."""
    sides = {side.layout for stack in stacks for side in (stack.have, stack.want)}
    ranks = [np.fromiter(layout.ranks, dtype=np.int64) for layout in sides]
    return np.unique(np.concatenate([*ranks, np.zeros(0, np.int64)]))


def flows_of(stacks: Sequence[Stack], world: Ints, topology: Topology | None) -> list[Flow]:
    """The flows of all stacks, with the work shared over all of them together."""
    hosts = topology.hosts_of(map(int, world)) if topology else None
    parts = [(stack, geometry) for stack in stacks for geometry in _geometries(stack, hosts)]
    grain = _grain(parts)
    sending = _share([(s, g.senders) for s, g in parts], world, grain)
    receiving = _share([(s, g.receivers) for s, g in parts], world, grain)
    relaying = _share([(s, g.relays.lines) for s, g in parts if g.relays], world, grain)
    relays = iter(relaying)
    return [
        Flow(
            stack,
            geometry,
            send,
            receive,
            next(relays) if geometry.relays else None,
            max(grain // stack.itemsize, 1),
        )
        for (stack, geometry), send, receive in zip(parts, sending, receiving, strict=True)
    ]


def _geometries(stack: Stack, hosts: dict[int, int] | None) -> list[Geometry]:
    if stack.have.layout.reduce is not None:
        return [listed_geometry(stack, hosts, addends) for addends in _addends(stack)]
    geometry = open_geometry(stack) if hosts is None else None
    if geometry is None:
        return [listed_geometry(stack, hosts)]
    if not geometry.covered:
        raise_uncovered(stack)
    return [geometry]


def _addends(stack: Stack) -> list[Addends]:
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
    have, want = addend_of(stack.have.layout), addend_of(stack.want.layout)
    here = {have[rank]: want[rank] for rank in sorted(have, reverse=True) if rank in want}
    owner = [here.get(addend, -1) for addend in range(num)]
    if all(owner.count(number) == num // kept for number in range(kept)):
        return owner
    return [addend * kept // num for addend in range(num)]


def _grain(parts: Sequence[tuple[Stack, Geometry]]) -> int:
    """The smallest share worth cutting: small next to what a sender has to send anyway."""
    total = sum(int(g.senders.amounts.sum()) * len(s.names) * s.itemsize for s, g in parts)
    senders = max((len(g.senders.members) for _, g in parts), default=1)
    return min(max(total // max(senders, 1) // 128, 1), SMALL)


def _share(
    lines: Sequence[tuple[Stack, LineSet]], world: Ints, grain: int
) -> list[Slots]:
    """Balance the lines of all stacks together and cut each by its members' shares."""
    sets = [
        LineSet(line.amounts * len(stack.names), line.first, line.members) for stack, line in lines
    ]
    to_share = [
        line.to_share(world, stack.itemsize, grain)
        for line, (stack, _) in zip(sets, lines, strict=True)
    ]
    shares = iter(balance([one for many in to_share for one in many], len(world)))
    return [
        line.slots([next(shares) for _ in many], stack.itemsize)
        for line, many, (stack, _) in zip(sets, to_share, lines, strict=True)
    ]


def loads_of(flows: Sequence[Flow], world: Ints) -> list[Load]:
    """What each flow makes every rank stage."""
    return [
        _open_load(flow, world)
        if isinstance(flow.geometry, OpenGeometry)
        else _listed_load(flow, world)
        for flow in flows
    ]


def _listed_load(flow: Flow, world: Ints) -> Load:
    """Count every row of every rank."""
    staged = np.zeros(len(world), dtype=np.int64)
    rows = np.zeros(len(world), dtype=np.int64)
    hops = longest = 0
    for transfers in flow.everything():
        moved = np.flatnonzero(transfers.source != transfers.destination)
        sizes = transfers.sizes[moved]
        for ranks in (transfers.source[moved], transfers.destination[moved]):
            place = np.searchsorted(world, ranks)
            np.add.at(staged, place, sizes * flow.stack.itemsize)
            np.add.at(rows, place, 1)
        if len(moved):
            hops, longest = max(hops, transfers.hop), max(longest, int(sizes.max()))
    extra = _accumulated(flow, world, rows)
    return Load(
        flow.stack.label, staged + extra, int(rows.max(initial=0)), flow.stack.itemsize, hops, longest
    )


def _accumulated(flow: Flow, world: Ints, rows: Ints) -> Ints:
    """Bytes in which reducers add up; each counts as further rows."""
    staged = np.zeros(len(world), dtype=np.int64)
    if flow.geometry.num_addends == 1:
        return staged
    first = next(flow.everything())
    place = np.searchsorted(world, first.destination)
    times = flow.accumulator_itemsize // flow.stack.itemsize or 1
    np.add.at(staged, place, first.sizes * flow.accumulator_itemsize)
    np.add.at(rows, place, times)
    return staged


def _open_load(flow: Flow, world: Ints) -> Load:
    """Bound every rank by its slots and regions, without listing a row."""
    itemsize, times = flow.stack.itemsize, len(flow.stack.names)
    staged = np.zeros(len(world), dtype=np.int64)
    cells = flow.geometry.cells_per_rank()
    send, receive = flow.sending, flow.receiving
    most = max(int(np.diff(receive.first).max(initial=1)), 1)
    for slots, copies in ((send, 1), (receive, most - 1)):
        sizes = np.diff(np.append(slots.starts, slots.base[-1]))
        rounding = np.minimum(flow.unit, sizes)
        np.add.at(staged, np.searchsorted(world, slots.ranks), (sizes + rounding) * itemsize * copies)
    lines = np.repeat(flow.geometry.receivers.amounts * times, np.diff(receive.first))
    np.add.at(staged, np.searchsorted(world, receive.ranks), lines * itemsize)
    num_senders = max(int(np.diff(send.first).max(initial=1)), 1)
    rows = 2 * (cells[0] + most) + (cells[1] * num_senders + most) * most
    longest = int(max(lines.max(initial=1), 1))
    return Load(flow.stack.label, staged, rows, itemsize, int(most > 1), longest)
