"""Any box of any stored tensor is read correctly, in little memory, and every byte is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.reader import open_storage
from reshard.checkpoint.integrity.checksums import Checker, Checksums, file_sums, sums_of
from reshard.checkpoint.storage.local import StoredFile
from reshard.checkpoint.transfer.examination import StoredReader, digests_of
from reshard.checkpoint.transfer.windows import Budget, Buffers, Source, bits_differ, in_order
from reshard.dtypes import ITEMSIZE, itemsize
from reshard.errors import CoverageError, DamageError, MemoryCapError
from reshard.layout.box import Box
from tests.checkpoint.making import cut, disjoint_boxes, overlapping_boxes, random_array, raw
from tests.soak import cases

SHAPES = [(), (0,), (7,), (40,), (6, 5), (3, 0, 2), (4, 3, 5), (12, 17)]


@contextmanager
def stored(
    array: np.ndarray, dtype: str, boxes: list[Box], transposed: bool = False
) -> Iterator[tuple[Source, StoredTensor]]:
    """A source with one tensor, every piece in a file of its own behind some bytes of no use."""
    with TemporaryDirectory() as folder:
        pieces, files, written = [], [], []
        for number, box in enumerate(boxes):
            piece, shape = cut(array, box), box.shape
            if transposed:
                piece = np.ascontiguousarray(piece.T)
                strides = [prod(shape[:dim]) for dim in range(len(shape))]
            else:
                strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
            data = bytes(number % 5) + raw(piece) + b"end"
            path = f"{number}.bin"
            Path(folder, path).write_bytes(data)
            written += sums_of(number, 0, data)
            files.append(StoredFile(path, len(data)))
            pieces.append(StoredPiece(box, number, number % 5, tuple(strides)))
        tensor = StoredTensor("w", array.shape, dtype, tuple(pieces))
        sums = Checksums(file_sums(files, written), {})
        with open_storage(folder) as storage:
            catalog = Catalog(folder, "test", tuple(files), {"w": tensor})
            yield Source(storage, catalog, sums, Checker(sums, folder)), tensor


@settings(max_examples=cases(35, 2000), deadline=None)
@given(st.data())
def test_boxes_are_read_right(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = data.draw(st.sampled_from(SHAPES))
    array = random_array(dtype, shape)
    boxes = data.draw(overlapping_boxes(shape))
    num_bytes = data.draw(st.sampled_from([16, 64, 1000]))
    with stored(array, dtype, boxes, data.draw(st.booleans())) as (source, tensor):
        reader = StoredReader(source, tensor)
        for windows in (list(reader.boxes(num_bytes)), list(reader.rows(num_bytes))):
            seen = np.zeros(shape, dtype=int)
            for box in windows:
                assert box.size * itemsize(dtype) <= max(num_bytes, itemsize(dtype))
                found = reader.read(box, Buffers.of(max(num_bytes, 16), casts=False))
                assert not bits_differ(found, cut(array, box)).any()
                cut(seen, box)[...] += 1
            assert (seen == 1).all()
        source.checker.finish(source.storage)


@settings(max_examples=cases(20, 1000), deadline=None)
@given(st.data())
def test_the_digest_does_not_depend_on_how_it_is_stored(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "bool", "complex128"]))
    shape = data.draw(st.sampled_from(SHAPES))
    array = random_array(dtype, shape)
    found = set()
    for boxes, window in (
        ([Box.whole(shape)], 1 << 20),
        (data.draw(disjoint_boxes(shape)), 48),
        (data.draw(overlapping_boxes(shape)), 100),
    ):
        with stored(array, dtype, boxes) as (source, tensor):
            budget = Budget(workers=2, window=window)
            problems: list[object] = []
            found |= digests_of(source, [tensor], budget, lambda _: None, problems.append).items()
            assert not problems
    assert len(found) == 1


@settings(max_examples=cases(25, 1000), deadline=None)
@given(st.data())
def test_replicas_that_disagree_are_told(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (7,), (6, 5), (4, 3, 5)]))
    array = random_array("complex128", shape)
    array.reshape(-1)[...] = np.array([complex("nan+nanj")]).view("V16")  # no number is itself
    boxes = [*data.draw(disjoint_boxes(shape)), Box.whole(shape)]
    with stored(array, "complex128", boxes) as (source, tensor):
        bit = data.draw(st.integers(0, array.nbytes * 8 - 1))
        for is_changed in (False, True):
            if is_changed:
                last = tensor.pieces[-1]
                path = Path(source.storage.root, source.name(last.file))
                content = bytearray(path.read_bytes())
                content[last.offset + bit // 8] ^= 1 << bit % 8
                path.write_bytes(content)
            plain = Source(source.storage, source.catalog, None, Checker(None, "ckpt"))
            problems: list = []
            budget = Budget(1, 100)
            digests_of(plain, [tensor], budget, lambda _: None, problems.append)
            assert len(problems) == is_changed
        assert problems[0].kind == "replicas"
        assert problems[0].tensor == "w"
        index = np.unravel_index(bit // 128, shape) if shape else ()
        assert f"the first at {tuple(map(int, index))}" in problems[0].message


def test_a_hole_is_an_error() -> None:
    array = random_array("float32", (6, 5))
    whole, missing = [Box((0, 0), (2, 5)), Box((4, 0), (6, 5))], Box((2, 0), (4, 5))
    with (
        stored(array, "float32", whole) as (source, tensor),
        pytest.raises(CoverageError, match=r"no file holds \[2:4, 0:5\], 10 of its 30"),
    ):
        StoredReader(source, tensor)
    assert tensor.missing() == (missing,)


def test_what_was_changed_is_not_read() -> None:
    array = random_array("float32", (6, 5))
    with stored(array, "float32", [Box.whole((6, 5))]) as (source, tensor):
        path = Path(source.storage.root, "0.bin")
        content = bytearray(path.read_bytes())
        content[50] ^= 4
        path.write_bytes(content)
        reader = StoredReader(source, tensor)
        reader.read(Box.whole((6, 5)), Buffers.of(1000, casts=False))
        with pytest.raises(DamageError, match=r"0\.bin: bytes 0 to 123 changed since"):
            source.checker.finish(source.storage)


def test_places() -> None:
    array = random_array("float32", (6, 5))
    with stored(array, "float32", [Box((0, 0), (6, 2)), Box((0, 2), (6, 5))]) as (source, tensor):
        reader = StoredReader(source, tensor)
        assert reader.place((2, 1)) == ("0.bin", 4 * 5)
        assert reader.place((2, 3)) == ("1.bin", 1 + 4 * 7)


def test_results_come_in_order_and_tasks_are_taken_as_needed() -> None:
    taken = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_order(lambda task, mine: (task, mine), tasks(), 3, lambda: "own")
    for number in range(20):
        assert next(results) == (number, (number, "own"))
    assert len(taken) < 60
    results.close()
    assert len(taken) < 60


def test_an_error_in_a_worker_is_raised_and_ends_the_work() -> None:
    def work(task: int, _: None) -> int:
        return 1 // (task - 5)

    with pytest.raises(ZeroDivisionError):
        list(in_order(work, iter(range(10**9)), 2, lambda: None))


@pytest.mark.parametrize("memory", ["1MiB", "3MiB", "64MiB", "256MiB", "100GiB"])
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_budgets_fit(memory: str, workers: int) -> None:
    from reshard.text import parse_bytes

    budget = Budget.of(memory, workers)
    assert 1 <= budget.workers <= workers
    assert 1 << 16 <= budget.window <= 8 << 20
    assert budget.workers * budget.window * 8 <= parse_bytes(memory)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(MemoryCapError, match="at least"):
        Budget.of("100KiB")
