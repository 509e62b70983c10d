"""Memory by address: this process's own as arrays, another process's through the kernel.

Linux lets one process copy from and to the memory of another of the same user, up to 1024 pieces on
each side with one system call (`process_vm_readv`, `process_vm_writev`); the other has to do
nothing. Yama, where it is on, wants the other to have said that it agrees (`PR_SET_PTRACER`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.columns import Ints, distinct

__all__ = [
    "Portion",
    "Route",
    "Stretches",
    "allow_others",
    "array_at",
    "pair_up",
    "read_from",
    "whole_at",
    "write_to",
]

MOST_PIECES = 1024
"""The kernel's limit of pieces per side and call (UIO_MAXIOV)."""

MOST_BYTES = 8 << 20
"""Bytes of one call: few enough that an abort is seen within milliseconds."""

PR_SET_PTRACER = 0x59616D61

Array = np.ndarray[Any, Any]


FIRST_PAGE = 4096
"""No memory lies below; and numpy takes a buffer at address 0 for no buffer."""


class _Everything:
    """The whole address space as one buffer, so that an array can be put at any address."""

    buffer: Any = (ctypes.c_char * ((1 << 62) - FIRST_PAGE)).from_address(FIRST_PAGE)


def array_at(
    address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> Array:
    """The array that lies at an address; strides in bytes. Whoever asks keeps the memory alive."""
    return np.ndarray(shape, dtype, _Everything.buffer, address - FIRST_PAGE, strides)


@dataclass(frozen=True, eq=False, slots=True)
class Stretches:
    """Stretches of memory, one after the other: where each begins and how long it is, in bytes."""

    address: Ints
    """From the start of memory, or of the tensor that the stretch lies in."""
    length: Ints
    tensor: Ints | None = None
    """Which tensor each lies in."""

    def cut_at(self, places: Ints, ends: Ints) -> Stretches:
        """The same stretches, with those that cross a place cut there."""
        if len(places) == 1 and places[0] == ends[-1]:
            return self
        stops = distinct(np.concatenate([ends, places]))
        old = np.searchsorted(ends, stops, side="left")
        starts = np.concatenate([[0], stops[:-1]])
        begins = ends[old] - self.length[old]
        tensor = None if self.tensor is None else self.tensor[old]
        return Stretches(self.address[old] + starts - begins, stops - starts, tensor)

    def table(self) -> Array:
        """As the kernel reads it: an address and a length per row."""
        return np.stack([self.address, self.length], axis=1)


class Portion:
    """The operands of one call: pieces here and pieces there, of equally many bytes."""

    __slots__ = ("num_bytes", "operands", "own", "theirs")

    def __init__(self, own: Array, theirs: Array, num_bytes: int) -> None:
        self.own = own
        self.theirs = theirs
        self.num_bytes = num_bytes
        self.operands = (own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)


def whole_at(address: int, into: Array) -> Portion:
    """The operands of a call that fills an array from one place of another process."""
    size = into.nbytes
    return Portion(np.array([[into.ctypes.data, size]]), np.array([[address, size]]), size)


class Route:
    """The calls that copy between two lists of stretches, wherever the tensors may lie.

    How lists are cut into calls depends on their lengths alone. So offsets within tensors are
    kept, and when tensors have moved only the addresses are filled in anew.
    """

    def __init__(self, own: Stretches, theirs: Stretches) -> None:
        self.sides = (own, theirs)
        self.places = _places(own, theirs)
        ends = [np.cumsum(side.length) for side in self.sides]
        own, theirs = (
            side.cut_at(self.places, end) for side, end in zip(self.sides, ends, strict=True)
        )
        self.sides = (own, theirs)
        self._last = [
            (np.searchsorted(np.cumsum(side.length), self.places, side="left") + 1).tolist()
            for side in self.sides
        ]
        self._touched = [
            () if side.tensor is None else distinct(side.tensor) for side in self.sides
        ]
        self._kept: tuple[bytes, list[Portion]] = (b"", [])
        """The calls that were last asked for, and for which addresses."""

    def __len__(self) -> int:
        return sum(len(side.length) for side in self.sides)

    def calls(self, own: Ints, theirs: Ints) -> list[Portion]:
        """The calls, for tensors that begin at these addresses; those of last time are kept."""
        bases = zip(self._touched, (own, theirs), strict=True)
        key = b"".join(base[touched].tobytes() for touched, base in bases)
        kept = self._kept  # another thread may replace it meanwhile
        if kept[0] != key:
            kept = self._kept = (key, self.calls_at(own, theirs))
        return kept[1]

    def calls_at(self, own: Ints | None, theirs: Ints | None) -> list[Portion]:
        """The calls, with addresses filled in; without any, offsets are from the start."""
        tables = [side.table() for side in self.sides]
        for table, side, bases in zip(tables, self.sides, (own, theirs), strict=True):
            if bases is not None and side.tensor is not None:
                table[:, 0] += bases[side.tensor]
        found, first, done = [], [0, 0], 0
        for one, other, end in zip(*self._last, self.places.tolist(), strict=True):
            rows = tables[0][first[0] : one], tables[1][first[1] : other]
            found.append(Portion(*rows, end - done))
            first, done = [one, other], end
        return found


def _places(own: Stretches, theirs: Stretches) -> Ints:
    """Where calls end, in bytes from the start: so that the kernel takes each."""
    total = int(own.length.sum())
    if not total:
        return np.zeros(0, dtype=np.int64)
    if total <= MOST_BYTES and max(len(own.length), len(theirs.length)) <= MOST_PIECES:
        return np.array([total])
    regular = np.arange(MOST_BYTES, total, MOST_BYTES)
    step = MOST_PIECES - 2
    ends = [np.cumsum(side.length)[step - 1 :: step] for side in (own, theirs)]
    return distinct(np.concatenate([regular, *ends, [total]]))


def pair_up(own: Stretches, theirs: Stretches) -> list[Portion]:
    """Cut two lists of equally many bytes into calls that the kernel takes."""
    return Route(own, theirs).calls_at(None, None)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(libc, name)
        call.restype = ctypes.c_ssize_t
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    return libc


def allow_others() -> None:
    """Let processes of the same user read and write this one's memory, where Yama asks."""
    _libc().prctl(PR_SET_PTRACER, ctypes.c_ulong(ctypes.c_ulong(-1).value), 0, 0, 0)


def read_from(pid: int, portion: Portion) -> None:
    """Copy from another process's memory into one's own."""
    _transfer(_libc().process_vm_readv, pid, portion)


def write_to(pid: int, portion: Portion) -> None:
    """Copy from one's own memory into another process's."""
    _transfer(_libc().process_vm_writev, pid, portion)


def _transfer(call: Callable[..., int], pid: int, portion: Portion) -> None:
    done = call(pid, *portion.operands)
    if done == portion.num_bytes:
        return
    number = ctypes.get_errno() if done < 0 else errno.EFAULT
    raise OSError(number, f"{os.strerror(number)}: {max(done, 0)} of {portion.num_bytes} bytes")
