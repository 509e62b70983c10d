"""Reads the tensors of which no two ranks need the same element, each rank into its own tensors.

Shards of FSDP, tensor or pipeline parallel need no exchange: each rank reads its boxes of the file.
A box that is one run of bytes in its file and in the tensor is read in place with ``pread``. A box
that splits rows is many short runs:

    file, row by row    |  rank 0  |  rank 1  |  rank 0  |  rank 1  |  rank 0  | ...

A system call for each would take longer than the copy, so these are copied out of mapped pages, a
few MiB at a time, while a thread reads the next blocks of the file ahead of the copies. That reads
whole pages, which ranks of one host share and ranks of several hosts do not: on several hosts such
a tensor is read by rows and exchanged, as are replicated tensors (``shared_reads``).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.checkpoint.catalog import StoredPiece
from reshard.checkpoint.live.entries import View, bytes_of, part_of
from reshard.checkpoint.piece_table import PieceTable
from reshard.checkpoint.storage.local import LocalStorage
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.checkpoint.transfer.windows import Source, in_order
from reshard.dtypes import itemsize
from reshard.errors import DamageError, ReshardError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints, sized_cache
from reshard.layout.coverage import overlapping_pairs
from reshard.layout.layout import Layout

STAGED = 16 << 20
"""Bytes that are read at a time for a tensor that cannot be read into directly: it is on a GPU, of
another dtype, or not contiguous."""
MAPPED = 32 << 20
"""Bytes of a file that are in the page table at a time: they count as memory of the process."""
BLOCK = 32 << 20
"""Bytes of a file that one rank reads ahead for all ranks of the host."""
BLOCKS_AHEAD = 2
"""So many blocks per rank are read ahead of the copies."""
LONGEST = 64 << 20
"""The most bytes of one task, so that workers share large tensors."""
MOST_WORKERS = 4

Array = np.ndarray[Any, Any]
_CELLS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


@sized_cache(16 << 20, lambda _, layout, shape: layout.num_bytes)
def _needed(layout: Layout, shape: tuple[int, ...]) -> tuple[int, bool]:
    """How many elements any rank needs, and whether no two ranks need the same one."""
    listed = listed_of(layout, shape)
    num_elements = int((listed.stops - listed.starts).prod(axis=1).sum())
    return num_elements, bool((np.diff(listed.first) == 1).all())


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
        num_elements, _ = _needed(self.layout, self.transfer.shape)
        return num_elements * itemsize(self.transfer.have)

    def windows(self, limit: int) -> Iterator[Box]:
        """What is read, in boxes of at most this many bytes."""
        shape, size = self.transfer.shape, itemsize(self.transfer.have)
        regions: Iterable[Box] = [Box.whole(shape)]
        if self.num_bytes < prod(shape) * size and not self.is_whole:
            listed = listed_of(self.layout, shape)
            rows = zip(listed.starts.tolist(), listed.stops.tolist(), strict=True)
            regions = (Box(tuple(start), tuple(stop)) for start, stop in rows)
        for region in regions:
            yield from region.slabs(max(limit // size, 1))


def split_requests(
    requests: Mapping[str, ReadRequest], maps: bool
) -> tuple[dict[str, ReadRequest], dict[str, ReadRequest]]:
    """The tensors that every rank reads for itself, and those that ranks read for each other.

    ``maps`` says whether boxes that are not runs can be read too. All ranks get the same result.
    """
    own: dict[str, ReadRequest] = {}
    shared: dict[str, ReadRequest] = {}
    for name, request in requests.items():
        transfer, layout = request.transfer, request.layout
        is_own = not request.is_whole and not transfer.replicas  # nothing to compare first
        if is_own:
            _, is_disjoint = _needed(layout, transfer.shape)
            is_own = is_disjoint and (maps or _are_runs(layout, transfer))
        (own if is_own else shared)[name] = request
    return own, shared


def _are_runs(layout: Layout, transfer: Transfer) -> bool:
    """Whether the common boxes of ranks and stored pieces are runs of bytes in their files."""
    _, _, parts = common_parts(transfer.source, listed_of(layout, transfer.shape))
    return bool(parts.is_run.all())


def common_parts(pieces: PieceTable, listed: Listed) -> tuple[Ints, Ints, PieceTable]:
    """Which stored pieces and which boxes of ranks have elements in common, and these elements."""
    rows, boxes = overlapping_pairs(pieces.starts, pieces.stops, listed.starts, listed.stops)
    starts = np.maximum(pieces.starts[rows], listed.starts[boxes])
    stops = np.minimum(pieces.stops[rows], listed.stops[boxes])
    return rows, boxes, pieces.clipped(rows, starts, stops)


class _Task(NamedTuple):
    """A part of a stored piece that is not empty, and the memory that it is read into."""

    piece: StoredPiece
    into: torch.Tensor
    dtype: str

    def split(self, num_bytes: int) -> Iterator[_Task]:
        """The task in parts of at most this many bytes."""
        piece, size = self.piece, itemsize(self.dtype)
        whole, most = piece.box, max(num_bytes // size, 1)
        if whole.size <= most:
            yield self
            return
        for box in whole.slabs(most):
            steps = zip(box.start, whole.start, piece.strides, strict=True)
            first = sum((low - start) * stride for low, start, stride in steps)
            part = StoredPiece(box, piece.file, piece.offset + first * size, piece.strides)
            yield _Task(part, part_of((whole, self.into), box), self.dtype)


class ReadAhead:
    """A thread that reads files into the page cache, ahead of the copies; ranks share the blocks.

    Ranks that copy columns need the same pages at the same time. The kernel reads ahead of their
    page faults by itself, but one block at a time, for which all ranks wait. Blocks are sent to
    ``/dev/null``, which copies nothing. ``posix_fadvise`` would read single pages instead, which
    costs a fifth more (``benchmarks/reports/load.md``).
    """

    def __init__(self, source: Source, tasks: Iterable[_Task], place: tuple[int, int]) -> None:
        """``place`` is this rank's number among the ranks of the host, and how many these are."""
        self._source, self._place = source, place
        self._blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """What is needed of every block, by file and block, in the order of the copies."""
        for task in tasks:
            start, stop = task.piece.span(task.dtype)
            for block in range(start // BLOCK, -(-stop // BLOCK)):
                part = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
                self._blocks.setdefault((task.piece.file, block), []).append(part)
        self._numbers = {block: number for number, block in enumerate(self._blocks)}
        self._reached = 0
        """The number of the block that the copies have come to."""
        self._over = False
        self._moved = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reshard-read-ahead")
        if self._blocks:
            self._thread.start()

    def reach(self, task: _Task) -> None:
        """Note that the copies have come to this task: blocks a little further on may be read."""
        block = task.piece.file, task.piece.offset // BLOCK
        self._reached = max(self._reached, self._numbers.get(block, 0))
        self._moved.set()

    def _run(self) -> None:
        """Read this rank's blocks; after an error the copies read them by page faults instead."""
        index, num = self._place
        with suppress(OSError, ReshardError), Path(os.devnull).open("wb") as null:
            for number, ((file, block), parts) in enumerate(self._blocks.items()):
                if (file + block) % num != index:
                    continue
                while number > self._reached + BLOCKS_AHEAD * num and not self._over:
                    self._moved.wait()
                    self._moved.clear()
                if self._over:
                    return
                self._read(self._source.name(file), parts, null.fileno())

    def _read(self, path: str, parts: Sequence[tuple[int, int]], null: int) -> None:
        """Read parts of a block, unless the last page is in the cache: then all of it may be."""
        storage = self._source.storage
        assert isinstance(storage, LocalStorage)
        with storage.using(path) as file:
            with suppress(OSError):  # it would wait, or the file system cannot tell
                os.preadv(file.descriptor, [bytearray(1)], parts[-1][1] - 1, os.RWF_NOWAIT)
                return
            # The kernel plans how far to read ahead per open file: the mapped one has its own plan.
            opened = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY)
            try:
                for start, stop in parts:
                    while start < stop:
                        sent = os.sendfile(null, opened, start, stop - start)
                        start = start + sent if sent else stop
            finally:
                os.close(opened)

    def close(self) -> None:
        self._over = True
        self._moved.set()
        if self._blocks:
            self._thread.join()


