"""Copy blocks on the host, by address; and copy from and to the memory of another process.

Blocks that are contiguous on both sides go through memmove, strided ones through numpy's copy loop,
which costs least per block; a change of dtype goes through torch, which knows every dtype.

Linux lets one process copy from and to the memory of another of the same user, up to 1,024 pieces
on each side with one system call (`process_vm_readv`, `process_vm_writev`); the other process has
to do nothing. Yama, where it is on, wants the other to have agreed (`PR_SET_PTRACER`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from reshard.dtypes import ITEMSIZE
from reshard.layout.columns import Ints
from reshard.live.program.copies import CopyBlocks
from reshard.live.program.runs import RAW, Array, IovecCall, array_at, run_lengths

__all__ = ["Bases", "HostCopies", "allow_access", "as_tensor", "read_memory", "write_memory"]

FEW = 64
"""Tables of more blocks compute all addresses at once, and keep their arrays between calls."""

MAX_KEPT = 4
"""Sets of addresses for which arrays are kept: as many as calls may have unread messages, and 1."""

MAX_ARRAYS = 1024
"""Blocks of which so much is kept; of more, only what was used last."""

Form = tuple[Sequence[int], np.dtype[Any], Sequence[int], Sequence[int]]
"""Shape, dtype, and strides in bytes at destination and source of a block that is not one run."""


_Step = tuple[int, int, int, int, int, Form | None]
"""Base and offset of a block at destination and source, its bytes, and how it is strided."""


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of a dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array).view(kind)


class Bases(Protocol):
    """Tensors with base numbers and addresses."""

    addresses: list[int]

    @property
    def table(self) -> Ints:
        """The addresses as an array."""


class HostCopies:
    """Tables of copies, ready to be run on the host for any base addresses."""

    def __init__(self, tables: Sequence[CopyBlocks]) -> None:
        self._few: list[_Step] = []
        self._many: list[_Many] = []
        self._casts: list[tuple[tuple[str, str], list[_Step]]] = []
        for table in tables:
            if table.cast is not None:
                self._casts.append((table.cast, _steps(table)))
            elif len(table) <= FEW:
                self._few += _steps(table)
            else:
                self._many.append(_Many(table))

    def run(self, tensors: Bases, staging: int = 0, num_bytes: int = 0) -> None:
        """Copy; the staging buffer is at this address and has so many bytes."""
        bases = tensors.addresses
        bases[-1] = staging
        for to, to_offset, by, by_offset, size, form in self._few:
            if form is None:
                ctypes.memmove(bases[to] + to_offset, bases[by] + by_offset, size)
            else:
                shape, kind, to_strides, by_strides = form
                array = array_at(bases[to] + to_offset, shape, kind, to_strides)
                array[...] = array_at(bases[by] + by_offset, shape, kind, by_strides)
        if self._many or self._casts:
            for many in self._many:
                many.run(tensors.table, staging)
            for cast, steps in self._casts:
                for step in steps:
                    _cast(step, cast, bases)


def _steps(table: CopyBlocks) -> list[_Step]:
    size = table.itemsize
    count = np.prod(table.widths, axis=1, dtype=np.int64)
    whole = np.full(len(table), table.cast is None)
    for strides in (table.destination_strides, table.source_strides):
        whole &= run_lengths(table.widths, strides) == count
    into = size if table.cast is None else np.full(len(table), ITEMSIZE[table.cast[1]])
    columns = (
        *(table.destination, table.destination_offset, table.source, table.source_offset),
        *(count * size, whole, table.widths, size),
        *(table.destination_strides * into[:, None], table.source_strides * size[:, None]),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        (*place, total, None if run else (shape, RAW[item], to_strides, by_strides))
        for *place, total, run, shape, item, to_strides, by_strides in rows
    ]


def _cast(step: _Step, cast: tuple[str, str], bases: Sequence[int]) -> None:
    to, to_offset, by, by_offset, _, form = step
    assert form is not None
    shape, _, to_strides, by_strides = form
    have, want = (RAW[ITEMSIZE[dtype]] for dtype in cast)
    target = as_tensor(array_at(bases[to] + to_offset, shape, want, to_strides), cast[1])
    source = as_tensor(array_at(bases[by] + by_offset, shape, have, by_strides), cast[0])
    if source.is_complex() and not target.is_complex():
        source = source.real  # torch would warn that the rest is lost
    target.copy_(source)


class _Many:
    """A table of many blocks without a cast: addresses are computed for all blocks at once."""

    def __init__(self, table: CopyBlocks) -> None:
        self._table = table
        count = np.prod(table.widths, axis=1, dtype=np.int64)
        ends = (table.destination_strides, table.source_strides)
        runs = [run_lengths(table.widths, strides) == count for strides in ends]
        self._whole = bool((runs[0] & runs[1]).all())
        self._num_bytes = (count * table.itemsize).tolist()
        self._kept: dict[bytes, list[tuple[Array, Array]]] = {}

    def run(self, bases: Ints, staging: int) -> None:
        """Copy, with these base addresses."""
        bases[-1] = staging
        table = self._table
        into = bases[table.destination] + table.destination_offset
        out = bases[table.source] + table.source_offset
        if self._whole:
            for to, by, size in zip(into.tolist(), out.tolist(), self._num_bytes, strict=True):
                ctypes.memmove(to, by, size)
        else:
            for target, source in self._arrays(into, out):
                target[...] = source

    def _arrays(self, into: Ints, out: Ints) -> list[tuple[Array, Array]]:
        """The arrays at these addresses; messages are in a few places in turn."""
        key = into.tobytes() + out.tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= (MAX_KEPT if len(into) <= MAX_ARRAYS else 1):
                self._kept.clear()
            table = self._table
            items = table.itemsize[:, None]
            columns = (
                into, out, table.widths, table.destination_strides * items,
                table.source_strides * items, table.itemsize,
            )  # fmt: skip
            found = self._kept[key] = [
                (array_at(to, shape, RAW[item], a), array_at(by, shape, RAW[item], b))
                for to, by, shape, a, b, item in zip(*(c.tolist() for c in columns), strict=True)
            ]
        return found


PR_SET_PTRACER = 0x59616D61


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(libc, name)
        call.restype = ctypes.c_ssize_t
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    return libc


def allow_access() -> None:
    """Let processes of the same user read and write this one's memory, where Yama asks."""
    _libc().prctl(PR_SET_PTRACER, ctypes.c_ulong(ctypes.c_ulong(-1).value), 0, 0, 0)


def read_memory(pid: int, call: IovecCall) -> None:
    """Copy from another process's memory into this one's."""
    done = _libc().process_vm_readv(pid, *call.operands)
    if done != call.num_bytes:
        raise _failure(done, call.num_bytes)


def write_memory(pid: int, call: IovecCall) -> None:
    """Copy from this process's memory into another's."""
    done = _libc().process_vm_writev(pid, *call.operands)
    if done != call.num_bytes:
        raise _failure(done, call.num_bytes)


def _failure(done: int, num_bytes: int) -> OSError:
    number = ctypes.get_errno() if done < 0 else errno.EFAULT
    return OSError(number, f"{os.strerror(number)}: {max(done, 0)} of {num_bytes} bytes")
