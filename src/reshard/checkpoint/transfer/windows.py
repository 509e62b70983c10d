"""One window of a tensor: read from the source pieces, perhaps cast, written to the target pieces.

    source pieces  --read-->  buffer (the window, row by row)  --write-->  target pieces

A part that is one run of bytes in its file and in the buffer is read or written in place. All
others go through a scratch buffer, so that files see long runs and only memory sees short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from reshard.checkpoint.piece_table import Extent, Located, extents
from reshard.checkpoint.storage.direct import BLOCK, aligned
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.dtypes import cast_into, itemsize
from reshard.errors import DamageError
from reshard.layout.box import Box, row_major
from reshard.text import quoted

__all__ = [
    "Buffers", "Reads", "Writes", "bits_differ", "buffer_bytes", "compare", "drain", "fill",
    "lead_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]

GAP = 4096
"""Bytes between two parts of a file that are read along rather than stepped over."""
DENSE = 0.8
"""How much of a range must be wanted for it to be read as one."""
_CELLS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Elements of so many bytes, for moving them; numpy has no integers of 16 bytes."""


class Reads(Protocol):
    """Where windows are read from."""

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a file of the source."""

    def name(self, file: int) -> str:
        """The path of a file, for errors."""


class Writes(Protocol):
    """Where windows are written to."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file of the output."""


class Buffers:
    """What one worker holds in memory: a window, a scratch buffer, and one to cast into.

    Each has a block to spare, so that what it holds can begin in its block as in the file.
    """

    def __init__(self, num_bytes: int, casts: bool) -> None:
        self.num_bytes = num_bytes
        self.window = aligned(num_bytes + BLOCK)
        self.scratch = aligned(num_bytes + BLOCK)
        self.cast = aligned(num_bytes + BLOCK) if casts else self.window


def buffer_bytes(num_bytes: int, casts: bool) -> int:
    """How much a worker's buffers take for windows of so many bytes."""
    return (num_bytes + 2 * BLOCK) * (3 if casts else 2)


def lead_of(transfer: Transfer, window: Box) -> int:
    """Where in its block a window had better begin: there it can be written as it lies."""
    parts = transfer.target.within(window)
    if not len(parts):
        return 0
    size = itemsize(transfer.want)
    first = zip(parts.starts[0].tolist(), window.start, row_major(window.shape), strict=True)
    place = sum((low - start) * stride for low, start, stride in first)
    return _lead(int(parts.offsets[0]) - place * size, size)


def _lead(offset: int, size: int) -> int:
    """Where in its block an offset lies; 0 if elements would lie across their own places there."""
    lead = offset % BLOCK
    return lead if lead % size == 0 else 0


@dataclass(frozen=True, slots=True)
class Group:
    """Parts of a window that lie in one range of bytes of a file."""

    parts: Located
    extent: Extent

    @property
    def is_dense(self) -> bool:
        """Whether most of the range belongs to the parts."""
        wanted = int(self.parts.num_bytes[self.extent.rows].sum())
        return wanted >= DENSE * self.extent.num_bytes

    @property
    def is_tiled(self) -> bool:
        """Whether every byte of the range belongs to one part."""
        return int(self.parts.num_bytes[self.extent.rows].sum()) == self.extent.num_bytes


def fill(transfer: Transfer, window: Box, buffers: Buffers, reads: Reads, lead: int = 0) -> Array:
    """Read a window into the buffer, ``lead`` bytes behind its start."""
    array = shaped(buffers.window[lead:], window, itemsize(transfer.have))
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


def compare(transfer: Transfer, window: Box, array: Array, buffers: Buffers, reads: Reads) -> None:
    """Read what the source holds of a window a second time, and refuse what differs."""
    for group in readable(transfer.replicas.within(window), buffers.num_bytes):
        _read_extent(group, buffers.scratch, reads)
        for row in group.extent.rows:
            view = _view(array, window, group.parts, row)
            other = _in_scratch(buffers.scratch, group, row)
            apart = bits_differ(view, other)
            if apart.any():
                raise _disagreement(transfer, group, row, apart, reads)


