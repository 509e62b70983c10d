"""A plan as a timeline in the Chrome trace format, for a trace viewer.

Every rank (or group of ranks, where there are many) is a process with two tracks, what it sends
and what it receives; a slice is one message of one round. With a topology a slice is as long as
the link needs; without one it is a microsecond per KiB, so that lengths compare bytes.

    >>> import json
    >>> from reshard.layout.layout import Layout
    >>> from reshard.layout.mesh import Mesh
    >>> from reshard.planning.plans import plan
    >>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=2), "- tp")
    >>> events = json.loads(to_trace(plan(have, want, shape=(64, 64))))["traceEvents"]
    >>> [(e["pid"], e["name"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
    [(0, 'to 1', 4096), (1, 'from 0', 4096), (1, 'to 0', 4096), (0, 'from 1', 4096)]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.layout.grid import Ints
from reshard.planning.cost.topology import Topology
from reshard.show.matrix import Groups, group

if TYPE_CHECKING:
    from reshard.planning.plans import Plan

__all__ = ["Message", "messages", "to_trace"]

MAX_TRACKS = 256
"""More ranks than this are put into groups."""
BYTES_PER_MICROSECOND = 1024
"""How long a slice is without a topology."""


@dataclass(frozen=True, slots=True)
class Message:
    """What goes from one rank or group to another in one round."""

    source: int
    destination: int
    num_bytes: int
    count: int
    """How many messages of single ranks these are."""


def to_trace(plan: Plan) -> str:
    """The timeline as JSON text."""
    groups = group(plan.world, MAX_TRACKS) if len(plan.world) else None
    events = list(_events(plan, groups)) if groups else []
    scale = "predicted by the topology" if plan.topology else "1 us is 1 KiB"
    return json.dumps({"traceEvents": events, "otherData": {"digest": plan.digest, "time": scale}})


def _events(plan: Plan, groups: Groups) -> Iterator[dict[str, Any]]:
    yield from _names(groups)
    start = 0.0
    for number, exchanged in sorted(messages(plan, groups).items()):
        busy: dict[tuple[int, int], float] = {}
        for message in exchanged:
            length = _microseconds(plan.topology, message, groups)
            yield from _slices(number, message, groups, length, start, busy)
        start += max(busy.values(), default=0.0)


def _names(groups: Groups) -> Iterator[dict[str, Any]]:
    for number, label in enumerate(groups.labels):
        name = f"rank {label}" if label.isdigit() else f"ranks {label}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for track, what in enumerate(("sends", "receives")):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": number,
                "tid": track,
                "args": {"name": what},
            }


def _slices(
    number: int,
    message: Message,
    groups: Groups,
    length: float,
    start: float,
    busy: dict[tuple[int, int], float],
) -> Iterator[dict[str, Any]]:
    """One slice at the sender and one at the receiver, after what each does already."""
    ends = (
        (message.source, 0, "to", message.destination),
        (message.destination, 1, "from", message.source),
    )
    for process, track, word, other in ends:
        at = busy.get((process, track), 0.0)
        busy[process, track] = at + length
        yield {
            "ph": "X",
            "name": f"{word} {groups.labels[other]}",
            "cat": "round",
            "pid": process,
            "tid": track,
            "ts": round(start + at, 3),
            "dur": round(length, 3),
            "args": {"round": number, "bytes": message.num_bytes, "messages": message.count},
        }


def messages(plan: Plan, groups: Groups) -> dict[int, list[Message]]:
    """The messages of every round, added up by groups of ranks."""
    rounds: dict[int, list[tuple[Ints, Ints, Ints]]] = {}
    for rank in plan.ranks:
        for rows in plan.for_rank(rank).sends.rows:
            for number in rows.rounds():
                kept, low, high = rows.of_round(number)
                if len(kept):
                    to, sizes = rows.transfers.destination[kept], high - low
                    itemsize = rows.flow.stack.itemsize_at(rows.transfers.hop)
                    sent = (np.full_like(to, rank), to, sizes * itemsize)
                    rounds.setdefault(number, []).append(sent)
    return {number: _grouped(sent, groups) for number, sent in rounds.items()}


def _grouped(sent: list[tuple[Ints, Ints, Ints]], groups: Groups) -> list[Message]:
    """Add up what goes from one group to another, and count the pairs of ranks."""
    source, destination, sizes = (np.concatenate(column) for column in zip(*sent, strict=True))
    first, second = (np.searchsorted(groups.numbers, ranks) for ranks in (source, destination))
    pairs, inverse = np.unique(first * len(groups.numbers) + second, return_inverse=True)
    totals = np.bincount(inverse, weights=sizes)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for pair, size in zip(pairs.tolist(), totals.tolist(), strict=True):
        places = divmod(pair, len(groups.numbers))
        key = int(groups.of[places[0]]), int(groups.of[places[1]])
        total, count = found.get(key, (0, 0))
        found[key] = total + int(size), count + 1
    return [Message(*key, *value) for key, value in sorted(found.items())]


def _microseconds(topology: Topology | None, message: Message, groups: Groups) -> float:
    if topology is None:
        return message.num_bytes / BYTES_PER_MICROSECOND
    ends = [
        int(groups.numbers[groups.of == end][0]) for end in (message.source, message.destination)
    ]
    hosts = topology.hosts_of(ends)
    link = topology.inside if hosts[ends[0]] == hosts[ends[1]] else topology.between
    return 1e6 * (message.num_bytes / link.bandwidth + message.count * link.latency)
