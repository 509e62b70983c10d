"""From lots to memory: where the blocks of a lot lie in the tensors that a rank brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from reshard.columns import Ints
from reshard.dtypes import itemsize
from reshard.run.live.copying import Spot
from reshard.run.live.holding import Held
from reshard.run.live.lots import End, Lot
from reshard.run.live.memory import Portion, Route, pair_up
from reshard.run.live.runs import stretches_of
from reshard.run.live.ways import run_lengths

__all__ = [
    "MOST_RUNS",
    "bytes_of",
    "num_runs",
    "own_offsets",
    "own_spot",
    "own_views",
    "portions",
    "route_of",
    "view_of",
]

MOST_RUNS = 1 << 16
"""Runs that are listed at a time: one megabyte of addresses per side."""


def own_spot(end: End, held: Held) -> Spot:
    """Where blocks lie in this rank's own tensors, which may have any strides."""
    spot = own_offsets(end, held)
    return Spot(held.address[end.tensor] + spot.address, spot.strides, end.dtype)


def own_offsets(end: End, held: Held) -> Spot:
    """Where blocks lie, counted from the start of their tensors."""
    size = itemsize(end.dtype)
    offset, strides = end.offset, end.strides
    for number, actual in held.strided.items():
        mine = np.flatnonzero(end.tensor == number)
        if len(mine):
            shape = tuple(held.tensors[number].shape)
            offset, strides = offset.copy(), np.array(strides)
            offset[mine] = _actual(offset[mine], shape, actual)
            strides[mine] = _actual(strides[mine].ravel(), shape, actual).reshape(len(mine), -1)
    return Spot(offset * size, strides, end.dtype)


def _actual(offset: Ints, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ints:
    """Offsets in a contiguous tensor as offsets in one with other strides.

    A stride is an offset too: that of the next index. Of a dim of one element it is never used.
    """
    count = int(np.prod(shape, dtype=np.int64))
    index = np.unravel_index(offset % max(count, 1), shape) if shape else ()
    total = np.zeros(len(offset), dtype=np.int64)
    for at, stride in zip(index, strides, strict=True):
        total += at * stride
    return total


def own_views(end: End, width: Ints, held: tuple[Held, Held]) -> Spot | list[torch.Tensor]:
    """Where blocks lie on this rank: in memory, or as views where tensors are on a device."""
    side = held[end.side]
    if side.address[end.tensor].all():
        return own_spot(end, side)
    columns = (end.tensor, end.offset, end.strides, width)
    return [
        view_of(side.tensors[number], offset, strides, shape)
        for number, offset, strides, shape in zip(*(c.tolist() for c in columns), strict=True)
    ]


def view_of(
    tensor: torch.Tensor, offset: int, strides: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """A block of a tensor of any strides, by where it would lie if that were contiguous."""
    if not tensor.is_contiguous():
        at = np.array([offset, *strides], dtype=np.int64)
        offset, *strides = _actual(at, tuple(tensor.shape), tensor.stride()).tolist()
    return tensor.detach().as_strided(shape, strides, tensor.storage_offset() + offset)


def bytes_of(tensor: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    """So many elements of a contiguous tensor, from an offset on, as bytes.

    torch calls a tensor of one element contiguous whatever its strides are, but gives no view of
    its bytes unless the last stride is 1.
    """
    flat = tensor.detach().as_strided((size,), (1,), tensor.storage_offset() + offset)
    return flat.view(torch.uint8)


def route_of(lot: Lot, end: End, other: End, held: Held) -> Route:
    """The calls that copy a lot between this process, where it is at ``end``, and another."""
    own, size = own_offsets(end, held), itemsize(other.dtype)
    return Route(
        stretches_of(own.address, lot.width, own.strides, size, end.tensor),
        stretches_of(other.offset * size, lot.width, other.strides, size, other.tensor),
    )


def portions(lot: Lot, end: End, other: End, held: Held, table: Ints) -> Iterator[Portion]:
    """The calls of a lot that has too many runs to list them all at once."""
    own, size = own_spot(end, held), itemsize(other.dtype)
    theirs = Spot(table[other.tensor] + other.offset * size, other.strides, other.dtype)
    for width, here, there in _chunks(lot.width, own, theirs):
        yield from pair_up(
            stretches_of(here.address, width, here.strides, size),
            stretches_of(there.address, width, there.strides, size),
        )


def num_runs(width: Ints, *strides: Ints) -> Ints:
    """Contiguous runs of each block, on the side that has more."""
    sizes = np.prod(width, axis=1, dtype=np.int64)
    counts = [sizes // run_lengths(width, side) for side in strides]
    found: Ints = np.maximum.reduce(counts)
    return found


def _chunks(width: Ints, own: Spot, theirs: Spot) -> Iterator[tuple[Ints, Spot, Spot]]:
    """Blocks in groups of not too many runs; a block that alone has too many is halved."""
    counts = num_runs(width, own.strides, theirs.strides)
    if int(counts.sum()) <= MOST_RUNS:
        yield width, own, theirs
        return
    group = np.cumsum(counts) // MOST_RUNS
    edges = np.flatnonzero(np.diff(group, prepend=-1))
    for start, stop in zip(edges.tolist(), [*edges[1:].tolist(), len(width)], strict=True):
        if stop - start == 1 and counts[start] > MOST_RUNS:
            yield from _chunks(*_halved(width, own, theirs, start))
        else:
            yield width[start:stop], _some(own, start, stop), _some(theirs, start, stop)


def _some(spot: Spot, start: int, stop: int) -> Spot:
    return Spot(spot.address[start:stop], spot.strides[start:stop], spot.dtype)


def _halved(width: Ints, own: Spot, theirs: Spot, block: int) -> tuple[Ints, Spot, Spot]:
    """One block as two, cut in the middle of its first dim of more than one index."""
    dim = int(np.argmax(width[block] > 1))
    low = width[block].copy()
    low[dim] //= 2
    high = width[block].copy()
    high[dim] -= low[dim]
    halves = []
    for spot in (own, theirs):
        at = spot.address[block] + np.array(
            [0, low[dim] * spot.strides[block, dim] * itemsize(spot.dtype)]
        )
        halves.append(Spot(at, np.stack([spot.strides[block]] * 2), spot.dtype))
    return np.stack([low, high]), halves[0], halves[1]
