"""Who reads which bytes: every byte once, by one rank, all ranks about equally many.

A tensor is read in *windows*, boxes that fit into what all ranks may hold at a time, and a window
in *cells*, boxes of one stored piece. A cell goes to a rank that wants it, where that keeps
the ranks even: what a rank reads for itself does not travel.

    file 0, file 1       cells                    reader
    +-------------+      +-------------+
    |             |      |      a      |   rank 0, which wants these rows
    |      0      |      +-------------+
    |             |  ->  |      b      |   rank 1
    +-------------+      +-------------+
    |      1      |      |      c      |   rank 2
    +-------------+      +-------------+

Nothing here opens a file, and every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.checkpoint.piece_table import Located, slabs
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.dtypes import itemsize
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import Ints
from reshard.layout.coverage import overlapping_pairs
from reshard.layout.layout import Layout

__all__ = ["Batch", "Limits", "Share", "Wish", "batches_of"]

LARGEST_CELL = 16 << 20
SMALLEST_CELL = 64 << 10
WORTH_CUTTING = 256 << 10
"""Bytes below which a piece of a file is not cut as the ranks want it."""
SLACK = 0.1
"""How far above its fair part a rank may go to read what it wants itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may be, so that every rank keeps to its memory.

    >>> Limits.of(128 << 20, num_ranks=4)
    Limits(share=134217728, cell=16777216, batch=469762048)
    """

    share: int
    """Bytes that a rank may read in a batch."""
    cell: int
    batch: int
    """Bytes of all ranks together: so few that the rank with the least always has room."""

    @classmethod
    def of(cls, share: int, num_ranks: int) -> Limits:
        """The limits for ranks that may read so much at a time."""
        cell = min(max(share // 8, SMALLEST_CELL), LARGEST_CELL)
        return cls(share, cell, num_ranks * (share - cell))


@dataclass(frozen=True, slots=True)
class Wish:
    """A tensor that is wanted: where it is stored, and how the ranks want it cut."""

    transfer: Transfer
    layout: Layout
    is_whole: bool
    """Whether to read all of it, also what no rank wants: its digest needs that."""

    @property
    def num_bytes(self) -> int:
        """Stored bytes that any rank wants, each once."""
        listed = listed_of(self.layout, self.transfer.shape)
        wanted = int((listed.stops - listed.starts).prod(axis=1).sum())
        return wanted * itemsize(self.transfer.have)

    def windows(self, limit: int) -> Iterator[Box]:
        """What is wanted, in boxes of at most so many bytes."""
        shape, size = self.transfer.shape, itemsize(self.transfer.have)
        regions: Iterable[Box] = [Box.whole(shape)]
        if self.num_bytes < prod(shape) * size and not self.is_whole:
            listed = listed_of(self.layout, shape)
            rows = zip(listed.starts.tolist(), listed.stops.tolist(), strict=True)
            regions = (Box(tuple(low), tuple(high)) for low, high in rows)
        for region in regions:
            yield from slabs(region, max(limit // size, 1))


@dataclass(frozen=True, slots=True)
class Share:
    """A window, and the boxes of it that each rank reads, in the order of its local tensor."""

    name: str
    window: Box
    boxes: Mapping[int, Sequence[Box]]


@dataclass(frozen=True, slots=True)
class Batch:
    """What is read and then moved at a time."""

    shares: tuple[Share, ...]
    finished: tuple[str, ...]
    """Tensors of which this is the last that is read."""


def batches_of(wishes: Mapping[str, Wish], ranks: Sequence[int], limits: Limits) -> Iterator[Batch]:
    """Everything that is wanted, in the order in which it is stored."""
    windows: list[tuple[str, Box]] = []
    finished: list[str] = []
    total = 0
    for name in sorted(wishes, key=lambda name: _place(wishes[name])):
        size = itemsize(wishes[name].transfer.have)
        for window in wishes[name].windows(limits.batch):
            if windows and total + window.size * size > limits.batch:
                yield _batch(windows, finished, wishes, ranks, limits)
                windows, finished, total = [], [], 0
            windows.append((name, window))
            total += window.size * size
        finished.append(name)
    if windows or finished:
        yield _batch(windows, finished, wishes, ranks, limits)


def _place(wish: Wish) -> tuple[int, int, str]:
    source = wish.transfer.source
    if not len(source):
        return 0, 0, wish.transfer.name
    first = np.lexsort((source.offsets, source.files))[0]
    return int(source.files[first]), int(source.offsets[first]), wish.transfer.name


def _batch(
    windows: Sequence[tuple[str, Box]],
    finished: Sequence[str],
    wishes: Mapping[str, Wish],
    ranks: Sequence[int],
    limits: Limits,
) -> Batch:
    sizes = [itemsize(wishes[name].transfer.have) for name, _ in windows]
    pairs = zip(windows, sizes, strict=True)
    total = sum(window.size * size for (_, window), size in pairs)
    limit = min(limits.cell, max(total // len(ranks) // 8, SMALLEST_CELL))
    cells = [_cells(wishes[name], window, limit) for name, window in windows]
    fair = min(total / len(ranks) * (1 + SLACK), limits.share - limits.cell)
    readers = _Readers(ranks, fair)
    shares = []
    for (name, window), found, size in zip(windows, cells, sizes, strict=True):
        boxes: dict[int, list[Box]] = {}
        for box, candidates in found:
            boxes.setdefault(readers.choose(candidates, box.size * size), []).append(box)
        shares.append(Share(name, window, boxes))
    return Batch(tuple(shares), tuple(finished))


class _Readers:
    """How much each rank has to read."""

    def __init__(self, ranks: Sequence[int], fair: float) -> None:
        self._ranks, self._fair = ranks, fair
        self._loads = np.zeros(len(ranks))
        self._numbers = {rank: number for number, rank in enumerate(ranks)}

    def choose(self, candidates: Ints, size: int) -> int:
        """The rank that reads so many bytes: of those that want them, unless it has its part."""
        near = [self._numbers[rank] for rank in candidates.tolist()]
        number = min(near, key=self._loads.__getitem__, default=None)
        if number is None or self._loads[number] + size > self._fair:
            number = int(self._loads.argmin())
        self._loads[number] += size
        return self._ranks[number]


def _cells(wish: Wish, window: Box, limit: int) -> list[tuple[Box, Ints]]:
    """The cells of a window, each with the ranks that want it."""
    size = itemsize(wish.transfer.have)
    listed = listed_of(wish.layout, wish.transfer.shape)
    parts = wish.transfer.source.within(window)
    mine, others = overlapping_pairs(parts.starts, parts.stops, listed.starts, listed.stops)
    starts = np.maximum(parts.starts[mine], listed.starts[others])
    stops = np.minimum(parts.stops[mine], listed.stops[others])
    cuts = parts.clipped(mine, starts, stops)
    first = np.searchsorted(mine, np.arange(len(parts) + 1))
    found = []
    for row in range(len(parts)):
        rows = range(int(first[row]), int(first[row + 1]))
        if _is_cut(cuts, rows, int(parts.num_bytes[row])):
            chosen = [(cuts.box(at), listed.of(int(others[at]))) for at in rows]
        else:
            holders = [listed.of(int(others[at])) for at in rows]
            chosen = [(parts.box(row), np.unique(np.concatenate([*holders, _NOBODY])))]
        for box, ranks in chosen:
            found += [(slab, ranks) for slab in slabs(box, max(limit // size, 1))]
    return found


_NOBODY = np.zeros(0, dtype=np.int64)


def _is_cut(cuts: Located, rows: range, num_bytes: int) -> bool:
    """Whether a stored piece is read as the ranks want it cut: in long runs, and all of it."""
    sizes = cuts.num_bytes[rows.start : rows.stop]
    if not len(rows) or int(sizes.sum()) != num_bytes:
        return False
    worth = len(rows) == 1 or num_bytes >= WORTH_CUTTING * len(rows)
    return worth and bool(cuts.is_run[rows.start : rows.stop].all())
