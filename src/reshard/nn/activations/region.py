"""The memory of a saved tensor, as it is kept until it is needed again.

Saved views of one input share one region:

    x            [rows, hidden]        the input of a module
    x.view(-1)   saved by one operation      \\
    x.t()        saved by another             >  one region: the bytes of x, kept once
    x            saved by a third            /
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from reshard.nn.activations.stats import Stats

__all__ = ["Region", "bytes_between", "share_of"]


SAMPLED = 32
"""Bytes of a region that tell it from others; a multiple of 8."""


def bytes_between(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes of the storage that a tensor lies in; not a copy."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found: torch.Tensor = view.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    return found


def share_of(num_bytes: int, unit: int, place: int, num_ranks: int) -> tuple[int, int]:
    """The bytes of one rank: whole elements, as torch.chunk cuts them.

    >>> [share_of(40, 4, place, 4) for place in range(4)]
    [(0, 12), (12, 24), (24, 36), (36, 40)]
    """
    count = num_bytes // unit
    most = -(-count // num_ranks)
    return min(place * most, count) * unit, min((place + 1) * most, count) * unit


def _sample_of(memory: torch.Tensor) -> torch.Tensor:
    """A few of the bytes, from the first to the last, as whole numbers."""
    last = memory.numel() - 1
    places = torch.arange(SAMPLED, device=memory.device) * last // (SAMPLED - 1)
    return memory[places].view(torch.int64)


class Region:
    """Memory that is kept until it is needed again: whole, or this rank's share, here or away."""

    def __init__(
        self,
        label: str,
        memory: torch.Tensor,
        unit: int,
        origin: StorageWeakRef,
        is_equal: bool,
        stats: Stats,
    ) -> None:
        self.label, self.is_equal = label, is_equal
        # While this is there, no other storage has the address of the one it was taken from: what
        # is saved next may not be taken for the same memory, though the first is gone by then.
        self._origin = origin
        self.num_bytes, self.unit, self.device = memory.numel(), unit, memory.device
        self.memory = memory
        """The bytes that are kept."""
        self.is_cut = False
        """Whether they are only this rank's share."""
        self.is_away = False
        """Whether they wait on the host."""
        self.whole: torch.Tensor | None = None
        """All bytes, while they are used."""
        self.views: set[int] = set()
        """Saved tensors that may still be asked for; a set, because several threads drop them."""
        self.number = 0
        """Its place among all that were kept on this group; the same on all ranks."""
        self._sample: torch.Tensor | None = None
        self.stats = stats
        stats.bytes_seen += self.num_bytes
        stats.bytes_kept += self.num_bytes

    @property
    def identity(self) -> list[int]:
        """Numbers that are the same on all ranks, and others for another region: some of its bytes
        are among them, because threads may number theirs in any order.
        """
        assert self._sample is not None  # only what was cut is asked for
        return [self.number, *self._sample.tolist()]

    @property
    def is_here(self) -> bool:
        """Whether all of it is at hand."""
        return not self.is_cut and not self.is_away

    def cut(self, place: int, num_ranks: int) -> None:
        """Keep only this rank's share."""
        low, high = share_of(self.num_bytes, self.unit, place, num_ranks)
        self._sample = _sample_of(self.memory)
        self.memory, self.is_cut = self.memory[low:high].clone(), True
        self.stats.bytes_kept += high - low - self.num_bytes

    def drop_view(self, view: int) -> None:
        """A saved tensor is gone; once all are, the whole is not needed any more."""
        self.views.discard(view)
        if not self.views:
            self.whole = None

    def __repr__(self) -> str:
        return f"Region({self.label}, {self.num_bytes} bytes, number {self.number})"
