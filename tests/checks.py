"""The central property: simulating the plan equals cutting the value by the destination.

`check_case` asserts it for one case, together with the promises of a plan that one can count:
bytes on the wire, peak memory, and the load of the busiest sender.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests import bounds, oracle
from tests.cases import DTYPES, Case, Side, addend_values

if TYPE_CHECKING:
    import reshard as rs

NOT_IN_NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
MOST_OVER_OPTIMUM = 1.1


@dataclass(frozen=True)
class Figures:
    """What a case measured, in bytes. `busiest` and `optimum` are of first-hand sending."""

    wire: int
    least: int
    most: int
    busiest: int = 0
    optimum: float = 0.0

    @property
    def excess(self) -> float:
        """How far the busiest sender is over what is promised, in bytes."""
        return self.busiest - MOST_OVER_OPTIMUM * self.optimum


def storage(dtype: str) -> str:
    """The numpy dtype whose bytes stand for this dtype."""
    return NOT_IN_NUMPY.get(dtype, dtype)


def build(side: Side, shape: tuple[int, ...]) -> rs.Layout:
    import reshard as rs

    if side.boxes is None:
        return rs.Layout(rs.Mesh.parse(side.mesh), side.layout)
    boxes = {
        rank: [rs.Box(start, stop) for start, stop in listed] for rank, listed in side.boxes.items()
    }
    return rs.Layout.from_boxes(shape, boxes)


def source_values(case: Case) -> np.ndarray:
    """The global value of every addend; arange wherever the dtype can count that far."""
    if case.have.addends()[0] is not None:
        return addend_values(case)
    size = math.prod(case.shape)
    if DTYPES[case.dtype] > 1:
        return np.arange(size).astype(storage(case.dtype))[None]
    most = 2 if case.dtype == "bool" else 256
    return np.random.default_rng(0).integers(0, most, (1, size)).astype(storage(case.dtype))


def arrays(side: Side, shape: tuple[int, ...], values: np.ndarray) -> dict[int, np.ndarray]:
    """What every rank holds of these addends."""
    _, addend = side.addends()
    return {rank: values[addend[rank]][held] for rank, held in side.held(shape).items()}


def expected(case: Case, values: np.ndarray) -> dict[int, np.ndarray]:
    """What every destination rank must hold after the move."""
    op, _ = case.have.addends()
    pending, _ = case.want.addends()
    if op is not None and pending is None:
        values = oracle.reduce_addends(op, values)[None]
    return arrays(case.want, case.shape, values)


def plan_case(case: Case) -> rs.Plan:
    import reshard as rs

    have, want = build(case.have, case.shape), build(case.want, case.shape)
    options = {} if case.memory is None else {"memory": case.memory}
    return rs.plan(have, want, shape=case.shape, dtype=case.dtype, **options)


def wire_bounds(case: Case) -> tuple[int, int]:
    """The least and the most bytes that the plan may send."""
    size, itemsize = math.prod(case.shape), DTYPES[case.dtype]
    have, want = case.have.held(case.shape), case.want.held(case.shape)
    num = case.have.num_addends
    if num == 1:
        exact = bounds.needed_elements(have, want, size)
        return exact * itemsize, exact * itemsize
    _, has = case.have.addends()
    pending, wants = case.want.addends()
    if pending is None:
        least = bounds.fewest_elements_of_sum(num, have, want, size)
        return least * itemsize, bounds.most_elements_of_sum(num, want, size) * itemsize
    exact = sum(
        bounds.needed_elements(
            {rank: at for rank, at in have.items() if has[rank] == addend},
            {rank: at for rank, at in want.items() if wants[rank] == addend},
            size,
        )
        for addend in range(num)
    )
    return exact * itemsize, exact * itemsize


def optimum_of_busiest(case: Case) -> float:
    """The least bytes of the busiest sender, when every missing byte is sent once by a holder."""
    size = math.prod(case.shape)
    missing = bounds.missing_by_holders(
        case.have.held(case.shape), case.want.held(case.shape), size
    )
    return bounds.lp_balance(missing) * DTYPES[case.dtype]


def check_error(case: Case, error: str) -> None:
    """Planning must raise the error that the case expects."""
    import reshard as rs

    try:
        plan_case(case)
    except getattr(rs, error):
        return
    raise AssertionError(f"planned, but {error} was expected")


def same(found: np.ndarray, wanted: np.ndarray, rank: int) -> None:
    assert found.shape == wanted.shape, f"rank {rank}: shape {found.shape}, not {wanted.shape}"
    size = wanted.dtype.itemsize
    assert found.dtype.itemsize == size, f"rank {rank}: {found.dtype}, not {wanted.dtype}"
    found = found.view(wanted.dtype)
    wrong = np.argwhere(found != wanted)
    if wrong.size:
        at = tuple(wrong[0])
        raise AssertionError(
            f"rank {rank}: {len(wrong)} wrong elements, first at {tuple(map(int, at))}: "
            f"{found[at]}, not {wanted[at]}"
        )


def check_case(case: Case, balance: bool = True) -> Figures | None:
    """Assert the property for one case and return what it measured (None for expected errors).

    Solving for the best balance takes as long as all else, so it can be left out.
    """
    import reshard as rs

    if case.error is not None:
        check_error(case, case.error)
        return None
    plan = plan_case(case)
    plan.check()
    values = source_values(case)
    held = {r: {"tensor": part} for r, part in arrays(case.have, case.shape, values).items()}
    out, report = rs.simulate(plan, held, report=True)
    for rank, wanted in expected(case, values).items():
        same(out[rank]["tensor"], wanted, rank)
    return check_figures(case, plan.summary(), report, balance)


def check_figures(
    case: Case, summary: rs.Summary, report: rs.SimulationReport, balance: bool
) -> Figures:
    """The counts of a plan: bytes against their bounds, memory against its cap."""
    least, most = wire_bounds(case)
    wire = summary.wire_bytes
    assert report.wire_bytes == wire, f"simulated {report.wire_bytes} bytes, planned {wire}"
    assert least <= wire <= most, f"{wire} bytes on the wire, not within {least} to {most}"
    assert report.num_messages == summary.num_messages
    peak = max(report.peak_bytes.values(), default=0)
    assert peak <= summary.peak_bytes, f"simulated peak {peak}, stated {summary.peak_bytes}"
    if case.memory is not None:
        assert summary.peak_bytes <= case.memory, f"peak {summary.peak_bytes} over {case.memory}"
    if case.have.num_addends > 1:
        return Figures(wire, least, most)
    assert summary.lower_bound_bytes == least, f"{summary.lower_bound_bytes}, not {least}"
    if not balance:
        return Figures(wire, least, most)
    return Figures(wire, least, most, summary.busiest_sender_bytes, optimum_of_busiest(case))
