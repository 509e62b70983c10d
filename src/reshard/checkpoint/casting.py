"""Elements of one dtype turned into another with numpy, also those that numpy lacks.

bfloat16 and the 8-bit floats round to the nearest, ties to even, and all follow torch where a value
is too large: float8_e4m3fn keeps its largest value, float8_e5m2 becomes infinite, the others NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from reshard.errors import DtypeError
from reshard.run.numpy_dtypes import cast, storage_dtype

__all__ = ["cast_into", "check_cast", "is_float"]

Array = np.ndarray[Any, Any]

BLOCK = 1 << 16
"""Elements that are cast at a time: what numpy makes on the way stays small."""

# Bits of the exponent and of the mantissa, bias of the exponent.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


def is_float(dtype: str) -> bool:
    """Whether a dtype is for real numbers, of which a cast keeps about the same.

    >>> is_float("bfloat16"), is_float("complex64"), is_float("int8")
    (True, False, False)
    """
    return dtype.startswith(("float", "bfloat"))


def check_cast(have: str, want: str, what: str = "") -> None:
    """Refuse a cast that cannot be done or would not keep values; ``what`` is cast.

    >>> check_cast("float32", "bfloat16")
    """
    reason = None if have == want else _objection(have, want)
    if reason is not None:
        of = f"{what}: " if what else ""
        raise DtypeError(f"{of}{have} cannot be cast to {want}: {reason}")


def _objection(have: str, want: str) -> str | None:
    """Why elements are not cast so; None if they may be."""
    alone = [dtype for dtype in (have, want) if dtype in ("float8_e8m0fnu", "complex32")]
    if alone:
        return f"{alone[0]} is only moved as it is"
    if have.startswith("complex"):
        kept = want.startswith("complex")
        return None if kept else "the imaginary parts would be lost; use a complex dtype"
    if want.startswith("complex"):
        return "real numbers stay real; use a floating-point dtype"
    if is_float(have):
        return None if is_float(want) else "fractions would be lost; use a floating-point dtype"
    if is_float(want) or np.can_cast(have, want, "safe"):
        return None
    return f"{want} does not hold every value of {have}; use a wider one"


def cast_into(source: Array, have: str, target: Array, want: str) -> None:
    """Cast stored elements into an array of the same shape, a few at a time."""
    flat, result = source.reshape(-1), target.reshape(-1)
    for at in range(0, flat.size, BLOCK):
        part = flat[at : at + BLOCK].view(storage_dtype(have))
        with np.errstate(over="ignore", invalid="ignore"):
            found = _cast(part, have, want)
        result[at : at + BLOCK] = found.view(result.dtype)


def _cast(array: Array, have: str, want: str) -> Array:
    if have in _FLOAT8:
        return _cast(_float8_values(have)[array], "float32", want)
    if have == "bfloat16":
        wide = array.astype(np.uint32)
        wide <<= 16
        return _cast(wide.view(np.float32), "float32", want)
    if want == "bfloat16":
        return _to_bfloat16(cast(array, have, "float32"))
    if want in _FLOAT8:
        return _to_float8(cast(array, have, "float32"), want)
    return cast(array, have, want)


def _to_bfloat16(array: Array) -> Array:
    """The upper half of each float32, rounded; a NaN stays one."""
    bits = array.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nans = np.isnan(array)
    if nans.any():
        result[nans] = 0x7FC0
    return result


def _to_float8(array: Array, want: str) -> Array:
    """A table knows the code for each upper half of a float32, and whether anything follows it."""
    bits = array.view(np.uint32)
    at = bits >> np.uint32(15)
    at &= np.uint32(0x1FFFE)
    at |= (bits & np.uint32(0xFFFF)) != 0
    codes: Array = _float8_codes(want)[at]
    return codes


@lru_cache(maxsize=8)
def _float8_codes(want: str) -> Array:
    """The codes of all upper halves of a float32, followed by zeros and by something else.

    That suffices: where two codes are equally near, the float32 ends in zeros.
    """
    halves = np.arange(1 << 17, dtype=np.uint32)
    bits = (halves >> np.uint32(1)) << np.uint32(16) | (halves & np.uint32(1)) << np.uint32(15)
    return _rounded_to_float8(bits.view(np.float32), want)


@lru_cache(maxsize=8)
def _float8_values(dtype: str) -> Array:
    """The number that each of the 256 codes stands for."""
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = np.where(exponent > 0, 1.0, 0.0) + mantissa / (1 << mantissa_bits)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    values = np.where(codes >= 128, -values, values)
    return _with_specials(values, dtype).astype(np.float32)


def _with_specials(values: Array, dtype: str) -> Array:
    """Infinities and NaNs, which each of the dtypes has elsewhere."""
    if dtype.endswith("fnuz"):
        values[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _rounded_to_float8(array: Array, want: str) -> Array:
    """The code of the nearest value; between two equally near ones, the even code."""
    values = _float8_values(want).astype(np.float64)
    top = int(np.flatnonzero(np.isfinite(values[:128]))[-1])
    finite = values[: top + 1]
    middles = (finite[1:] + finite[:-1]) / 2
    # One step past the largest value rounds up to what would be the next one.
    middles = np.append(middles, finite[-1] + (finite[-1] - finite[-2]) / 2)
    size = np.abs(array.astype(np.float64))
    codes = np.searchsorted(middles, size, side="left")
    tie = codes < np.searchsorted(middles, size, side="right")
    codes += tie & (codes % 2 == 1)
    return _finish_float8(array, codes, top, want)


def _finish_float8(array: Array, codes: Array, top: int, want: str) -> Array:
    """Signs, and what is too large or no number."""
    negative = np.signbit(array)
    if want == "float8_e5m2":
        codes = np.where(codes > top, 0x7C, codes)
        codes = np.where(np.isnan(array), 0x7F, codes) + 128 * negative
        return codes.astype(np.uint8)
    if want == "float8_e4m3fn":
        codes = np.where(np.isnan(array), 0x7F, np.minimum(codes, top)) + 128 * negative
        return codes.astype(np.uint8)
    codes = np.where(codes > 0, codes + 128 * negative, 0)
    return np.where((codes % 128 > top) | (codes > 255) | np.isnan(array), 0x80, codes).astype(
        np.uint8
    )
