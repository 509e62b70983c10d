"""What a plan costs: bytes and messages of ranks, memory, the busiest link, and seconds.

Bytes are added up by rank, without listing the pairs of ranks of rows that go to whole lines; so
they are between groups of ranks. ``messages`` counts messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, distinct, numbered
from reshard.planning.cells.listed import Home
from reshard.planning.cells.transfers import Fan, HostFan
from reshard.planning.cost.messages import Stream, messages_of, pairs_of
from reshard.planning.cost.topology import Link, Topology
from reshard.planning.flows import Flow
from reshard.planning.hosts import HostFlow
from reshard.planning.rounds import Schedule, Slot


class Traffic:
    """Bytes and messages of a plan; those of links too, if the hosts of ranks are known."""

    def __init__(
        self, flows: Sequence[Flow], slots: Sequence[Slot], world: Ints, home: Home | None = None
    ) -> None:
        self.world = world
        self._counts_up = bool(len(world)) and int(world[-1]) == len(world) - 1
        self._ends = list(zip(flows, slots, strict=True))
        self.first_hand, self.passed_on, self.received = np.zeros((3, len(world)), dtype=np.int64)
        self.links = np.zeros((2, 2, 2, len(world) if home else 0), dtype=np.int64)
        """With a topology: inside hosts and between them, sent and received, bytes and messages."""
        self.hosts: Ints = home(world) if home else world
        """The host of each rank; without a topology each rank is one."""
        self.messages = 0
        """All that goes from one rank to another in one round is one message."""
        for times, pairs, sends in messages_of(self._counted(), self.hosts, self._places):
            self.messages += times * (len(pairs) + (int(sends.sent.sum()) if sends else 0))
            if home is not None:
                ends = np.divmod(pairs, max(len(world), 1))
                self._add_links(1, ends, np.full(len(pairs), times))
            if home is not None and sends is not None:
                self.links[1, 0, 1, sends.senders] += sends.sent * times
                self.links[1, 1, 1] += sends.received * times

    def _counted(self) -> Iterator[Stream]:
        """All rows, as their bytes are counted."""
        for stream in self._streams():
            self._count(stream)
            yield stream

    def _streams(self) -> Iterator[Stream]:
        for flow, slot in self._ends:
            # Addends are passed on without knowing hosts: list whether each row is inside one.
            known = isinstance(flow, HostFlow) or not self.links.size
            for rows in flow.streams() if known else flow.everything():
                some = np.flatnonzero(rows.served)
                if 0 < len(some) < len(rows.rows) and not isinstance(rows, HostFan):
                    rows = rows.take(some)
                if len(some):
                    yield Stream(flow, slot, rows.rows, rows)

    def _places(self, ranks: Ints) -> Ints:
        # Ranks are nearly always 0 to n - 1; with look-ups a summary takes 15 to 60 % longer.
        return ranks if self._counts_up else self.world.searchsorted(ranks)

    def _sum(self, ranks: Ints, amounts: Ints) -> Ints:
        return np.bincount(self._places(ranks), amounts, len(self.world)).astype(np.int64)

    def _count(self, stream: Stream) -> None:
        rows, ends, num_bytes = stream.transfers, stream.ends, stream.num_bytes
        if isinstance(ends, Fan):
            sent, received = self._sum(*ends.sent(num_bytes)), self._sum(*ends.received(num_bytes))
            first_hand = self._sum(rows.source, num_bytes)
            if self.links.size:
                self.links[1, :, 0] += np.stack([sent, received])
        else:
            source, destination, amounts = ends.summed(num_bytes)
            sent, received = self._sum(source, amounts), self._sum(destination, amounts)
            first_hand = sent
            if self.links.size:
                self._add_links(0, (self._places(source), self._places(destination)), amounts)
        self.received += received
        self.passed_on += sent
        if not (rows.hop or rows.again):
            self.first_hand += first_hand
            self.passed_on -= first_hand

    def _add_links(self, what: int, ends: tuple[Ints, Ints], amounts: Ints) -> None:
        """Count bytes (0) or messages (1) between places of ranks."""
        away = self.hosts[ends[0]] != self.hosts[ends[1]]
        for between, side in product((0, 1), (0, 1)):
            some = np.flatnonzero(away == between)
            added = np.bincount(ends[side][some], amounts[some], len(self.world))
            self.links[between, side, what] += added.astype(np.int64)

    @property
    def num_bytes(self) -> int:
        return int(self.received.sum())

    def between(self, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
        """All bytes between groups of ranks, and those from source tensors.

        Given the group of each rank of the plan as a sender, and its group as a receiver.
        """
        num, size = int(sources.max(initial=-1)) + 1, int(destinations.max(initial=-1)) + 1
        tables = np.zeros((2, num, size), dtype=np.int64)
        for stream in self._streams():
            added = np.zeros_like(tables[0])
            if isinstance(stream.ends, Fan):
                rows = sources[self._places(stream.transfers.source)]
                times = self._receivers_by_group(stream.ends, destinations)
                np.add.at(added, rows, times * stream.num_bytes[:, None])
            else:
                source, destination, num_bytes = stream.ends.summed(stream.num_bytes)
                ends = sources[self._places(source)], destinations[self._places(destination)]
                np.add.at(added, ends, num_bytes)
            tables[: 1 + (stream.transfers.hop == 0)] += added
        return tables[0], tables[1]

    def _receivers_by_group(self, fan: Fan, groups: Ints) -> Ints:
        """How many ranks of each group get each row of a fan."""
        size = int(groups.max()) + 1
        gets, has = (
            np.bincount(
                lines.line_of * size + groups[self._places(lines.members)],
                minlength=len(lines.counts) * size,
            ).reshape(-1, size)
            for lines in (fan.wanting, fan.holders)
        )
        times = gets[fan.rows.line] - has[fan.kind]
        row = np.flatnonzero(fan.left_out >= 0)
        times[row, groups[self._places(fan.left_out[row])]] -= 1
        return times

    @cached_property
    def _ends_of_pairs(self) -> tuple[Ints, Ints]:
        """Every pair of ranks that exchange anything: as many as there are, so not for thousands
        of ranks that all pass on to each other."""
        keys = np.zeros(0, dtype=np.int64)
        for stream in self._streams():
            pairs, _ = pairs_of(stream.ends, len(self.world), self._places)
            keys = distinct(np.concatenate([keys, pairs]))
        source, destination = np.divmod(keys, max(len(self.world), 1))
        return self.world[source], self.world[destination]

    @property
    def source(self) -> Ints:
        """The sender of every pair of ranks that exchange anything."""
        return self._ends_of_pairs[0]

    @property
    def destination(self) -> Ints:
        """The receiver of every pair of ranks that exchange anything."""
        return self._ends_of_pairs[1]


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
    """First-hand bytes of the source rank that sends the most; every copied byte counts once."""
    mean_sender_bytes: float
    """First-hand bytes per rank that sends any."""
    busiest_relay_bytes: int
    """The most bytes that any rank passes on, or sends again to further ranks."""
    mean_relay_bytes: float = 0.0
    """Bytes that a rank passes on, over the ranks that do."""
    between_hosts_bytes: int | None = None
    """Bytes that travel between hosts; None without a topology."""
    between_hosts_lower_bound_bytes: int | None = None
    """Bytes that must enter a host because no rank on it holds them; None without a topology, and
    where addends are added up."""
    seconds: float | None = None
    """Predicted seconds; None without a topology."""
    bottleneck: str | None = None
    """The link that takes longest; None without a topology."""
    bottleneck_over_mean: float | None = None
    """Its seconds over the mean of the links of its kind that are used; None without a topology."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def summarize(
    flows: Sequence[Flow], traffic: Traffic, schedule: Schedule, topology: Topology | None
) -> Summary:
    needed, copied = map(sum, zip((0, 0), *map(needs_of, flows), strict=True))
    sent, passed_on = traffic.first_hand, traffic.passed_on
    return Summary(
        wire_bytes=traffic.num_bytes,
        lower_bound_bytes=needed,
        copied_bytes=copied,
        num_messages=traffic.messages,
        num_rounds=schedule.num_rounds,
        peak_bytes=schedule.peak_bytes,
        busiest_sender_bytes=int(sent.max(initial=0)),
        mean_sender_bytes=float(sent.sum() / max(int(np.count_nonzero(sent)), 1)),
        busiest_relay_bytes=int(passed_on.max(initial=0)),
        mean_relay_bytes=float(passed_on.sum() / max(int(np.count_nonzero(passed_on)), 1)),
        **(_link_figures(flows, traffic, topology) if topology else {}),
    )


