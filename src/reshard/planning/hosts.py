"""Plans with a topology: each byte enters a host once, and hosts share the work before ranks do.

How a part reaches all ranks that lack it:

- The relay gets the part from its sender and passes it on to an entry rank on every other host
  where no rank holds it, and to the other ranks of its own host.
- On a host where some rank holds the part, one of these serves the entry rank.
- An entry rank passes the part on to the other ranks of its host.
- Where a rank of the relay's own host holds the part, the sender serves the entry ranks directly.

So a byte enters a host once, and not at all where it is held. Sending and passing on are shared
over hosts, which have links of their own, then over the ranks of each host; only what must enter
some host counts for its holders, because everything else is sent by a rank of the same host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from reshard.layout.columns import Ints, distinct, numbered
from reshard.planning.cells.geometry import Geometry
from reshard.planning.cells.listed import ListedGeometry, before, listed_geometries
from reshard.planning.classes import Stack
from reshard.planning.flows import AT_ONCE, Flow, Mask, Transfers, grain_of, lacking, share_plainly
from reshard.planning.sharing import LineSet, Loads, Slots, blocks, repeated, share

__all__ = ["Home", "HostFlow", "host_blocks", "host_flows"]

Home = Callable[[Ints], Ints]
"""The hosts of ranks."""


@dataclass(frozen=True, eq=False)
class Stations:
    """The ranks of lines, host by host: a station is the ranks of a line on one host."""

    members: Ints
    """Ranks in the order of lines, then hosts, then ranks."""
    first: Ints
    """Where the members of each station begin; one more entry ends the last."""
    host: Ints
    of_line: Ints
    """Where the stations of each line begin; one more entry ends the last."""

    @classmethod
    def of(cls, lines: LineSet, home: Home) -> Stations:
        """Group the members of each line by host."""
        line, host = lines.line_of, home(lines.members)
        order = np.lexsort((lines.members, host, line))
        line, host = line[order], host[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (line[1:] != line[:-1]) | (host[1:] != host[:-1])
        first = np.append(np.flatnonzero(new), len(order))
        of_line = np.searchsorted(line[new], np.arange(len(lines.counts) + 1))
        return cls(lines.members[order], first, host[new], of_line)

    @cached_property
    def counts(self) -> Ints:
        """How many members each station has."""
        return np.diff(self.first)

    @cached_property
    def lines(self) -> LineSet:
        """The hosts of each line."""
        return LineSet.plain(self.of_line, self.host)

    def find(self, lines: Ints, hosts: Ints) -> Ints:
        """The station of each line on each host; -1 where there is none."""
        return self.lines.find(lines, hosts)


@dataclass(frozen=True, eq=False)
class HostFlow(Flow):
    """A flow between hosts."""

    home: Home = field(kw_only=True)

    @cached_property
    def wanting(self) -> Stations:
        """The ranks that want each line, host by host."""
        return Stations.of(self.geometry.wanting, self.home)

    @cached_property
    def holding(self) -> Stations:
        """The ranks that hold each line of senders, host by host."""
        return Stations.of(self.geometry.senders, self.home)

    @cached_property
    def _of_line(self) -> tuple[Ints, Ints]:
        """Where the parts of each line begin, and the parts in that order."""
        line = self.parts().line
        order = np.argsort(line, kind="stable")
        lines = np.arange(len(self.geometry.wanting.counts) + 1)
        return np.searchsorted(line[order], lines), order

    def rows_into(self) -> tuple[Ints, Ints]:
        """Hosts, perhaps several times, and at most so many rows that go to each."""
        parts = np.diff(self._of_line[0])[self.wanting.lines.line_of]
        return self.wanting.host, parts * self.wanting.counts

    def into(self, hosts: range) -> Iterator[Transfers]:
        """Every row to a rank of these hosts."""
        stations = np.flatnonzero(
            (self.wanting.host >= hosts.start) & (self.wanting.host < hosts.stop)
        )
        first, order = self._of_line
        row, at = repeated(first, self.wanting.lines.line_of[stations])
        yield from self._deliver(self.parts(), order[at], stations[row], None)

    def streams(self) -> Iterator[Transfers]:
        """Every row of every rank, host by host of the receivers."""
        for hosts in host_blocks([self], int(self.wanting.host.max(initial=-1)) + 1):
            yield from self.into(hosts)

    def for_rank(self, rank: int) -> Iterator[Transfers]:
        """Every row that a rank has to do with: sent, received, or copied by itself."""
        yield from self._copies(rank)
        parts = self.parts()
        yield from self._deliver(parts, *self._pairs_of(parts, rank), rank)

    def _is_direct(self, parts: Transfers) -> Mask:
        """Where the sender serves all entry ranks itself."""
        direct: Mask = self.holding.find(parts.send_line, self.home(parts.destination)) >= 0
        return direct

    def _pairs_of(self, parts: Transfers, rank: int) -> tuple[Ints, Ints]:
        """The parts and the stations that a rank has to do with, in the order of the parts."""
        here = int(self.home(np.array([rank]))[0])
        wanted = self.wanting.find(parts.line, np.full(len(parts), here))
        rows = [np.flatnonzero(wanted >= 0)]
        stations = [wanted[rows[0]]]
        direct = self._is_direct(parts)
        plain = np.flatnonzero((parts.source == rank) & ~direct)
        at = self.wanting.find(parts.line[plain], self.home(parts.destination[plain]))
        away = np.flatnonzero(self.wanting.host[at] != here)
        rows.append(plain[away])
        stations.append(at[away])
        chosen = np.flatnonzero(np.where(direct, parts.source, parts.destination) == rank)
        row, station = repeated(self.wanting.of_line, parts.line[chosen])
        away = np.flatnonzero(self.wanting.host[station] != here)
        rows.append(chosen[row[away]])
        stations.append(station[away])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        return row[order], np.concatenate(stations)[order]

    def _deliver(
        self, parts: Transfers, at: Ints, station: Ints, rank: int | None
    ) -> Iterator[Transfers]:
        """The rows by which parts reach the ranks of stations; those of one rank, if given."""
        if not len(at):
            return
        pair, member = repeated(self.wanting.first, station)
        member = self.wanting.members[member]
        lacks = self.geometry.senders.find(parts.send_line[at][pair], member) < 0
        pair, member = pair[lacks], member[lacks]
        feeder, hop, enters, first = self._feeders(parts, at, station, pair, member)
        entry = np.full(len(at), -1, dtype=np.int64)
        entry[pair[enters]] = member[enters]
        fed = enters | (entry[pair] < 0)
        source = np.where(fed, feeder[pair], entry[pair])
        hop = hop[pair] + ~fed
        again = (hop == 0) & ~first
        mine = np.ones(len(pair), dtype=bool)
        if rank is not None:
            mine = (source == rank) | (member == rank)
        for number in range(3):
            for repeats in (False, True):
                rows = np.flatnonzero(mine & (hop == number) & (again == repeats))
                if len(rows):
                    yield replace(
                        parts.take(at[pair[rows]]),
                        source=source[rows],
                        destination=member[rows],
                        hop=number,
                        again=repeats,
                    )

    def _feeders(
        self, parts: Transfers, at: Ints, station: Ints, pair: Ints, member: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Who sends a part to a station, at which hop; and for every lacking member of it, whether
        it is the entry rank, and whether its copy is the first that leaves a source rank."""
        relay, line, send = parts.destination[at], parts.line[at], parts.send_line[at]
        turn = self.geometry.wanting.find(line, relay) - self.geometry.wanting.first[line]
        own = self.home(relay) == self.wanting.host[station]
        held = self.holding.find(send, self.wanting.host[station])
        direct = self._is_direct(parts)[at]
        count = np.bincount(pair, minlength=len(at))
        place = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
        chosen = place == (turn % np.maximum(count, 1))[pair]
        enters = np.where(own[pair], member == relay[pair], chosen)
        inside = np.maximum(held, 0)
        local = self.holding.members[
            self.holding.first[inside] + turn % self.holding.counts[inside]
        ]
        holds = self.geometry.senders.find(send, relay) >= 0
        local = np.where(own & holds, relay, local)
        outside = np.where(own | direct, parts.source[at], relay)
        feeder = np.where(held >= 0, local, outside)
        hop = np.where((held >= 0) | own | direct, 0, 1)
        begins = station == self._first_needy(parts, at) if direct.any() else own
        once = np.where((own & holds)[pair], place == 0, enters)
        first = np.where(held[pair] >= 0, once, begins[pair])
        return feeder, hop, enters, first

    def _first_needy(self, parts: Transfers, at: Ints) -> Ints:
        """For each part the first station, from its relay's on, where no rank holds it."""
        which, number = numbered(at)
        line, send = parts.line[which], parts.send_line[which]
        begin, end = self.wanting.of_line[line], self.wanting.of_line[line + 1]
        station = self.wanting.find(line, self.home(parts.destination[which]))
        open_ = np.arange(len(which))
        for _ in range(int((end - begin).max(initial=0))):
            held = self.holding.find(send[open_], self.wanting.host[station[open_]]) >= 0
            open_ = open_[held]
            if not len(open_):
                break
            after = station[open_] + 1
            station[open_] = np.where(after == end[open_], begin[open_], after)
        return station[number]


