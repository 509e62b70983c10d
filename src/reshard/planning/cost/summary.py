"""The figures of a whole plan: bytes, messages, memory, the busiest rank, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, numbered
from reshard.planning.cost.topology import Link, Topology
from reshard.planning.cost.traffic import Traffic
from reshard.planning.flows import Flow
from reshard.planning.hosts import HostFlow
from reshard.planning.rounds import Schedule

__all__ = ["Summary", "needs_of", "summarize"]


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
    flows: Sequence[Flow],
    traffic: Traffic,
    schedule: Schedule,
    topology: Topology | None,
) -> Summary:
    """Work out the figures of a plan from all its rows."""
    sent, passed = traffic.first_hand, traffic.passed_on
    senders = int(np.count_nonzero(sent))
    needs = [needs_of(flow) for flow in flows]
    figures = _link_figures(flows, traffic, topology) if topology else {}
    return Summary(
        wire_bytes=traffic.num_bytes,
        lower_bound_bytes=sum(need for need, _ in needs),
        copied_bytes=sum(copied for _, copied in needs),
        num_messages=traffic.messages,
        num_rounds=schedule.num_rounds,
        peak_bytes=schedule.peak_bytes,
        busiest_sender_bytes=int(sent.max(initial=0)),
        mean_sender_bytes=float(sent.sum() / senders) if senders else 0.0,
        busiest_relay_bytes=int(passed.max(initial=0)),
        mean_relay_bytes=float(passed.sum() / max(int(np.count_nonzero(passed)), 1)),
        **figures,
    )


def needs_of(flow: Flow) -> tuple[int, int]:
    """Bytes that ranks want and lack, and bytes they want and hold; from the layouts alone."""
    geometry, stack = flow.geometry, flow.stack
    times = len(stack.names) * stack.itemsize
    if flow.adds:
        rows = list(flow.everything())
        moved = ((int(r.sizes[r.source != r.destination].sum()), r.hop) for r in rows)
        return sum(size * stack.itemsize_at(hop) for size, hop in moved), 0
    copied = int(geometry.copied_elements()[1].sum())
    return (geometry.wanted_elements() - copied) * times, copied * times


def _link_figures(flows: Sequence[Flow], traffic: Traffic, topology: Topology) -> dict[str, Any]:
    """Bytes between hosts, predicted seconds, and the link that takes longest."""
    world, hosts, links = traffic.world, traffic.hosts, traffic.links
    found = [
        *_busiest("rank {} sending inside its host", world, links[0, 0], topology.inside),
        *_busiest("rank {} receiving inside its host", world, links[0, 1], topology.inside),
        *_busiest("host {} sending", hosts, links[1, 0], topology.between),
        *_busiest("host {} receiving", hosts, links[1, 1], topology.between),
    ]
    seconds, name, over_mean = max(found, default=(0.0, "nothing moves", 1.0))
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
    lined, times = flow.geometry.all(), len(flow.stack.names) * flow.stack.itemsize
    hosts = flow.wanting.lines.counts[lined.receive_line]
    hosts = hosts - flow.hosts.counts[flow.hosts.kinds.of]
    return int(lined.cells.size @ hosts) * times


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
