"""Where in its storage does a tensor lie, and what else lies there?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Extent", "extent_of", "lattice_of"]

Lattice = tuple[int, tuple[tuple[int, int], ...]]
"""Where elements lie: the first, and the sizes and strides of all dims, in any order."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a storage from the first to the last element of a tensor."""

    start: int
    stop: int
    is_full: bool
    """Whether every byte between belongs to the tensor."""

    def __contains__(self, other: Extent) -> bool:
        return self.start <= other.start and other.stop <= self.stop


def extent_of(tensor: torch.Tensor) -> Extent:
    """Where a tensor lies; one with elements.

    >>> x = torch.zeros(6, 4)
    >>> extent_of(x.t()), extent_of(x[:, :2])
    (Extent(start=0, stop=96, is_full=True), Extent(start=0, stop=88, is_full=False))
    """
    unit, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in _dims(tensor))
    return Extent(start * unit, (start + last + 1) * unit, _has_no_gaps(tensor))


def lattice_of(tensor: torch.Tensor) -> Lattice:
    """Which elements of the storage a tensor has, whatever the order of its dims.

    >>> x = torch.zeros(6, 4)[:, :2]
    >>> lattice_of(x) == lattice_of(x.t().unsqueeze(0))
    True
    """
    return int(tensor.storage_offset()), tuple(sorted(_dims(tensor)))


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in dims if size > 1 and stride]


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the dims lie one within the other; those that repeat elements do not count."""
    expected = 1
    for size, stride in sorted(_dims(tensor), key=lambda dim: dim[1]):
        if stride != expected:
            return False
        expected *= size
    return True
