"""Tensors out of a checkpoint, box by box, with several workers and under a cap of memory.

    with opened("ckpt") as source:
        w = StoredReader(source, source.catalog.tensors["w"])
        for box in w.boxes(num_bytes=8 << 20):
            array = w.read(box, buffers)        # elements as unsigned integers, row-major

Every byte that is read is compared with the checksums of the checkpoint, where it has some.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.reader import read_catalog
from reshard.checkpoint.integrity.checksums import Checker, Checksums, load
from reshard.checkpoint.integrity.crcs import Crcs, changed, crc_of, crcs_of
from reshard.checkpoint.piece_table import Located, slabs
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.local import open_storage
from reshard.checkpoint.transfer.given import as_mesh, as_rules
from reshard.checkpoint.transfer.transfers import Fed, Transfer, source_of
from reshard.checkpoint.transfer.windows import Buffers, fill, readable
from reshard.dtypes import itemsize
from reshard.errors import DamageError, MemoryCapError
from reshard.layout.box import Box
from reshard.planning.names import Feed
from reshard.text import format_bytes, parse_bytes

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["Budget", "Meter", "Source", "StoredReader", "in_order", "opened"]

Array = np.ndarray[Any, Any]
Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_WORKERS = 4
REMOTE_WORKERS = 16
LARGEST_WINDOW = 8 << 20
SMALLEST_MEMORY = 1 << 20
SHARES = 8
"""A worker's part of the memory, in windows: two sides with a scratch buffer each, and room for
what numpy makes on the way."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many workers read, and how large their windows are, so that all fits in memory.

    >>> Budget.of("256MiB", workers=4).window, Budget.of("4MiB", workers=4)
    (8388608, Budget(workers=1, window=524288))
    """

    workers: int
    window: int
    """Bytes of one window."""

    @classmethod
    def of(cls, memory: int | str, workers: int | None = None) -> Budget:
        """Share so much memory between workers: so many, or one for each core."""
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
        """The same, with more workers where a server lets each of them wait."""
        is_local = all(storage.is_local for storage in storages)
        return cls.of(memory, None if is_local else REMOTE_WORKERS)


class Meter:
    """Counts bytes, and tells how many are done and of how many."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is open to be read, and checked while it is."""

    catalog: Catalog
    storage: Storage
    checksums: Checksums | None
    checker: Checker
    crcs: Crcs = field(default_factory=lambda: Crcs(()))
    """What torch wrote down of files that have no checksums of ours."""

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from one of the catalog's files."""
        path = self.name(file)
        self.storage.read_into(path, offset, buffer)
        self.checker.saw(path, offset, buffer)
        self.crcs.add(self.crcs.parts(file, offset, buffer))

    def check_crcs(self) -> None:
        """Raise DamageError if a record of which something was read has changed."""
        for crc, now in self.crcs.values(self.unread):
            if crc.value != now:
                raise DamageError(changed(self.catalog, crc, now))

    def unread(self, file: int, start: int, stop: int) -> int:
        """The CRC-32 of bytes that were not read yet."""
        return crc_of(self.storage, self.name(file), start, stop)

    def name(self, file: int) -> str:
        """The path of one of the catalog's files."""
        return self.catalog.files[file].path


@contextmanager
def opened(
    root: str | Path, rules: Rules | str | None = None, mesh: Mesh | str | None = None
) -> Iterator[Source]:
    """Open a checkpoint of any format; damage of its headers is raised."""
    with open_storage(root) as storage:
        checksums = load(storage)
        catalog = read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        checker = Checker(checksums, storage.root)
        crcs = Crcs(crcs_of(storage, catalog, checksums))
        yield Source(catalog, storage, checksums, checker, crcs)


@dataclass(frozen=True, slots=True)
class Replica:
    """A box that is stored a second time, and what is stored there."""

    box: Box
    file: int
    offset: int
    """The byte of its first element."""
    array: Array


class StoredReader:
    """Reads one tensor; raises CoverageError if a part of it is stored nowhere."""

    def __init__(self, source: Source, tensor: StoredTensor) -> None:
        self.source = source
        self.tensor = tensor
        fed = Fed(tensor, Feed(tensor.name))
        have, replicas = source_of(tensor.name, tensor.shape, [fed], tensor.zeros)
        none = Located.none(len(tensor.shape), itemsize(tensor.dtype))
        whole = (Box.whole(tensor.shape),)
        self._transfer = Transfer(
            tensor.name, tensor.shape, tensor.dtype, tensor.dtype, have, replicas, none, whole,
            is_padded=bool(tensor.zeros),
        )  # fmt: skip

    @property
    def has_replicas(self) -> bool:
        """Whether some elements are stored more than once."""
        return len(self._transfer.replicas) > 0

    def boxes(self, num_bytes: int) -> Iterator[Box]:
        """The tensor in boxes of at most so many bytes that are quick to read.

        They are parts of pieces, each a run of its file. Where there are replicas they are whole
        rows, so that all copies of an element are in memory at once; and where some elements are
        stored nowhere and are zero.
        """
        if self.has_replicas or self.tensor.zeros:
            yield from self.rows(num_bytes)
            return
        limit = max(num_bytes // itemsize(self.tensor.dtype), 1)
        for piece in self._transfer.source.boxes():
            yield from slabs(piece, limit)

    def rows(self, num_bytes: int) -> Iterable[Box]:
        """The tensor in boxes of at most so many bytes, in row-major order."""
        return self._transfer.windows(num_bytes)

    def read(self, box: Box, buffers: Buffers) -> Array:
        """A box, as unsigned integers of the size of its elements; valid until the next read."""
        return fill(self._transfer, box, buffers, self.source)

    def replicas(self, box: Box, buffers: Buffers) -> Iterator[Replica]:
        """What is stored again of a box, one copy at a time."""
        scratch = buffers.scratch
        for group in readable(self._transfer.replicas.within(box), buffers.num_bytes):
            extent, parts = group.extent, group.parts
            span = scratch[: extent.num_bytes]
            self.source.read_into(extent.file, extent.start, span.data)
            for row in extent.rows.tolist():
                offset = int(parts.offsets[row])
                array = _strided(span, offset - extent.start, parts, row)
                yield Replica(parts.box(row), extent.file, offset, array)

    def place(self, index: tuple[int, ...]) -> tuple[str, int]:
        """The file that holds an element, and the byte at which it begins."""
        box = Box(index, tuple(at + 1 for at in index))
        held = self._transfer.source.within(box)
        if not len(held):
            return "(padding)", 0
        return self.source.name(int(held.files[0])), int(held.offsets[0])


def _strided(span: Array, offset: int, parts: Located, row: int) -> Array:
    """A part where it lies among bytes that were read."""
    shape, strides = parts.shapes[row].tolist(), parts.strides[row].tolist()
    return np.ndarray(shape, f"V{parts.itemsize}", span.data, offset, strides)


def in_order(
    work: Callable[[Task, Any], Result],
    tasks: Iterable[Task],
    workers: int,
    make: Callable[[], Any],
) -> Iterator[tuple[Task, Result]]:
    """Do tasks in several threads, each with what ``make`` made, and give the results in order.

    Tasks are taken as they are needed, so that there may be more of them than fit in memory.
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

    pool = ThreadPoolExecutor(workers, "reshard-read")
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
