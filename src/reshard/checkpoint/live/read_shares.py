"""The shares of the ranks in reading: every byte is read once, by one rank, in equal shares.

A tensor is read in *windows*, boxes that fit into the memory of all ranks together, and a window in
*cells*, boxes of one stored piece. A cell is read by a rank that needs it, if that keeps the shares
equal: what a rank reads for itself is not sent.

    file 0, file 1       cells                    reader
    +-------------+      +-------------+
    |             |      |      a      |   rank 0, which needs these rows
    |      0      |      +-------------+
    |             |  ->  |      b      |   rank 1
    +-------------+      +-------------+
    |      1      |      |      c      |   rank 2
    +-------------+      +-------------+

Nothing here opens a file, and every rank computes the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.checkpoint.piece_table import PieceTable, slabs
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.dtypes import itemsize
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import Ints
from reshard.layout.coverage import overlapping_pairs
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import axes_of, is_mixed
from reshard.planning.sharing import LeastLoaded

__all__ = ["Batch", "Limits", "ReadRequest", "Share", "batches_of", "is_partition"]

LARGEST_CELL = 16 << 20
SMALLEST_CELL = 64 << 10
WORTH_SPLITTING = 256 << 10
"""Pieces of fewer bytes are not split by the boxes of the ranks."""
SLACK = 0.1
"""How far a rank may exceed its fair share to read what it needs itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of a batch with which every rank keeps to its memory.

    >>> Limits.of(128 << 20, num_ranks=4)
    Limits(share=134217728, cell=16777216, batch=469762048)
    """

    share: int
    """The most bytes that a rank reads in a batch."""
    cell: int
    batch: int
    """The most bytes of all ranks together: the least loaded rank always has room for a cell."""

    @classmethod
    def of(cls, share: int, num_ranks: int) -> Limits:
        """The limits for ranks that read at most ``share`` bytes at a time."""
        cell = min(max(share // 8, SMALLEST_CELL), LARGEST_CELL)
        return cls(share, cell, num_ranks * (share - cell))


def is_partition(layout: Layout) -> bool:
    """Whether a layout in plain words has every element on exactly one rank.

    For other layouts that depends on the shape, and listing their boxes shows it. Most are plain,
    and listing takes as long as everything else that a load does before it reads.
    """
    words = layout.words
    if isinstance(layout, BoxLayout) or words.on or words.without or words.flat or words.reduce:
        return False
    used = {axis for cuts in words.dims for axis in axes_of(cuts)}
    is_used = (size == 1 or axis in used for axis, size in layout.mesh.axes.items())
    return all(is_used) and not any(map(is_mixed, words.dims))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A tensor to be read: where it is stored, and its layout on the ranks."""

    transfer: Transfer
    layout: Layout
    is_whole: bool
    """Whether all of it is read, also what no rank needs, for its digest."""

    @property
    def num_bytes(self) -> int:
        """Stored bytes that any rank needs, each once."""
        if is_partition(self.layout):
            return prod(self.transfer.shape) * itemsize(self.transfer.have)
        listed = listed_of(self.layout, self.transfer.shape)
        needed = int((listed.stops - listed.starts).prod(axis=1).sum())
        return needed * itemsize(self.transfer.have)

    def windows(self, limit: int) -> Iterator[Box]:
        """What is read, in boxes of at most this many bytes."""
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
    """A window, and the boxes of it that each rank reads, in the order of its buffer."""

    name: str
    window: Box
    boxes: Mapping[int, Sequence[Box]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Shares that are read and then scattered at a time."""

    shares: tuple[Share, ...]
    finished: tuple[str, ...]
    """Tensors whose last window is in this batch."""


def batches_of(
    requests: Mapping[str, ReadRequest], ranks: Sequence[int], limits: Limits
) -> Iterator[Batch]:
    """All requests in batches, in the order in which they are stored."""
    windows: list[tuple[str, Box]] = []
    finished: list[str] = []
    total = 0
    for name in sorted(requests, key=lambda name: _place(requests[name])):
        size = itemsize(requests[name].transfer.have)
        for window in requests[name].windows(limits.batch):
            if windows and total + window.size * size > limits.batch:
                yield _batch(windows, finished, requests, ranks, limits)
                windows, finished, total = [], [], 0
            windows.append((name, window))
            total += window.size * size
        finished.append(name)
    if windows or finished:
        yield _batch(windows, finished, requests, ranks, limits)


def _place(request: ReadRequest) -> tuple[int, int, str]:
    source = request.transfer.source
    if not len(source):
        return 0, 0, request.transfer.name
    first = np.lexsort((source.offsets, source.files))[0]
    return int(source.files[first]), int(source.offsets[first]), request.transfer.name


def _batch(
    windows: Sequence[tuple[str, Box]],
    finished: Sequence[str],
    requests: Mapping[str, ReadRequest],
    ranks: Sequence[int],
    limits: Limits,
) -> Batch:
    sizes = [itemsize(requests[name].transfer.have) for name, _ in windows]
    pairs = zip(windows, sizes, strict=True)
    total = sum(window.size * size for (_, window), size in pairs)
    limit = min(limits.cell, max(total // len(ranks) // 8, SMALLEST_CELL))
    cells = [_cells(requests[name], window, limit) for name, window in windows]
    fair = min(total / len(ranks) * (1 + SLACK), limits.share - limits.cell)
    readers = LeastLoaded(ranks)
    shares = []
    for (name, window), found, size in zip(windows, cells, sizes, strict=True):
        boxes: dict[int, list[Box]] = {}
        for box, candidates in found:
            reader = readers.choose(candidates.tolist(), box.size * size, fair)
            boxes.setdefault(reader, []).append(box)
        shares.append(Share(name, window, boxes))
    return Batch(tuple(shares), tuple(finished))


def _cells(request: ReadRequest, window: Box, limit: int) -> list[tuple[Box, Ints]]:
    """The cells of a window, each with the ranks that need it."""
    size = itemsize(request.transfer.have)
    listed = listed_of(request.layout, request.transfer.shape)
    parts = request.transfer.source.within(window)
    mine, others = overlapping_pairs(parts.starts, parts.stops, listed.starts, listed.stops)
    starts = np.maximum(parts.starts[mine], listed.starts[others])
    stops = np.minimum(parts.stops[mine], listed.stops[others])
    parted = parts.clipped(mine, starts, stops)
    first = np.searchsorted(mine, np.arange(len(parts) + 1))
    found = []
    for row in range(len(parts)):
        rows = range(int(first[row]), int(first[row + 1]))
        if _is_split(parted, rows, int(parts.num_bytes[row])):
            chosen = [(parted.box(at), listed.of(int(others[at]))) for at in rows]
        else:
            holders = [listed.of(int(others[at])) for at in rows]
            chosen = [(parts.box(row), np.unique(np.concatenate([*holders, _NO_RANKS])))]
        for box, ranks in chosen:
            found += [(slab, ranks) for slab in slabs(box, max(limit // size, 1))]
    return found


_NO_RANKS = np.zeros(0, dtype=np.int64)


def _is_split(parted: PieceTable, rows: range, num_bytes: int) -> bool:
    """Whether a stored piece is read by the boxes of the ranks: in long runs, and all of it."""
    sizes = parted.num_bytes[rows.start : rows.stop]
    if not len(rows) or int(sizes.sum()) != num_bytes:
        return False
    worth = len(rows) == 1 or num_bytes >= WORTH_SPLITTING * len(rows)
    return worth and bool(parted.is_run[rows.start : rows.stop].all())
