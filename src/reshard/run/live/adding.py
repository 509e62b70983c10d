"""Add up blocks slice by slice, so that what is being added up stays in the processor's cache.

Sums go straight to where they are wanted: no tensor of sums beside it, and no further copy. Halves
are added up in float32, of which there is never more than a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from reshard.dtypes import accumulator
from reshard.run.live.memory import Array

__all__ = ["ADDED", "OPS", "TORCH_OPS", "add_up"]

ADDED = {"float32", "float64", "int32", "int64", "float16", "bfloat16"}
"""Dtypes whose addends are added up here."""

SLICE_BYTES = 1 << 18
"""Of one addend: all that is added at a time, and the sum, should fit into a cache of a core."""

OPS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
TORCH_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda total, addend: total.add_(addend),
    "avg": lambda total, addend: total.add_(addend),
    "prod": lambda total, addend: total.mul_(addend),
    "max": lambda total, addend: torch.maximum(total, addend, out=total),
    "min": lambda total, addend: torch.minimum(total, addend, out=total),
}


def add_up(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """Add up two addends or more in their order, all of the same shape as ``total``.

    Nothing but sums is ever written to ``total``: others may be reading the same sums there, from a
    tied tensor. Gives the bytes that it took besides.

    >>> total = np.zeros(3, "float32")
    >>> add_up("avg", "float32", total, [np.full(3, n, "float32") for n in (1, 2, 6)])
    12
    >>> total.tolist()
    [3.0, 3.0, 3.0]
    """
    add, most = _add if accumulator(dtype) == dtype else _add_halves, 0
    with np.errstate(all="ignore"):  # infinite gradients are no news to those who scale losses
        for at in _slices(total.shape, total.itemsize):
            most = max(most, add(op, dtype, total[at], [addend[at] for addend in addends]))
    return most


def _add(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    if len(addends) == 2 and op != "avg":
        OPS[op](addends[0], addends[1], out=total)
        return 0
    sums = np.empty(total.shape, total.dtype)
    OPS[op](addends[0], addends[1], out=sums)
    for addend in addends[2:]:
        OPS[op](sums, addend, out=sums)
    if op == "avg":
        np.divide(sums, len(addends), out=sums)
    total[...] = sums
    return sums.nbytes


def _add_halves(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """The same for what numpy may not know, of which arrays have only the bits."""
    kind: torch.dtype = getattr(torch, dtype)
    sums = np.empty(total.shape, "float32")
    wide = torch.from_numpy(sums)
    wide.copy_(torch.from_numpy(addends[0]).view(kind))
    for addend in addends[1:]:
        TORCH_OPS[op](wide, torch.from_numpy(addend).view(kind))
    if op == "avg":
        np.divide(sums, len(addends), out=sums)
    torch.from_numpy(total).view(kind).copy_(wide)
    return sums.nbytes


def _slices(shape: Sequence[int], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Where the slices of an array are: cut along the first dims, as far as it takes."""
    dim = next((n for n, size in enumerate(shape) if size > 1), None)
    num_bytes = prod(shape) * itemsize
    if dim is None or num_bytes <= SLICE_BYTES:
        yield (...,)
        return
    step = max(SLICE_BYTES * shape[dim] // num_bytes, 1)
    for first in range(0, shape[dim], step):
        last = min(first + step, shape[dim])
        for rest in _slices((last - first, *shape[dim + 1 :]), itemsize):
            inner = rest[1:] if rest != (...,) else (...,)
            yield (*[slice(None)] * dim, slice(first, last), *inner)
