"""What a rank must hold after a move: numpy arithmetic, torch's casts, and the oracle's indices.

Nothing here comes from reshard: layouts are read by `tests.oracle`, which has its own parser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from tests import generate
from tests.cases import Case

SMALL_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that are added up in float32."""

MOVED = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
ADDED = (*MOVED[1:14], *SMALL_FLOATS, "bfloat16", "float32")
"""What is added up in tests; some more often."""
CAST_TO = (
    "float32", "float64", "bfloat16", "float16", "int32", "int64", "int16", "complex64",
    "float8_e4m3fn",
)  # fmt: skip


@dataclass(frozen=True)
class Moved:
    """One tensor: how it is cut before and after, and its dtype at both ends."""

    case: Case
    cast: str

    @property
    def op(self) -> str | None:
        """The reduction that the move does; None if it does none."""
        pending, _ = self.case.want.addends()
        return None if pending else self.case.have.addends()[0]

    def values(self, seed: int) -> torch.Tensor:
        """The source: one row of elements per addend."""
        case, rng = self.case, np.random.default_rng(seed)
        kind: torch.dtype = getattr(torch, case.dtype)
        rows = (case.have.num_addends, math.prod(case.shape))
        if self.op is None and self.cast == case.dtype:
            most = 2 if kind == torch.bool else 256
            drawn = rng.integers(0, most, (rows[0], rows[1] * kind.itemsize), dtype=np.uint8)
            return torch.from_numpy(drawn.reshape(-1)).view(kind).reshape(rows)
        if self.op == "prod" or not (kind.is_floating_point or kind.is_complex):
            return torch.from_numpy(rng.integers(0, 4, rows)).to(kind)
        # No casts of negative numbers to unsigned ones: they are not defined.
        return torch.from_numpy(np.abs(rng.normal(0.0, 3.0, rows))).to(kind)

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The destination's value of every addend that it keeps, of its dtype."""
        if self.op is not None:
            values = _reduced(self.op, values)[None]
        if values.is_complex() and not getattr(torch, self.cast).is_complex:
            values = values.real
        return values.to(getattr(torch, self.cast))

    def given(self, values: torch.Tensor, rank: int) -> torch.Tensor | None:
        """A rank's local source tensor; None if it is no holder."""
        return _cut(self.case.have, self.case.shape, values, rank)

    def wanted(self, values: torch.Tensor, rank: int) -> torch.Tensor | None:
        """A rank's local destination tensor, of reduced values; None if it gets none."""
        return _cut(self.case.want, self.case.shape, values, rank)


def _cut(side, shape: tuple[int, ...], values: torch.Tensor, rank: int) -> torch.Tensor | None:
    indices = side.held(shape).get(rank)
    if indices is None:
        return None
    row = values[side.addends()[1][rank] if len(values) > 1 else 0]
    row = row.clone(memory_format=torch.contiguous_format)
    if not row.numel():
        return torch.empty(indices.shape, dtype=values.dtype)
    elements = row.view(torch.uint8).reshape(row.numel(), row.element_size()).numpy()
    picked = torch.from_numpy(elements[indices.reshape(-1)].reshape(-1))
    return picked.view(values.dtype).reshape(indices.shape)


def _reduced(op: str, addends: torch.Tensor) -> torch.Tensor:
    """Add up in order, in the accumulation dtype, and divide there; nothing is rounded."""
    small = str(addends.dtype).removeprefix("torch.") in SMALL_FLOATS
    rows = (addends.float() if small else addends).numpy()
    act = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    total = rows[0]
    for row in rows[1:]:
        total = act[op](total, row)
    if op == "avg":
        count = np.asarray(len(rows), dtype=rows.dtype)
        divide = np.floor_divide if np.issubdtype(rows.dtype, np.integer) else np.divide
        total = divide(total, count)
    return torch.from_numpy(np.ascontiguousarray(total))


def random_moved(rng: Random, num_ranks: int) -> Moved:
    """A random pair of layouts on these ranks, with random dtypes."""
    while True:
        case = generate.random_case(rng, within=range(num_ranks))
        if case.error is None:
            break
    op = case.have.addends()[0]
    dtype = rng.choice(MOVED if op is None else ADDED)
    if op in ("max", "min") and dtype.startswith("complex"):
        dtype = "float32"
    cast = rng.choice(CAST_TO) if generate.chance(rng, 25) else dtype
    if dtype == "uint32" and cast != dtype:
        cast = "int64"
    return Moved(Case(case.have, case.want, case.shape, dtype, case.memory), cast)