def needs_of(flow: Flow) -> tuple[int, int]:
    """Bytes that ranks want and lack, and bytes they want and hold; from the layouts alone."""
    geometry, stack = flow.geometry, flow.stack
    times = len(stack.names) * stack.itemsize
    if flow.stack.adds:
        moved = ((int(s.rows.sizes @ s.served), s.rows.hop) for s in flow.streams())
        return sum(size * stack.itemsize_at(hop) for size, hop in moved), 0
    copied = int(geometry.copied_elements()[1].sum())
    return (geometry.wanted - copied) * times, copied * times


def _link_figures(flows: Sequence[Flow], traffic: Traffic, topology: Topology) -> dict[str, Any]:
    """Bytes between hosts, predicted seconds, and the link that takes longest."""
    hosts, links = traffic.hosts, traffic.links
    ends = (
        ("rank {} sending inside its host", traffic.world, links[0, 0], topology.inside),
        ("rank {} receiving inside its host", traffic.world, links[0, 1], topology.inside),
        ("host {} sending", hosts, links[1, 0], topology.between),
        ("host {} receiving", hosts, links[1, 1], topology.between),
    )
    busiest = [figures for one in ends for figures in _busiest(*one)]
    seconds, name, over_mean = max(busiest, default=(0.0, "nothing moves", 1.0))
    between = [flow for flow in flows if isinstance(flow, HostFlow)]
    summed = len(between) < len(flows)
    return {
        "between_hosts_bytes": int(links[1, 0, 0].sum()),
        "between_hosts_lower_bound_bytes": None if summed else sum(map(_entering_bytes, between)),
        "seconds": seconds,
        "bottleneck": name,
        "bottleneck_over_mean": over_mean,
    }


def _entering_bytes(flow: HostFlow) -> int:
    """Bytes that must enter some host: each wanted cell once per host that lacks and holds none."""
    cells, times = flow.geometry.all(), len(flow.stack.names) * flow.stack.itemsize
    hosts = flow.wanting.lines.counts[cells.receive_line]
    hosts = hosts - flow.hosts.common.counts[flow.hosts.kinds.of]
    return int(cells.size @ hosts) * times


def _busiest(name: str, end: Ints, counts: Ints, link: Link) -> list[tuple[float, str, float]]:
    """The busiest of many equal links, given bytes and messages of the ranks at each: its seconds
    (bytes over bandwidth, plus latencies), its name, and how far it is over the mean."""
    ends, inverse = numbered(end)
    num_bytes, messages = (np.bincount(inverse, weights=count) for count in counts)
    used = np.flatnonzero(messages)
    if not len(used):
        return []
    spent = num_bytes[used] / link.bandwidth + messages[used] * link.latency
    worst = int(spent.argmax())
    over_mean = float(spent[worst] / spent.mean()) if spent[worst] else 1.0
    return [(float(spent[worst]), name.format(int(ends[used[worst]])), over_mean)]
