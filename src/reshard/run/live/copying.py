"""Copy blocks inside one process, by address: between tensors, and into and out of messages.

Bytes that stay as they are go through numpy's copy loop, which costs least per block; a change of
dtype goes through torch, which knows every dtype. What to copy is listed once as pairs of arrays
and reused as long as the addresses stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.columns import Ints
from reshard.dtypes import itemsize
from reshard.run.live.memory import Array, array_at

__all__ = ["RAW", "Copies", "Spot", "arrays_of", "packed_strides", "tensor_at"]

RAW = {
    size: np.dtype(kind)
    for size, kind in zip((1, 2, 4, 8, 16), ("u1", "u2", "u4", "u8", "c16"), strict=True)
}
"""What stands for elements of so many bytes that are only copied."""


@dataclass(frozen=True, eq=False, slots=True)
class Spot:
    """Where blocks are: the address of each, strides in elements, and the dtype there."""

    address: Ints
    strides: Ints
    dtype: str


Place = Spot | list[torch.Tensor]
"""Blocks in the memory of the host, or views of tensors on a device."""


def packed_strides(width: Ints) -> Ints:
    """The strides of blocks that are contiguous, one row per block."""
    strides = np.ones_like(width)
    for dim in reversed(range(width.shape[1] - 1)):
        strides[:, dim] = strides[:, dim + 1] * width[:, dim + 1]
    return strides


class Copies:
    """Pairs of arrays, each to be copied into the other."""

    def __init__(self, width: Ints, target: Place, source: Place) -> None:
        self.raw: list[tuple[Array, Array]] = []
        self.cast: list[tuple[torch.Tensor, torch.Tensor]] = []
        if isinstance(target, Spot) and isinstance(source, Spot) and target.dtype == source.dtype:
            self.raw = list(zip(arrays_of(width, target), arrays_of(width, source), strict=True))
        else:
            pairs = zip(_tensors(width, target), _tensors(width, source), strict=True)
            self.cast = [(into, _real(out, into)) for into, out in pairs]

    def run(self) -> None:
        """Copy them all."""
        for target, source in self.raw:
            target[...] = source
        for into, out in self.cast:
            into.copy_(out)

    def __len__(self) -> int:
        return len(self.raw) + len(self.cast)


def _real(out: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The real part, where only that is wanted: torch would warn that the rest is lost."""
    return out.real if out.is_complex() and not into.is_complex() else out


def arrays_of(width: Ints, spot: Spot, kind: np.dtype[Any] | None = None) -> Iterator[Array]:
    """The blocks at a spot; without a kind they are only good to be copied."""
    size = itemsize(spot.dtype)
    strides = (spot.strides * size).tolist()
    for at, shape, steps in zip(spot.address.tolist(), width.tolist(), strides, strict=True):
        yield array_at(at, shape, kind or RAW[size], steps)


def _tensors(width: Ints, place: Place) -> Iterable[torch.Tensor]:
    if not isinstance(place, Spot):
        return place
    return (_as_torch(array, place.dtype) for array in arrays_of(width, place))


def _as_torch(array: Array, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of a dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array).view(kind)


def tensor_at(address: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The contiguous tensor at an address."""
    size = itemsize(dtype)
    strides = [
        int(step) * size for step in packed_strides(np.array([shape], np.int64).reshape(1, -1))[0]
    ]
    return _as_torch(array_at(address, shape, RAW[size], strides), dtype)


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Bytes of memory as a tensor that a process group can send."""
    array: np.ndarray[Any, Any] = array_at(address, (num_bytes,), RAW[1], (1,))
    return torch.from_numpy(array)
