"""The simulation refuses arrays that do not fit the plan."""

from __future__ import annotations

import numpy as np
import pytest

import reshard as rs

SERVERS = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "tp -")


@pytest.mark.parametrize(
    "array", [np.zeros((2, 4), np.int32), np.zeros((4, 2), np.float32), np.zeros(8, np.float32)]
)
def test_simulate_refuses_other_arrays(array: np.ndarray) -> None:
    plan = rs.plan(rs.Layout(rs.Mesh(dp=1), "..."), SERVERS, shape=(2, 4), dtype="float32")
    with pytest.raises(rs.PlanError, match=r'"tensor".*\(2, 4\)'):
        rs.simulate(plan, {0: {"tensor": array}})
