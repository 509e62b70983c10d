"""Element types of tensors, by torch's names: their sizes, and casts and ordered sums with numpy.

numpy lacks bfloat16 and the 8-bit floats: they are stored as unsigned integers. Casts to them round
to nearest, ties to even, and follow torch where a value is too large: float8_e4m3fn saturates,
float8_e5m2 becomes infinite, the fnuz types NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.errors import DtypeError, PlanError
from reshard.text import quoted

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element."""

_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "fp64": "float64", "double": "float64", "long": "int64", "int": "int32",
    "fp8": "float8_e4m3fn", "f16": "float16", "f64": "float64",
}  # fmt: skip


def canonical_dtype(dtype: object) -> str:
    """The one name of a dtype; accepts ``torch.bfloat16``, numpy dtypes and short names.

    >>> canonical_dtype("bf16"), canonical_dtype("torch.float32")
    ('bfloat16', 'float32')
    """
    named = getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    name = str(named).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in ITEMSIZE:
        raise DtypeError(f"{quoted(dtype)} is not a dtype: use one of {' '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: str) -> int:
    return ITEMSIZE[dtype]


_LOSSY = {
    ("int32", "complex64"), ("uint32", "complex64"), ("int64", "complex128"),
    ("uint64", "complex128"), ("float8_e8m0fnu", "float16"),
}  # fmt: skip
"""Casts to a wider dtype that cannot be undone."""


def wire_dtype(have: str, want: str) -> str:
    """The dtype that travels: the narrower of the two, the destination's where they tie.

    What is passed on is cast back from the destination's dtype, so where that would lose anything
    the destination's dtype travels.

    >>> wire_dtype("float32", "bfloat16"), wire_dtype("bfloat16", "float32")
    ('bfloat16', 'bfloat16')
    """
    narrower = ITEMSIZE[have] < ITEMSIZE[want] and (have, want) not in _LOSSY
    return have if narrower else want


def accumulator(dtype: str) -> str:
    """The dtype in which addends of this dtype are added up: halves add in float32."""
    if dtype == "complex32":
        return "complex64"
    small = dtype.startswith("float8") or dtype in ("float16", "bfloat16")
    return "float32" if small else dtype


_LACKING = {
    name for name in ITEMSIZE if name.startswith("float8") or name in ("bfloat16", "complex32")
}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that stores this dtype: itself, or unsigned integers of its size."""
    import numpy as np

    return np.dtype(f"u{ITEMSIZE[dtype]}" if dtype in _LACKING else dtype)


def reduce_in_order(op: str, addends: Sequence[Array], dtype: str, want: str) -> Array:
    """Add up (or multiply, ...) addends one after the other, halves in float32.

    What comes out is divided there, for a mean, and rounded once: to the wanted dtype.
    """
    import numpy as np

    wide = accumulator(dtype)
    combine = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)
    total = cast(addends[0], dtype, wide).copy()
    for addend in addends[1:]:
        total = combine(total, cast(addend, dtype, wide))
    if op == "avg":
        whole = np.issubdtype(total.dtype, np.integer)
        total = total // len(addends) if whole else total / len(addends)
    return cast(total.astype(storage_dtype(wide), copy=False), wide, want)


BLOCK = 1 << 16  # elements that are cast at a time: what numpy makes on the way stays small

# Bits of the mantissa, and bias of the exponent.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
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
    import numpy as np

    moved_only = [dtype for dtype in (have, want) if dtype in ("float8_e8m0fnu", "complex32")]
    from_complex, to_complex = have.startswith("complex"), want.startswith("complex")
    if have == want or (from_complex and to_complex and not moved_only):
        return
    if moved_only:
        reason = f"{moved_only[0]} is only moved as it is"
    elif from_complex:
        reason = "the imaginary parts would be lost; use a complex dtype"
    elif to_complex:
        reason = "real numbers stay real; use a floating-point dtype"
    elif is_float(want) or (not is_float(have) and np.can_cast(have, want, "safe")):
        return
    elif is_float(have):
        reason = "fractions would be lost; use a floating-point dtype"
    else:
        reason = f"{want} does not hold every value of {have}; use a wider one"
    raise DtypeError(f"{what}{': ' if what else ''}{have} cannot be cast to {want}: {reason}")


def cast_into(source: Array, have: str, target: Array, want: str) -> None:
    """Cast stored elements into an array of the same shape, a few at a time."""
    import numpy as np

    flat, result = source.reshape(-1), target.reshape(-1)
    for at in range(0, flat.size, BLOCK):
        part = flat[at : at + BLOCK].view(storage_dtype(have))
        with np.errstate(over="ignore", invalid="ignore"):
            result[at : at + BLOCK] = cast(part, have, want).view(result.dtype)


def cast(array: Array, have: str, want: str) -> Array:
    """Convert stored elements from one dtype to another."""
    import numpy as np

    if have == want:
        return array
    if have in _FLOAT8:
        return cast(_float8_values(have)[array], "float32", want)
    if have == "bfloat16":
        wide = np.asarray(array).astype(np.uint32)
        wide <<= 16
        return cast(wide.view(np.float32), "float32", want)
    if want == "bfloat16":
        return _to_bfloat16(cast(array, have, "float32"))
    if want in _FLOAT8:
        return _to_float8(cast(array, have, "float32"), want)
    if have in _LACKING or want in _LACKING:
        lacking, other = (have, want) if have in _LACKING else (want, have)
        raise PlanError(
            f"numpy has no {lacking}: simulate moves it as bytes and cannot cast it to or from "
            f"{other}; run the plan live"
        )
    return array.astype(want)


def _to_bfloat16(array: Array) -> Array:
    """The upper half of each float32, rounded; a NaN stays one."""
    import numpy as np

    array = np.asarray(array, dtype=np.float32)
    bits = array.view(np.uint32)
    rounded = np.asarray(bits >> np.uint32(16))  # a number, of a tensor without dims
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
    import numpy as np

    bits = array.view(np.uint32)
    at = bits >> np.uint32(15)
    at &= np.uint32(0x1FFFE)
    at |= (bits & np.uint32(0xFFFF)) != 0
    return np.asarray(_float8_codes(want)[at])


@lru_cache(maxsize=8)
def _float8_codes(want: str) -> Array:
    """The codes of all upper halves of a float32, followed by zeros and by something else.

    That suffices: where two codes are equally near, and the even one is taken, the float32 ends in
    zeros.
    """
    import numpy as np

    halves = np.arange(1 << 17, dtype=np.uint32)
    bits = (halves >> np.uint32(1)) << np.uint32(16) | (halves & np.uint32(1)) << np.uint32(15)
    numbers = bits.view(np.float32)
    values = _float8_values(want).astype(np.float64)
    top = int(np.flatnonzero(np.isfinite(values[:128]))[-1])
    finite = values[: top + 1]
    middles = (finite[1:] + finite[:-1]) / 2
    # One step past the largest value rounds up to what would be the next one.
    middles = np.append(middles, finite[-1] + (finite[-1] - finite[-2]) / 2)
    size = np.abs(numbers.astype(np.float64))
    codes = np.searchsorted(middles, size, side="left")
    tie = codes < np.searchsorted(middles, size, side="right")
    codes += tie & (codes % 2 == 1)
    too_large = {"float8_e4m3fn": top, "float8_e5m2": 0x7C}.get(want, 0x80)
    codes = np.where(codes > top, too_large, codes)
    # The only NaN of the fnuz types is where the others have a negative zero.
    is_fnuz = want.endswith("fnuz")
    codes = np.where(np.isnan(numbers), 0x80 if is_fnuz else 0x7F, codes)
    has_sign = (codes > 0) & (codes < 0x80) if is_fnuz else True
    return np.asarray(codes + 128 * (np.signbit(numbers) & has_sign), dtype=np.uint8)


@lru_cache(maxsize=8)
def _float8_values(dtype: str) -> Array:
    import numpy as np

    bits, bias = _FLOAT8[dtype]
    exponent, mantissa = np.divmod(np.arange(128), 1 << bits)
    sizes = np.ldexp((exponent > 0) + mantissa / (1 << bits), np.maximum(exponent, 1) - bias)
    values = np.concatenate([sizes, -sizes])
    # Infinities and NaNs, which each of the dtypes has elsewhere.
    if dtype.endswith("fnuz"):
        values[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return np.asarray(values, dtype=np.float32)
