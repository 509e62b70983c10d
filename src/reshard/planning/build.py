"""From stacks to flows: list what must be listed, share the work, put it into rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reshard.layout.columns import Ints, distinct
from reshard.planning.balance import balance
from reshard.planning.flow import Flow, Transfers
from reshard.planning.geometry import Geometry
from reshard.planning.lines import LineSet, Slots
from reshard.planning.open_geometry import OpenGeometry, open_geometry
from reshard.planning.rounds import Load, Uses
from reshard.planning.stacks import Stack
from reshard.planning.topology import Topology

__all__ = ["flows_of", "load_of", "world_of"]

SMALL = 64 * 1024
"""Bytes below which cutting a transfer costs more than it balances."""

MOST_STRAIGHT = 256 * 1024
"""Bytes up to which a rank sends copies of the same to all that want it: a round less is worth
more. Where that makes no rank busier than passing on would, it does so with any number of bytes."""

MOST_STRAIGHT_ROWS = 4096
"""Rows of a stack of which that is tried out."""


def world_of(stacks: Sequence[Stack]) -> Ints:
    """All ranks that any layout speaks of, in rising order."""
    sides = {side.layout for stack in stacks for side in (stack.have, stack.want)}
    ranks = [np.fromiter(layout.ranks, dtype=np.int64) for layout in sides]
    return distinct(np.concatenate([*ranks, np.zeros(0, np.int64)]))


def flows_of(
    stacks: Sequence[Stack], world: Ints, topology: Topology | None, listed: bool
) -> list[Flow]:
    """The flows of all stacks, with the work shared over all of them together.

    With ``listed`` all cells are listed, also where a rank could do without.
    """
    hosts = topology.hosts_of(map(int, world)) if topology else None
    parts = [
        (stack, geometry) for stack in stacks for geometry in _geometries(stack, hosts, listed)
    ]
    grain = _grain(parts)
    sending = _share([(s, g.senders) for s, g in parts], world, grain)
    receiving = _share([(s, g.receivers) for s, g in parts], world, grain)
    relaying = _share([(s, g.relays.lines) for s, g in parts if g.relays], world, grain)
    relays = iter(relaying)
    flows = [
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
    return flows if topology else _straightened(flows)


def _straightened(flows: list[Flow]) -> list[Flow]:
    """Let senders serve all that want the same, where that is small or makes none busier.

    Addends are passed on as a sum, which is less, unless they are two: then it is the same.
    """
    chosen = {at: replace(flow, straight=True) for at, flow in enumerate(flows) if _has_few(flow)}
    sent = {at: _sent(flow) for at, flow in chosen.items()}
    small = sum(int(each.max(initial=0)) for each in sent.values()) <= MOST_STRAIGHT
    return [
        chosen[at] if at in chosen and _is_worth(flow, sent[at], small) else flow
        for at, flow in enumerate(flows)
    ]


def _is_worth(flow: Flow, straight: Ints, small: bool) -> bool:
    if small and flow.geometry.num_addends == 1:
        return True
    passing = _sent(flow)
    return bool(
        straight.sum() <= passing.sum() and straight.max(initial=0) <= passing.max(initial=0)
    )


def _has_few(flow: Flow) -> bool:
    """Whether anything is passed on, and in so few rows that all can be looked at."""
    geometry = flow.geometry
    if not geometry.listed or int(np.diff(geometry.wanting.first).max(initial=0)) < 2:
        return False
    rows = int(np.diff(geometry.wanting.first)[flow.parts().line].sum())
    return rows * geometry.num_addends <= MOST_STRAIGHT_ROWS


def _sent(flow: Flow) -> Ints:
    """Bytes that each rank sends, first-hand and passed on."""
    moved = [(r, np.flatnonzero(r.source != r.destination)) for r in flow.everything()]
    ranks = np.concatenate([rows.source[some] for rows, some in moved])
    itemsize = flow.stack.itemsize_at
    sizes = np.concatenate([rows.sizes[some] * itemsize(rows.hop) for rows, some in moved])
    return np.bincount(ranks, weights=sizes).astype(np.int64)


def _geometries(stack: Stack, hosts: dict[int, int] | None, listed: bool) -> list[Geometry]:
    """The geometries of a stack: one, or one per addend that the destination keeps.

    Listing loads when it is needed: most moves do without it, and a command should be instant.
    """
    geometry = open_geometry(stack) if hosts is None and not listed else None
    if geometry is None:
        from reshard.planning.listing import listed_geometries

        return [*listed_geometries(stack, hosts)]
    if not geometry.covered:
        from reshard.planning.coverage import raise_uncovered

        raise_uncovered(stack)
    return [geometry]


def _grain(parts: Sequence[tuple[Stack, Geometry]]) -> int:
    """The smallest share worth cutting: small next to what a sender has to send anyway."""
    total = sum(int(g.senders.amounts.sum()) * len(s.names) * s.itemsize for s, g in parts)
    senders = max((len(g.senders.members) for _, g in parts), default=1)
    return min(max(total // max(senders, 1) // 128, 1), SMALL)


def _share(lines: Sequence[tuple[Stack, LineSet]], world: Ints, grain: int) -> list[Slots]:
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


def load_of(flow: Flow, world: Ints) -> Load:
    """What a flow makes every rank stage."""
    if isinstance(flow.geometry, OpenGeometry):
        return _open_load(flow, world)
    return _listed_load(flow, world)


def _kin(stack: Stack) -> object:
    """What stacks have in common that differ only in who holds the source."""
    have, want, feed = stack.have, stack.want, stack.feed
    inserted = (feed.have_insert, feed.want_insert)
    sizes = (have.shape, have.dtype, want.shape, want.dtype)
    return (*sizes, want.layout, feed.moves, inserted, have.layout.reduce is None)


def _listed_load(flow: Flow, world: Ints) -> Load:
    """Count every row; what is passed on by sender, without listing its pairs."""
    tally = _Tally(world, flow.stack)
    parts = flow.parts()
    for rows in flow.first_hand(parts):
        tally.exchange(rows)
    if not flow.straight:
        tally.pass_on(parts, flow.geometry.wanting)
    for entered, lines in flow.entering(parts):
        tally.exchange(entered)
        tally.pass_on(entered, lines)
    itemsize = flow.stack.itemsize
    staged, count = tally.num_bytes, tally.rows
    for part in flow.accumulated():
        wide, place = flow.accumulator_itemsize, np.searchsorted(world, part.destination)
        np.add.at(staged, place, part.sizes * wide)
        np.add.at(count, place, _width(flow.stack, wide))
    return Load(
        flow.stack.label,
        _kin(flow.stack),
        staged,
        int(count.max(initial=0)),
        itemsize,
        tally.hops,
        int(parts.sizes.max(initial=0)),
        flow.geometry.relays is not None,
        lambda: _uses(flow, world),
    )


class _Tally:
    """Bytes and rows that every rank sends or receives; a row of wider elements counts as more."""

    def __init__(self, world: Ints, stack: Stack) -> None:
        self.world = world
        self.stack = stack
        self.num_bytes = np.zeros(len(world), dtype=np.int64)
        self.rows = np.zeros(len(world), dtype=np.int64)
        self.hops = 0

    def exchange(self, rows: Transfers) -> None:
        """Count both ends of rows."""
        moved = np.flatnonzero(rows.source != rows.destination)
        for ends in (rows.source[moved], rows.destination[moved]):
            self._add(ends, rows.sizes[moved], 1, rows.hop)
        self.hops = max(self.hops, rows.hop if len(moved) else 0)

    def pass_on(self, rows: Transfers, wanting: LineSet) -> None:
        """Count rows that their receivers pass on to all others of the line."""
        others = np.diff(wanting.first)[rows.line] - 1
        if not len(rows) or not others.any():
            return
        hop = rows.hop + 1
        self._add(rows.destination, rows.sizes * others, others, hop)
        # Every member of a line gets all of it, except what it received itself.
        num_lines = len(wanting.first) - 1
        sizes = np.bincount(rows.line, weights=rows.sizes, minlength=num_lines).astype(np.int64)
        counts = np.bincount(rows.line, minlength=num_lines)
        times = np.diff(wanting.first)
        self._add(wanting.members, np.repeat(sizes, times), np.repeat(counts, times), hop)
        self._add(rows.destination, -rows.sizes * (others > 0), -1 * (others > 0), hop)
        self.hops = max(self.hops, hop)

    def _add(self, ranks: Ints, elements: Ints, rows: Ints | int, hop: int) -> None:
        place = np.searchsorted(self.world, ranks)
        np.add.at(self.num_bytes, place, elements * self.stack.itemsize_at(hop))
        np.add.at(self.rows, place, rows * _width(self.stack, self.stack.itemsize_at(hop)))


def _width(stack: Stack, itemsize: int) -> int:
    """As how many elements that source ranks send an element of so many bytes counts."""
    return -(-itemsize // stack.itemsize)


def _uses(flow: Flow, world: Ints) -> Uses:
    """Both ends of every row of every rank, and the parts in which receivers add up."""
    none = np.zeros(0, dtype=np.int64)
    ranks, parts, sizes, elements = [none], [none], [none], [none]
    for transfers in flow.everything():
        itemsize = flow.stack.itemsize_at(transfers.hop)
        moved = np.flatnonzero(transfers.source != transfers.destination)
        for end in (transfers.source[moved], transfers.destination[moved]):
            ranks.append(end)
            parts.append(transfers.part[moved])
            sizes.append(transfers.sizes[moved] * itemsize)
            elements.append(np.full_like(end, _width(flow.stack, itemsize)))
    for part in flow.accumulated():
        wide = flow.accumulator_itemsize
        ranks.append(part.destination)
        parts.append(part.part)
        sizes.append(part.sizes * wide)
        elements.append(np.full(len(part), _width(flow.stack, wide)))
    place = np.searchsorted(world, np.concatenate(ranks))
    return Uses(
        place, np.concatenate(parts), np.concatenate(sizes), np.concatenate(elements), len(world)
    )


def _open_load(flow: Flow, world: Ints) -> Load:
    """Bound every rank by its slots and regions, without listing a row."""
    itemsize, times = flow.stack.itemsize, len(flow.stack.names)
    assert isinstance(flow.geometry, OpenGeometry)
    staged = np.zeros(len(world), dtype=np.int64)
    send, receive = flow.sending, flow.receiving
    most = int(np.diff(receive.first).max(initial=1))
    for slots, copies in ((send, 1), (receive, most - 1)):
        sizes = np.diff(np.append(slots.starts, slots.base[-1]))
        # A cut is rounded by at most half a unit, and a slot has two ends.
        sizes += np.minimum(flow.unit, sizes)
        np.add.at(staged, np.searchsorted(world, slots.ranks), sizes * itemsize * copies)
    lines = np.repeat(flow.geometry.receivers.amounts * times, np.diff(receive.first))
    np.add.at(staged, np.searchsorted(world, receive.ranks), lines * itemsize)
    for ranks, elements in flow.geometry.copies_per_rank():
        np.add.at(staged, np.searchsorted(world, ranks), elements * times * itemsize * -2)
    sent, wanted = flow.geometry.cells_per_rank()
    senders = int(np.diff(send.first).max(initial=1))
    rows = sent * most + (wanted * senders + most) * most
    return Load(
        flow.stack.label,
        _kin(flow.stack),
        staged,
        rows,
        itemsize,
        int(most > 1),
        int(lines.max(initial=1)),
        False,
        None,
    )
