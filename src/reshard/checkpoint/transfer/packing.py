"""Many small tensors at a time: read in long ranges, digested together, written in long ranges.

A checkpoint of a mixture of experts has tens of thousands of tensors. For a small one, a system
call, a checksum and an array cost more than its bytes. A *pack* is a list of whole small tensors,
one after the other in memory, row-major, without gaps:

    file     | w0    | w1    | b1| ... another tensor ... | w2    |
    pack     | w0    | w1    | b1| w2    |                           two reads, one digest call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from reshard.checkpoint.catalog import StoredPiece, StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major

SMALL = 64 << 10
"""Bytes of the largest tensor that is packed."""
GAP = 4096
"""Gaps in a file of up to this many bytes are read and thrown away, which beats a second read."""
ALONE = 64 << 10
"""Runs of at least this many bytes are read one by one, into their place."""
LONGEST = 4 << 20
"""The most bytes of one write, which has one checksum."""
AT_ONCE = 1 << 16
"""Bytes that are digested at a time: for more, OpenBLAS starts a second thread, which spins longer
than it works."""

Item = TypeVar("Item")
Array = np.ndarray[Any, Any]
CELLS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""The numpy type that copies elements of a size; numpy has no integers of 16 bytes."""


class Reads(Protocol):
    """Where tensors are read from."""

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a file."""

    def name(self, file: int) -> str:
        """The path of a file, for errors."""


class Placed(NamedTuple):
    """Bytes to be written, and their place in a file."""

    file: int
    offset: int
    data: bytes | memoryview


class _Run(NamedTuple):
    """A range of a file, and its place in a pack."""

    file: int
    offset: int
    size: int
    place: int
    tensor: int
    """The tensor and the piece of a box that is not one run of bytes; else -1 and None."""
    piece: StoredPiece | None

    @property
    def stop(self) -> int:
        return self.offset + self.size


def tiles(shape: tuple[int, ...], pieces: Sequence[StoredPiece]) -> bool:
    """Whether pieces tile a tensor, as far as is seen at once: one piece, or a row along one dim.

    If this is False they may tile it in another way: ``layout.coverage`` decides.

    >>> from reshard.layout.box import Box
    >>> halves = [StoredPiece(Box((0, 0), (4, 1)), 0, 0, (1, 1)),
    ...           StoredPiece(Box((0, 1), (4, 2)), 0, 4, (1, 1))]
    >>> tiles((4, 2), halves), tiles((4, 2), halves[:1]), tiles((4, 2), [*halves, halves[0]])
    (True, False, False)
    """
    if len(pieces) == 1:
        box = pieces[0].box
        return box.stop == shape and not any(box.start)
    if not pieces or not shape:
        return False
    first = pieces[0].box
    dim = next((d for d, size in enumerate(first.stop) if size != shape[d]), None)
    if dim is None or any(first.start):
        return False
    end = 0
    for piece in pieces:
        start, stop = piece.box.start, piece.box.stop
        if start[dim] != end or start[:dim] != first.start[:dim] or any(start[dim + 1 :]):
            return False
        if stop[:dim] != shape[:dim] or stop[dim + 1 :] != shape[dim + 1 :]:
            return False
        end = stop[dim]
    return end == shape[dim]


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes add up to at most the limit; a larger item is alone.

    >>> list(batches([3, 4, 1, 9, 2], int, 5))
    [[3], [4, 1], [9], [2]]
    """
    some, total = list[Item](), 0
    for item in items:
        amount = size(item)
        if some and total + amount > limit:
            yield some
            some, total = [], 0
        some.append(item)
        total += amount
    if some:
        yield some


