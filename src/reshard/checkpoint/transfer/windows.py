"""One window of a tensor: read it from the source pieces, cast it, write it to the output pieces.

    source pieces  --read-->  buffer (the window, row-major)  --write-->  output pieces

A part that is one run of bytes both in its file and in the buffer is read or written in place.
Other parts go through a scratch buffer: files are accessed in long runs, only memory in short ones.

Windows are read and written by worker threads, whose number and buffers fit into a given memory.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from reshard.checkpoint.output_files import BLOCK, aligned
from reshard.checkpoint.piece_table import Extent, PieceTable, extents
from reshard.checkpoint.storage import Storage
from reshard.checkpoint.transfer.packing import CELLS, Reads
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.dtypes import cast_into, itemsize
from reshard.errors import DamageError, MemoryCapError
from reshard.layout.box import Box, row_major
from reshard.text import format_bytes, parse_bytes, quoted

__all__ = [
    "Budget", "Buffers", "Meter", "Replica", "Writes", "bits_differ", "buffer_bytes",
    "collector_paused", "compare", "drain", "fill", "in_order", "lead_of", "readable",
    "replicas_of", "within", "writable",
]  # fmt: skip

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_WORKERS = 4
REMOTE_WORKERS = 16
LARGEST_WINDOW = 8 << 20
SMALLEST_MEMORY = 1 << 20
SHARES = 8
"""A worker's share of the memory, in windows: two sides with a scratch buffer each, and what numpy
allocates for temporary results."""

_lock = threading.Lock()
_paused: list[bool] = []
"""One entry per thread inside `collector_paused`; the first says whether the collector was on."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of workers and the size of their windows that fit into a given memory.

    >>> Budget.of("256MiB", workers=4).window, Budget.of("4MiB", workers=4)
    (8388608, Budget(workers=1, window=524288))
    """

    workers: int
    window: int
    """Bytes of one window."""

    @classmethod
    def of(cls, memory: int | str, workers: int | None = None) -> Budget:
        """Divide the memory between this many workers, by default one for each core."""
        total = parse_bytes(memory)
        if total < SMALLEST_MEMORY:
            raise MemoryCapError(
                f"{format_bytes(total)} of memory is too little to read a checkpoint: "
                f"give at least {format_bytes(SMALLEST_MEMORY)}"
            )
        wanted = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        workers = max(min(wanted, total // (4 * SMALLEST_MEMORY)), 1)
        return cls(workers, min(total // workers // SHARES, LARGEST_WINDOW))

    @classmethod
    def for_reading(cls, memory: int | str, *storages: Storage) -> Budget:
        """The budget for reading these; remote storage gets more workers, which mostly wait."""
        is_local = all(storage.is_local for storage in storages)
        return cls.of(memory, None if is_local else REMOTE_WORKERS)


class Meter:
    """Counts bytes and reports how many are done, of how many."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def in_order(
    work: Callable[[Task, Any], Result],
    tasks: Iterable[Task],
    workers: int,
    make: Callable[[], Any],
) -> Iterator[tuple[Task, Result]]:
    """Run tasks in worker threads and yield the results in the order of the tasks.

    Every worker has its own object from ``make``, such as its buffers. Tasks are taken from the
    iterable as they are needed, so there may be more of them than fit in memory. An error is raised
    in its turn; tasks that have not started by then are cancelled.
    """
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(workers):
        idle.put(make())

    def run(task: Task) -> Result:
        mine = idle.get()
        try:
            return work(task, mine)
        finally:
            idle.put(mine)

    pool = ThreadPoolExecutor(workers, "reshard-checkpoint")
    pending: deque[tuple[Task, Future[Result]]] = deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(run, task)))
            if len(pending) >= 4 * workers:
                first, result = pending.popleft()
                yield first, result.result()
        while pending:
            first, result = pending.popleft()
            yield first, result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the block, in all threads.

    A checkpoint of 100,000 tensors is a million small objects, none of them garbage. The collector
    would scan them again and again as their number grows: 40 % of a conversion's time.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    with _lock:
        _paused.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_enabled = _paused[0]
            _paused.pop()
            if not _paused and was_enabled:
                gc.enable()


Array = np.ndarray[Any, Any]

