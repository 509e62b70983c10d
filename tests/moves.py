"""Run a plan on known values and compare every rank with the oracle: what the tests share.

Layouts are read back from their text (or their boxes) by the oracle, so that what a rank should
hold never comes from the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

import reshard as rs
from reshard.layout.layout import BoxLayout
from reshard.rules import Rules
from reshard.rules.models import preset, tensors
from tests import bounds, oracle
from tests.cases import DTYPES
from tests.checks import same, storage

Values = Mapping[str, np.ndarray]


def held(layout: rs.Layout, shape: tuple[int, ...]) -> oracle.Held:
    """The flat indices that every rank holds, as the oracle reads the layout."""
    if isinstance(layout, BoxLayout):
        boxes = {r: [(b.start, b.stop) for b in listed] for r, listed in layout.boxes.items()}
        return oracle.local_indices_of_boxes(shape, boxes)
    return oracle.local_indices(str(layout.mesh), str(layout), shape)


def counting(shape: tuple[int, ...], dtype: str = "int64", first: int = 0) -> np.ndarray:
    """A tensor of different values where the dtype can count that far."""
    values = np.arange(first, first + math.prod(shape))
    most = {"bool": 2, "uint8": 251, "int8": 120, "float16": 2039}.get(dtype, 1 << 23)
    return (values % most).reshape(shape).astype(storage(dtype))


def values_of(specs: Mapping[str, rs.TensorSpec]) -> dict[str, np.ndarray]:
    """A value for every tensor; no two tensors begin alike."""
    return {
        name: counting(spec.shape, spec.dtype, 7 * number)
        for number, (name, spec) in enumerate(specs.items())
    }


def given(specs: Mapping[str, rs.TensorSpec], values: Values) -> dict[int, dict[str, np.ndarray]]:
    """What every rank holds of these values."""
    arrays: dict[int, dict[str, np.ndarray]] = {}
    for name, spec in specs.items():
        for rank, local in oracle.cut(values[name], held(spec.layout, spec.shape)).items():
            arrays.setdefault(rank, {})[name] = local
    return arrays


def check_move(
    plan: rs.Plan, values: Values | None = None, expected: Values | None = None
) -> rs.SimulationReport:
    """Prove and simulate a plan; every rank must end with its cut of what is expected.

    Without values every source tensor counts; without expectations tensors keep their values.
    """
    plan.check()
    values = values_of(plan.have) if values is None else values
    expected = values if expected is None else expected
    out, report = rs.simulate(plan, given(plan.have, values), report=True)
    for name, spec in plan.want.items():
        wanted = oracle.cut(expected[name], held(spec.layout, spec.shape))
        for rank, local in wanted.items():
            same(out[rank][name], local, rank)
    check_counts(plan, report)
    return report


def check_counts(plan: rs.Plan, report: rs.SimulationReport) -> None:
    """What the plan states is what happened, and staging stayed under the cap."""
    summary = plan.summary()
    assert report.wire_bytes == summary.wire_bytes
    assert report.num_messages == summary.num_messages
    assert report.num_rounds == summary.num_rounds
    peak = max(report.peak_bytes.values(), default=0)
    assert peak <= summary.peak_bytes <= plan.memory


def needed_bytes(plan: rs.Plan) -> int:
    """The least that must travel when every tensor moves on its own: wanted and not held."""
    total = 0
    for name, want in plan.want.items():
        have, size = plan.have[name], math.prod(want.shape)
        missing = bounds.needed_elements(
            held(have.layout, have.shape), held(want.layout, want.shape), size
        )
        total += missing * min(DTYPES[have.dtype], DTYPES[want.dtype])
    return total


def first_hand(plan: rs.Plan) -> dict[int, int]:
    """Bytes that every rank reads from its source tensors and sends."""
    return {
        rank: sum(step.num_bytes for step in plan.for_rank(rank).sends if step.hop == 0)
        for rank in plan.ranks
    }


def least_of_busiest(plan: rs.Plan) -> float:
    """The LP optimum of the busiest sender over all tensors of a plan, in bytes."""
    missing: dict[tuple[int, ...], int] = {}
    for name, want in plan.want.items():
        have, size = plan.have[name], math.prod(want.shape)
        itemsize = min(DTYPES[have.dtype], DTYPES[want.dtype])
        found = bounds.missing_by_holders(
            held(have.layout, have.shape), held(want.layout, want.shape), size
        )
        for holders, count in found.items():
            missing[holders] = missing.get(holders, 0) + count * itemsize
    return bounds.lp_balance(missing)


def model_plan(
    model: str, have: str, want: str, fsdp: str | None = None, **more: object
) -> rs.Plan:
    """A plan for all tensors of a model, from FSDP over an axis to copies on a mesh."""
    shapes = tensors(model)
    sides = []
    for mesh, axes in ((rs.Mesh.parse(have), fsdp), (rs.Mesh.parse(want), None)):
        replicate = " ".join(axis for axis in mesh.axes if axis != axes)
        rules = Rules.load(config=preset(model), fsdp=axes, replicate=replicate)
        layouts = rules.layouts({name: s for name, (s, _) in shapes.items()}, mesh)
        sides.append({n: rs.TensorSpec(s, d, layouts[n]) for n, (s, d) in shapes.items()})
    return rs.plan(*sides, **more)  # type: ignore[arg-type]
