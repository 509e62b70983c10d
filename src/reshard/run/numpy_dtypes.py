"""Dtypes on numpy: storage for those it lacks, casts between them, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.dtypes import ITEMSIZE, accumulator
from reshard.errors import PlanError

__all__ = ["cast", "reduce_in_order", "storage_dtype"]

Array = np.ndarray[Any, Any]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_LACKING = {
    name for name in ITEMSIZE if name.startswith("float8") or name in ("bfloat16", "complex32")
}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that stores this dtype: itself, or unsigned integers of its size."""
    return np.dtype(_UNSIGNED[ITEMSIZE[dtype]] if dtype in _LACKING else dtype)


def cast(array: Array, have: str, want: str) -> Array:
    """Convert stored elements from one dtype to another; bfloat16 by its bits."""
    if have == want:
        return array
    if want == "bfloat16":
        return _to_bfloat16(cast(array, have, "float32"))
    if have == "bfloat16":
        wide = (array.astype(np.uint32) << 16).view(np.float32)
        return wide if want == "float32" else cast(wide, "float32", want)
    for dtype in (have, want):
        if dtype in _LACKING:
            raise PlanError(
                f"numpy has no {dtype}: simulate moves it as bytes and cannot cast it to or from "
                f"{want if dtype == have else have}; run the plan live"
            )
    return array.astype(want)


def _to_bfloat16(array: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even; a NaN stays one."""
    bits = np.asarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded.astype(np.uint16))


def reduce_in_order(op: str, addends: Sequence[Array], dtype: str, want: str) -> Array:
    """Add up (or multiply, ...) addends one after the other, halves in float32.

    What comes out is divided there, for a mean, and rounded once: to the wanted dtype.
    """
    wide = accumulator(dtype)
    total = cast(addends[0], dtype, wide).copy()
    for addend in addends[1:]:
        other = cast(addend, dtype, wide)
        if op in ("sum", "avg"):
            total = total + other if total.dtype != bool else total | other
        elif op == "prod":
            total = total * other
        else:
            total = np.maximum(total, other) if op == "max" else np.minimum(total, other)
    if op == "avg":
        whole = np.issubdtype(total.dtype, np.integer)
        total = total // len(addends) if whole else total / len(addends)
    return cast(total.astype(storage_dtype(wide), copy=False), wide, want)
