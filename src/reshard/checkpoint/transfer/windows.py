"""Reads windows of tensors from a checkpoint, in worker threads within a limit of memory.

    source pieces  --read-->  buffer (the window, row-major)

A part that is one run of bytes both in its file and in the buffer is read in place. Other parts go
through a scratch buffer: files are accessed in long runs, only memory in short ones. All bytes are
compared with the checksums of the checkpoint as they are read.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity.checksums import SIDECAR, Checker, Checksums, damage, sum_of
from reshard.checkpoint.integrity.crcs import Crcs, Part, changed, crc_of, crcs_of
from reshard.checkpoint.piece_table import Extent, PieceTable, extents
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.storage.output_files import BLOCK, aligned
from reshard.checkpoint.transfer.packing import CELLS, GAP, Read, within
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.dtypes import itemsize
from reshard.errors import DamageError, MemoryCapError
from reshard.layout.box import Box
from reshard.text import format_bytes, parse_bytes, quoted

Task = TypeVar("Task")
Result = TypeVar("Result")
Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""

MOST_WORKERS = 4
REMOTE_WORKERS = 16
LARGEST_WINDOW = 8 << 20
SMALLEST_MEMORY = 1 << 20
SHARES = 8
"""A worker's share of the memory, in windows: two sides with a scratch buffer each, and what numpy
allocates for temporary results."""

DENSE = 0.8
"""The share of a range that must be needed for the range to be read as one."""


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

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def in_order(
    work: Callable[[Task, Any], Result],
    tasks: Iterable[Task],
    workers: int,
    make: Callable[[], Any] = lambda: None,
) -> Generator[tuple[Task, Result], None, None]:
    """Run tasks in worker threads and yield the results in the order of the tasks.

    Every worker has its own object from ``make``, such as its buffers. Tasks are taken from the
    iterable as they are needed, so there may be more of them than fit in memory. An error is raised
    in its turn; tasks that have not started by then are cancelled.
    """
    own = threading.local()

    def run(task: Task) -> Result:
        if not hasattr(own, "value"):
            own.value = make()
        return work(task, own.value)

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
    """Pause Python's garbage collector, in all threads.

    A checkpoint of 100,000 tensors is a million small objects, none of them garbage. The collector
    would scan them again and again as their number grows: 40 % of a conversion's time. Threads may
    overlap: the collector may then run before the last of them ends, but is never left off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class Source:
    """The files of a checkpoint by number, with its checksums and a count of the bytes read."""

    storage: Storage
    catalog: Catalog
    checksums: Checksums | None = None
    checker: Checker = field(default_factory=lambda: Checker(None, ""))
    """Compares what is read with the checksums."""
    crcs: Crcs = field(default_factory=lambda: Crcs(()))
    """The CRC-32 records of torch's files, for files that have no checksums of ours."""
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, storage: Storage, catalog: Catalog, checksums: Checksums | None) -> Source:
        """A source whose bytes are all compared with what is known of them."""
        crcs = Crcs(crcs_of(storage, catalog, checksums))
        return cls(storage, catalog, checksums, Checker(checksums, storage.root), crcs)

    def read_into(
        self, file: int, offset: int, buffer: memoryview, crcs: list[Part] | None = None
    ) -> None:
        """Fill a buffer; parts of CRC-32 records are added up, or collected in a list."""
        path = self.name(file)
        self.storage.read_into(path, offset, buffer)
        self.checker.check(path, offset, buffer)
        self.count(len(buffer))
        parts = self.crcs.parts(file, offset, buffer)
        if crcs is None:
            self.crcs.add(parts)
        else:
            crcs += parts

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes

    def name(self, file: int) -> str:
        return self.catalog.files[file].path

    def check_crcs(self, which: Collection[int] | None = None) -> None:
        """Raise DamageError if a CRC-32 record, of those read in part or of these, has changed.

        Bytes of a record that were not read yet are read now.
        """
        for crc, now in self.crcs.values(self.unread, which):
            if crc.value != now:
                [(message, _)] = changed(self.catalog, [(crc, now)])
                raise DamageError(message)

    def unread(self, file: int, start: int, stop: int) -> int:
        """The CRC-32 of bytes that were not read yet."""
        self.count(stop - start)
        return crc_of(self.storage, self.name(file), start, stop)

    def blame_digest(self, transfer: Transfer, digest: str, expected: str) -> NoReturn:
        """Raise DamageError for a tensor whose digest is wrong; names a damaged chunk of it."""
        files = self.checksums.files if self.checksums else {}
        for number in sorted(set(transfer.source.files.tolist())):
            path = self.name(number)
            sums = files.get(path)
            for chunk in map(sums.chunk, range(len(sums.ends))) if sums else ():
                now = sum_of(self.storage, path, chunk.start, chunk.stop)
                if now != chunk.sum:
                    where = f"tensor {quoted(transfer.name)}: {self.storage.where(path)}"
                    raise DamageError(damage(where, chunk, now))
        raise DamageError(
            f"tensor {quoted(transfer.name)} of {self.storage.root} has the digest {digest} and "
            f"its {SIDECAR} says {expected}: the files changed since they were written"
        )


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of one worker: a window, a scratch buffer, and a buffer to cast into."""

    num_bytes: int
    window: Array
    scratch: Array
    cast: Array

    @classmethod
    def of(cls, num_bytes: int, casts: bool) -> Buffers:
        """New buffers. Each has a spare block, to have its content aligned as in the file."""
        window, scratch = aligned(num_bytes + BLOCK), aligned(num_bytes + BLOCK)
        return cls(num_bytes, window, scratch, aligned(num_bytes + BLOCK) if casts else window)

    @staticmethod
    def size_of(num_bytes: int, casts: bool) -> int:
        """Bytes of all buffers, for windows of this size."""
        return (num_bytes + 2 * BLOCK) * (3 if casts else 2)


@dataclass(frozen=True, slots=True)
class Group:
    """Parts of a window that are in one range of bytes of a file: some rows of a table."""

    parts: PieceTable
    extent: Extent

    def boxes(self) -> Iterator[Box]:
        return map(self.parts.box, self.extent.rows.tolist())

    def views(self, array: Array, window: Box) -> list[Array]:
        """The parts in the array of the window."""
        starts, stops = (
            column[self.extent.rows] for column in (self.parts.starts, self.parts.stops)
        )
        limits = zip(starts.tolist(), stops.tolist(), strict=True)
        return [array[within(low, high, window.start)] for low, high in limits]

    def runs(self, views: Collection[Array]) -> list[tuple[int, memoryview]]:
        """The offset in the file and the memory of each part; empty unless all are runs in both."""
        rows = self.extent.rows
        if not self.parts.is_run[rows].all() or not all(view.flags.c_contiguous for view in views):
            return []
        memory = (view.reshape(-1).view(np.uint8).data for view in views)
        return [*zip(self.parts.offsets[rows].tolist(), memory, strict=True)]

    def arrays(self, data: Array) -> list[Array]:
        """The parts as strided arrays in the bytes of the range."""
        parts, rows, cell = self.parts, self.extent.rows, CELLS[self.parts.itemsize]
        offsets = (parts.offsets[rows] - self.extent.start).tolist()
        table = zip(parts.shapes[rows].tolist(), offsets, parts.strides[rows].tolist(), strict=True)
        return [np.ndarray(shape, cell, data.data, at, strides) for shape, at, strides in table]

    def read(self, scratch: Array, read: Read) -> list[Array]:
        """Read the range, and return the parts in it."""
        data = scratch[: self.extent.num_bytes]
        read(self.extent.file, self.extent.start, data.data)
        return self.arrays(data)


def readable(
    parts: PieceTable, limit: int, gap: int = GAP, share: float = DENSE
) -> Iterator[Group]:
    """Parts grouped into long ranges of their files, most of whose bytes are needed."""
    for extent in extents(parts, gap, limit):
        needed = parts.num_bytes[extent.rows].sum()
        if needed >= share * extent.num_bytes and extent.num_bytes <= limit:
            yield Group(parts, extent)
        else:
            runs = parts[extent.rows].runs()
            yield from (Group(runs, one) for one in extents(runs, gap, limit))


def writable(parts: PieceTable, limit: int) -> Iterator[Group]:
    """Parts grouped into ranges of their files that they fill without a gap."""
    return readable(parts, limit, gap=0, share=1.0)


def fill(transfer: Transfer, window: Box, buffers: Buffers, read: Read, lead: int = 0) -> Array:
    """Read a window into the buffer, ``lead`` bytes behind its start."""
    array = shaped(buffers.window[lead:], window, itemsize(transfer.have))
    if transfer.zeros:
        array[...] = 0
    for group in readable(transfer.source.within(window), buffers.num_bytes):
        views = group.views(array, window)
        if runs := group.runs(views):
            for offset, memory in runs:
                read(group.extent.file, offset, memory)
        else:
            for view, stored in zip(views, group.read(buffers.scratch, read), strict=True):
                view[...] = stored
    return array


def unequal_replicas(
    transfer: Transfer, window: Box, array: Array, buffers: Buffers, read: Read
) -> Iterator[tuple[Box, int, Array]]:
    """Read the other stored copies of a window: the box, file and elements of each that differs."""
    if not transfer.replicas:
        return
    for group in readable(transfer.replicas.within(window), buffers.num_bytes):
        views, copies = group.views(array, window), group.read(buffers.scratch, read)
        for view, copy, box in zip(views, copies, group.boxes(), strict=True):
            apart = bits_differ(view, copy)
            if apart.any():
                yield box, group.extent.file, apart


def compare(
    transfer: Transfer,
    window: Box,
    array: Array,
    buffers: Buffers,
    read: Read,
    name: Callable[[int], str],
) -> None:
    """Read the other stored copies of a window, and raise DamageError where they differ."""
    for box, file, apart in unequal_replicas(transfer, window, array, buffers, read):
        at = np.argwhere(apart)
        low = tuple(int(a) + b for a, b in zip(at.min(axis=0), box.start, strict=True))
        high = tuple(int(a) + 1 + b for a, b in zip(at.max(axis=0), box.start, strict=True))
        holder = transfer.source.within(Box(low, high))
        one = name(int(holder.files[0])) if len(holder) else "another file"
        raise DamageError(
            f"tensor {quoted(transfer.name)} {Box(low, high)}: {one} and {name(file)} hold "
            f"different values, and both should hold the same ({len(at)} elements differ): one of "
            "them is damaged or from another step; --no-compare (compare_replicas=False) takes the "
            "first"
        )


def bits_differ(left: Array, right: Array) -> Array:
    """Which elements of two arrays differ in any bit."""
    width = left.itemsize
    word = f"u{min(width, 8)}"
    apart = left[..., np.newaxis].view(word) != right[..., np.newaxis].view(word)
    return np.asarray(apart.any(axis=-1) if width > 8 else apart[..., 0])


def shaped(buffer: Array, window: Box, size: int) -> Array:
    """The first bytes of a buffer as the elements of a window."""
    flat: Array = buffer[: window.size * size].view(CELLS[size])
    return flat.reshape(window.shape)
