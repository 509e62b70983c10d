"""The copies of a lot inside one process, worked out once for any addresses.

Shapes and strides of blocks never change between calls; addresses do, when tensors or messages lie
elsewhere. A block that is contiguous on both sides is one `memmove`. Others are pairs of arrays,
which are kept as long as the addresses stay the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from reshard.columns import Ints
from reshard.dtypes import itemsize
from reshard.run.live.copying import Copies, Spot
from reshard.run.live.ways import run_lengths

__all__ = ["Passage"]

Base = Ints | int
"""Where the tensor of each block begins, or the message that all are in."""


class Passage:
    """Blocks between two places that are known up to where they begin."""

    def __init__(self, width: Ints, target: Spot, source: Spot) -> None:
        """Spots have offsets instead of addresses."""
        self._width = width
        self._target = target
        self._source = source
        sizes = np.prod(width, axis=1, dtype=np.int64)
        ends = (target, source)
        whole = (bool((run_lengths(width, end.strides) == sizes).all()) for end in ends)
        self._straight = target.dtype == source.dtype and all(whole)
        self._num_bytes = (sizes * itemsize(target.dtype)).tolist()
        self._kept: tuple[list[int], list[int], Copies] | None = None

    def __len__(self) -> int:
        return len(self._width)

    def run(self, target: Base, source: Base) -> None:
        """Copy, between tensors or messages that begin here."""
        into = (self._target.address + target).tolist()
        out = (self._source.address + source).tolist()
        if self._straight:
            for at, by, size in zip(into, out, self._num_bytes, strict=True):
                ctypes.memmove(at, by, size)
        else:
            self._copies(into, out).run()

    def _copies(self, into: Sequence[int], out: Sequence[int]) -> Copies:
        kept = self._kept
        if kept is not None and kept[0] == into and kept[1] == out:
            return kept[2]
        spots = (
            Spot(np.array(at, dtype=np.int64), end.strides, end.dtype)
            for at, end in ((into, self._target), (out, self._source))
        )
        copies = Copies(self._width, *spots)
        self._kept = (list(into), list(out), copies)
        return copies
