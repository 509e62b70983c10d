"""Reads tensors that only one rank needs directly into the tensors of that rank.

A tensor of which no two ranks need the same element (shards of FSDP, tensor or pipeline parallel)
needs no exchange: each rank reads its own boxes of the file, and every byte is still read once in
the whole job. A box that is one run of bytes in its file and in the tensor is read in place with
``pread``. A box that splits rows is many short runs:

    file, row by row    |  rank 0  |  rank 1  |  rank 0  |  rank 1  |  rank 0  | ...

A system call for each would take longer than the copy, so these are copied out of mapped pages, a
few MiB at a time. That reads whole pages, which ranks of one host share and ranks of several hosts
do not: on several hosts such a tensor is read by rows and exchanged, as are replicated tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.checkpoint.catalog import StoredPiece
from reshard.checkpoint.live.entries import View, part_of
from reshard.checkpoint.live.read_shares import ReadRequest
from reshard.checkpoint.piece_table import slabs
from reshard.checkpoint.storage.local import LocalStorage
from reshard.checkpoint.transfer.source import Source
from reshard.checkpoint.transfer.windows import in_order
from reshard.dtypes import itemsize
from reshard.errors import DamageError
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.layout import Layout

__all__ = ["DirectReader", "split_requests"]

STAGED = 16 << 20
"""Bytes that are read at a time for a tensor that cannot be read into directly: it is on a GPU, of
another dtype, or not contiguous."""
MAPPED = 32 << 20
"""Bytes of a file that are mapped at a time: mapped pages count as memory of the process."""
LONGEST = 64 << 20
"""The most bytes of one task, so that workers share large tensors."""
MOST_WORKERS = 4

Array = np.ndarray[Any, Any]
_CELLS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def split_requests(
    requests: Mapping[str, ReadRequest], maps: bool
) -> tuple[dict[str, ReadRequest], dict[str, ReadRequest]]:
    """The tensors that every rank reads for itself, and those that ranks read for each other.

    ``maps`` says whether boxes that are not runs can be read too. All ranks get the same result.
    """
    own: dict[str, ReadRequest] = {}
    shared: dict[str, ReadRequest] = {}
    known: dict[tuple[Layout, tuple[int, ...]], tuple[Box, ...] | None] = {}
    for name, request in requests.items():
        key = request.layout, request.transfer.shape
        if key not in known:
            known[key] = _disjoint_boxes(*key)
        (own if _is_own(request, known[key], maps) else shared)[name] = request
    return own, shared


def _is_own(request: ReadRequest, boxes: tuple[Box, ...] | None, maps: bool) -> bool:
    """Whether no two ranks need the same element, and nothing is to be compared first."""
    if request.is_whole or len(request.transfer.replicas) or boxes is None:
        return False
    pieces = request.transfer.source.pieces
    return maps or all(_is_run(piece, box & piece.box) for box in boxes for piece in pieces())


def _disjoint_boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
    """The boxes of a layout, or None if a box has several holders."""
    listed = listed_of(layout, shape)
    if not (np.diff(listed.first) == 1).all():
        return None
    rows = zip(listed.starts.tolist(), listed.stops.tolist(), strict=True)
    return tuple(Box(tuple(low), tuple(high)) for low, high in rows)


def _is_run(piece: StoredPiece, box: Box) -> bool:
    """Whether a box inside a piece is one run of bytes of its file, in row-major order."""
    expected = 1
    for length, stride in zip(reversed(box.shape), reversed(piece.strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True, slots=True)
class _Task:
    """A box of a stored piece, and the memory that it is read into."""

    piece: StoredPiece
    box: Box
    into: torch.Tensor
    dtype: str

    @property
    def start(self) -> int:
        """The byte of the file at which the box begins."""
        starts = zip(self.box.start, self.piece.box.start, self.piece.strides, strict=True)
        before = sum((low - first) * stride for low, first, stride in starts)
        return self.piece.offset + before * itemsize(self.dtype)

    @property
    def stop(self) -> int:
        """The byte of the file at which the box ends."""
        steps = zip(self.box.shape, self.piece.strides, strict=True)
        last = sum((length - 1) * stride for length, stride in steps)
        return self.start + (last + 1) * itemsize(self.dtype)

    def split(self, num_bytes: int) -> Iterator[_Task]:
        """The task in parts of at most this many bytes."""
        for box in slabs(self.box, max(num_bytes // itemsize(self.dtype), 1)):
            yield _Task(self.piece, box, part_of((self.box, self.into), box), self.dtype)


@dataclass(frozen=True, slots=True)
class DirectReader:
    """Reads the boxes of one rank into its tensors."""

    source: Source
    workers: int
    """Threads; 1 reads in the calling thread."""

    @classmethod
    def of(cls, source: Source, num_cores: int, num_local: int) -> DirectReader:
        """The reader of one of ``num_local`` ranks of a host; remote storage gets more threads."""
        share = num_cores // num_local if source.storage.is_local else MOST_WORKERS
        return cls(source, max(min(share, MOST_WORKERS), 1))

    def read(
        self, requests: Mapping[str, ReadRequest], views: Mapping[str, Sequence[View]]
    ) -> None:
        """Read this rank's part of these tensors."""
        tasks = sorted(self._tasks(requests, views), key=lambda task: (task.piece.file, task.start))
        if self.workers == 1:
            for task in tasks:
                self._read(task)
            return
        parts = [part for task in tasks for part in task.split(LONGEST)]
        for _ in in_order(lambda task, _: self._read(task), parts, self.workers, lambda: None):
            pass

    def _tasks(
        self, requests: Mapping[str, ReadRequest], views: Mapping[str, Sequence[View]]
    ) -> Iterator[_Task]:
        for name, request in requests.items():
            for piece in request.transfer.source.pieces():
                for view in views.get(name, ()):
                    box = view[0] & piece.box
                    if box.size:
                        yield _Task(piece, box, part_of(view, box), request.transfer.have)

    def _read(self, task: _Task) -> None:
        kind: torch.dtype = getattr(torch, task.dtype)
        here = task.into.device.type == "cpu" and task.into.dtype == kind
        if here and task.into.is_contiguous() and _is_run(task.piece, task.box):
            self._fill(task, task.into)
        elif here and isinstance(self.source.storage, LocalStorage):
            self._fill_by_rows(task)
        else:
            for part in task.split(STAGED):
                staged = torch.empty(part.box.shape, dtype=kind)
                self._read(_Task(part.piece, part.box, staged, part.dtype))
                part.into.copy_(staged)

    def _fill(self, task: _Task, into: torch.Tensor) -> None:
        """Read one run of bytes in place."""
        memory = into.reshape(-1).view(torch.uint8).numpy().data
        self.source.read_into(task.piece.file, task.start, memory)

    def _fill_by_rows(self, task: _Task) -> None:
        """Copy a strided box out of mapped pages, or element by element into a strided tensor."""
        storage = self.source.storage
        assert isinstance(storage, LocalStorage)
        path = self.source.name(task.piece.file)
        width = itemsize(task.dtype)
        share = max(task.box.size * width * MAPPED // max(task.stop - task.start, 1), width)
        with storage.using(path) as file:
            for part in task.split(share):
                if part.stop > file.size:
                    raise DamageError(
                        f"{storage.where(path)}: bytes {part.start} to {part.stop} are wanted and "
                        f"the file has {file.size}: it is cut short"
                    )
                _copy_mapped(file.descriptor, part, width)
                self.source.count(part.box.size * width)


def _copy_mapped(descriptor: int, task: _Task, width: int) -> None:
    """Copy a box out of mapped pages of its file."""
    _read_ahead(descriptor, task.start, task.stop)
    skipped = task.start % mmap.ALLOCATIONGRANULARITY
    length = task.stop - task.start + skipped
    # private and writable only so that torch takes the array without a warning; it is not written
    with mmap.mmap(
        descriptor,
        length,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=task.start - skipped,
    ) as pages:
        strides = [stride * width for stride in task.piece.strides]
        stored: Array = np.ndarray(task.box.shape, _CELLS[width], pages, skipped, strides)
        # torch copies runs of 1 to 2 KiB a fifth faster than numpy does
        task.into.view(_SAME_SIZE[width]).copy_(torch.from_numpy(stored))
        del stored


def _read_ahead(descriptor: int, start: int, stop: int) -> None:
    """Ask the kernel to read a range ahead of the page faults, unless it is in memory already.

    The advice visits all pages of the range, which costs a warm load a tenth of its time; reading
    one byte without waiting shows whether it is needed.
    """
    try:
        os.preadv(descriptor, [bytearray(1)], stop - 1, os.RWF_NOWAIT)
    except BlockingIOError:
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
    except OSError:  # the file system does not support it
        return
