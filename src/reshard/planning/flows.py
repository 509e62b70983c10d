"""The flows of all stacks: who shares which line, so that no rank or host has much more to do.

Work is shared in two steps, over all stacks together. The holders of each line share the sending;
then the ranks that want it share the passing on, the less the more they send already. With a
topology both are shared over hosts first, which have links of their own, then over the ranks of
each host; and only what must enter some host counts for the holders, because everything else is
sent by a rank of the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, distinct, numbered
from reshard.planning.cells.geometry import Geometry, raise_uncovered
from reshard.planning.cells.listed import ListedGeometry, before, listed_geometries
from reshard.planning.cells.regular import regular_geometry
from reshard.planning.classes import Stack
from reshard.planning.sharing import Home, LineSet, Loads, Slots, Stations, repeated, share
from reshard.planning.transfers import Flow

__all__ = ["flows_of"]

SMALL = 64 * 1024
"""Bytes below which cutting a transfer costs more than it balances."""

MAX_DIRECT = 256 * 1024
"""Bytes up to which a rank sends copies of the same to all that want it: a round less is worth
more. Where that makes no rank busier than passing on would, it does so with any number of bytes."""

MAX_DIRECT_ROWS = 4096
"""Rows of a stack of which that is tried out."""


def flows_of(stacks: Sequence[Stack], world: Ints, home: Home, listed: bool) -> list[Flow]:
    """The flows of all stacks; with ``listed`` all cells are listed, also where a rank could do
    without."""
    parts = [
        (stack, geometry if home is None else _entering_only(geometry, home))
        for stack in stacks
        for geometry in _geometries(stack, listed or home is not None)
    ]
    grain = _grain(parts)
    ranks, hosts = Loads.none(world), Loads.none(world if home is None else distinct(home(world)))
    if home is not None:
        for stack, geometry in parts:
            _add_local(ranks, stack, geometry, home)
    sent = [_Lines.of(stack, g, g.senders, home, False) for stack, g in parts]
    passed = [_Lines.of(stack, g, g.receivers, home, True) for stack, g in parts]
    sending = _slots(sent, grain, hosts, ranks)
    receiving = _slots(passed, grain, hosts, ranks)
    flows = [
        Flow(stack, geometry, lines.home, send, receive, max(grain // stack.itemsize, 1))
        for (stack, geometry), lines, send, receive in zip(
            parts, sent, sending, receiving, strict=True
        )
    ]
    return _with_direct(flows) if home is None else flows


def _geometries(stack: Stack, listed: bool) -> list[Geometry]:
    """The geometries of a stack: one, or one per addend that the destination keeps."""
    geometry = None if listed else regular_geometry(stack)
    if geometry is None:
        return [*listed_geometries(stack)]
    if not geometry.covered:
        raise_uncovered(stack)
    return [geometry]


def _grain(parts: Sequence[tuple[Stack, Geometry]]) -> int:
    """The smallest share worth cutting: small next to what a sender has to send anyway."""
    total = sum(int(g.senders.amounts.sum()) * len(s.names) * s.itemsize for s, g in parts)
    senders = max((len(g.senders.members) for _, g in parts), default=1)
    return min(max(total // max(senders, 1) // 128, 1), SMALL)


def _entering_only(geometry: Geometry, home: Home) -> Geometry:
    """The same cells, of which only those that must enter some host count for their senders."""
    if geometry.num_addends > 1 or not isinstance(geometry, ListedGeometry):
        return geometry
    lined, senders = geometry.cells, geometry.senders
    cell, _, held = _stations_of_cells(geometry, home)
    enters = np.bincount(cell, weights=held < 0, minlength=len(lined.send_line)) > 0
    sizes = lined.cells.size * enters
    amounts = np.bincount(lined.send_line, weights=sizes, minlength=len(senders.counts))
    return replace(
        geometry,
        cells=replace(lined, send_at=before(lined.send_line, sizes, len(senders.counts))),
        senders=LineSet(amounts.astype(np.int64), senders.first, senders.members),
    )


def _stations_of_cells(geometry: Geometry, home: Home) -> tuple[Ints, Ints, Ints]:
    """Every cell with each station that wants it, and the station that holds it there, or -1."""
    lined = geometry.all()
    wanting, holding = Stations.of(geometry.wanting, home), Stations.of(geometry.senders, home)
    cell, station = repeated(wanting.of_line, lined.receive_line)
    return cell, station, holding.find(lined.send_line[cell], wanting.host[station])


def _add_local(ranks: Loads, stack: Stack, geometry: Geometry, home: Home) -> None:
    """What ranks send inside their host: cells that a rank of it holds and another one lacks."""
    if geometry.num_addends > 1:
        return
    lined = geometry.all()
    wanting, holding = Stations.of(geometry.wanting, home), Stations.of(geometry.senders, home)
    cell, station, held = _stations_of_cells(geometry, home)
    inside = np.flatnonzero(held >= 0)
    row, member = repeated(wanting.first, station[inside])
    rank = wanting.members[member]
    lacks = geometry.senders.find(lined.send_line[cell[inside[row]]], rank) < 0
    served = np.bincount(row[lacks], minlength=len(inside)) > 0
    inside = inside[served]
    row, member = repeated(holding.first, held[inside])
    sizes = lined.cells.size[cell[inside]] * len(stack.names) * stack.itemsize
    each = sizes // holding.counts[held[inside]]
    np.add.at(ranks.loads, ranks.find(holding.members[member]), each[row])


@dataclass(frozen=True, eq=False)
class _Lines:
    """Lines to share, host by host."""

    lines: LineSet
    itemsize: int
    home: Home
    stations: Stations
    chosen: NDArray[np.bool_]
    """The stations that get a share."""
    passes: bool
    """Whether a member sends its share to every other host and every other rank of its own."""

    @classmethod
    def of(
        cls, stack: Stack, geometry: Geometry, lines: LineSet, home: Home, passes: bool
    ) -> _Lines:
        home = home if geometry.num_addends == 1 else None
        stations = Stations.of(lines, home)
        chosen = np.ones(len(stations.host), dtype=bool)
        if passes and geometry.listed and geometry.num_addends == 1:
            chosen = _lacking(geometry, stations, home)
        whole = LineSet(lines.amounts * len(stack.names), lines.first, lines.members)
        return cls(whole, stack.itemsize, home, stations, chosen, passes)

    def over_stations(self) -> tuple[LineSet, int, Ints | int]:
        """The lines, to be shared by the chosen stations."""
        ends = np.concatenate([[0], np.cumsum(self.chosen)])[self.stations.of_line]
        lines = LineSet(self.lines.amounts, ends, self.stations.host[self.chosen])
        return lines, self.itemsize, np.diff(self.stations.of_line) - 1 if self.passes else 1

    def over_ranks(self, amounts: Ints) -> tuple[LineSet, int, Ints | int]:
        """The amounts of the stations, to be shared by the ranks of each."""
        lines = LineSet(amounts, self.stations.first, self.stations.members)
        hosts = np.diff(self.stations.of_line)
        times = np.repeat(hosts, hosts) - 1 + lines.counts - 1
        return lines, self.itemsize, times if self.passes else 1

    def scattered(self, shares: Ints) -> Ints:
        """The shares of all stations, given those of the chosen ones."""
        found = np.zeros(len(self.chosen), dtype=np.int64)
        found[self.chosen] = shares
        return found


def _slots(jobs: Sequence[_Lines], grain: int, hosts: Loads, ranks: Loads) -> list[Slots]:
    """Share lines over hosts, then over the ranks of each host; a rank may be a host of its own."""
    shares: dict[int, Ints] = {}
    for known, ends in ((True, hosts), (False, ranks)):
        some = [n for n, job in enumerate(jobs) if (job.home is not None) == known]
        found = share([jobs[n].over_stations() for n in some], ends, grain)
        shares |= {n: jobs[n].scattered(one) for n, one in zip(some, found, strict=True)}
        if known:
            sets = [jobs[n].over_ranks(shares[n]) for n in some]
            shares |= dict(zip(some, share(sets, ranks, grain), strict=True))
    return [
        Slots.of(LineSet(job.lines.amounts, job.lines.first, job.stations.members), shares[n])
        for n, job in enumerate(jobs)
    ]


def _lacking(geometry: Geometry, stations: Stations, home: Home) -> NDArray[np.bool_]:
    """The stations that do not hold all of their line; all stations of a line that all hold."""
    lined, holding = geometry.all(), Stations.of(geometry.senders, home)
    kinds, kind = numbered(lined.send_line * len(geometry.wanting.counts) + lined.receive_line)
    send, line = np.divmod(kinds, max(len(geometry.wanting.counts), 1))
    holders = LineSet(holding.of_line, holding.of_line, holding.host)
    wanters = LineSet(stations.of_line, stations.of_line, stations.host)
    row, host = holders.common(wanters, send, line)
    sizes = np.bincount(kind, weights=lined.cells.size, minlength=len(kinds))
    station = stations.find(line[row], host)
    held = np.bincount(station, weights=sizes[row], minlength=len(stations.host))
    of_line = np.repeat(np.arange(len(geometry.wanting.counts)), np.diff(stations.of_line))
    lacks = held < geometry.wanting.amounts[of_line]
    some = np.bincount(of_line, weights=lacks, minlength=len(geometry.wanting.counts)) > 0
    found: NDArray[np.bool_] = lacks | ~some[of_line]
    return found


def _with_direct(flows: list[Flow]) -> list[Flow]:
    """Let senders serve all that want the same directly, where that is small or makes none busier.

    Addends are passed on as a sum, which is less, unless they are two: then it is the same.
    """
    chosen = {at: replace(flow, direct=True) for at, flow in enumerate(flows) if _has_few(flow)}
    sent = {at: _sent(flow) for at, flow in chosen.items()}
    small = sum(int(each.max(initial=0)) for each in sent.values()) <= MAX_DIRECT
    return [
        chosen[at] if at in chosen and _is_worth(flow, sent[at], small) else flow
        for at, flow in enumerate(flows)
    ]


def _is_worth(flow: Flow, direct: Ints, small: bool) -> bool:
    if small and flow.geometry.num_addends == 1:
        return True
    passing = _sent(flow)
    return bool(direct.sum() <= passing.sum() and direct.max(initial=0) <= passing.max(initial=0))


def _has_few(flow: Flow) -> bool:
    """Whether anything is passed on, and in so few rows that all can be looked at."""
    geometry = flow.geometry
    if not geometry.listed or flow.most < 2:
        return False
    rows = int(geometry.wanting.counts[flow.parts().line].sum())
    return rows * geometry.num_addends <= MAX_DIRECT_ROWS


def _sent(flow: Flow) -> Ints:
    """Bytes that each rank sends, first-hand and passed on."""
    found = np.zeros(int(flow.geometry.senders.members.max(initial=0)) + 1, dtype=np.int64)
    for rows in flow.everything():
        some = np.flatnonzero(rows.source != rows.destination)
        sizes = rows.sizes[some] * flow.stack.itemsize_at(rows.hop)
        sent = np.bincount(rows.source[some], weights=sizes).astype(np.int64)
        if len(sent) > len(found):
            found, sent = sent, found
        found[: len(sent)] += sent
    return found
