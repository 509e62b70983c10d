"""Addends of any shape, strides and dtype: the same bits as added up whole, one after the other."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as rs
from reshard.dtypes import cast, reduce_in_order, storage_dtype
from reshard.live.copy import reduce
from tests.moves import check_counts

OPS = ("sum", "avg", "prod", "max", "min")
Array = np.ndarray


def some(rng: np.random.Generator, shape: list[int], order: list[int], dtype: str) -> Array:
    """Values of a dtype, laid out in memory with dims in another order."""
    values = np.asarray(rng.uniform(-3, 3, [shape[dim] for dim in order]), "float32")
    bits = cast(values, "float32", dtype).astype(storage_dtype(dtype)).reshape(values.shape)
    return bits.transpose([order.index(dim) for dim in range(len(order))])


@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    dtype=st.sampled_from(sorted(reduce.DIRECT)),
    op=st.sampled_from(OPS),
    count=st.integers(2, 5),
    slice_bytes=st.sampled_from([1, 16, 64, 1 << 18]),
    data=st.data(),
)
def test_slices_add_up_to_the_whole(
    shape: list[int], dtype: str, op: str, count: int, slice_bytes: int, data: st.DataObject
) -> None:
    if op == "avg" and dtype.startswith("int"):
        op = "sum"
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(count + 1)]
    addends = [some(rng, shape, order, dtype) for order in orders[1:]]
    kept = [addend.copy() for addend in addends]
    total = some(rng, shape, orders[0], dtype)
    with mock.patch.object(reduce, "SLICE_BYTES", slice_bytes):
        took = reduce.add_up(op, dtype, total, addends)
    assert took <= max(2 * slice_bytes, 8)  # halves are twice as wide, and one element is one
    assert np.array_equal(total, reduce_in_order(op, kept, dtype, dtype))
    assert all(np.array_equal(one, other) for one, other in zip(addends, kept, strict=True))


@pytest.mark.parametrize(
    ("dtype", "large", "small"),
    [("float32", 24, 0), ("bfloat16", 24, 0), ("float16", 15, -10), ("float64", 60, 0)],
)
def test_addends_are_added_in_their_order(dtype: str, large: int, small: int) -> None:
    """Powers of two so far apart that another order loses the small one."""
    rows = [[2.0**large], [-(2.0**large)], [2.0**small], [0.0]]
    addends = [cast(np.array(row), "float64", dtype) for row in rows]
    total = np.zeros_like(addends[0])
    reduce.add_up("sum", dtype, total, addends)
    assert cast(total, dtype, "float64").tolist() == [2.0**small]
    reduce.add_up("sum", dtype, total, [addends[at] for at in (0, 2, 1, 3)])
    assert cast(total, dtype, "float64").tolist() == [0.0]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_nothing_but_sums_is_written(op: str, count: int) -> None:
    """A peer that reads a tied tensor meanwhile sees nothing but final sums."""
    addends = [np.full((3, 4), 2.0 + n, "float32") for n in range(count)]
    total = reduce_in_order(op, addends, "float32", "float32")
    expected, act = total.copy(), reduce.OPS[op]

    def watched(one: Array, other: Array, out: Array) -> None:
        act(one, other, out=out)
        assert np.array_equal(total, expected)

    with mock.patch.dict(reduce.OPS, {op: watched}):
        reduce.add_up(op, "float32", total, addends)
    assert np.array_equal(total, expected)


@pytest.mark.parametrize("dtype", sorted(d for d in reduce.DIRECT if not d.startswith("int")))
def test_what_is_not_a_number_is_no_error(dtype: str) -> None:
    """As in torch: numpy would warn, which some turn into an error."""
    values = cast(np.array([np.nan, np.inf, 1.0], "float32"), "float32", dtype)
    other = cast(np.array([1.0, -np.inf, 2.0], "float32"), "float32", dtype)
    for op in ("sum", "max", "min"):
        total = np.zeros_like(values)
        reduce.add_up(op, dtype, total, [other, values])
        found = cast(total, dtype, "float32")
        assert np.isnan(found[0])
        assert np.isnan(found[1]) == (op == "sum")
        assert found[2] == {"sum": 3.0, "max": 2.0, "min": 1.0}[op]


@pytest.mark.parametrize("want", ["float32", "complex64", "float16", "bfloat16"])
@pytest.mark.parametrize("memory", [None, 96, 400])
@pytest.mark.parametrize("ranks_per_host", [None, 3])
def test_averages_are_rounded_once(
    want: str, memory: int | None, ranks_per_host: int | None
) -> None:
    """Also on replicas that get the average from another: it travels as the destination has it."""
    shape = (37,)
    have, whole = rs.Layout(rs.Mesh(dp=3), "- | avg dp"), rs.Layout(rs.Mesh(x=8), "-")
    plan = rs.plan(
        {"w": rs.TensorSpec(shape, "bfloat16", have)},
        {"w": rs.TensorSpec(shape, want, whole)},
        memory=memory,
        topology=rs.Topology(ranks_per_host=ranks_per_host) if ranks_per_host else None,
    )
    rows = np.random.default_rng(0).normal(0, 3, (3, *shape)).astype("float32")
    bits = [cast(row, "float32", "bfloat16") for row in rows]
    wide = [cast(row, "bfloat16", "float32") for row in bits]
    average = (wide[0] + wide[1] + wide[2]) / np.float32(3)
    found, report = rs.simulate(plan, {r: {"w": row} for r, row in enumerate(bits)}, report=True)
    for rank in range(8):
        assert np.array_equal(found[rank]["w"], cast(average, "float32", want)), rank
    check_counts(plan, report)
