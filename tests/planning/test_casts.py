"""Casts on the way: with sums, with relays, and under a memory cap."""

from __future__ import annotations

import numpy as np
import pytest

import reshard as rs


def spec(shape: tuple[int, ...], dtype: str, layout: rs.Layout) -> rs.TensorSpec:
    return rs.TensorSpec(shape=shape, dtype=dtype, layout=layout)


@pytest.mark.parametrize("cap", [96, 300, 4096])
@pytest.mark.parametrize("dtypes", [("float64", "int8"), ("float32", "float16"), ("int8", "int64")])
def test_a_sum_with_a_cast_costs_what_it_states(dtypes: tuple[str, str], cap: int) -> None:
    mesh = rs.Mesh(dp=4)
    have = spec((64,), dtypes[0], rs.Layout(mesh, "... | sum dp"))
    plan = rs.plan({"g": have}, {"g": spec((64,), dtypes[1], rs.Layout(mesh, "..."))}, memory=cap)
    plan.check()
    addends = {r: {"g": (np.arange(64) % 7 + r).astype(dtypes[0])} for r in range(4)}
    out, report = rs.simulate(plan, addends, report=True)
    assert report.wire_bytes == plan.summary().wire_bytes
    assert max(report.peak_bytes.values()) <= plan.summary().peak_bytes <= cap
    expected = (np.arange(64) % 7 * 4 + 6).astype(dtypes[1])
    assert all((out[rank]["g"] == expected).all() for rank in range(4))


@pytest.mark.parametrize("dtypes", [("int32", "complex64"), ("int64", "complex128")])
def test_replicas_agree_after_a_cast(dtypes: tuple[str, str]) -> None:
    """What is passed on must not be rounded a second time."""
    have = spec((8,), dtypes[0], rs.Layout(rs.Mesh(tp=1), "tp"))
    want = spec((8,), dtypes[1], rs.Layout(rs.Mesh(r=4, ranks=[1, 2, 3, 4]), "..."))
    value = np.full(8, np.iinfo(dtypes[0]).max, dtype=dtypes[0])
    out = rs.simulate(rs.plan({"w": have}, {"w": want}), {0: {"w": value}})
    assert all((out[rank]["w"] == value.astype(dtypes[1])).all() for rank in (1, 2, 3, 4))
