"""Run a plan on numpy arrays in one process, round by round, and count what happens.

This is the reference executor: short, slow and obviously right. Every other way to run a plan must
give the same arrays, bytes and messages.

    >>> import numpy as np
    >>> import reshard as rs
    >>> have, want = rs.Layout(rs.Mesh(dp=2), "dp -"), rs.Layout(rs.Mesh(tp=2), "- tp")
    >>> plan = rs.plan(have, want, shape=(2, 4), dtype="int64")
    >>> rows = {rank: {"tensor": np.arange(4).reshape(1, 4) + 10 * rank} for rank in (0, 1)}
    >>> rs.simulate(plan, rows)[1]["tensor"].tolist()
    [[2, 3], [12, 13]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np

from reshard.dtypes import accumulator, cast, itemsize, reduce_in_order, storage_dtype
from reshard.errors import PlanError, require_type
from reshard.layout.box import Box
from reshard.layout.boxlist import LocalPieces
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import Plan
from reshard.planning.rank import RankPlan, Step

Array = np.ndarray[Any, Any]
Arrays = Mapping[int, Mapping[str, Array]]


@dataclass(slots=True)
class SimulationReport:
    """What happened: to be compared with what the plan states."""

    wire_bytes: int = 0
    num_messages: int = 0
    num_rounds: int = 0
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """The most bytes that each rank staged in any round."""
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that each rank sent."""


@overload
def simulate(
    plan: Plan, arrays: Arrays, *, report: Literal[False] = False
) -> dict[int, dict[str, Array]]: ...
@overload
def simulate(
    plan: Plan, arrays: Arrays, *, report: Literal[True]
) -> tuple[dict[int, dict[str, Array]], SimulationReport]: ...
def simulate(plan: Plan, arrays: Arrays, *, report: bool = False) -> Any:
    """Move the arrays of all ranks along a plan; with ``report=True`` also say what it took.

    Dtypes that numpy lacks are arrays of unsigned integers of the same size.
    """
    require_type(plan, Plan, "simulate()", "give a plan, as rs.plan makes, and arrays by rank")
    require_type(arrays, Mapping, "the arrays to simulate", "give {rank: {name: array}}")
    machines = {rank: _Machine(plan, rank, arrays.get(rank, {})) for rank in plan.ranks}
    counts = SimulationReport(num_rounds=plan.num_rounds)
    for number in range(plan.num_rounds):
        _exchange(machines, number, counts)
    results = {rank: machine.want for rank, machine in machines.items() if machine.want}
    return (results, counts) if report else results


def _exchange(machines: Mapping[int, _Machine], number: int, counts: SimulationReport) -> None:
    """All ranks pack, then all unpack; a message is a list of arrays."""
    messages: dict[tuple[int, int], list[Array]] = {}
    for machine in machines.values():
        for step in machine.plan.sends.of_round(number):
            packed = machine.pack(step)
            messages.setdefault((step.source, step.destination), []).append(packed)
    for (source, destination), parts in messages.items():
        size = sum(part.nbytes for part in parts)
        counts.wire_bytes += size
        counts.num_messages += 1
        counts.sent_bytes[source] = counts.sent_bytes.get(source, 0) + size
        machines[source].staged += size
        machines[destination].staged += size
    for machine in machines.values():
        machine.finish(number, {s: m for (s, d), m in messages.items() if d == machine.rank})
        peak = counts.peak_bytes.get(machine.rank, 0)
        counts.peak_bytes[machine.rank] = max(peak, machine.staged)
        machine.staged = 0