GAP = 4096
"""Gaps in a file of up to this many bytes are read and thrown away, which beats a second read."""
DENSE = 0.8
"""The share of a range that must be needed for the range to be read as one."""


class Writes(Protocol):
    """Where windows are written to."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file of the output."""


class Buffers:
    """The memory of one worker: a window, a scratch buffer, and a buffer to cast into.

    Each has a spare block, so that its content can have the same alignment as in the file.
    """

    def __init__(self, num_bytes: int, casts: bool) -> None:
        self.num_bytes = num_bytes
        self.window = aligned(num_bytes + BLOCK)
        self.scratch = aligned(num_bytes + BLOCK)
        self.cast = aligned(num_bytes + BLOCK) if casts else self.window


def buffer_bytes(num_bytes: int, casts: bool) -> int:
    """Bytes of the buffers of one worker, for windows of this size."""
    return (num_bytes + 2 * BLOCK) * (3 if casts else 2)


def lead_of(transfer: Transfer, window: Box) -> int:
    """The offset in the buffer at which a window is aligned as in its file, for direct writes."""
    parts = transfer.destination.within(window)
    if not len(parts):
        return 0
    size = itemsize(transfer.want)
    first = zip(parts.starts[0].tolist(), window.start, row_major(window.shape), strict=True)
    place = sum((low - start) * stride for low, start, stride in first)
    return _lead(int(parts.offsets[0]) - place * size, size)


def _lead(offset: int, size: int) -> int:
    """An offset within its block; 0 if elements would not be aligned to their size there."""
    lead = offset % BLOCK
    return lead if lead % size == 0 else 0


@dataclass(frozen=True, slots=True)
class Group:
    """Parts of a window that are in one range of bytes of a file."""

    parts: PieceTable
    extent: Extent


def fill(transfer: Transfer, window: Box, buffers: Buffers, reads: Reads, lead: int = 0) -> Array:
    """Read a window into the buffer, ``lead`` bytes behind its start."""
    array = _shaped(buffers.window[lead:], window, itemsize(transfer.have))
    if transfer.is_padded:
        array[...] = 0
    for group in readable(transfer.source.within(window), buffers.num_bytes):
        views = [(row, _view(array, window, group.parts, row)) for row in group.extent.rows]
        if all(_is_direct(group.parts, row, view) for row, view in views):
            for row, view in views:
                reads.read_into(group.extent.file, int(group.parts.offsets[row]), _bytes(view))
            continue
        _read_extent(group, buffers.scratch, reads)
        for row, view in views:
            view[...] = _in_scratch(buffers.scratch, group, row)
    return array


@dataclass(frozen=True, slots=True)
class Replica:
    """A box that is stored a second time, and its content there."""

    box: Box
    file: int
    array: Array


def replicas_of(
    transfer: Transfer, window: Box, buffers: Buffers, reads: Reads
) -> Iterator[Replica]:
    """Read the other stored copies of parts of a window, one at a time."""
    for group in readable(transfer.replicas.within(window), buffers.num_bytes):
        _read_extent(group, buffers.scratch, reads)
        for row in group.extent.rows.tolist():
            array = _in_scratch(buffers.scratch, group, row)
            yield Replica(group.parts.box(row), group.extent.file, array)


def compare(transfer: Transfer, window: Box, array: Array, buffers: Buffers, reads: Reads) -> None:
    """Read the other stored copies of a window, and raise DamageError where they differ."""
    for replica in replicas_of(transfer, window, buffers, reads):
        apart = bits_differ(array[within(replica.box, window)], replica.array)
        if apart.any():
            raise _disagreement(transfer, replica, apart, reads)


def bits_differ(left: Array, right: Array) -> Array:
    """Which elements of two arrays differ in any bit."""
    width = left.itemsize
    word = f"u{min(width, 8)}"
    apart = left[..., np.newaxis].view(word) != right[..., np.newaxis].view(word)
    return np.asarray(apart.any(axis=-1) if width > 8 else apart[..., 0])


def cast(transfer: Transfer, window: Box, array: Array, buffers: Buffers, lead: int = 0) -> Array:
    """The window in the dtype of the output, ``lead`` bytes behind the start of its buffer."""
    if transfer.have == transfer.want:
        return array
    result = _shaped(buffers.cast[lead:], window, itemsize(transfer.want))
    cast_into(array, transfer.have, result, transfer.want)
    return result


