"""Plans with a topology: each byte enters a host once, and hosts share the work before ranks do.

- The relay of a part gets it from its sender, unless it holds it, and passes it on to an entry rank
  on every other host where no rank holds it, and to the other ranks of its own host.
- On a host where some rank holds the part, one of these serves the entry rank.
- An entry rank passes the part on to the other ranks of its host.

Sending and passing on are shared over hosts, which have links of their own, then over the ranks of
each host. Only what must enter some host counts for its holders: everything else is sent by a rank
of the same host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints, blocks, contained, distinct, numbered
from reshard.planning.cells.listed import (
    Home,
    HostLines,
    ListedGeometry,
    Stations,
    listed_geometries,
)
from reshard.planning.cells.transfers import AnyRows, Fan, HostFan, Transfers
from reshard.planning.classes import Stack
from reshard.planning.flows import AT_ONCE, Flow, grain_of, lacking, share_plainly
from reshard.planning.sharing import Job, LineSet, Loads, Mask, Slots, repeated, share, share_slots

HostJob = tuple[Stack, ListedGeometry, HostLines]
IN_BALANCE = 1.1  # how far above the mean a rank may be that passes on
NEARLY = 1.02  # how far above what the busiest host must receive a host may be that sends


class _Relays(NamedTuple):
    """What is known of each part and of its relay."""

    kind: Ints  # of the part
    turn: Ints  # the place of its relay among the ranks that want its line
    station: Ints  # where the relay is among the stations of its line
    host_holds: Mask  # where some rank of the relay's host holds the part
    holds: Mask  # where the relay itself holds it


@dataclass(frozen=True, eq=False)
class HostFlow(Flow):
    """A flow between hosts."""

    home: Home = field(kw_only=True)
    hosts: HostLines = field(kw_only=True)

    @property
    def wanting(self) -> Stations:
        return self.hosts.wanting

    @property
    def holding(self) -> Stations:
        return self.hosts.holding

    def streams(self) -> Iterator[AnyRows]:
        """Rows to the stations of relays; to all others what enters them, or is sent by a rank
        there that holds it, and what is passed on inside."""
        for some in blocks(self.wanting.counts[self._relays.station], AT_ONCE):
            at = np.arange(some.start, some.stop)
            yield from self._deliver(at, self._relays.station[at], None)
        for size in distinct(self.wanting.counts).tolist():
            yield from self._entering(size)
        holders, lacking = self.holding.counts[self.hosts.held_at], self.hosts.lacking.counts
        span = int(holders.max(initial=0)) + 1
        for sizes in distinct((lacking * span + holders)[lacking > 0]).tolist():
            yield from self._inside(sizes % span, sizes // span)

    def everything(self) -> Iterator[Transfers]:
        line = self.parts().line
        for some in blocks(self.geometry.wanting.counts[line], AT_ONCE):
            at, station = repeated(self.wanting.lines.first, line[some.start : some.stop])
            yield from self._deliver(at + some.start, station, None)

    def for_rank(self, rank: int) -> Iterator[Transfers]:
        yield from self._copies(rank)
        yield from self._deliver(*self._pairs_of(rank), rank)

    @cached_property
    def _relays(self) -> _Relays:
        parts, lines = self.parts(), self.geometry.wanting
        home = self.home(parts.destination)
        return _Relays(
            kind=self.hosts.kinds.of[parts.runs.cell],
            turn=lines.find(parts.line, parts.destination) - lines.first[parts.line],
            station=self.wanting.lines.find(parts.line, home),
            host_holds=self.holding.lines.find(parts.send_line, home) >= 0,
            holds=self.geometry.senders.find(parts.send_line, parts.destination) >= 0,
        )

    @cached_property
    def _first_needy(self) -> Ints:
        """For each part the first station, from its relay's on, where no rank holds it."""
        parts, station = self.parts(), self._relays.station
        begin, end = self.wanting.lines.first[parts.line], self.wanting.lines.first[parts.line + 1]
        kind, after_held = self._relays.kind, np.append(self.hosts.after_held, 0)
        # Once more for those that came to the end of their line and begin anew.
        for _ in range(2):
            at = self.hosts.common.find(kind, self.wanting.lines.members[station])
            after = np.where(at >= 0, after_held[at], station)
            station = np.where(after == end, begin, after)
        return station

    def _entering(self, size: int) -> Iterator[Fan | HostFan]:
        """What enters stations of so many ranks where no rank holds it, but for the relay's own.

        A part enters at the rank that has its relay's place, modulo the ranks of the station. So
        relays with equal places send to the same entry ranks.
        """
        wanting, parts, place = self.wanting, self.parts(), np.arange(size)
        relays, turn = self._relays, self._relays.turn
        stations = np.flatnonzero(wanting.counts == size)
        lines, number = numbered(wanting.lines.line_of[stations])
        member = wanting.members[wanting.first[stations][:, None] + place]
        others = member[:, (place[:, None] + place[1:]) % size].reshape(member.size, size - 1)
        entries, order = LineSet.sorted(
            (number[:, None] * size + place).reshape(-1), member.reshape(-1), len(lines) * size
        )
        mine = np.flatnonzero(contained(parts.line, lines))
        line = np.searchsorted(lines, parts.line[mine]) * size + turn[mine] % size
        kind, holders = self._held_entries(mine, size)
        own = wanting.counts[self._relays.station[mine]] == size
        entry = wanting.first[self._relays.station[mine]] + turn[mine] % np.where(own, size, 1)
        left_out = np.where(own & ~relays.host_holds[mine], wanting.members[entry], -1)
        again = wanting.counts[self._first_needy[mine]] != size
        way = np.where(relays.holds[mine], again, 2)
        for hop, which in ((0, 0), (0, 1), (1, 2)):
            some = np.flatnonzero(way == which)
            rows = replace(parts.take(mine[some]), line=line[some], hop=hop, again=which == 1)
            rows = replace(rows, source=rows.destination)
            fan = Fan(rows, entries, kind[some], holders, left_out[some])
            if fan.served.any():
                yield fan
                if size > 1:
                    yield HostFan(fan, entries.members, others[order], hop + 1)

    def _held_entries(self, mine: Ints, size: int) -> tuple[Ints, LineSet]:
        """For each of some parts a kind, and for each kind the ranks at which it would enter
        stations of so many ranks, if no rank there held it."""
        wanting, hosts, relays = self.wanting, self.hosts, self._relays
        keys, kind = numbered(relays.kind[mine] * size + relays.turn[mine] % size)
        row, at = repeated(hosts.common.first, keys // size)
        station = hosts.wanted_at[at]
        some = np.flatnonzero(wanting.counts[station] == size)
        entry = wanting.members[wanting.first[station[some]] + keys[row[some]] % size]
        return kind, LineSet.sorted(row[some], entry, len(keys))[0]

    def _inside(self, holders: int, lackers: int) -> Iterator[HostFan]:
        """What so many ranks of a host that hold parts send to so many there that lack them, on
        all hosts but the relay's own: to an entry rank, which passes it on."""
        hosts, holding, lacking = self.hosts, self.holding, self.hosts.lacking
        kind, place = self._relays.kind, self._relays.turn
        period, counts = math.lcm(holders, lackers), holding.counts[hosts.held_at]
        every = LineSet(hosts.common.first, np.arange(len(hosts.held_at)))
        pairs = every.only((counts == holders) & (lacking.counts == lackers))
        mine = np.flatnonzero(pairs.counts[kind])
        keys, line = numbered(kind[mine] * period + place[mine] % period)
        row, at = repeated(pairs.first, keys // period)
        pair, turn = pairs.members[at], keys[row] % period
        entry = lacking.members[lacking.first[pair] + turn % lackers]
        entries, order = LineSet.sorted(row, entry, len(keys))
        pair, turn = pair[order], turn[order]
        own = hosts.common.find(kind[mine], self.wanting.lines.members[self._relays.station[mine]])
        here = (own >= 0) & (counts[own] == holders) & (lacking.counts[own] == lackers)
        entry = lacking.first[own] + place[mine] % np.where(here, lackers, 1)
        left_out = np.where(here, lacking.members[np.where(here, entry, 0)], -1)
        rows = replace(self.parts().take(mine), line=line)
        no_holders = LineSet(0 * entries.first, entries.members[:0])
        fan = Fan(rows, entries, line, no_holders, left_out)
        if fan.served.any():
            feeder = holding.members[holding.first[hosts.held_at[pair]] + turn % holders]
            yield HostFan(fan, feeder, entries.members[:, None], 0)
            others = (turn[:, None] + np.arange(1, lackers)) % lackers
            if lackers > 1:
                others = lacking.members[lacking.first[pair][:, None] + others]
                yield HostFan(fan, entries.members, others, 1)

    def _pairs_of(self, rank: int) -> tuple[Ints, Ints]:
        """The parts and the stations that a rank has to do with, in the order of the parts."""
        parts, here = self.parts(), int(self.home(np.array([rank]))[0])
        lines, relay_station = self.wanting.lines, self._relays.station
        wanted = lines.find(parts.line, np.full(len(parts), here))
        inside = np.flatnonzero(wanted >= 0)
        direct = np.flatnonzero((parts.source == rank) & ~self._relays.host_holds)
        direct = direct[lines.members[relay_station[direct]] != here]
        relayed = np.flatnonzero(parts.destination == rank)
        row, station = repeated(lines.first, parts.line[relayed])
        away = np.flatnonzero(lines.members[station] != here)
        rows = np.concatenate([inside, direct, relayed[row[away]]])
        stations = np.concatenate([wanted[inside], relay_station[direct], station[away]])
        order = np.argsort(rows, kind="stable")
        return rows[order], stations[order]

    def _deliver(self, at: Ints, station: Ints, rank: int | None) -> Iterator[Transfers]:
        """The rows by which parts reach the ranks of stations; those of one rank, if given."""
        if not len(at):
            return
        parts, holding, send = self.parts(), self.holding, self.parts().send_line[at]
        station_held = holding.lines.find(send, self.wanting.lines.members[station])
        pair, entry = repeated(self.wanting.first, station)
        member = self.wanting.members[entry]
        some = np.flatnonzero(station_held[pair] >= 0)
        lacks = np.ones(len(pair), dtype=bool)
        lacks[some] = self.geometry.senders.find(send[pair[some]], member[some]) < 0
        pair, member = pair[lacks], member[lacks]
        # Which rank sends to the station, at which hop.
        relay, turn, ready = parts.destination[at], self._relays.turn[at], self._relays.holds[at]
        own = self._relays.station[at] == station
        inside = np.maximum(station_held, 0)
        local = holding.members[holding.first[inside] + turn % holding.counts[inside]]
        outside = np.where(own, parts.source[at], relay)
        feeder = np.where(station_held >= 0, np.where(own & ready, relay, local), outside)
        hop = np.where((station_held >= 0) | own | ready, 0, 1)
        # Which lacking rank of the station it sends to; that rank passes the part on to the others.
        count = np.bincount(pair, minlength=len(at))
        number = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
        in_turn = number == (turn % np.maximum(count, 1))[pair]
        enters = np.where(own[pair], member == relay[pair], in_turn)
        entry = np.full(len(at), -1, dtype=np.int64)
        entry[pair[enters]] = member[enters]
        fed = enters | (entry[pair] < 0)
        source, hop = np.where(fed, feeder[pair], entry[pair]), hop[pair] + ~fed
        # Which copies are the first that leave a source rank.
        begins = station == self._first_needy[at] if ready.any() else own
        once = np.where((own & ready)[pair], number == 0, enters)
        again = (hop == 0) & ~np.where(station_held[pair] >= 0, once, begins[pair])
        mine = (source == rank) | (member == rank) | (rank is None)
        for number_of_hop, repeats in product(range(3), (False, True)):
            rows = np.flatnonzero(mine & (hop == number_of_hop) & (again == repeats))
            if len(rows):
                moved = replace(parts.take(at[pair[rows]]), hop=number_of_hop, again=repeats)
                yield replace(moved, source=source[rows], destination=member[rows])


def host_flows(stacks: Sequence[Stack], world: Ints, home: Home) -> list[Flow]:
    """The flows of all stacks; addends are added up as if there were no hosts."""
    parts: list[tuple[Stack, ListedGeometry]] = []
    lines: list[HostLines | None] = []
    for stack in stacks:
        for geometry in listed_geometries(stack):
            hosts = HostLines.of(geometry, home)
            parts.append((stack, _entering_only(geometry, hosts) if hosts else geometry))
            lines.append(hosts)
    grain = grain_of(parts)
    ranks, loads = Loads.none(world), Loads.none(distinct(home(world)))
    between = [(*one, hosts) for one, hosts in zip(parts, lines, strict=True) if hosts]
    plain = [one for one, hosts in zip(parts, lines, strict=True) if not hosts]
    for job in between:
        _add_local(ranks, *job)
    slots: list[list[Slots]] = []
    for passes in (False, True):
        if passes:
            shared = iter(_pass_on(between, loads, ranks, home, grain))
        else:
            shared = iter(_share_over_hosts(between, False, loads, ranks, grain))
        others = iter(share_plainly(plain, passes, ranks, grain))
        slots.append([next(shared if hosts else others) for hosts in lines])
    flows: list[Flow] = []
    for (stack, one), hosts, send, receive in zip(parts, lines, *slots, strict=True):
        flow = Flow(stack, one, send, receive, max(grain // stack.itemsize, 1))
        flows.append(HostFlow(**vars(flow), home=home, hosts=hosts) if hosts else flow)
    return flows


def _pass_on(
    parts: Sequence[HostJob], loads: Loads, ranks: Loads, home: Home, grain: int
) -> list[Slots]:
    """Share the passing on of every line, over hosts first; but over all ranks alike where ranks
    would not be in balance, and no link between hosts takes longer than the busiest must."""
    wanting = np.zeros(len(ranks.ranks), dtype=bool)
    for *_, hosts in parts:
        wanting[ranks.find(hosts.wanting.members)] = True
    host = loads.find(home(ranks.ranks[wanting]))
    num = np.bincount(host, minlength=len(loads.ranks))
    aims, most = _aims(parts, loads, num)
    sent, before = loads.loads.copy(), ranks.loads.copy()
    # A host that should send less than others counts as one that has sent the difference.
    loads.loads[num > 0] += (aims.max(initial=0) - aims).astype(np.int64)[num > 0]
    over_hosts = _share_over_hosts(parts, True, loads, ranks, grain)
    relayed = (ranks.loads - before)[wanting]
    if relayed.max(initial=0) <= IN_BALANCE * relayed.sum() / max(len(relayed), 1):
        return over_hosts
    each = aims / np.maximum(num, 1)
    less = np.zeros_like(before)
    less[wanting] = (each.max() - each)[host]
    alike = Loads(ranks.ranks, less.copy())
    over_ranks = _share_over_ranks(parts, alike, grain)
    sent += np.bincount(host, (alike.loads - less)[wanting], len(num)).astype(np.int64)
    return over_ranks if sent[num > 0].max() <= NEARLY * most else over_hosts


def _share_over_ranks(parts: Sequence[HostJob], ranks: Loads, grain: int) -> list[Slots]:
    """Share the passing on of every line over its ranks, wherever they are."""
    jobs: list[Job] = []
    for stack, geometry, hosts in parts:
        stations, amounts = hosts.wanting, geometry.receive_amounts * len(stack.names)
        some = np.repeat(lacking(geometry, hosts.common, stations.lines), stations.counts)
        jobs.append(Job(stations.whole, amounts, some, stack.itemsize, stations.lines.counts - 1))
    return share_slots(jobs, ranks, grain)


def _aims(parts: Sequence[HostJob], loads: Loads, num: Ints) -> tuple[NDArray[np.float64], float]:
    """How much each host should send, by the number of its ranks that want anything, up to what the
    busiest host must receive, and that: up to there links between hosts take no longer."""
    received, total = np.zeros(len(num)), int(loads.loads[num > 0].sum())
    for stack, geometry, hosts in parts:
        itemsize, wanting = stack.itemsize * len(stack.names), hosts.wanting.lines
        amounts = geometry.receive_amounts * itemsize
        saved = (
            np.bincount(hosts.kinds.of, geometry.cells.size, len(hosts.common.counts)) * itemsize
        )
        for lines, sizes in ((wanting, amounts), (hosts.common, -saved)):
            at = loads.find(lines.members)
            received += np.bincount(at, sizes[lines.line_of], len(received))
        total += int(amounts @ np.maximum(wanting.counts - 1, 1))
    # What is sent counts parts for hosts that hold them too.
    most = float(received.max(initial=0) * total / max(received.sum(), 1))
    rising = np.sort(num)
    rest = np.maximum(total - most * np.arange(len(num))[::-1], 0)
    each = rest / np.maximum(np.cumsum(rising), 1)
    fits = np.flatnonzero(rising * each <= most)
    return np.minimum(num * (each[fits[-1]] if len(fits) else most), most), most


def _share_over_hosts(
    parts: Sequence[HostJob], passes: bool, loads: Loads, ranks: Loads, grain: int
) -> list[Slots]:
    """Share the sending, or the passing on, of every line over hosts, then over their ranks.

    A rank that passes on sends its share to every other host and to every other rank of its own.
    """
    jobs, inside = list[Job](), list[Job]()
    sides = [hosts.wanting if passes else hosts.holding for *_, hosts in parts]
    for (stack, geometry, hosts), stations in zip(parts, sides, strict=True):
        lines = stations.lines
        some = lacking(geometry, hosts.common, lines) if passes else None
        amounts = geometry.receive_amounts if passes else geometry.send_amounts
        times = lines.counts - 1 if passes else 1
        jobs.append(Job(lines, amounts * len(stack.names), some, stack.itemsize, times))
    for stations, job, amounts in zip(sides, jobs, share(jobs, loads, grain), strict=True):
        others = stations.lines.counts[stations.lines.line_of] - 1 + stations.counts - 1
        inside.append(Job(stations, amounts, None, job.itemsize, others if passes else 1))
    shares = share(inside, ranks, grain)
    return [
        Slots.of(stations.whole, job.amounts, each)
        for stations, job, each in zip(sides, jobs, shares, strict=True)
    ]


def _entering_only(geometry: ListedGeometry, hosts: HostLines) -> ListedGeometry:
    """The same cells, of which only those that must enter some host count for their senders."""
    cells = geometry.cells
    enters = hosts.common.counts[hosts.kinds.of] < hosts.wanting.lines.counts[cells.receive_line]
    amounts, send_at = geometry.senders.lay_out(cells.send_line, cells.size * enters)
    return replace(geometry, cells=replace(cells, send_at=send_at), send_amounts=amounts)


def _add_local(ranks: Loads, stack: Stack, geometry: ListedGeometry, hosts: HostLines) -> None:
    """What ranks send inside their host: cells that a rank of it holds and another one lacks."""
    served = hosts.lacking.counts > 0
    cell, at = repeated(hosts.common.first, hosts.kinds.of)
    cell, station = cell[served[at]], hosts.held_at[at[served[at]]]
    row, member = repeated(hosts.holding.first, station)
    sizes = geometry.cells.size[cell] * len(stack.names) * stack.itemsize
    each = sizes // hosts.holding.counts[station]
    np.add.at(ranks.loads, ranks.find(hosts.holding.members[member]), each[row])
