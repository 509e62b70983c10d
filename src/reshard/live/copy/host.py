"""Copy blocks on the host, by address.

Blocks that are contiguous on both sides go through memmove, strided ones through numpy's copy loop,
which costs least per block; a change of dtype goes through torch, which knows every dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.columns import Ints
from reshard.dtypes import ITEMSIZE
from reshard.live.program.copies import CopyBlocks
from reshard.live.program.memory import RAW, Array, array_at
from reshard.live.program.runs import run_lengths

__all__ = ["HostCopies", "as_tensor"]

FEW = 64
"""Tables of more blocks compute all addresses at once, and keep their arrays between calls."""

MAX_KEPT = 4
"""Sets of addresses for which arrays are kept: as many as calls may have unread messages, and 1."""

MAX_ARRAYS = 1024
"""Blocks of which so much is kept; of more, only what was used last."""

Form = tuple[Sequence[int], np.dtype[Any], Sequence[int], Sequence[int]]
"""Shape, dtype, and strides in bytes at destination and source of a block that is not one run."""


class _Step(NamedTuple):
    """The copy of one block; a base of -1 is the staging buffer."""

    destination: int
    destination_offset: int
    source: int
    source_offset: int
    num_bytes: int
    form: Form | None


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of a dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array).view(kind)


class HostCopies:
    """Tables of copies, ready to be run on the host for any base addresses."""

    def __init__(self, tables: Sequence[CopyBlocks], staging: int) -> None:
        """``staging`` is the number of the staging buffer in the tables."""
        self._few: list[_Step] = []
        self._many: list[_Many] = []
        self._casts: list[tuple[tuple[str, str], list[_Step]]] = []
        for table in tables:
            if table.cast is not None:
                self._casts.append((table.cast, _steps(table, staging)))
            elif len(table) <= FEW:
                self._few += _steps(table, staging)
            elif len(table):
                self._many.append(_Many(table, staging))

    def run(self, addresses: Sequence[int], table: Ints, staging: int = 0) -> None:
        """Copy, with these base addresses (as a list and as an array) and this staging buffer."""
        for to, to_offset, by, by_offset, size, form in self._few:
            into = (addresses[to] if to >= 0 else staging) + to_offset
            out = (addresses[by] if by >= 0 else staging) + by_offset
            if form is None:
                ctypes.memmove(into, out, size)
            else:
                shape, kind, to_strides, by_strides = form
                array = array_at(into, shape, kind, to_strides)
                array[...] = array_at(out, shape, kind, by_strides)
        for many in self._many:
            many.run(table, staging)
        for cast, steps in self._casts:
            for step in steps:
                _cast(step, cast, addresses, staging)


def _steps(table: CopyBlocks, staging: int) -> list[_Step]:
    size = table.itemsize
    count = np.prod(table.widths, axis=1, dtype=np.int64)
    whole = np.ones(len(table), dtype=bool)
    for strides in (table.destination_strides, table.source_strides):
        whole &= run_lengths(table.widths, strides) == count
    items = [np.full(len(table), ITEMSIZE[table.cast[1]]) if table.cast else size, size]
    columns = (
        np.where(table.destination == staging, -1, table.destination),
        table.destination_offset,
        np.where(table.source == staging, -1, table.source),
        table.source_offset,
        count * size,
        table.widths,
        table.destination_strides * items[0][:, None],
        table.source_strides * items[1][:, None],
        whole & (table.cast is None),
        size,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        _Step(to, at, by, begin, total, None if run else (shape, RAW[item], into, out))
        for to, at, by, begin, total, shape, into, out, run, item in rows
    ]


def _cast(step: _Step, cast: tuple[str, str], addresses: Sequence[int], staging: int) -> None:
    into = addresses[step.destination] if step.destination >= 0 else staging
    out = addresses[step.source] if step.source >= 0 else staging
    assert step.form is not None
    shape, _, to_strides, by_strides = step.form
    have, want = (RAW[ITEMSIZE[dtype]] for dtype in cast)
    target = as_tensor(array_at(into + step.destination_offset, shape, want, to_strides), cast[1])
    source = as_tensor(array_at(out + step.source_offset, shape, have, by_strides), cast[0])
    if source.is_complex() and not target.is_complex():
        source = source.real  # torch would warn that the rest is lost
    target.copy_(source)


class _Many:
    """A table of many blocks without a cast: addresses are computed for all blocks at once."""

    def __init__(self, table: CopyBlocks, staging: int) -> None:
        self._table = table
        self._staging = tuple(bool((side == staging).all()) for side in _sides(table))
        count = np.prod(table.widths, axis=1, dtype=np.int64)
        ends = (table.destination_strides, table.source_strides)
        runs = [run_lengths(table.widths, strides) == count for strides in ends]
        self._whole = bool((runs[0] & runs[1]).all())
        self._num_bytes = (count * table.itemsize).tolist()
        self._kept: dict[bytes, list[tuple[Array, Array]]] = {}

    def run(self, bases: Ints, staging: int) -> None:
        """Copy, with these base addresses."""
        table = self._table
        offsets = (table.destination_offset, table.source_offset)
        places = zip(_sides(table), offsets, self._staging, strict=True)
        into, out = (
            offset + (staging if staged else bases[side]) for side, offset, staged in places
        )
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


def _sides(table: CopyBlocks) -> tuple[Ints, Ints]:
    return table.destination, table.source
