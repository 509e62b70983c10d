"""Memory of this process by address, as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["RAW", "Array", "array_at"]

Array = np.ndarray[Any, Any]

RAW = {
    size: np.dtype(kind)
    for size, kind in zip((1, 2, 4, 8, 16), ("u1", "u2", "u4", "u8", "c16"), strict=True)
}
"""The numpy dtype for elements of so many bytes that are only copied."""

FIRST_PAGE = 4096
"""Nothing is mapped below; and numpy takes a buffer at address 0 for no buffer."""


class _Everything:
    """The whole address space as one buffer, so that an array can be put at any address."""

    buffer: Any = (ctypes.c_char * ((1 << 62) - FIRST_PAGE)).from_address(FIRST_PAGE)


def array_at(
    address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int]
) -> Array:
    """The array at an address; strides in bytes. The caller keeps the memory alive."""
    return np.ndarray(shape, dtype, _Everything.buffer, address - FIRST_PAGE, strides)