class MappedFiles:
    """Files as mapped memory, of which a few MiB are in the page table at a time."""

    def __init__(self, storage: LocalStorage, ahead: ReadAhead) -> None:
        self._storage, self._ahead = storage, ahead
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def copy(self, path: str, task: _Task) -> None:
        start, stop = task.piece.span(task.dtype)
        self._ahead.reach(task)
        with self._storage.using(path) as file:
            if stop > file.size:
                raise DamageError(
                    f"{self._storage.where(path)}: bytes {start} to {stop} are needed "
                    f"and the file has {file.size}: it is truncated"
                )
            with self._lock:
                pages = self._maps.get(path)
                if pages is None:
                    # private and writable only so that torch takes the array without a warning
                    access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
                    pages = mmap.mmap(file.descriptor, file.size, **access)
                    self._maps[path] = pages
        width = itemsize(task.dtype)
        strides = [stride * width for stride in task.piece.strides]
        stored: Array = np.ndarray(task.piece.box.shape, _CELLS[width], pages, start, strides)
        # torch copies runs of 1 to 2 KiB a fifth faster than numpy does
        part = torch.from_numpy(stored)
        task.into.view(part.dtype).copy_(part)
        del stored, part
        first = start - start % mmap.PAGESIZE
        pages.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def close(self) -> None:
        self._ahead.close()
        for pages in self._maps.values():
            with suppress(BufferError):  # an error that is being raised still refers to an array
                pages.close()


