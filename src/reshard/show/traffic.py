"""Who sends how much to whom: as a small matrix, and as a timeline for a trace viewer.

The matrix is between ranks, hosts, or groups of them:

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> from reshard.show.terminal import plain
>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=3, ranks=[4, 5, 6]), "- tp")
>>> move = plan(have, want, shape=(2048, 1536), dtype="float32")
>>> print(plain(draw(traffic_matrix(move, most=8))))
bytes from rank (down) to rank (across)
          4     5     6  total
    0  2.0M  2.0M  2.0M   6.0M
    1  2.0M  2.0M  2.0M   6.0M
total  4.0M  4.0M  4.0M  12.0M

In the timeline, of the Chrome trace format, every rank (or group of ranks, where there are many) is
a process with two tracks, what it sends and what it receives; a slice is one message of one round.
With a topology a slice is as long as the link needs; without one it is a microsecond per KiB, so
that lengths compare bytes.

>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=2), "- tp")
>>> events = json.loads(to_trace(plan(have, want, shape=(64, 64))))["traceEvents"]
>>> [(e["pid"], e["name"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
[(0, 'to 1', 4096), (1, 'from 0', 4096), (1, 'to 0', 4096), (0, 'from 1', 4096)]
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, distinct, numbered
from reshard.layout.mesh import format_ranks
from reshard.planning.plans import Plan
from reshard.planning.rank import Rows
from reshard.show.terminal import Line, Span, heat

MAX_TRACKS = 256
"""More ranks than this are put into groups in a timeline."""
BYTES_PER_MICROSECOND = 1024
"""How long a slice is without a topology."""


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """Numbers (of ranks or hosts) in rising order, put into few groups."""

    labels: tuple[str, ...]
    numbers: Ints
    of: Ints

    def find(self, numbers: Ints) -> Ints:
        """The groups of these numbers; of any group where a number is in none."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), max(len(self.of) - 1, 0))
        return self.of[at] if len(self.of) else at