def bits_differ(left: Array, right: Array) -> Array:
    """Which elements of two arrays have other bits, whatever they stand for."""
    width = left.itemsize
    word = f"u{min(width, 8)}"
    apart = left[..., np.newaxis].view(word) != right[..., np.newaxis].view(word)
    return np.asarray(apart.any(axis=-1) if width > 8 else apart[..., 0])


def cast(transfer: Transfer, window: Box, array: Array, buffers: Buffers, lead: int = 0) -> Array:
    """The window in the dtype of the output, ``lead`` bytes behind the start of its buffer."""
    if transfer.have == transfer.want:
        return array
    result = shaped(buffers.cast[lead:], window, itemsize(transfer.want))
    cast_into(array, transfer.have, result, transfer.want)
    return result


def drain(transfer: Transfer, window: Box, array: Array, buffers: Buffers, writes: Writes) -> None:
    """Write a window to all target pieces that meet it."""
    for group in writable(transfer.target.within(window), buffers.num_bytes):
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


def readable(parts: Located, limit: int) -> Iterator[Group]:
    """Parts grouped so that files are read in long ranges and little is read in vain."""
    for extent in extents(parts, GAP, limit):
        group = Group(parts, extent)
        if group.is_dense and extent.num_bytes <= limit:
            yield group
            continue
        runs = parts[extent.rows].runs()
        yield from (Group(runs, extent) for extent in extents(runs, GAP, limit))


def writable(parts: Located, limit: int) -> Iterator[Group]:
    """Parts grouped into ranges that they fill without a gap."""
    for extent in extents(parts, 0, limit):
        group = Group(parts, extent)
        if group.is_tiled and extent.num_bytes <= limit:
            yield group
            continue
        runs = parts[extent.rows].runs()
        yield from (Group(runs, extent) for extent in extents(runs, 0, limit))


def shaped(buffer: Array, window: Box, size: int) -> Array:
    """The first bytes of a buffer as the elements of a window."""
    flat: Array = buffer[: window.size * size].view(_CELLS[size])
    return flat.reshape(window.shape)


def _view(array: Array, window: Box, parts: Located, row: int) -> Array:
    """The part of a window that a row is about."""
    starts, stops = parts.starts[row].tolist(), parts.stops[row].tolist()
    limits = zip(starts, stops, window.start, strict=True)
    where: tuple[Any, ...] = tuple(slice(low - at, high - at) for low, high, at in limits)
    view: Array = array[(*where, ...)]  # with "..." a 0-d part is an array too
    return view


def _is_direct(parts: Located, row: int, view: Array) -> bool:
    return bool(parts.is_run[row]) and view.flags.c_contiguous


def _bytes(view: Array) -> memoryview:
    return view.reshape(-1).view(np.uint8).data


def _read_extent(group: Group, scratch: Array, reads: Reads) -> None:
    extent = group.extent
    reads.read_into(extent.file, extent.start, scratch[: extent.num_bytes].data)


def _in_scratch(scratch: Array, group: Group, row: int) -> Array:
    """A part where it lies among the bytes of its range."""
    parts = group.parts
    return np.ndarray(
        tuple(parts.shapes[row].tolist()),
        _CELLS[parts.itemsize],
        scratch.data,
        int(parts.offsets[row]) - group.extent.start,
        tuple(parts.strides[row].tolist()),
    )


def _disagreement(
    transfer: Transfer, group: Group, row: int, differs: Array, reads: Reads
) -> DamageError:
    box = group.parts.box(row)
    at = np.argwhere(differs)
    low = tuple(int(a) + b for a, b in zip(at.min(axis=0), box.start, strict=True))
    high = tuple(int(a) + 1 + b for a, b in zip(at.max(axis=0), box.start, strict=True))
    where = Box(low, high)
    holder = transfer.source.within(where)
    one = reads.name(int(holder.files[0])) if len(holder) else "another file"
    return DamageError(
        f"tensor {quoted(transfer.name)} {where}: {one} and {reads.name(group.extent.file)} hold "
        f"different values, and both should hold the same ({len(at)} elements differ): one of them "
        "is damaged or from another step; --no-compare (compare_replicas=False) takes the first"
    )
