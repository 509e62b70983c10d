"""The contiguous runs of blocks: what the kernel, or the network, can take in one piece."""

from __future__ import annotations

import numpy as np

from reshard.columns import Ints
from reshard.run.live.memory import Stretches
from reshard.run.live.ways import run_lengths

__all__ = ["stretches_of"]


def stretches_of(
    first: Ints, width: Ints, strides: Ints, itemsize: int, tensor: Ints | None = None
) -> Stretches:
    """All runs of blocks in row-major order; ``first`` is the address of each block.

    >>> runs = stretches_of(np.array([1000]), np.array([[2, 3]]), np.array([[10, 1]]), 4)
    >>> runs.address.tolist(), runs.length.tolist()
    ([1000, 1040], [12, 12])
    """
    run = run_lengths(width, strides)
    if not len(width):
        return Stretches(run, run, tensor)
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
    return Stretches(address, length, None if tensor is None else tensor[block])


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
