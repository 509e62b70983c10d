"""Windows cover every element once, for any two layouts; plans are made fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.catalog import StoredPiece, StoredTensor
from reshard.checkpoint.conversion.names import left_over, outlines_of
from reshard.checkpoint.output import OutputTensor
from reshard.checkpoint.piece_table import PieceTable, extents
from reshard.checkpoint.transfer.transfers import (
    Transfer,
    chunks_of,
    source_of,
    transfer_of,
)
from reshard.checkpoint.transfer.windows import Buffers, compare, fill, readable, writable
from reshard.errors import CoverageError, DamageError
from reshard.layout.box import Box, row_major
from reshard.layout.boxlist import listed_of
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.planning.names import Feed, stack
from tests.checkpoint.making import disjoint_boxes, overlapping_boxes
from tests.soak import cases, within

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def stored(name: str, shape: tuple[int, ...], boxes: list[Box]) -> StoredTensor:
    """Each box in a file of its own, behind 8 bytes."""
    kept = [box for box in boxes if box.size]
    pieces = [StoredPiece(box, n, 8, row_major(box.shape)) for n, box in enumerate(kept)]
    return StoredTensor(name, shape, "float32", tuple(pieces))


def located(tensor: StoredTensor) -> PieceTable:
    return PieceTable.of(tensor.pieces, len(tensor.shape), 4)


def plan(shape: tuple[int, ...], have: list[Box], want: list[Box]) -> Transfer:
    target = OutputTensor("w", shape, "float32", stored("w", shape, want).pieces)
    return transfer_of(target, [Feed("w")], {"w": stored("w", shape, have)})


def counted(located: PieceTable, shape: tuple[int, ...]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for box in located.boxes():
        limits = zip(box.start, box.stop, strict=True)
        count[(*(slice(low, high) for low, high in limits), ...)] += 1
    return count


@settings(max_examples=cases(35, 5000), deadline=None)
@given(st.data())
def test_windows_read_and_write_every_element_once(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    transfer = plan(shape, data.draw(overlapping_boxes(shape)), data.draw(disjoint_boxes(shape)))
    limit = data.draw(st.integers(4, 200))
    seen = [np.zeros(shape, dtype=int) for _ in range(2)]
    windows = [w for chunk in chunks_of([transfer], limit) for _, w in chunk.windows]
    assert windows == list(transfer.windows(limit))
    for window in windows:
        assert window.size * 4 <= max(limit, 4)
        for total, side in zip(seen, (transfer.source, transfer.destination), strict=True):
            total += counted(side.within(window), shape)
    assert (seen[0] == 1).all()
    assert (seen[1] == 1).all()


@settings(max_examples=cases(90, 5000), deadline=None)
@given(st.data())
def test_replicas_are_what_is_left(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(overlapping_boxes(shape))
    chosen, replicas = source_of("w", shape, [Feed("w")], {"w": stored("w", shape, boxes)})
    total = counted(located(stored("w", shape, boxes)), shape)
    assert (counted(chosen, shape) == 1).all()
    again = counted(replicas, shape) if replicas else 0
    assert (counted(chosen, shape) + again == total).all()


@settings(max_examples=cases(90, 5000), deadline=None)
@given(st.data())
def test_groups_hold_all_bytes_and_writes_touch_no_others(data: st.DataObject) -> None:
    """Boxes of one row-major file: any of them, as reads and as writes."""
    shape = data.draw(SHAPES)
    strides = row_major(shape)
    pieces = [
        StoredPiece(
            box, 0, 4 * sum(a * b for a, b in zip(box.start, strides, strict=True)), strides
        )
        for box in data.draw(disjoint_boxes(shape))[: data.draw(st.integers(1, 9))]
        if box.size
    ]
    parts = PieceTable.of(pieces, len(shape), 4)
    limit = data.draw(st.integers(4, 400))
    wanted = set()
    for box in parts.boxes():
        limits = zip(box.start, box.stop, strict=True)
        flat = np.arange(int(np.prod(shape))).reshape(shape)
        wanted |= set(flat[(*(slice(low, high) for low, high in limits), ...)].ravel().tolist())
    for group in writable(parts, limit):
        assert group.parts.num_bytes[group.extent.rows].sum() == group.extent.num_bytes
    written = [
        at
        for group in writable(parts, limit)
        for at in range(group.extent.start // 4, group.extent.stop // 4)
    ]
    assert sorted(written) == sorted(wanted)
    read = {
        at
        for group in readable(parts, limit)
        for at in range(group.extent.start // 4, group.extent.stop // 4)
    }
    assert wanted <= read
    for group in (*readable(parts, limit), *writable(parts, limit)):
        largest = group.parts.num_bytes[group.extent.rows].max(initial=0)
        assert group.extent.num_bytes <= max(limit, int(largest))


@given(st.data())
def test_slabs_tile_a_box_in_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    limit = data.draw(st.integers(1, 50))
    parts = list(Box.whole(shape).slabs(limit))
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    joined = []
    for part in parts:
        assert part.size <= limit
        limits = zip(part.start, part.stop, strict=True)
        joined += flat[(*(slice(low, high) for low, high in limits), ...)].ravel().tolist()
    assert joined == flat.ravel().tolist()


def test_extents_step_over_large_gaps_only() -> None:
    pieces = [StoredPiece(Box((at,), (at + 10,)), 0, start, (1,)) for at, start in
              ((0, 0), (10, 15), (20, 5000), (30, 20))]  # fmt: skip
    parts = PieceTable.of(pieces, 1, 1)
    found = [(extent.start, extent.stop) for extent in extents(parts, gap=8, limit=100)]
    assert found == [(0, 30), (5000, 5010)]
    cut = [(extent.start, extent.stop) for extent in extents(parts, gap=8, limit=26)]
    assert cut == [(0, 25), (20, 30), (5000, 5010)]


def test_a_hole_is_named() -> None:
    with pytest.raises(CoverageError, match=r'"w" of shape \(6, 4\): no file holds \[2:4, 0:4\]'):
        plan((6, 4), [Box((0, 0), (2, 4)), Box((4, 0), (6, 4))], [Box.whole((6, 4))])
    with pytest.raises(CoverageError, match=r"no file holds"):
        plan((6, 4), [], [Box.whole((6, 4))])


def test_a_piece_outside_is_damage() -> None:
    with pytest.raises(DamageError, match="disagree about its shape"):
        plan((6, 4), [Box((0, 0), (7, 4))], [Box.whole((6, 4))])


def columns(layout: Layout, shape: tuple[int, int]) -> PieceTable:
    """A file for each box of a layout, without an object for each."""
    listed = listed_of(layout, shape)
    sizes = listed.stops - listed.starts
    strides = np.stack([sizes[:, 1] * 2, np.full(len(sizes), 2)], axis=1)
    files = np.arange(len(sizes))
    return PieceTable(2, listed.starts, listed.stops, files, files * 0, strides)


def test_many_tensors_on_many_ranks_are_planned_fast() -> None:
    """2,000 tensors from 1024 to 768 shards in 2 s of one core; here a tenth of them."""
    from reshard.checkpoint.transfer.transfers import _without_replicas

    shape = (8192, 6144)
    have, want = Layout(Mesh(x=1024), "x -"), Layout(Mesh(x=768), "- x")
    count = cases(200, 2000)
    columns(have, shape), columns(want, shape)
    start = time.process_time()
    for number in range(count):
        source, replicas = _without_replicas(columns(have, shape), shape[0] * shape[1])
        target = columns(want, shape)
        transfer = Transfer(str(number), shape, "bfloat16", "bfloat16", source, replicas, target)
        assert sum(1 for _ in transfer.windows(8 << 20)) == 13
    assert time.process_time() - start < within(count / 1000)


class Copies:
    """Files in memory; each is one copy of a tensor, behind 8 bytes."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.files = [bytes(8) + array.tobytes() for array in arrays]

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.files[file][offset : offset + len(buffer)]

    def name(self, file: int) -> str:
        return f"file {file}"


