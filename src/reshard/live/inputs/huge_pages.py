"""Huge pages for large tensors that are moved repeatedly.

The kernel copies between two processes page by page. With pages of 2 MiB instead of 4 KiB a move of
64 MiB takes a third less time (``benchmarks/reports/special_cases.md``). They are not requested
where the system gives huge pages to every process or to none, nor for new memory, where a huge page
may take long to get.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["RepeatedTensors"]

MIN_BYTES = 4 << 20
"""Smaller tensors are left alone; numpy requests huge pages from the same size on."""

MADV_COLLAPSE = 25
"""Not in Python's mmap: since Linux 6.1."""


class RepeatedTensors:
    """Detects large tensors that are given again at the same addresses."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """``sizes`` are the base numbers of tensors, and their bytes."""
        self._large = [number for number, size in sizes if size >= MIN_BYTES]
        self._last: list[int] = []
        self._times = 0

    def note(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Note a call; in the second one with the same tensors these get huge pages."""
        if not self._large:
            return
        large = [tensors[number] for number in self._large if number in tensors]
        places = [tensor.data_ptr() for tensor in large]
        self._times = self._times + 1 if places == self._last else 0
        self._last = places
        if self._times == 1 and _are_on_request():
            for tensor in large:
                _collapse(tensor)


def _collapse(tensor: torch.Tensor) -> None:
    """Move a tensor that is in use to huge pages; its values and its address stay.

    Costs about as much as to copy it. Where memory is short the kernel leaves it as it is.
    """
    if tensor.is_cpu and tensor.is_contiguous():
        page, start = mmap.PAGESIZE, tensor.data_ptr()
        first, last = -(-start // page) * page, (start + tensor.nbytes) // page * page
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call(first, last - first, MADV_COLLAPSE)


@lru_cache(maxsize=1)
def _are_on_request() -> bool:
    """Whether this system gives huge pages to processes that request them."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[madvise]" in setting