def host_blocks(flows: Sequence[Flow], num_hosts: int) -> Iterator[range]:
    """All hosts in ranges that get at most `AT_ONCE` rows of these flows, or one host."""
    rows = np.zeros(num_hosts, dtype=np.int64)
    for flow in flows:
        if isinstance(flow, HostFlow):
            hosts, count = flow.rows_into()
            rows += np.bincount(hosts, count, num_hosts).astype(np.int64)
    return blocks(rows, AT_ONCE)


def host_flows(stacks: Sequence[Stack], world: Ints, home: Home) -> list[Flow]:
    """The flows of all stacks; addends are added up as if there were no hosts."""
    found = [(stack, one) for stack in stacks for one in listed_geometries(stack)]
    parts = [(s, one if _sums(one) else _entering_only(one, home)) for s, one in found]
    grain = grain_of(parts)
    ranks, hosts = Loads.none(world), Loads.none(distinct(home(world)))
    between = [(stack, one) for stack, one in parts if not _sums(one)]
    plain = [(stack, one) for stack, one in parts if _sums(one)]
    for stack, geometry in between:
        _add_local(ranks, stack, geometry, home)
    slots: list[list[Slots]] = []
    for passes in (False, True):
        shared = iter(_share_over_hosts(between, passes, home, hosts, ranks, grain))
        others = iter(share_plainly(plain, passes, ranks, grain))
        slots.append([next(others if _sums(one) else shared) for _, one in parts])
    flows: list[Flow] = []
    for (stack, one), send, receive in zip(parts, *slots, strict=True):
        flow = Flow(stack, one, send, receive, max(grain // stack.itemsize, 1))
        flows.append(flow if _sums(one) else HostFlow(**vars(flow), home=home))
    return flows


def _sums(geometry: Geometry) -> bool:
    return geometry.num_addends > 1


def _share_over_hosts(
    parts: Sequence[tuple[Stack, ListedGeometry]],
    passes: bool,
    home: Home,
    hosts: Loads,
    ranks: Loads,
    grain: int,
) -> list[Slots]:
    """Share the sending, or the passing on, of every line over hosts, then over their ranks.

    Who passes on sends its share to every other host and to every other rank of its own.
    """
    found, chosen, jobs = [], [], []
    for stack, geometry in parts:
        lines = geometry.receivers if passes else geometry.senders
        stations = Stations.of(lines, home)
        some = np.ones(len(stations.host), dtype=bool)
        if passes:
            some = _lacking(geometry, stations, home)
        amounts = lines.amounts * len(stack.names)
        times = stations.lines.counts - 1 if passes else 1
        found.append((LineSet(amounts, lines.first, stations.members), stations, stack.itemsize))
        chosen.append(some)
        jobs.append(
            (LineSet(amounts, stations.of_line, stations.host).only(some), stack.itemsize, times)
        )
    inside = []
    for (_, stations, itemsize), some, given in zip(
        found, chosen, share(jobs, hosts, grain), strict=True
    ):
        shares = np.zeros(len(some), dtype=np.int64)
        shares[some] = given
        others = stations.lines.counts[stations.lines.line_of] - 1 + stations.counts - 1
        lines = LineSet(shares, stations.first, stations.members)
        inside.append((lines, itemsize, others if passes else 1))
    return [
        Slots.of(lines, shares)
        for (lines, *_), shares in zip(found, share(inside, ranks, grain), strict=True)
    ]


def _entering_only(geometry: ListedGeometry, home: Home) -> ListedGeometry:
    """The same cells, of which only those that must enter some host count for their senders."""
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


def _lacking(geometry: ListedGeometry, stations: Stations, home: Home) -> Mask:
    """The stations that do not hold all of their line; all stations of a line that all hold."""
    assert geometry.held is not None
    (kind, held), lined = geometry.held, geometry.all()
    send, line = np.zeros((2, len(held.counts)), dtype=np.int64)
    send[kind], line[kind] = lined.send_line, lined.receive_line
    holding = Stations.of(geometry.senders, home)
    row, host = holding.lines.common(stations.lines, send, line)
    first = np.searchsorted(row, np.arange(len(send) + 1))
    return lacking(geometry, LineSet.plain(first, host), stations.lines)