@pytest.mark.parametrize("dtype", ["complex128", "float64", "complex64", "float32", "float16"])
def test_replicas_are_compared_by_their_bits(dtype: str) -> None:
    """A NaN is like itself, and 0.0 is not like -0.0: what is compared are bytes, not numbers."""
    values = np.array([[np.nan, 0.0], [np.inf, 1.0]]).astype(dtype)
    whole = [Box.whole(values.shape)] * 2
    pieces = [StoredPiece(box, file, 8, (2, 1)) for file, box in enumerate(whole)]
    tensor = StoredTensor("w", values.shape, dtype, tuple(pieces))
    target = OutputTensor("w", values.shape, dtype, tensor.pieces[:1])
    transfer = transfer_of(target, [Feed("w")], {"w": tensor})
    buffers = Buffers.of(values.nbytes, casts=False)

    def check(other: np.ndarray) -> None:
        copies = Copies(values, other)
        array = fill(transfer, whole[0], buffers, copies.read_into)
        compare(transfer, whole[0], array, buffers, copies.read_into, copies.name)

    check(values.copy())
    negative = values.copy()
    negative[0, 1] = -negative[0, 1]
    with pytest.raises(DamageError, match=r"\[0:1, 1:2\].*file 0 and file 1.*1 elements differ"):
        check(negative)


def calls_of(action: Callable[[], object]) -> int:
    """The calls of Python and C functions, the same on any machine."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_a_further_piece_costs_little() -> None:
    """What it costs to read it from a file of its own."""

    def calls(count: int) -> int:
        parts = columns(Layout(Mesh(x=count), "x -"), (count, 4))
        transfer = Transfer("w", (count, 4), "int16", "int16", parts, parts[:0], parts)
        whole, buffers = Box.whole((count, 4)), Buffers.of(8 * count, casts=False)
        copies = Copies(*np.zeros((count, 4), np.int16))
        return calls_of(lambda: fill(transfer, whole, buffers, copies.read_into))

    assert (calls(110) - calls(10)) / 100 < 60


def test_a_further_source_costs_little() -> None:
    """What it costs to plan one of the sources of a stack."""

    def calls(count: int) -> int:
        have = {f"w.{n}": stored(f"w.{n}", (4, 4), [Box.whole((4, 4))]) for n in range(count)}
        outlines = outlines_of(have, {"w": stack("w.{n}")})
        target = OutputTensor("w", (count, 4, 4), "float32", ())

        def plan() -> None:
            transfer_of(target, outlines["w"].feeds, have)
            assert left_over(have, outlines) == ()

        return calls_of(plan)

    assert (calls(110) - calls(10)) / 100 < 320
