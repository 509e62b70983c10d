"""Where two tensors differ, and by how much; read side by side, window by window.

Entries that are not tensors are compared as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.checkpoint.integrity.checksums import sum_of
from reshard.checkpoint.transfer.source import Source, StoredReader
from reshard.checkpoint.transfer.windows import Buffers, bits_differ
from reshard.checkpoint.transfer.workers import Budget, in_order
from reshard.dtypes import cast_into
from reshard.layout.box import Box

__all__ = ["Difference", "between", "difference", "differing_objects", "is_number"]

Array = np.ndarray[Any, Any]

BLOCK = 1 << 16
"""Elements that are converted to numbers at a time, as numbers take more memory."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one shape differ."""

    count: int
    """Elements whose bits differ."""
    first: tuple[int, ...]
    """The first of them in row-major order."""
    box: Box
    """The smallest box around all of them."""
    largest: float | int | None
    """The largest absolute difference of two numbers; None if only NaNs differ."""

    def __or__(self, later: Difference) -> Difference:
        """Both together; ``later`` comes after this one in row-major order."""
        low = tuple(map(min, self.box.start, later.box.start))
        high = tuple(map(max, self.box.stop, later.box.stop))
        known = [each.largest for each in (self, later) if each.largest is not None]
        return Difference(
            self.count + later.count, self.first, Box(low, high), max(known, default=None)
        )


def difference(left: StoredReader, right: StoredReader, budget: Budget) -> Difference | None:
    """Compare two stored tensors of one shape; None if they are equal.

    Tensors of the same dtype are compared bit by bit, others as numbers.
    """
    dtypes = left.tensor.dtype, right.tensor.dtype

    def work(box: Box, buffers: tuple[Buffers, Buffers]) -> Difference | None:
        return between(left.read(box, buffers[0]), right.read(box, buffers[1]), dtypes, box)

    def make() -> tuple[Buffers, Buffers]:
        return Buffers(budget.window, casts=False), Buffers(budget.window, casts=False)

    wider = max(left, right, key=lambda side: side.tensor.num_bytes)
    total: Difference | None = None
    for _, found in in_order(work, wider.rows(budget.window), budget.workers, make):
        if found is not None:
            total = found if total is None else total | found
    return total


def between(left: Array, right: Array, dtypes: tuple[str, str], box: Box) -> Difference | None:
    """How two arrays of raw elements of a box differ; None if they are equal."""
    is_one = dtypes[0] == dtypes[1]
    apart = bits_differ(left, right) if is_one else _values_differ(left, right, dtypes)
    if not apart.any():
        return None
    low, high = [], []
    for dim in range(apart.ndim):
        other = tuple(d for d in range(apart.ndim) if d != dim)
        here = np.flatnonzero(apart.any(axis=other))
        low.append(int(here[0]) + box.start[dim])
        high.append(int(here[-1]) + 1 + box.start[dim])
    at = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
    first = tuple(int(index) + start for index, start in zip(at, box.start, strict=True))
    largest = max(_distances(left, right, apart, dtypes), default=None)
    count = int(np.count_nonzero(apart))
    return Difference(count, first, Box(tuple(low), tuple(high)), largest)


def _values_differ(left: Array, right: Array, dtypes: tuple[str, str]) -> Array:
    """Which elements differ as numbers; all NaNs are equal."""
    apart = np.empty(left.shape, dtype=bool)
    flat, pair = apart.reshape(-1), (left.reshape(-1), right.reshape(-1))
    for at in range(0, len(flat), BLOCK):
        one, two = (
            _as_float(side[at : at + BLOCK], dtype)
            for side, dtype in zip(pair, dtypes, strict=True)
        )
        flat[at : at + BLOCK] = (one != two) & ~(np.isnan(one) & np.isnan(two))
    return apart


def _distances(
    left: Array, right: Array, apart: Array, dtypes: tuple[str, str]
) -> Iterator[float | int]:
    """The largest distance in each block that has differing elements."""
    whole = dtypes[0] == dtypes[1] and dtypes[0].startswith(("int", "uint", "bool"))
    flat = left.reshape(-1), right.reshape(-1), apart.reshape(-1)
    for at in range(0, apart.size, BLOCK):
        one, two, differ = (each[at : at + BLOCK] for each in flat)
        pair = one[differ], two[differ]
        if not len(pair[0]):
            continue
        if whole:
            yield _whole_distance(*pair, dtypes[0])
        elif all(map(is_number, dtypes)):
            one, two = (_as_float(side, dtype) for side, dtype in zip(pair, dtypes, strict=True))
            with np.errstate(invalid="ignore", over="ignore"):
                far = np.abs(one - two)
            far = far[~np.isnan(far)]
            if len(far):
                yield float(far.max())


def is_number(dtype: str) -> bool:
    """Whether elements of a dtype can be converted to numbers and subtracted."""
    return dtype not in ("complex32", "float8_e8m0fnu")


def _whole_distance(left: Array, right: Array, dtype: str) -> int:
    """The largest distance of integers; exact, also where it does not fit into int64."""
    kind = "u1" if dtype == "bool" else f"{'u' if dtype.startswith('u') else 'i'}{left.itemsize}"
    one, two = left.view(kind), right.view(kind)
    high, low = np.maximum(one, two), np.minimum(one, two)
    with np.errstate(over="ignore"):
        return int((high - low).view(f"u{left.itemsize}").max())


def _as_float(array: Array, dtype: str) -> Array:
    want = "complex128" if dtype.startswith("complex") else "float64"
    result = np.empty(array.shape, want)
    cast_into(array, dtype, result, want)
    return result


def differing_objects(left: Source, right: Source) -> Iterator[str]:
    """Entries that are not tensors and that differ, or that one side lacks.

    If one side has none, nothing is compared: most formats cannot hold such entries.
    """
    mine, theirs = left.catalog.objects, right.catalog.objects
    if not mine or not theirs:
        return
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs or not _same_object(left, right, name):
            yield name


def _same_object(left: Source, right: Source, name: str) -> bool:
    one, two = left.catalog.objects[name], right.catalog.objects[name]
    return one.size == two.size and _object_sum(left, name) == _object_sum(right, name)


def _object_sum(side: Source, name: str) -> bytes:
    entry = side.catalog.objects[name]
    return sum_of(side.storage, side.name(entry.file), entry.offset, entry.offset + entry.size)
