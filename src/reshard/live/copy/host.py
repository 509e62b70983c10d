"""Copy blocks on the host, and copy from and to the memory of another process.

Blocks that are contiguous on both sides go through memmove, strided ones through numpy's copy loop,
a change of dtype through torch, which knows every dtype.

Linux lets a process copy from and to the memory of another one of the same user, up to 1,024 runs
on each side with one system call (`process_vm_readv`, `process_vm_writev`), without any work in the
other process. Where Yama is enabled, the other process must have agreed (`PR_SET_PTRACER`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from reshard.dtypes import ITEMSIZE
from reshard.layout.columns import Ints, distinct
from reshard.live.program.blocks import CopyBlocks, CopyList
from reshard.live.program.messages import IovecCall, run_lengths

Array = np.ndarray[Any, Any]

RAW = {np.dtype(kind).itemsize: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "c16")}
"""The numpy dtype of elements of so many bytes that are copied without a cast."""

FIRST_PAGE = 4096
"""Nothing is mapped below this address, and numpy treats a buffer at address 0 as missing."""

MEMORY: Any = (ctypes.c_char * ((1 << 62) - FIRST_PAGE)).from_address(FIRST_PAGE)
"""The whole address space as one buffer, so that an array can be placed at any address."""


def array_at(
    address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> Array:
    """The array at an address; strides are in bytes. The caller keeps the memory alive."""
    return np.ndarray(shape, dtype, MEMORY, address - FIRST_PAGE, strides)


MAX_KEPT = 4
"""Sets of base addresses for which arrays are kept: deferred eager messages of 3 calls, and 1."""

MAX_ARRAYS = 1024  # tables of more strided blocks keep arrays for the last base addresses only

FEW_BLOCKS = 64
"""Up to so many blocks are copied in a loop over plain numbers, without arrays of addresses."""

_Block = tuple[Any, ...]
"""Base and offset of destination and source, bytes, shape, element, strides of both."""

Copy = tuple[Any, Any]
"""Destination and source of a strided block: two arrays, or two tensors where elements are cast."""


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of a dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array).view(kind)


class Bases(Protocol):
    """Tensors by base number."""

    tensors: dict[int, torch.Tensor]
    addresses: list[int]  # the base addresses; the staging buffer's is last

    @property
    def table(self) -> Ints: ...

    is_host: bool
    """Whether all tensors are in the memory of the host."""


class HostCopies:
    """Tables of copies, compiled for the host; they run for any base addresses."""

    def __init__(self, copies: CopyList) -> None:
        self._contiguous: list[tuple[CopyBlocks, list[int]]] = []
        """Blocks that are copied with memmove, and their bytes."""
        self._strided: list[_StridedBlocks] = []
        self._blocks: list[_Block] | None = None
        tables = copies.tables()
        if sum(map(len, tables)) <= FEW_BLOCKS and all(one.cast is None for one in tables):
            self._blocks = [block for table in tables for block in _blocks(table)]
            return
        for table in tables:
            num_bytes = _contiguous_bytes(table)
            some = num_bytes > 0
            if some.any():
                self._contiguous.append((table.take(some), num_bytes[some].tolist()))
            if not some.all():
                self._strided.append(_StridedBlocks(table.take(~some)))

    def run(self, tensors: Bases, staging: int = 0, num_bytes: int = 0) -> None:
        """Copy; the staging buffer has this address and so many bytes."""
        if self._blocks is None:
            bases = tensors.table
            bases[-1] = staging
            for table, sizes in self._contiguous:
                for arguments in zip(*_addresses(table, bases), sizes, strict=True):
                    ctypes.memmove(*arguments)
            for part in self._strided:
                part.run(bases)
            return
        at, array = tensors.addresses, np.ndarray
        at[-1] = staging
        for to, to_offset, by, offset, num_bytes, shape, kind, to_strides, strides in self._blocks:
            if num_bytes:
                ctypes.memmove(at[to] + to_offset, at[by] + offset, num_bytes)
            else:  # `array_at`, without two calls per block; the offsets count from `MEMORY`
                target = array(shape, kind, MEMORY, at[to] + to_offset, to_strides)
                target[...] = array(shape, kind, MEMORY, at[by] + offset, strides)


def _blocks(table: CopyBlocks) -> Iterator[_Block]:
    """Each block by itself; bytes are 0 for one that is not contiguous."""
    size, num_bytes = table.itemsize, _contiguous_bytes(table)
    shift = np.where(num_bytes, 0, FIRST_PAGE)
    columns = (
        *(table.destination, table.destination_offset - shift),
        *(table.source, table.source_offset - shift),
        *(num_bytes, table.widths),
        *(table.destination_strides * size[:, None], table.source_strides * size[:, None], size),
    )
    for *places, count, shape, to_strides, strides, item in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        yield *places, count, shape, RAW[item], to_strides, strides


def _contiguous_bytes(table: CopyBlocks) -> Ints:
    """The bytes of each block that is copied unchanged and is one run on both sides; else 0."""
    sides = (table.source_strides, table.destination_strides)
    source, destination = (run_lengths(table.widths, strides) for strides in sides)
    sizes = np.prod(table.widths, axis=1)
    one_run = (table.cast is None) & (np.minimum(source, destination) == sizes)
    return np.where(one_run, sizes * table.itemsize, 0)


def _addresses(table: CopyBlocks, bases: Ints) -> tuple[list[int], list[int]]:
    """The addresses of all blocks, at the destination and at the source."""
    destination = bases[table.destination] + table.destination_offset
    return destination.tolist(), (bases[table.source] + table.source_offset).tolist()


class _StridedBlocks:
    """Blocks that numpy copies or torch casts; arrays are kept for base addresses that recur."""

    def __init__(self, table: CopyBlocks) -> None:
        self._table = table
        self._touched = distinct(np.concatenate([table.source, table.destination]))
        self._kept: dict[bytes, list[Copy]] = {}

    def run(self, bases: Ints) -> None:
        key = bases[self._touched].tobytes()
        copies = self._kept.get(key)
        if copies is None:
            if len(self._kept) >= (MAX_KEPT if len(self._table) <= MAX_ARRAYS else 1):
                self._kept.clear()
            copies = self._kept[key] = list(self._copies(bases))
        if self._table.cast is None:
            for target, source in copies:
                target[...] = source
        else:
            for target, source in copies:
                target.copy_(source)

    def _copies(self, bases: Ints) -> Iterator[Copy]:
        table, cast = self._table, self._table.cast
        size = table.itemsize
        to_size = size if cast is None else np.full(len(table), ITEMSIZE[cast[1]])
        columns = (
            *(table.widths, to_size, table.destination_strides * to_size[:, None]),
            *(size, table.source_strides * size[:, None]),
        )
        rows = zip(*_addresses(table, bases), *(c.tolist() for c in columns), strict=True)
        for to, by, shape, to_item, to_strides, item, strides in rows:
            target = array_at(to, shape, RAW[to_item], to_strides)
            source = array_at(by, shape, RAW[item], strides)
            if cast is None:
                yield target, source
                continue
            have, want = as_tensor(source, cast[0]), as_tensor(target, cast[1])
            drops = have.is_complex() and not (want.is_complex() or want.dtype is torch.bool)
            yield want, have.real if drops else have  # torch would warn of the imaginary part


PR_SET_PTRACER = 0x59616D61


@cache
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
    _check(_libc().process_vm_readv(pid, *call.operands), call.num_bytes)


def write_memory(pid: int, call: IovecCall) -> None:
    """Copy from this process's memory into another's."""
    _check(_libc().process_vm_writev(pid, *call.operands), call.num_bytes)


def _check(done: int, num_bytes: int) -> None:
    if done != num_bytes:
        number = ctypes.get_errno() if done < 0 else errno.EFAULT
        raise OSError(number, f"{os.strerror(number)}: {max(done, 0)} of {num_bytes} bytes")