class _Machine:
    """One simulated rank: its source arrays, its destination arrays, and what it stages."""

    def __init__(self, plan: Plan, rank: int, arrays: Mapping[str, Array]) -> None:
        if not isinstance(arrays, Mapping):
            raise PlanError(
                f"rank {rank} holds a {type(arrays).__name__}: give a dict of arrays by name for "
                f'every rank, such as {{0: {{"{next(iter(plan.have), "w")}": array}}}}'
            )
        self.rank = rank
        self.plan: RankPlan = plan.for_rank(rank)
        self.specs = (plan.have, plan.want)
        self.staged = 0
        self.local: dict[tuple[int, str], LocalPieces] = {}
        self.have = {
            name: _checked(name, rank, plan.have[name], array)
            for name, array in arrays.items()
            if name in plan.have
        }
        self.want = {
            name: np.zeros(spec.layout.local_shape(rank, spec.shape), storage_dtype(spec.dtype))
            for name, spec in plan.want.items()
            if spec.layout.holds(rank) is not None
        }

    def pack(self, step: Step) -> Array:
        side, name, box = 1, step.name, step.box
        if step.hop == 0:
            side, name, box = 0, step.have_name, step.have_box
        return cast(self._view(side, name, box), self.specs[side][name].dtype, step.dtype).copy()

    def finish(self, number: int, messages: Mapping[int, list[Array]]) -> None:
        """Copy what stays here, unpack what arrived, and add up addends in order."""
        arrived = {source: iter(parts) for source, parts in messages.items()}
        here = [(step, self.pack(step)) for step in self.plan.copies.of_round(number)]
        received = self.plan.receives.of_round(number)
        addends: dict[tuple[str, Box], list[tuple[Step, Array]]] = {}
        for step, part in [*here, *((step, next(arrived[step.source])) for step in received)]:
            if step.addend >= 0:
                addends.setdefault((step.name, step.box), []).append((step, part))
            else:
                self._write(step, cast(part, step.dtype, self.specs[1][step.name].dtype))
        for parts in addends.values():
            step = parts[0][0]
            have, want = self.specs[0][step.have_name], self.specs[1][step.name]
            op = have.layout.reduce[0] if have.layout.reduce else "sum"
            ordered = [part for _, part in sorted(parts, key=lambda one: one[0].addend)]
            self.staged += ordered[0].size * itemsize(accumulator(have.dtype))
            self._write(step, reduce_in_order(op, ordered, have.dtype, want.dtype))

    def _write(self, step: Step, value: Array) -> None:
        view = self._view(1, step.name, step.box)
        view[...] = value.reshape(view.shape)

    def _view(self, side: int, name: str, box: Box) -> Array:
        """A box of a local array, found through the piece that contains it."""
        arrays = (self.have, self.want)[side]
        if name not in arrays:
            raise PlanError(f'rank {self.rank} was given no array for "{name}", which it holds')
        if (side, name) not in self.local:
            spec = self.specs[side][name]
            pieces = spec.layout.pieces(self.rank, spec.shape)
            self.local[side, name] = LocalPieces(pieces, len(spec.shape))
        place = self.local[side, name].find(box)
        if place is None:
            raise PlanError(f'rank {self.rank} does not hold box {box} of "{name}"')
        flat = arrays[name].reshape(-1)
        strides = [stride * flat.itemsize for stride in place[1]]
        return np.lib.stride_tricks.as_strided(flat[place[0] :], box.shape, strides)


def _checked(name: str, rank: int, spec: TensorSpec, array: Array) -> Array:
    """The array as contiguous storage, if it has the shape and dtype that the spec says."""
    shape = spec.layout.local_shape(rank, spec.shape)
    dtype = storage_dtype(spec.dtype)
    array = np.asarray(array)
    lacking = dtype != spec.dtype
    fits = array.dtype.itemsize == dtype.itemsize if lacking else array.dtype == dtype
    if tuple(array.shape) != shape or not fits:
        raise PlanError(
            f"rank {rank} has an array of shape {array.shape} and dtype {array.dtype} for "
            f'"{name}" and its layout says {shape} and {spec.dtype}: give the local array'
        )
    return np.ascontiguousarray(array).reshape(-1).view(dtype)