def read_direct(
    source: Source,
    requests: Mapping[str, ReadRequest],
    views: Mapping[str, Sequence[View]],
    place: tuple[int, int],
) -> None:
    """Read this rank's part of these tensors; ``place`` as in `ReadAhead`."""
    tasks = [
        _Task(piece, part_of(view, piece.box), request.transfer.have)
        for name, request in requests.items()
        for view in views.get(name, ())
        for piece in request.transfer.source.within(view[0]).pieces()
    ]
    tasks.sort(key=lambda task: (task.piece.file, task.piece.offset))
    # Remote storage gets more threads, which mostly wait.
    share = (os.cpu_count() or 1) // place[1] if source.storage.is_local else MOST_WORKERS
    workers = max(min(share, MOST_WORKERS), 1)
    with ExitStack() as stack:
        mapped = None
        if isinstance(source.storage, LocalStorage):
            split = [task for task in tasks if not task.piece.is_contiguous]
            ahead = ReadAhead(source, split, place)
            mapped = stack.enter_context(closing(MappedFiles(source.storage, ahead)))
        if workers == 1:  # in the calling thread
            for task in tasks:
                _read(source, task, mapped)
            return
        parts = [part for task in tasks for part in task.split(LONGEST)]
        for _ in in_order(lambda task, _: _read(source, task, mapped), parts, workers):
            pass


def _read(source: Source, task: _Task, mapped: MappedFiles | None) -> None:
    kind: torch.dtype = getattr(torch, task.dtype)
    here = task.into.device.type == "cpu" and task.into.dtype == kind
    if here and task.into.is_contiguous() and task.piece.is_contiguous:
        source.read_into(task.piece.file, task.piece.offset, bytes_of(task.into).data)
    elif here and mapped is not None:
        size = task.piece.num_bytes(task.dtype)
        start, stop = task.piece.span(task.dtype)
        for part in task.split(size * MAPPED // (stop - start)):
            mapped.copy(source.name(task.piece.file), part)
        source.count(size)
    else:
        for part in task.split(STAGED):
            staged = torch.empty(part.piece.box.shape, dtype=kind, device="cpu")
            _read(source, part._replace(into=staged), mapped)
            part.into.copy_(staged)