@dataclass(frozen=True, slots=True)
class Pack:
    """Small tensors, one after the other in a buffer."""

    tensors: Sequence[StoredTensor]
    """Each of which its pieces tile."""
    buffer: Array
    """At least as many bytes as all tensors together have."""
    starts: Sequence[int]
    """The offset of each tensor, and the end of the last one."""

    @classmethod
    def of(cls, tensors: Sequence[StoredTensor], buffer: Array) -> Pack:
        sizes = (tensor.num_bytes for tensor in tensors)
        return cls(tensors, buffer, [*accumulate(sizes, initial=0)])

    def read(self, scratch: Array, reads: Reads) -> None:
        """Fill the buffer from files, in ranges no longer than ``scratch``."""
        memory, spare = self.buffer.data, scratch.data
        rising = sorted(self._runs(), key=lambda run: run[:2])
        for runs in _spans(_merged(rising), len(scratch)):
            first, stop = runs[0], max(run.stop for run in runs)
            if len(runs) == 1 and first.piece is None:
                place = memory[first.place : first.place + first.size]
                reads.read_into(first.file, first.offset, place)
                continue
            reads.read_into(first.file, first.offset, spare[: stop - first.offset])
            for run in runs:
                at = run.offset - first.offset
                if run.piece is None:
                    memory[run.place : run.place + run.size] = spare[at : at + run.size]
                else:
                    box, into = run.piece.box, self.array(run.tensor)
                    strides = [stride * into.itemsize for stride in run.piece.strides]
                    stored: Array = np.ndarray(box.shape, into.dtype, spare, at, strides)
                    into[_inside(box)] = stored

    def _runs(self) -> Iterator[_Run]:
        for number, (tensor, (start, stop)) in enumerate(
            zip(self.tensors, pairwise(self.starts), strict=True)
        ):
            first = tensor.pieces[0]
            if len(tensor.pieces) == 1 and first.strides == _strides(tensor.shape):
                yield _Run(first.file, first.offset, stop - start, start, -1, None)
                continue
            width = itemsize(tensor.dtype)
            for piece in tensor.pieces:
                place = place_in(tensor.shape, piece.box)
                if place is not None and piece.is_contiguous:
                    size, at = piece.box.size * width, start + place * width
                    yield _Run(piece.file, piece.offset, size, at, -1, None)
                elif piece.box.size:
                    low, high = piece.span(tensor.dtype)
                    yield _Run(piece.file, low, high - low, 0, number, piece)

    def array(self, number: int) -> Array:
        tensor = self.tensors[number]
        cell = CELLS[itemsize(tensor.dtype)]
        return np.ndarray(tensor.shape, cell, self.buffer.data, self.starts[number])

    def bytes_of(self, number: int, box: Box) -> bytes | memoryview:
        """A box of one of the tensors, in row-major order."""
        tensor = self.tensors[number]
        place = place_in(tensor.shape, box)
        if place is None:
            part: bytes = self.array(number)[_inside(box)].tobytes()
            return part
        width = itemsize(tensor.dtype)
        at = self.starts[number] + place * width
        return self.buffer.data[at : at + box.size * width]

    def digests(self) -> list[int]:
        """The digest value of each tensor, for ``digest.finish``."""
        by_size: dict[int, list[int]] = {}
        for number, (start, stop) in enumerate(pairwise(self.starts)):
            by_size.setdefault(stop - start, []).append(number)
        values = [0] * len(self.tensors)
        memory, starts = self.buffer.data, self.starts
        for size, numbers in by_size.items():
            most = max(AT_ONCE // size, 1)
            for at in range(0, len(numbers), most):
                some = numbers[at : at + most]
                data = b"".join([memory[starts[n] : starts[n] + size] for n in some])
                rows = np.frombuffer(data, dtype=np.uint8).reshape(len(some), size)
                for number, value in zip(some, digest.whole(rows), strict=True):
                    values[number] = value
        return values


def joined_writes(placed: Iterable[Placed]) -> Iterator[Placed]:
    """Join adjacent writes, which come in the order of the files, into long ones."""
    parts: list[bytes | memoryview] = []
    file, start, end = -1, 0, 0
    for one in placed:
        size = len(one.data)
        if (one.file, one.offset) != (file, end) or end + size - start > LONGEST:
            if parts:
                yield Placed(file, start, b"".join(parts))
            parts, file, start, end = [], one.file, one.offset, one.offset
        parts.append(one.data)
        end += size
    if parts:
        yield Placed(file, start, b"".join(parts))


@lru_cache(maxsize=4096)
def place_in(shape: tuple[int, ...], box: Box) -> int | None:
    """The index of a box's first element in a row-major tensor; None if the box is not one run.

    >>> place_in((4, 6), Box((2, 0), (4, 6))), place_in((4, 6), Box((0, 2), (4, 4)))
    (12, None)
    """
    is_cut = False
    for length, size in zip(box.shape, shape, strict=True):
        if is_cut and length != size:
            return None
        is_cut = is_cut or length > 1
    strides = row_major(shape)
    return sum(low * stride for low, stride in zip(box.start, strides, strict=True))


_strides = lru_cache(maxsize=4096)(row_major)


def _merged(runs: Iterable[_Run]) -> Iterator[_Run]:
    """Join runs that are adjacent both in the file and in the pack."""
    first: _Run | None = None
    size = 0
    for run in runs:
        if first is not None and run.piece is None is first.piece:
            follows = run.offset == first.offset + size and run.place == first.place + size
            if follows and run.file == first.file:
                size += run.size
                continue
        if first is not None:
            yield first._replace(size=size)
        first, size = run, run.size
    if first is not None:
        yield first._replace(size=size)


def _spans(runs: Iterable[_Run], limit: int) -> Iterator[list[_Run]]:
    """Group runs that are read together, across small gaps; a long run is read alone."""
    span: list[_Run] = []
    stop = 0
    for run in runs:
        near = span and run.file == span[0].file and run.offset - stop <= GAP
        fits = near and max(stop, run.stop) - span[0].offset <= limit
        if not fits or run.size >= ALONE or span[-1].size >= ALONE:
            if span:
                yield span
            span, stop = [], 0
        span.append(run)
        stop = max(stop, run.stop)
    if span:
        yield span


def _inside(box: Box) -> Any:
    return (*(slice(low, high) for low, high in zip(box.start, box.stop, strict=True)), ...)
