"""Memory by address: arrays, contiguous runs, and how the kernel copies between lists of runs.

A run is a stretch of memory that is contiguous in a tensor: what the kernel or the network takes in
one piece.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.layout.columns import Ints, distinct

__all__ = ["RAW", "Array", "IovecCall", "IovecPlan", "Runs", "array_at", "run_lengths", "runs_of"]

Array = np.ndarray[Any, Any]

RAW = {
    size: np.dtype(kind)
    for size, kind in zip((1, 2, 4, 8, 16), ("u1", "u2", "u4", "u8", "c16"), strict=True)
}
"""The numpy dtype for elements of so many bytes that are only copied."""

FIRST_PAGE = 4096
"""Nothing is mapped below; and numpy takes a buffer at address 0 for no buffer."""


class _Everything:
    """The whole address space as one buffer, so that an array can be put at any address."""

    buffer: Any = (ctypes.c_char * ((1 << 62) - FIRST_PAGE)).from_address(FIRST_PAGE)


def array_at(
    address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> Array:
    """The array at an address; strides in bytes. The caller keeps the memory alive."""
    return np.ndarray(shape, dtype, _Everything.buffer, address - FIRST_PAGE, strides)


MAX_PIECES = 1024
"""The kernel's limit of pieces per side and system call (UIO_MAXIOV)."""

MAX_BYTES = 8 << 20
"""Bytes of one system call: few enough that an abort is seen within milliseconds."""


