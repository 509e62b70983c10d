"""A move as plain data: two layouts as text or boxes, a shape, a dtype. Prints as code to paste."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests import bounds, oracle
from tests.oracle import Boxes, Held

DTYPES = {
    "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "bool": 1, "float16": 2,
    "bfloat16": 2, "float8_e4m3fn": 1, "int16": 2, "complex64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """Who holds a tensor: a mesh and a layout, or boxes on ranks."""

    mesh: str = ""
    layout: str = ""
    boxes: Boxes | None = None

    def held(self, shape: Sequence[int]) -> Held:
        if self.boxes is not None:
            return oracle.local_indices_of_boxes(shape, self.boxes)
        return oracle.local_indices(self.mesh, self.layout, shape)

    def addends(self) -> tuple[str | None, dict[int, int]]:
        """The operation of a pending sum and every rank's addend; every rank's is 0 without one."""
        if self.boxes is not None:
            return None, dict.fromkeys(self.boxes, 0)
        return oracle.addends(self.mesh, self.layout)

    @property
    def num_addends(self) -> int:
        return 1 if self.boxes is not None else oracle.num_addends(self.mesh, self.layout)

    def code(self, shape: Sequence[int]) -> str:
        """The call that makes this layout."""
        if self.boxes is None:
            return f"rs.Layout(rs.Mesh.parse({self.mesh!r}), {self.layout!r})"
        listed = ", ".join(
            f"{rank}: [{', '.join(f'rs.Box({start}, {stop})' for start, stop in boxes)}]"
            for rank, boxes in self.boxes.items()
        )
        return f"rs.Layout.from_boxes({tuple(shape)}, {{{listed}}})"


@dataclass(frozen=True)
class Case:
    """One tensor to move. `error` names the exception that planning must raise, if any."""

    have: Side
    want: Side
    shape: tuple[int, ...]
    dtype: str = "int64"
    memory: int | None = None
    error: str | None = None

    def snippet(self) -> str:
        """Code that plans this case; paste it anywhere."""
        memory = "" if self.memory is None else f", memory={self.memory}"
        return (
            "import reshard as rs\n"
            f"have = {self.have.code(self.shape)}\n"
            f"want = {self.want.code(self.shape)}\n"
            f"p = rs.plan(have, want, shape={self.shape}, dtype={self.dtype!r}{memory})\n"
            f"p.check()  # the whole property: tests.checks.check_case({self!r})\n"
        )


def covered(have: Side, want: Side, shape: tuple[int, ...]) -> bool:
    """Is all that the destination wants held by the source, every addend of it included?"""
    num_elements = math.prod(shape)
    have_held, want_held = have.held(shape), want.held(shape)
    _, have_addend = have.addends()
    want_op, want_addend = want.addends()
    for addend in range(have.num_addends):
        holding = {r: at for r, at in have_held.items() if have_addend[r] == addend}
        wanting = {r: at for r, at in want_held.items() if not want_op or want_addend[r] == addend}
        if not bounds.covered(holding, wanting, num_elements):
            return False
    return True


def addend_values(case: Case) -> np.ndarray:
    """Numbers for every addend of the source, such that every operation is exact."""
    num, size = case.have.num_addends, math.prod(case.shape)
    op, _ = case.have.addends()
    rng = np.random.default_rng(0)
    if op == "prod":
        return rng.choice([1, 2, -1], (num, size)).astype(case.dtype)
    return (rng.integers(-9, 9, (num, size)) * (num if op == "avg" else 1)).astype(case.dtype)


def row_bytes(case: Case) -> int:
    """The bytes of one row: the smallest piece that the planner need cut."""
    return math.prod(case.shape[1:]) * DTYPES[case.dtype]
