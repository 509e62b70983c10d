"""The element types a tensor may have, by the names torch gives them: how many bytes is one?"""

from __future__ import annotations

from reshard.errors import DtypeError, quoted

__all__ = ["ITEMSIZE", "accumulator", "canonical_dtype", "itemsize", "wire_dtype"]

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
    """Bytes of one element of a canonical dtype."""
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
    small = dtype.startswith("float8") or dtype in ("float16", "bfloat16")
    return "float32" if small else dtype