def run_lengths(width: Ints, strides: Ints) -> Ints:
    """How many elements are contiguous from the start of each block on.

    >>> run_lengths(np.array([[4, 8], [4, 8]]), np.array([[8, 1], [32, 1]])).tolist()
    [32, 8]
    """
    run = np.ones(len(width), dtype=np.int64)
    growing = np.ones(len(width), dtype=bool)
    for dim in reversed(range(width.shape[1])):
        one = width[:, dim] == 1
        growing &= one | (strides[:, dim] == run)
        run = np.where(growing & ~one, run * width[:, dim], run)
    return run


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Runs of memory, one after the other: where each begins and how long it is, in bytes."""

    address: Ints
    """From the start of memory, or of the tensor that the run is in."""
    length: Ints
    tensor: Ints | None = None
    """Which tensor each is in."""

    @classmethod
    def single(cls, address: int, length: int) -> Runs:
        """One run at an address."""
        return cls(np.array([address]), np.array([length]))

    def split_at(self, places: Ints, ends: Ints) -> Runs:
        """The same runs, with those that cross a place split there."""
        if len(places) == 1 and places[0] == ends[-1]:
            return self
        stops = distinct(np.concatenate([ends, places]))
        old = np.searchsorted(ends, stops, side="left")
        starts = np.concatenate([[0], stops[:-1]])
        begins = ends[old] - self.length[old]
        tensor = None if self.tensor is None else self.tensor[old]
        return Runs(self.address[old] + starts - begins, stops - starts, tensor)


def runs_of(
    first: Ints, width: Ints, strides: Ints, itemsize: int, tensor: Ints | None = None
) -> Runs:
    """All runs of blocks in row-major order; ``first`` is the address of each block.

    >>> runs = runs_of(np.array([1000]), np.array([[2, 3]]), np.array([[10, 1]]), 4)
    >>> runs.address.tolist(), runs.length.tolist()
    ([1000, 1040], [12, 12])
    """
    run = run_lengths(width, strides)
    if not len(width):
        return Runs(run, run, tensor)
    if (width == width[0]).all() and (strides == strides[0]).all():
        within = _offsets(width[:1], strides[:1], run[:1], np.zeros(1, np.int64))
        address = (first[:, None] + within[None, :] * itemsize).ravel()
        block = np.repeat(np.arange(len(width)), len(within))
        length = np.full(len(address), run[0] * itemsize)
    else:
        counts = np.prod(width, axis=1, dtype=np.int64) // run
        block = np.repeat(np.arange(len(width)), counts)
        address = first[block] + _offsets(width, strides, run, block) * itemsize
        length = run[block] * itemsize
    return Runs(address, length, None if tensor is None else tensor[block])


def _offsets(width: Ints, strides: Ints, run: Ints, block: Ints) -> Ints:
    """Where the runs of blocks begin, in elements from the start of their block."""
    counts = np.prod(width, axis=1, dtype=np.int64) // run
    if len(width) == 1:
        block = np.zeros(int(counts[0]), dtype=np.int64)
    left = np.arange(len(block)) - (np.cumsum(counts) - counts)[block]
    offset = np.zeros(len(block), dtype=np.int64)
    inside = run.copy()
    for dim in reversed(range(width.shape[1])):
        # Dims within the run were walked already: their widths divide what is left of it.
        in_run = inside > 1
        inside = np.where(in_run, inside // width[:, dim], inside)
        walked = np.where(in_run, 1, width[:, dim])
        offset += left % walked[block] * strides[block, dim]
        left = left // walked[block]
    return offset


class IovecCall:
    """The operands of one system call: pieces here and pieces there, of equally many bytes."""

    __slots__ = ("num_bytes", "operands", "own", "theirs")

    def __init__(self, own: Array, theirs: Array, num_bytes: int) -> None:
        self.own = own
        self.theirs = theirs
        self.num_bytes = num_bytes
        self.operands = (own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)


class IovecPlan:
    """The system calls that copy between two lists of runs, wherever the tensors may be.

    How lists are divided into calls depends on their lengths alone. So offsets within tensors are
    kept, and when tensors have moved only the addresses are filled in anew.
    """

    def __init__(self, own: Runs, theirs: Runs) -> None:
        self.places = _places(own, theirs)
        ends = [np.cumsum(side.length) for side in (own, theirs)]
        self.sides = tuple(
            side.split_at(self.places, end) for side, end in zip((own, theirs), ends, strict=True)
        )
        self._last = [
            (np.searchsorted(np.cumsum(side.length), self.places, side="left") + 1).tolist()
            for side in self.sides
        ]
        self._touched = [
            () if side.tensor is None else distinct(side.tensor) for side in self.sides
        ]
        self._kept: tuple[bytes, list[IovecCall]] = (b"", [])
        """The calls that were last asked for, and for which addresses."""

    def __len__(self) -> int:
        return sum(len(side.length) for side in self.sides)

    def calls(self, own: Ints, theirs: Ints) -> list[IovecCall]:
        """The calls, for tensors that begin at these addresses; those of last time are kept."""
        bases = zip(self._touched, (own, theirs), strict=True)
        key = b"".join(base[touched].tobytes() for touched, base in bases)
        kept = self._kept  # another thread may replace it meanwhile
        if kept[0] != key:
            kept = self._kept = (key, self.calls_at(own, theirs))
        return kept[1]

    def calls_at(self, own: Ints | None, theirs: Ints | None) -> list[IovecCall]:
        """The calls, with addresses filled in; without any, runs count from the start of memory."""
        tables = [np.stack([side.address, side.length], axis=1) for side in self.sides]
        for table, side, bases in zip(tables, self.sides, (own, theirs), strict=True):
            if bases is not None and side.tensor is not None:
                table[:, 0] += bases[side.tensor]
        found, first, done = [], [0, 0], 0
        for one, other, end in zip(*self._last, self.places.tolist(), strict=True):
            rows = tables[0][first[0] : one], tables[1][first[1] : other]
            found.append(IovecCall(*rows, end - done))
            first, done = [one, other], end
        return found


def _places(own: Runs, theirs: Runs) -> Ints:
    """Where calls end, in bytes from the start, so that the kernel takes each."""
    total = int(own.length.sum())
    if not total:
        return np.zeros(0, dtype=np.int64)
    if total <= MAX_BYTES and max(len(own.length), len(theirs.length)) <= MAX_PIECES:
        return np.array([total])
    regular = np.arange(MAX_BYTES, total, MAX_BYTES)
    step = MAX_PIECES - 2
    ends = [np.cumsum(side.length)[step - 1 :: step] for side in (own, theirs)]
    return distinct(np.concatenate([regular, *ends, [total]]))