def group(numbers: Ints, most: int) -> Groups:
    """At most so many groups of neighbours, each within one block of a power of two.

    >>> group(np.arange(10, 64), 16).labels[:2]
    ('10-11', '12-15')
    """
    numbers, size = distinct(numbers), 1
    while len(distinct(numbers // size)) > most:
        size *= 2
    blocks, of = numbered(numbers // size)
    members = (numbers[of == block] for block in range(len(blocks)))
    labels = (format_ranks(range(some[0], some[-1] + 1)) for some in members)
    return Groups(tuple(labels), numbers, of)


@dataclass(frozen=True, eq=False, slots=True)
class Matrix:
    """Bytes from each source (rows) to each destination (columns)."""

    kind: str
    """What the rows and columns are: ``rank`` or ``host``."""
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    num_bytes: Ints
    first_hand: Ints
    """The part of the bytes that comes from source tensors; the rest is passed on."""
    row_of: Ints
    """The row of each rank of ``plan.world`` that sends; any row for the others."""
    column_of: Ints
    """The column of each rank that receives; any column for the others."""


def traffic_matrix(plan: Plan, most: int = 16) -> Matrix:
    """The traffic of a plan between at most so many senders and receivers.

    Between hosts where the plan has a topology, else between ranks.
    """
    traffic, number, kind = plan.traffic, plan.world, "rank"
    if plan.topology is not None:
        hosts = plan.topology.hosts_of(plan.ranks)
        number, kind = np.array([hosts[rank] for rank in plan.ranks], dtype=np.int64), "host"
    rows = group(number[traffic.first_hand + traffic.passed_on > 0], most)
    columns = group(number[traffic.received > 0], most)
    shape = len(rows.labels), len(columns.labels)
    places = rows.find(number), columns.find(number)
    num_bytes, first_hand = (table[: shape[0], : shape[1]] for table in traffic.between(*places))
    return Matrix(kind, rows.labels, columns.labels, num_bytes, first_hand, *places)


def draw(matrix: Matrix) -> list[Line]:
    """The matrix as lines, with sums; the more bytes, the stronger the colour."""
    if not matrix.num_bytes.size:
        return [[Span("no traffic between ranks")]]
    largest = int(matrix.num_bytes.max())
    rows = [*matrix.num_bytes, matrix.num_bytes.sum(axis=0)]
    texts = [[short_bytes(int(n)) for n in (*row, row.sum())] for row in rows]
    labels, across = [*matrix.sources, "total"], [*matrix.destinations, "total"]
    widths = [max(map(len, column)) for column in zip(across, *texts, strict=True)]
    gutter = max(map(len, labels))

    def line(label: str, texts: Sequence[str], tones: Iterable[str | None]) -> Line:
        cells = zip(texts, widths, tones, strict=False)
        spans = (Span(f" {text.rjust(width)} ", tone) for text, width, tone in cells)
        return [Span(label.rjust(gutter) + " "), *spans]

    kinds = f"{matrix.kind} (down) to {matrix.kind} (across)"
    lines = [[Span(f"bytes from {kinds}")], line("", across, repeat(None))]
    for label, row, text in zip(labels, rows, texts, strict=True):
        tones = (heat(n / largest) if n and label != "total" else None for n in row)
        lines.append(line(label, text, chain(tones, [None])))
    return lines


def short_bytes(num_bytes: int) -> str:
    """An amount in at most five characters; K, M, G and T are powers of 1024.

    >>> short_bytes(8 * 1024**2), short_bytes(1536), short_bytes(7), short_bytes(0)
    ('8.0M', '1.5K', '7', '.')
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    scaled = num_bytes / 1024**power
    digits = int(power > 0 and scaled < 99.95)
    return f"{scaled:.{digits}f}{' KMGT'[power].strip()}" if num_bytes else "."


def to_trace(plan: Plan) -> str:
    events = list(_events(plan, group(plan.world, MAX_TRACKS)))
    scale = "predicted by the topology" if plan.topology else "1 us is 1 KiB"
    return json.dumps({"traceEvents": events, "otherData": {"digest": plan.digest, "time": scale}})


def _events(plan: Plan, groups: Groups) -> Iterator[dict[str, Any]]:
    """The names of processes and tracks; then a slice at the sender of each message, and one at
    its receiver, after what each does already."""
    for number, label in enumerate(groups.labels):
        about = {"ph": "M", "name": "process_name", "pid": number}
        yield {**about, "args": {"name": f"rank{'' if label.isdigit() else 's'} {label}"}}
        for track, what in enumerate(("sends", "receives")):
            yield {**about, "name": "thread_name", "tid": track, "args": {"name": what}}
    start = 0.0
    for number, exchanged in sorted(_messages(plan, groups).items()):
        busy = defaultdict[tuple[int, int], float](float)
        for source, destination, num_bytes, count in exchanged:
            length = _microseconds(plan, groups, (source, destination), num_bytes, count)
            ends = (source, 0, "to", destination), (destination, 1, "from", source)
            for process, track, direction, other in ends:
                at = start + busy[process, track]
                busy[process, track] += length
                name = f"{direction} {groups.labels[other]}"
                where = {"cat": "round", "pid": process, "tid": track}
                times = {"ts": round(at, 3), "dur": round(length, 3)}
                about = {"round": number, "bytes": num_bytes, "messages": count}
                yield {"ph": "X", "name": name, **where, **times, "args": about}
        start += max(busy.values(), default=0.0)


def _messages(plan: Plan, groups: Groups) -> dict[int, list[tuple[int, int, int, int]]]:
    """What goes from group to group in every round: bytes, and messages of single ranks."""
    rounds = defaultdict[int, list[tuple[Ints, Ints, Ints]]](list)
    for flow, slot in zip(plan.flows, plan.schedule.slots, strict=True):
        for transfers in flow.everything():
            rows = Rows(flow, slot, transfers.moved())
            for number in rows.rounds():
                some, low, high = rows.of_round(number)
                if len(some):
                    moved = rows.transfers.take(some)
                    num_bytes = (high - low) * flow.stack.itemsize_at(moved.hop)
                    rounds[number].append((moved.source, moved.destination, num_bytes))
    messages = {}
    for number, sent in rounds.items():
        *ends, sizes = (np.concatenate(column) for column in zip(*sent, strict=True))
        first, second = (np.searchsorted(groups.numbers, ranks) for ranks in ends)
        pairs, pair = numbered(first * len(groups.numbers) + second)
        of = [groups.of[at] for at in np.divmod(pairs, len(groups.numbers))]
        keys, key = numbered(of[0] * len(groups.labels) + of[1])
        num_bytes = np.bincount(key, np.bincount(pair, sizes)).astype(np.int64)
        columns = *np.divmod(keys, len(groups.labels)), num_bytes, np.bincount(key)
        messages[number] = list(zip(*(column.tolist() for column in columns), strict=True))
    return messages


def _microseconds(
    plan: Plan, groups: Groups, ends: tuple[int, int], num_bytes: int, count: int
) -> float:
    topology = plan.topology
    if topology is None:
        return num_bytes / BYTES_PER_MICROSECOND
    ranks = [int(groups.numbers[groups.of == end][0]) for end in ends]
    hosts = topology.hosts_of(ranks)
    link = topology.inside if hosts[ranks[0]] == hosts[ranks[1]] else topology.between
    return 1e6 * (num_bytes / link.bandwidth + count * link.latency)
