"""A spec is all that planning needs to know of one tensor: its shape, its dtype and its layout."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from reshard.dtypes import canonical_dtype, itemsize
from reshard.layout.fingerprint import fingerprint
from reshard.layout.layout import Layout, check_shape

__all__ = ["TensorSpec"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """Shape, dtype and layout of one tensor; equal if the same ranks hold the same elements.

    >>> from reshard.layout.mesh import Mesh
    >>> spec = TensorSpec(shape=(8, 4), dtype="bf16", layout=Layout(Mesh(tp=2), "tp -"))
    >>> spec.dtype, spec.num_bytes
    ('bfloat16', 64)
    >>> spec == TensorSpec((8, 4), "bfloat16", Layout(Mesh(x=2), "x[4,4] ..."))
    True
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(index, self.shape)))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_shape(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, once."""
        size = itemsize(self.dtype)
        for length in self.shape:
            size *= length
        return size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        return self.layout == other.layout or self.layout.same_as(other.layout, self.shape)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, fingerprint(self.layout, self.shape)))
