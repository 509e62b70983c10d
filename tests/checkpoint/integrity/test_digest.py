"""The digest does not depend on the cut, and finds what it promises to find."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.digest import MODULUS, PRIMES
from reshard.dtypes import ITEMSIZE
from reshard.layout.box import Box
from tests.soak import cases

DTYPES = sorted(ITEMSIZE)
ORDERS = [prime // 2 for prime in PRIMES]
"""After so many bytes the weights of a prime come again."""


def by_the_book(data: bytes) -> int:
    """The definition of docs/digest.md."""
    return int.from_bytes(data, "little") % MODULUS


def random_tensor(seed: int, shape: tuple[int, ...], width: int) -> np.ndarray:
    data = np.random.default_rng(seed).bytes(prod(shape) * width)
    return np.frombuffer(bytearray(data), dtype=f"V{width}").reshape(shape)


def value(array: np.ndarray, dtype: str) -> int:
    return digest.part(array, Box.whole(array.shape), array.shape, dtype)


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, str]:
    dtype = draw(st.sampled_from(DTYPES))
    most = draw(st.sampled_from([3, 20, 300]))
    shape = tuple(draw(st.lists(st.integers(0, most), max_size=4 if most < 20 else 2)))
    return random_tensor(draw(st.integers(0, 99)), shape, ITEMSIZE[dtype]), dtype


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a tensor, in any order."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += box.split(dim, draw(st.integers(box.start[dim], box.stop[dim])))
    return draw(st.permutations(boxes))


@settings(max_examples=cases(35, 2000), deadline=None)
@given(tensors())
def test_is_what_the_page_says(case: tuple[np.ndarray, str]) -> None:
    array, dtype = case
    want = by_the_book(array.tobytes())
    assert value(array, dtype) == want
    assert digest.part(array.tobytes(), Box.whole(array.shape), array.shape, dtype) == want


@settings(max_examples=cases(60, 4000), deadline=None)
@given(st.data())
def test_any_cut_gives_the_same(data: st.DataObject) -> None:
    array, dtype = data.draw(tensors())
    boxes = data.draw(boxes_of(array.shape))
    for copy in (lambda part: part, np.copy):
        parts = [digest.part(copy(cut(array, box)), box, array.shape, dtype) for box in boxes]
        assert digest.combine(parts) == value(array, dtype)


@settings(max_examples=cases(20, 500), deadline=None)
@given(st.data())
def test_any_strides_give_the_same(data: st.DataObject) -> None:
    """A box may be a view of something else: of every other row, of a transposed tensor."""
    array, dtype = data.draw(tensors())
    order = data.draw(st.permutations(range(array.ndim)))
    wide = np.zeros([2 * array.shape[dim] for dim in order], dtype=array.dtype)
    back = [order.index(dim) for dim in range(array.ndim)]
    view = wide.transpose(back)[(*(slice(None, None, 2) for _ in order), ...)]
    np.copyto(view, array)
    assert value(view, dtype) == value(array, dtype)


@pytest.mark.parametrize("shape", [(9, 513), (3, 5, 1031), (2, 4099), (5000, 1030), (1 << 20,)])
@pytest.mark.parametrize("at", [3, 512])
def test_long_rows_of_any_length_are_split(shape: tuple[int, ...], at: int) -> None:
    """Into words and the bytes after them, into groups of columns, into few thousand rows."""
    array = random_tensor(at, shape, 1)
    boxes = Box.whole(shape).split(len(shape) - 1, at)
    parts = [digest.part(cut(array, box), box, shape, "uint8") for box in boxes]
    assert digest.combine(parts) == value(array, "uint8") == by_the_book(array.tobytes())


@settings(max_examples=cases(35, 2000), deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    array, dtype = data.draw(tensors().filter(lambda case: case[0].size > 0))
    raw = bytearray(array.tobytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    whole = Box.whole(array.shape)
    changed = digest.part(raw, whole, array.shape, dtype)
    assert (changed - value(array, dtype)) % MODULUS


@settings(max_examples=cases(35, 2000), deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=12), st.binary(min_size=12, max_size=12))
def test_any_change_of_twelve_neighbouring_bytes_is_found(at: int, old: bytes, new: bytes) -> None:
    """The difference is a number below the modulus, times a power of 256."""
    new = new[: len(old)]
    low, high = bytes(at), bytes(range(7))
    one, two = low + old + high, low + new + high
    shape = (len(one),)
    values = [digest.part(data, Box.whole(shape), shape, "uint8") for data in (one, two)]
    assert (values[0] == values[1]) == (old == new)


@settings(max_examples=cases(35, 1000), deadline=None)
@given(st.data())
def test_any_swap_is_found(data: st.DataObject) -> None:
    array, dtype = data.draw(tensors().filter(lambda case: case[0].size > 1))
    dim = data.draw(st.sampled_from([d for d, size in enumerate(array.shape) if size > 1]))
    low, high = data.draw(
        st.lists(st.integers(0, array.shape[dim] - 1), min_size=2, max_size=2, unique=True)
    )
    order = np.arange(array.shape[dim])
    order[[low, high]] = high, low
    swapped = array.take(order, axis=dim)
    same = swapped.tobytes() == array.tobytes()
    assert (value(swapped, dtype) == value(array, dtype)) == same


@pytest.mark.parametrize("distance", [1, 2**14, 2**29, ORDERS[0], prod(ORDERS[:3]), 2**50])
def test_swaps_far_apart_are_found(distance: int) -> None:
    """Two words of a tensor of petabytes: only their boxes are made."""
    shape, one, two = (2**51,), np.array([7], np.uint8), np.array([9], np.uint8)
    here, there = Box((5,), (6,)), Box((5 + distance,), (6 + distance,))

    def pair(low: np.ndarray, high: np.ndarray) -> int:
        parts = digest.part(low, here, shape, "uint8"), digest.part(high, there, shape, "uint8")
        return digest.combine(parts)

    assert pair(one, two) != pair(two, one)


def test_primes_are_what_the_page_says() -> None:
    def is_prime(number: int) -> bool:
        return all(number % d for d in range(2, int(number**0.5) + 1))

    safe = [p for p in range(5, 2**13) if is_prime(p) and is_prime(p // 2)]
    assert sorted(PRIMES) == safe[-8:]
    assert all(pow(256, order, p) == 1 for p, order in zip(PRIMES, ORDERS, strict=True))
    assert MODULUS > 2**103
    assert digest.COLUMNS * (2**32 - 1) * (max(PRIMES) // 2) + max(PRIMES) < 2**53
    assert digest.ROWS * (max(PRIMES) + 1) * max(PRIMES) < 2**53


def test_the_largest_sums_are_exact() -> None:
    """Ones only where a power is positive: dot products come as near to 2**53 as they can."""
    for p in PRIMES:
        powers = [pow(256, 4 * i, p) for i in range(digest.COLUMNS)]
        line = np.array([0xFFFFFFFF if power <= p // 2 else 0 for power in powers], np.uint32)
        array = np.tile(line, 140)[:-7]
        assert value(array, "float32") == by_the_book(array.tobytes())


def test_the_largest_remainders_of_rows_are_exact() -> None:
    """Sums that leave half a prime on the side of their power, so that products only add up."""
    step = 4 * digest.COLUMNS
    powers = [[pow(256, i * step, p) for i in range(digest.ROWS)] for p in PRIMES]
    sums = [
        [(p << 39) + (p // 2 if power <= p // 2 else -(p // 2)) for power in lane]
        for p, lane in zip(PRIMES, powers, strict=True)
    ]
    found = digest._contracted(np.array(sums, np.float64), ((digest.ROWS, step),))
    for p, lane, factors in zip(PRIMES, sums, powers, strict=True):
        exact = sum(number * factor for number, factor in zip(lane, factors, strict=True))
        assert found % p == exact % p


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 4095, 4096, 4098, 70_001])
def test_bytes_may_begin_anywhere_in_memory(shift: int, length: int) -> None:
    memory = np.frombuffer(np.random.default_rng(shift).bytes(length + 16), np.uint8)
    run = memory[shift : shift + length]
    assert value(run, "uint8") == by_the_book(run.tobytes())


def test_digests_tell_shapes_and_dtypes_apart() -> None:
    texts = {
        digest.finish(5, shape, dtype)
        for shape in [(), (1,), (6,), (2, 3), (3, 2), (23,)]
        for dtype in ["float32", "int32"]
    }
    assert len(texts) == 12
    assert all(len(text) == 32 for text in texts)


def test_an_array_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        digest.part(np.zeros((2, 2), np.float64), Box.whole((2, 2)), (2, 2), "float32")
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        digest.part(np.zeros((2, 3), np.float32), Box.whole((2, 2)), (2, 2), "float32")


def test_threads_give_the_same() -> None:
    array = random_tensor(0, (64, 40_000), 2)
    boxes = [Box((row, 0), (row + 1, 40_000)) for row in range(64)]
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda box: digest.part(cut(array, box), box, array.shape, "bfloat16"), boxes
        )
        assert digest.combine(parts) == value(array, "bfloat16")
