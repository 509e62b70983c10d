"""The copies of a lot inside one process, worked out once for any addresses.

Shapes and strides of blocks never change between calls; addresses do, when tensors or messages lie
elsewhere. A block that is contiguous on both sides is one `memmove`. Others are pairs of arrays,
which are kept for the few addresses that come up again and again.
"""

from __future__ import annotations

import ctypes

import numpy as np

from reshard.columns import Ints
from reshard.dtypes import itemsize
from reshard.run.live.copying import Copies, Spot
from reshard.run.live.ways import run_lengths

__all__ = ["Passage"]

MOST_KEPT = 4
"""Addresses for which arrays are kept: as many as calls may have messages packed, and one more."""

FEW = 1024
"""Blocks of which so much is kept; of more, only what was used last."""

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
        self._kept: dict[bytes, Copies] = {}

    def __len__(self) -> int:
        return len(self._width)

    def run(self, target: Base, source: Base) -> None:
        """Copy, between tensors or messages that begin here."""
        into, out = self._target.address + target, self._source.address + source
        if self._straight:
            for at, by, size in zip(into.tolist(), out.tolist(), self._num_bytes, strict=True):
                ctypes.memmove(at, by, size)
        else:
            self._copies(into, out).run()

    def _copies(self, into: Ints, out: Ints) -> Copies:
        """The arrays of these addresses; messages lie in a few places in turn."""
        key = into.tobytes() + out.tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= (MOST_KEPT if len(into) <= FEW else 1):
                self._kept.clear()
            target = Spot(into, self._target.strides, self._target.dtype)
            source = Spot(out, self._source.strides, self._source.dtype)
            found = self._kept[key] = Copies(self._width, target, source)
        return found
