"""Huge pages under large tensors that are moved again and again.

The kernel copies between two processes page by page. With pages of 2 MiB instead of 4 KiB a move
into the memory of another process takes a fifth less time (``benchmarks/reports/move.md``). Where
the system gives huge pages to every process, or to none, nothing is asked for; nor for new memory,
where a huge page may take long to get.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["MIN_BYTES", "RepeatedTensors"]

MIN_BYTES = 4 << 20
"""Smaller tensors are left alone; numpy asks for huge pages from the same size on."""

MADV_COLLAPSE = 25
"""Not in Python's mmap: since Linux 6.1."""


class RepeatedTensors:
    """Notices large tensors that come again at the same addresses."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """``sizes`` are the base numbers of tensors, and their bytes."""
        self._large = [number for number, size in sizes if size >= MIN_BYTES]
        self._last: list[int] = []
        self._times = 0

    def note(self, addresses: Sequence[int], tensors: dict[int, torch.Tensor]) -> None:
        """Note a call; in the second one with the same tensors these get huge pages."""
        places = [addresses[number] for number in self._large]
        self._times = self._times + 1 if places == self._last else 0
        self._last = places
        if self._times == 1 and _are_on_request():
            for number in self._large:
                if number in tensors:
                    _collapse(tensors[number])


def _collapse(tensor: torch.Tensor) -> None:
    """Put a tensor that is in use on huge pages; its values and its address stay.

    Costs about as much as to copy it. Where memory is short the kernel leaves it as it is.
    """
    if tensor.is_cpu and tensor.is_contiguous():
        page, start = mmap.PAGESIZE, tensor.data_ptr()
        first, last = -(-start // page) * page, (start + tensor.nbytes) // page * page
        _madvise()(first, last - first, MADV_COLLAPSE)


@lru_cache(maxsize=1)
def _are_on_request() -> bool:
    """Whether this system gives huge pages to processes that ask."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[madvise]" in setting


@lru_cache(maxsize=1)
def _madvise() -> Any:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