def drain(transfer: Transfer, window: Box, array: Array, buffers: Buffers, writes: Writes) -> None:
    """Write a window to all output pieces that overlap it."""
    for group in writable(transfer.destination.within(window), buffers.num_bytes):
        views = [(row, _view(array, window, group.parts, row)) for row in group.extent.rows]
        if all(_is_direct(group.parts, row, view) for row, view in views):
            for row, view in views:
                writes.write(group.extent.file, int(group.parts.offsets[row]), _bytes(view))
            continue
        lead = _lead(group.extent.start, group.parts.itemsize)
        filled = buffers.scratch[lead : lead + group.extent.num_bytes]
        for row, view in views:
            _in_scratch(filled, group, row)[...] = view
        writes.write(group.extent.file, group.extent.start, filled.data)


def readable(parts: PieceTable, limit: int) -> Iterator[Group]:
    """Parts grouped into long ranges of their files, most of whose bytes are needed."""
    return _grouped(parts, limit, GAP, DENSE)


def writable(parts: PieceTable, limit: int) -> Iterator[Group]:
    """Parts grouped into ranges of their files that they fill without a gap."""
    return _grouped(parts, limit, 0, 1.0)


def _grouped(parts: PieceTable, limit: int, gap: int, share: float) -> Iterator[Group]:
    for extent in extents(parts, gap, limit):
        needed = int(parts.num_bytes[extent.rows].sum())
        if needed >= share * extent.num_bytes and extent.num_bytes <= limit:
            yield Group(parts, extent)
            continue
        runs = parts[extent.rows].runs()
        yield from (Group(runs, extent) for extent in extents(runs, gap, limit))


def _shaped(buffer: Array, window: Box, size: int) -> Array:
    """The first bytes of a buffer as the elements of a window."""
    flat: Array = buffer[: window.size * size].view(CELLS[size])
    return flat.reshape(window.shape)


def within(box: Box, window: Box) -> Any:
    """The index of a box in the array of a window that contains it."""
    limits = zip(box.start, box.stop, window.start, strict=True)
    # with "..." a 0-d part is an array too
    return (*(slice(low - at, high - at) for low, high, at in limits), ...)


def _view(array: Array, window: Box, parts: PieceTable, row: int) -> Array:
    """The part of a window that a row of a table describes."""
    limits = zip(parts.starts[row].tolist(), parts.stops[row].tolist(), window.start, strict=True)
    where: tuple[Any, ...] = tuple(slice(low - at, high - at) for low, high, at in limits)
    view: Array = array[(*where, ...)]
    return view


def _is_direct(parts: PieceTable, row: int, view: Array) -> bool:
    return bool(parts.is_run[row]) and view.flags.c_contiguous


def _bytes(view: Array) -> memoryview:
    return view.reshape(-1).view(np.uint8).data


def _read_extent(group: Group, scratch: Array, reads: Reads) -> None:
    extent = group.extent
    reads.read_into(extent.file, extent.start, scratch[: extent.num_bytes].data)


def _in_scratch(scratch: Array, group: Group, row: int) -> Array:
    """A part, as a strided array in the bytes of its range."""
    parts = group.parts
    return np.ndarray(
        tuple(parts.shapes[row].tolist()),
        CELLS[parts.itemsize],
        scratch.data,
        int(parts.offsets[row]) - group.extent.start,
        tuple(parts.strides[row].tolist()),
    )


def _disagreement(
    transfer: Transfer, replica: Replica, differs: Array, reads: Reads
) -> DamageError:
    at = np.argwhere(differs)
    low = tuple(int(a) + b for a, b in zip(at.min(axis=0), replica.box.start, strict=True))
    high = tuple(int(a) + 1 + b for a, b in zip(at.max(axis=0), replica.box.start, strict=True))
    where = Box(low, high)
    holder = transfer.source.within(where)
    one = reads.name(int(holder.files[0])) if len(holder) else "another file"
    return DamageError(
        f"tensor {quoted(transfer.name)} {where}: {one} and {reads.name(replica.file)} hold "
        f"different values, and both should hold the same ({len(at)} elements differ): one of them "
        "is damaged or from another step; --no-compare (compare_replicas=False) takes the first"
    )
