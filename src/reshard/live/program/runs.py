"""Memory by address: arrays, contiguous runs, and the system calls that copy between runs.

A run is a range of memory that is contiguous in a tensor. One `process_vm_readv` or
`process_vm_writev` copies between two lists of runs, one in each process.
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
"""The numpy dtype of elements of so many bytes that are copied without a cast."""

FIRST_PAGE = 4096
"""Nothing is mapped below this address, and numpy treats a buffer at address 0 as missing."""

_memory: Any = (ctypes.c_char * ((1 << 62) - FIRST_PAGE)).from_address(FIRST_PAGE)
"""The whole address space as one buffer, so that an array can be placed at any address."""


def array_at(
    address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> Array:
    """The array at an address; strides are in bytes. The caller keeps the memory alive."""
    return np.ndarray(shape, dtype, _memory, address - FIRST_PAGE, strides)


MAX_PIECES = 1024
"""The kernel's limit of runs per side and system call (UIO_MAXIOV)."""

MAX_BYTES = 8 << 20
"""Bytes of one system call: few enough that an abort is seen within milliseconds."""


def run_lengths(width: Ints, strides: Ints) -> Ints:
    """Number of elements that are contiguous from the start of each block.

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
    """A list of runs: tensor, offset and length of each, in bytes."""

    base: Ints
    """The tensor's number in the table of base addresses."""
    offset: Ints
    length: Ints

    @classmethod
    def join(cls, parts: Sequence[Runs]) -> Runs:
        """All runs of several lists in one list."""
        columns = zip(*((one.base, one.offset, one.length) for one in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def split_at(self, places: Ints) -> Runs:
        """The same runs, with those that cross one of these places split there."""
        ends = np.cumsum(self.length)
        stops = distinct(np.concatenate([ends, places]))
        old = np.searchsorted(ends, stops, side="left")
        starts = np.concatenate([[0], stops[:-1]])
        begins = ends[old] - self.length[old]
        return Runs(self.base[old], self.offset[old] + starts - begins, stops - starts)


def runs_of(base: Ints, offset: Ints, width: Ints, strides: Ints, itemsize: int) -> Runs:
    """All runs of blocks, in row-major order; ``offset`` says where in a tensor a block begins.

    >>> runs = runs_of(np.array([0]), np.array([100]), np.array([[2, 3]]), np.array([[10, 1]]), 4)
    >>> runs.offset.tolist(), runs.length.tolist()
    ([100, 140], [12, 12])
    """
    run = run_lengths(width, strides)
    counts = np.prod(width, axis=1, dtype=np.int64) // run
    block = np.repeat(np.arange(len(width)), counts)
    left = np.arange(len(block)) - (np.cumsum(counts) - counts)[block]
    elements = np.zeros(len(block), dtype=np.int64)
    inside = run.copy()
    for dim in reversed(range(width.shape[1])):
        # The dims inside a run are not walked: their widths divide what is left of its length.
        in_run = inside > 1
        inside = np.where(in_run, inside // width[:, dim], inside)
        walked = np.where(in_run, 1, width[:, dim])
        elements += left % walked[block] * strides[block, dim]
        left = left // walked[block]
    return Runs(base[block], offset[block] + elements * itemsize, run[block] * itemsize)


class IovecCall:
    """The operands of one system call: runs here and runs there, of equally many bytes."""

    __slots__ = ("num_bytes", "operands", "own", "theirs")

    def __init__(self, own: Array, theirs: Array, num_bytes: int) -> None:
        self.own = own
        self.theirs = theirs
        self.num_bytes = num_bytes
        self.operands = (own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)

    @classmethod
    def single(cls, own: int, theirs: int, num_bytes: int) -> IovecCall:
        """Copy between two addresses."""
        here, there = (np.array([[address, num_bytes]]) for address in (own, theirs))
        return cls(here, there, num_bytes)


class IovecPlan:
    """The system calls that copy between two lists of runs, for any base addresses.

    How lists are divided into calls depends on lengths alone. Only the addresses are filled in for
    the tensors of each call.
    """

    def __init__(self, own: Runs, theirs: Runs) -> None:
        self._ends = _call_ends(own, theirs)
        self._sides = own.split_at(self._ends), theirs.split_at(self._ends)
        self._last = [
            (np.searchsorted(np.cumsum(side.length), self._ends, side="left") + 1).tolist()
            for side in self._sides
        ]

    def calls(self, own: Ints, theirs: Ints) -> list[IovecCall]:
        """The calls for these tables of base addresses."""
        tables = [
            np.stack([bases[side.base] + side.offset, side.length], axis=1)
            for side, bases in zip(self._sides, (own, theirs), strict=True)
        ]
        found, first, done = [], [0, 0], 0
        for one, other, end in zip(*self._last, self._ends.tolist(), strict=True):
            rows = tables[0][first[0] : one], tables[1][first[1] : other]
            found.append(IovecCall(*rows, end - done))
            first, done = [one, other], end
        return found


def _call_ends(own: Runs, theirs: Runs) -> Ints:
    """Where calls end, in bytes from the start, so that each is within the kernel's limits."""
    total = int(own.length.sum())
    step = MAX_PIECES - 2
    ends = [np.cumsum(side.length)[step - 1 :: step] for side in (own, theirs)]
    return distinct(np.concatenate([np.arange(MAX_BYTES, total, MAX_BYTES), *ends, [total]]))
