"""Who sends how much to whom, as a small matrix: between ranks, hosts, or groups of them.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> from reshard.show.ink import plain
>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=3, ranks=[4, 5, 6]), "- tp")
>>> move = plan(have, want, shape=(2048, 1536), dtype="float32")
>>> print(plain(draw(traffic_matrix(move, most=8))))
bytes from rank (down) to rank (across)
          4     5     6  total
    0  2.0M  2.0M  2.0M   6.0M
    1  2.0M  2.0M  2.0M   6.0M
total  4.0M  4.0M  4.0M  12.0M
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reshard.layout.columns import distinct, distinct_first, numbered
from reshard.layout.grid import Ints
from reshard.show.ink import Line, Span, heat

if TYPE_CHECKING:
    from reshard.planning.plans import Plan

__all__ = [
    "Ends", "Groups", "Matrix", "draw", "group", "short_bytes", "traffic_ends", "traffic_matrix",
]  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """Numbers (of ranks or hosts) in rising order, put into few groups."""

    labels: tuple[str, ...]
    numbers: Ints
    of: Ints
    """The group of each number."""

    def find(self, numbers: Ints) -> Ints:
        """The groups of these numbers; of any group where a number is in none."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), max(len(self.of) - 1, 0))
        found: Ints = self.of[at] if len(self.of) else at
        return found


def group(numbers: Ints, most: int) -> Groups:
    """At most so many groups of neighbours, each within one block of a power of two.

    >>> group(np.arange(10, 64), 16).labels[:2]
    ('10-11', '12-15')
    """
    numbers = distinct(numbers)
    size = 1
    while len(distinct(numbers // size)) > most:
        size *= 2
    _, first = distinct_first(numbers // size)
    _, of = numbered(numbers // size)
    if not len(numbers):
        return Groups((), numbers, of)
    lows, highs = numbers[first].tolist(), numbers[np.append(first[1:], len(numbers)) - 1].tolist()
    runs = zip(lows, highs, strict=True)
    labels = tuple(f"{low}-{high}" if high > low else str(low) for low, high in runs)
    return Groups(labels, numbers, of)


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


@dataclass(frozen=True, eq=False, slots=True)
class Ends:
    """A matrix, and where each rank of a plan stands in it."""

    matrix: Matrix
    sources: Ints
    """The row of each rank of ``plan.world`` that sends; any row for the others."""
    destinations: Ints
    """The column of each rank that receives; any column for the others."""


def traffic_matrix(plan: Plan, most: int = 16) -> Matrix:
    """The traffic of a plan between at most so many senders and receivers.

    Between hosts where the plan has a topology, else between ranks.
    """
    return traffic_ends(plan, most).matrix


def traffic_ends(plan: Plan, most: int) -> Ends:
    """The same matrix, and where each rank stands in it."""
    traffic, number, kind = plan.traffic, plan.world, "rank"
    if plan.topology is not None:
        hosts = plan.topology.hosts_of(plan.ranks)
        number, kind = np.array([hosts[rank] for rank in plan.ranks], dtype=np.int64), "host"
    rows = group(number[traffic.first_hand + traffic.passed_on > 0], most)
    columns = group(number[traffic.received > 0], most)
    shape = len(rows.labels), len(columns.labels)
    sources, destinations = rows.find(number), columns.find(number)
    found = traffic.between(sources, destinations)
    num_bytes, first_hand = (table[: shape[0], : shape[1]] for table in found)
    matrix = Matrix(kind, rows.labels, columns.labels, num_bytes, first_hand)
    return Ends(matrix, sources, destinations)


def draw(matrix: Matrix) -> list[Line]:
    """The matrix as lines, with sums; the more bytes, the stronger the colour."""
    if not matrix.num_bytes.size:
        return [[Span("no traffic between ranks")]]
    largest = int(matrix.num_bytes.max())
    rows = [*matrix.num_bytes, matrix.num_bytes.sum(axis=0)]
    texts = [[short_bytes(int(n)) for n in (*row, row.sum())] for row in rows]
    labels = [*matrix.sources, "total"]
    across = [*matrix.destinations, "total"]
    widths = [max(map(len, column)) for column in zip(across, *texts, strict=True)]
    gutter = max(map(len, labels))
    kinds = f"{matrix.kind} (down) to {matrix.kind} (across)"
    lines: list[Line] = [
        [Span(f"bytes from {kinds}")],
        _line("", across, [None] * len(across), gutter, widths),
    ]
    for label, row, text in zip(labels, rows, texts, strict=True):
        tones = [heat(n / largest) if n and label != "total" else None for n in row]
        lines.append(_line(label, text, [*tones, None], gutter, widths))
    return lines


def _line(
    label: str,
    texts: Sequence[str],
    tones: Sequence[str | None],
    gutter: int,
    widths: Sequence[int],
) -> Line:
    spans = [Span(label.rjust(gutter) + " ")]
    for text, tone, width in zip(texts, tones, widths, strict=True):
        spans.append(Span(f" {text.rjust(width)} ", tone))
    return spans


def short_bytes(num_bytes: int) -> str:
    """An amount in at most five characters; K, M, G and T are powers of 1024.

    >>> short_bytes(8 * 1024**2), short_bytes(1536), short_bytes(7), short_bytes(0)
    ('8.0M', '1.5K', '7', '.')
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    scaled = num_bytes / 1024**power
    digits = int(power > 0 and scaled < 99.95)
    return f"{scaled:.{digits}f}{' KMGT'[power].strip()}" if num_bytes else "."
