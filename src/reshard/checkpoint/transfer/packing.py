"""Many small tensors at a time: read in long ranges, digested together, written in long ranges.

A checkpoint of a mixture of experts has tens of thousands of tensors. For a small one, a system
call, a checksum and an array cost more than its bytes. A *pack* is a list of whole small tensors,
one after the other in memory, row-major, without gaps:

    file     | w0    | w1    | b1| ... another tensor ... | w2    |
    pack     | w0    | w1    | b1| w2    |                           two reads, one digest call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from reshard.checkpoint.catalog import StoredPiece, StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major

SMALL = 64 << 10
"""Bytes of the largest tensor that is packed, and of the longest range of a file for a piece."""
GAP = 4096
"""Gaps in a file of up to this many bytes are read and thrown away, which beats a second read."""
LONGEST = 4 << 20
"""The most bytes of one write, which has one checksum."""
AT_ONCE = 1 << 16
"""Bytes that are digested at a time: for more, OpenBLAS starts a second thread, which spins longer
than it works."""

Item = TypeVar("Item")
Array = np.ndarray[Any, Any]
CELLS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""The numpy type that copies elements of a size; numpy has no integers of 16 bytes."""
Read = Callable[[int, int, memoryview], None]
"""Fills a buffer with bytes of a file, from an offset on."""
Write = tuple[int, int, bytes | memoryview]
"""A file, an offset, and the bytes to be written there."""


class _Range(NamedTuple):
    """The range of a file that holds a piece of one of the tensors of a pack."""

    file: int
    start: int
    stop: int
    place: int | None
    """The byte of the pack at which the piece begins, if it is one run there and in the file."""
    tensor: int
    piece: StoredPiece


def tiles(shape: tuple[int, ...], pieces: Sequence[StoredPiece]) -> bool:
    """Whether pieces tile a tensor, as far as is seen at once: one piece, or a row along one dim.

    If this is False they may tile it in another way: ``layout.coverage`` decides.
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


def is_small(tensor: StoredTensor) -> bool:
    """Whether a tensor can be packed: pieces that tile it are in short ranges of their files."""
    if not 0 < tensor.num_bytes <= SMALL or not tiles(tensor.shape, tensor.pieces):
        return False
    spans = (piece.span(tensor.dtype) for piece in tensor.pieces)
    return _is_run(tensor) or all(stop - start <= SMALL for start, stop in spans)


def _is_run(tensor: StoredTensor) -> bool:
    """Whether a tensor is one run of bytes of a file, as most are."""
    return len(tensor.pieces) == 1 and tensor.pieces[0].strides == _strides(tensor.shape)


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


class Pack:
    """Small tensors, one after the other in a buffer."""

    def __init__(self, tensors: Sequence[StoredTensor], buffer: Array) -> None:
        """Tensors that their pieces tile, and a buffer for all of their bytes."""
        self.tensors, self.buffer = tensors, buffer
        self.starts = [*accumulate((tensor.num_bytes for tensor in tensors), initial=0)]
        """The offset of each tensor, and the end of the last one."""

    def read(self, scratch: Array, read: Read) -> None:
        """Fill the buffer from files, in ranges no longer than ``scratch``."""
        memory, spare = self.buffer.data, scratch.data
        rising = sorted(self._ranges(), key=itemgetter(0, 1))
        for ranges in _neighbours(rising, len(scratch)):
            file, begin, *_ = ranges[0]
            read(file, begin, spare[: max(one.stop for one in ranges) - begin])
            for _, start, stop, place, number, piece in ranges:
                at = start - begin
                if place is not None:
                    memory[place : place + stop - start] = spare[at : at + stop - start]
                    continue
                array, box = self.array(number), piece.box
                strides = [stride * array.itemsize for stride in piece.strides]
                stored: Array = np.ndarray(box.shape, array.dtype, spare, at, strides)
                array[within(box.start, box.stop)] = stored

    def _ranges(self) -> Iterator[_Range]:
        for number, (tensor, (begin, end)) in enumerate(
            zip(self.tensors, pairwise(self.starts), strict=True)
        ):
            if _is_run(tensor):
                [piece] = tensor.pieces
                stop = piece.offset + end - begin
                yield _Range(piece.file, piece.offset, stop, begin, number, piece)
                continue
            width = itemsize(tensor.dtype)
            for piece in tensor.pieces:
                if piece.box.size:
                    index = place_in(tensor.shape, piece.box) if piece.is_contiguous else None
                    place = None if index is None else begin + index * width
                    yield _Range(piece.file, *piece.span(tensor.dtype), place, number, piece)

    def array(self, number: int) -> Array:
        tensor = self.tensors[number]
        cell = CELLS[itemsize(tensor.dtype)]
        return np.ndarray(tensor.shape, cell, self.buffer.data, self.starts[number])

    def bytes_of(self, number: int, box: Box) -> bytes | memoryview:
        """A box of one of the tensors, in row-major order."""
        tensor = self.tensors[number]
        place = place_in(tensor.shape, box)
        if place is None:
            part: bytes = self.array(number)[within(box.start, box.stop)].tobytes()
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


def _neighbours(ranges: Iterable[_Range], limit: int) -> Iterator[list[_Range]]:
    """Group ranges that are read at once: of one file, small gaps apart, within the limit."""
    some, end = list[_Range](), 0
    for one in ranges:
        last = max(end, one.stop)
        is_near = some and one.file == some[0].file and one.start <= end + GAP
        if not is_near or last - some[0].start > limit:
            if some:
                yield some
            some, last = [], one.stop
        some.append(one)
        end = last
    if some:
        yield some


def joined_writes(writes: Iterable[Write]) -> Iterator[Write]:
    """Join adjacent writes, which come in the order of the files, into long ones."""
    parts: list[bytes | memoryview] = []
    number, start, end = -1, 0, 0
    for file, offset, data in writes:
        if (file, offset) != (number, end) or end + len(data) - start > LONGEST:
            if parts:
                yield number, start, b"".join(parts)
            parts, number, start, end = [], file, offset, offset
        parts.append(data)
        end += len(data)
    if parts:
        yield number, start, b"".join(parts)


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


def within(start: Sequence[int], stop: Sequence[int], origin: Sequence[int] = ()) -> Any:
    """The index of a box in an array that begins at an origin, by default at 0 in every dim."""
    limits = zip(start, stop, origin or (0,) * len(start), strict=True)
    # with "..." a 0-d part is an array too
    return (*(slice(low - at, high - at) for low, high, at in limits), ...)
