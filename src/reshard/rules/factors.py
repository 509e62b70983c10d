"""A large axis is read as two: tp=16 of a model with 8 kv heads as kv=8 and rep=2.

>>> factor = Factor("tp", ("kv", "rep"), "kv_heads", read_by="heads")
>>> factor.split(Mesh(dp=2, tp=16), {"kv_heads": 8, "heads": 32})
Mesh(dp=2, kv=8, rep=2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.errors import RulesError
from reshard.layout.mesh import MAX_RANKS, Mesh


@dataclass(frozen=True, slots=True)
class Factor:
    """``tp = { into = ["kv", "rep"], at_most = "kv_heads" }``: how a large axis is read."""

    axis: str
    into: tuple[str, str]
    at_most: str
    read_by: str | None = None
    """The number of what reads these, such as q heads; if it is another one, the axis must divide
    ``at_most``, or a rank would lack what it reads."""

    def split(self, mesh: Mesh, model: Mapping[str, int | None]) -> Mesh:
        """The mesh with two axes in the place of this one, if that is larger than its number."""
        at_most, size = model[self.at_most], mesh.axes.get(self.axis, 1)
        if not at_most or size <= at_most:
            self._check_readers(at_most, size, model.get(self.read_by or ""))
            return mesh
        if size % at_most:
            raise RulesError(
                f"{self.axis}={size} is not a multiple of {self.at_most}={at_most}: "
                f"use {self.axis}={size // at_most * at_most} or a divisor of {at_most}"
            )
        two = dict(zip(self.into, (at_most, size // at_most), strict=True))
        axes: dict[str, int] = {}
        for axis, count in mesh.axes.items():
            axes |= two if axis == self.axis else {axis: count}
        if len(axes) != len(mesh.axes) + 1:
            raise RulesError(f"mesh {mesh} has {self.axis} and also one of {' '.join(self.into)}")
        return Mesh(ranks=mesh.ranks, **axes)

    def _check_readers(self, at_most: int | None, size: int, readers: int | None) -> None:
        """Refuse a size of the axis that separates kv heads from the q heads that read them."""
        if not at_most or not readers or at_most % size == 0 or readers == at_most:
            return
        divisors = [one for one in range(1, min(at_most, MAX_RANKS) + 1) if at_most % one == 0]
        nearest = [one for one in divisors if one < size][-1:]
        nearest += [one for one in divisors if one > size][:1]
        raise RulesError(
            f"{self.axis}={size} does not divide {self.at_most}={at_most}: ranks would lack some "
            f"of the {self.at_most} that their part of the {readers} {self.read_by} reads; use "
            f"{' or '.join(f'{self.axis}={one}' for one in nearest)}"
        )

    def notes(self, mesh: Mesh, model: Mapping[str, int | None]) -> Iterator[str]:
        """What a reader should know of the axis on this mesh."""
        at_most, size = model[self.at_most] or 0, mesh.axes.get(self.axis, 1)
        if self.split(mesh, model) is not mesh:
            (first, second), copies = self.into, size // at_most
            yield (
                f"{self.axis}={size} is read as {first}={at_most} {second}={copies}, because "
                f"{self.at_most} is {at_most}: {copies} neighbours hold the same part of what is "
                f"cut by {first} alone"
            )
        elif at_most % size and self.read_by and model[self.read_by] is None:
            yield (
                f"warning: {self.axis}={size} does not divide {self.at_most}={at_most}: ranks may "
                f"lack some that they read; give {self.read_by}= to have this checked"
            )
