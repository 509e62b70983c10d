"""The one description of strided copies: blocks, and numbered base addresses.

A call has a table of base addresses: its source tensors, its destination tensors, and last a
staging buffer. `CopyBlocks` lists blocks to copy between places, each given as a number in that
table and an offset. It does not depend on addresses, so it is compiled once per plan. The host
copies it with memmove and numpy, a GPU with one kernel launch, and the kernel reads and writes
other processes along the same strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.layout.columns import Ints

__all__ = ["CopyBlocks", "CopyList", "Place", "packed_strides"]


def packed_strides(width: Ints) -> Ints:
    """The strides of blocks that are contiguous, one row per block."""
    strides = np.ones_like(width)
    for dim in reversed(range(width.shape[1] - 1)):
        strides[:, dim] = strides[:, dim + 1] * width[:, dim + 1]
    return strides


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where blocks are: one row per block."""

    base: Ints
    """Numbers in the table of base addresses."""
    offset: Ints
    """Bytes from there."""
    strides: Ints
    """Elements from one index to the next, one column per dim."""
    dtype: str

    @classmethod
    def in_message(cls, width: Ints, at: Ints, base: int, dtype: str) -> Place:
        """Blocks that are packed one after the other; ``at`` is where each begins, in bytes."""
        return cls(np.full(len(width), base), at, packed_strides(width), dtype)


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Blocks to copy, one per row: element ``i`` of a block is on both sides at

        base address + offset + itemsize * (i[0] * stride[0] + i[1] * stride[1] + ...)

    Blocks of fewer dims than the others are filled up with dims of width 1.
    """

    source: Ints
    """Numbers in the table of base addresses."""
    destination: Ints
    source_offset: Ints
    """Bytes from the base address."""
    destination_offset: Ints
    widths: Ints
    """Elements along each dim, outermost first: one row of D numbers per block."""
    source_strides: Ints
    """Elements from one index to the next, per dim."""
    destination_strides: Ints
    itemsize: Ints
    """Bytes of one element; of the source, where elements are cast."""
    cast: tuple[str, str] | None = field(default=None, kw_only=True)
    """Source and destination dtype of all blocks; None if bytes are copied unchanged."""

    def __post_init__(self) -> None:
        count, shape = len(self.source), self.widths.shape
        if len(shape) != 2 or shape[0] != count:
            raise PlanError(f"widths has shape {shape}: give one row for each of {count} blocks")
        for name in CopyBlocks.__slots__[:-1]:
            found = getattr(self, name).shape
            expected = shape if name.endswith(("widths", "strides")) else (count,)
            if found != expected:
                raise PlanError(f"{name} has shape {found} and must have {expected}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> CopyBlocks:
        """Some of the blocks."""
        columns = (getattr(self, name) for name in CopyBlocks.__slots__ if name != "cast")
        return CopyBlocks(*(column[rows] for column in columns), cast=self.cast)


class CopyList:
    """Copies of many transfers, joined to one table per change of dtype."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str] | None, list[list[Ints]]] = {}

    def add(self, width: Ints, source: Place, destination: Place) -> None:
        """Copy blocks of this width from one place to another."""
        cast = (source.dtype, destination.dtype) if source.dtype != destination.dtype else None
        item = np.full(len(width), itemsize(source.dtype))
        offsets = [source.offset, destination.offset]
        strides = [source.strides, destination.strides]
        columns = [source.base, destination.base, *offsets, width, *strides, item]
        self._rows.setdefault(cast, []).append(columns)

    def tables(self) -> list[CopyBlocks]:
        """One table per change of dtype."""
        return [replace(CopyBlocks(*_joined(rows)), cast=cast) for cast, rows in self._rows.items()]


def _joined(rows: Sequence[list[Ints]]) -> list[Ints]:
    """The columns of all rows one after the other, with equally many dims."""
    num_dims = max(1, *(columns[4].shape[1] for columns in rows))
    fills = {4: 1, 5: 0, 6: 0}
    return [
        np.concatenate(
            [_filled(part, num_dims, fills[n]) if n in fills else part for part in parts]
        )
        for n, parts in enumerate(zip(*rows, strict=True))
    ]


def _filled(rows: Ints, num_dims: int, value: int) -> Ints:
    """Rows padded to so many dims, new ones first."""
    lacking = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (lacking, 0)), constant_values=value) if lacking else rows
