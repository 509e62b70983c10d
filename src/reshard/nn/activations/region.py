"""The memory of a saved tensor, in the form in which it is kept until it is needed again.

Saved views of one tensor share one region:

    x            [rows, hidden]        the input of a module
    x.view(-1)   saved by one operation      \\
    x.t()        saved by another             >  one region: the bytes of x, kept once
    x            saved by a third            /
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from reshard.nn.activations.stats import Stats

__all__ = ["Form", "Region", "Span", "bytes_of", "share_of", "span_of"]


class Form(Enum):
    """How a region is kept."""

    WHOLE = "keep"
    SHARE = "shard"
    HOST = "offload"


@dataclass(frozen=True, slots=True)
class Span:
    """A range of elements of a storage."""

    start: int
    length: int

    def __contains__(self, other: Span) -> bool:
        return self.start <= other.start and other.start + other.length <= self.start + self.length


def span_of(tensor: torch.Tensor) -> Span | None:
    """The memory from the first to the last element, if it is no more than the elements need.

    >>> span_of(torch.zeros(6, 4).t()), span_of(torch.zeros(6, 4)[:, :2])
    (Span(start=0, length=24), None)
    >>> span_of(torch.zeros(3).expand(5, 3))
    Span(start=0, length=3)
    """
    if not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in sizes)
    return Span(int(tensor.storage_offset()), length) if length <= tensor.numel() else None


def bytes_of(tensor: torch.Tensor, span: Span | None) -> torch.Tensor:
    """The bytes of a span of the tensor's storage, or else of a copy without gaps."""
    if span is None:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    unit, storage = tensor.element_size(), tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found: torch.Tensor = view.set_(storage, span.start * unit, (span.length * unit,), (1,))
    return found


def share_of(num_bytes: int, unit: int, place: int, num_ranks: int) -> tuple[int, int]:
    """The bytes of one rank: whole elements, as torch.chunk cuts them.

    >>> [share_of(40, 4, place, 4) for place in range(4)]
    [(0, 12), (12, 24), (24, 36), (36, 40)]
    """
    count = num_bytes // unit
    most = -(-count // num_ranks)
    return min(place * most, count) * unit, min((place + 1) * most, count) * unit


class Region:
    """Memory that is kept until it is needed again."""

    def __init__(
        self,
        label: str,
        memory: torch.Tensor,
        unit: int,
        origin: torch.Tensor,
        is_equal: bool,
        stats: Stats,
    ) -> None:
        self.label, self.is_equal = label, is_equal
        self.num_bytes, self.unit, self.device = memory.numel(), unit, memory.device
        self.form = Form.WHOLE
        self.memory = memory
        """The bytes that are kept, in the form they are in."""
        self.whole: torch.Tensor | None = None
        """All bytes, while they are needed."""
        self.uses: dict[int, bool] = {}
        """The saved views that are alive, and whether each was asked for since it is whole."""
        self.number = 0
        """How many were kept before it."""
        self.stats = stats
        # While this is there, no other storage has its address.
        self._origin = StorageWeakRef(origin.untyped_storage())  # type: ignore[no-untyped-call]
        stats.bytes_seen += self.num_bytes
        stats.bytes_kept += self.num_bytes

    def cut(self, place: int, num_ranks: int) -> None:
        """Keep only this rank's share."""
        low, high = share_of(self.num_bytes, self.unit, place, num_ranks)
        self.memory, self.form = self.memory[low:high].clone(), Form.SHARE
        self.stats.bytes_kept += high - low - self.num_bytes

    def used(self, view: int) -> None:
        """A view was asked for; once all have been, the whole is not needed any more."""
        self.uses[view] = True
        self._settle()

    def dropped(self, view: int) -> None:
        """A view is gone."""
        self.uses.pop(view, None)
        self._settle()

    def _settle(self) -> None:
        if all(self.uses.values()):
            self.whole = None
            self.uses = dict.fromkeys(self.uses, False)

    def __repr__(self) -> str:
        return f"Region({self.label}, {self.num_bytes} bytes, {self.form.value})"
