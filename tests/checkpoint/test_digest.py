"""The digest does not depend on the cut, and finds what it promises to find."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.box import Box
from reshard.checkpoint import digest
from reshard.checkpoint.digest import MODULUS, PRIMES, G
from reshard.dtypes import ITEMSIZE
from tests.soak import cases

DTYPES = sorted(ITEMSIZE)


def by_the_book(data: bytes, width: int) -> int:
    """The definition of docs/digest.md, word by word."""
    size = min(width, 2)
    total, power = 0, 1
    for at in range(0, len(data), size):
        total += int.from_bytes(data[at : at + size], "little") * power
        power = power * G % MODULUS
    return total % MODULUS


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


@settings(max_examples=cases(60, 2000), deadline=None)
@given(tensors())
def test_is_what_the_page_says(case: tuple[np.ndarray, str]) -> None:
    array, dtype = case
    want = by_the_book(array.tobytes(), ITEMSIZE[dtype])
    assert value(array, dtype) == want
    assert digest.part(array.tobytes(), Box.whole(array.shape), array.shape, dtype) == want


@settings(max_examples=cases(100, 4000), deadline=None)
@given(st.data())
def test_any_cut_gives_the_same(data: st.DataObject) -> None:
    array, dtype = data.draw(tensors())
    boxes = data.draw(boxes_of(array.shape))
    parts = [digest.part(cut(array, box), box, array.shape, dtype) for box in boxes]
    assert digest.combine(parts) == value(array, dtype)


@settings(max_examples=cases(30, 500), deadline=None)
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


@settings(max_examples=cases(60, 2000), deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    array, dtype = data.draw(tensors().filter(lambda case: case[0].size > 0))
    raw = bytearray(array.tobytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    whole = Box.whole(array.shape)
    changed = digest.part(raw, whole, array.shape, dtype)
    assert all((changed - value(array, dtype)) % prime for prime in PRIMES)


@settings(max_examples=cases(60, 1000), deadline=None)
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


@pytest.mark.parametrize("distance", [1, 2**14, 2**29, PRIMES[0] - 1, 3 * (PRIMES[1] - 1), 2**50])
def test_swaps_far_apart_are_found(distance: int) -> None:
    """Two words of a tensor of petabytes: only their boxes are made."""
    shape, one, two = (2**51,), np.array([7], np.uint8), np.array([9], np.uint8)
    here, there = Box((5,), (6,)), Box((5 + distance,), (6 + distance,))

    def pair(low: np.ndarray, high: np.ndarray) -> int:
        parts = digest.part(low, here, shape, "uint8"), digest.part(high, there, shape, "uint8")
        return digest.combine(parts)

    assert pair(one, two) != pair(two, one)


def test_primes_and_base_are_what_the_page_says() -> None:
    def is_prime(number: int) -> bool:
        return all(number % d for d in range(2, int(number**0.5) + 1))

    assert all(is_prime(p) and is_prime(p // 2) and p < 2**29 for p in PRIMES)
    for p in PRIMES:
        assert pow(G, 2, p) != 1
        assert pow(G, p // 2, p) != 1
    assert digest.COLUMNS * (2**16 - 1) * (max(PRIMES) // 2) <= 2**53
    assert digest.ROWS * (max(PRIMES) // 2 + 1) * digest.HALF <= 2**53


def test_the_largest_sums_are_exact() -> None:
    """Ones only where a power is positive: dot products come as near to 2**53 as they can."""
    for p in PRIMES:
        powers = [pow(G, i, p) for i in range(digest.COLUMNS)]
        line = np.array([0xFFFF if power <= p // 2 else 0 for power in powers], np.uint16)
        array = np.tile(line, 140)[:-7]
        assert value(array, "bfloat16") == by_the_book(array.tobytes(), 2)


def test_the_largest_remainders_of_rows_are_exact() -> None:
    """Sums that leave half a prime on the side of their power, so that products only add up."""
    step = digest.COLUMNS
    powers = [[pow(G, i * step, p) for i in range(digest.ROWS)] for p in PRIMES]
    sums = [
        [(p << 23) + (p // 2 if power <= p // 2 else -(p // 2)) for power in lane]
        for p, lane in zip(PRIMES, powers, strict=True)
    ]
    found = digest._contracted(np.array(sums, np.float64), ((digest.ROWS, step),))
    for p, lane, factors in zip(PRIMES, sums, powers, strict=True):
        exact = sum(number * factor for number, factor in zip(lane, factors, strict=True))
        assert found % p == exact % p


def test_no_change_of_six_neighbouring_words_is_missed() -> None:
    """Changes that are missed form a lattice; none of its vectors is as short as a change is."""
    count = 6
    rows = [[MODULUS] + [0] * (count - 1)]
    for at in range(1, count):
        rows += [[-pow(G, at, MODULUS)] + [int(at == column) for column in range(1, count)]]
    shortest = min(_dot(row, row) for row in _reduced_lattice(rows))
    assert shortest > count * (2**16) ** 2


def _dot(left: list, right: list) -> Fraction:
    return sum((a * b for a, b in zip(left, right, strict=True)), Fraction(0))


def _orthogonal(rows: list[list[int]]) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """The rows made orthogonal one after the other (Gram and Schmidt), and what was taken away."""
    result: list[list[Fraction]] = []
    factors: list[list[Fraction]] = []
    for row in rows:
        rest, taken = [Fraction(x) for x in row], []
        for other in result:
            taken.append(_dot(row, other) / _dot(other, other))
            rest = [a - taken[-1] * b for a, b in zip(rest, other, strict=True)]
        result.append(rest)
        factors.append(taken)
    return result, factors


def _reduced_lattice(rows: list[list[int]]) -> list[list[Fraction]]:
    """The orthogonal vectors of a reduced basis (Lenstra, Lenstra and Lovasz).

    No vector of the lattice is shorter than the shortest of them.
    """
    at = 1
    while at < len(rows):
        for other in reversed(range(at)):
            times = round(_orthogonal(rows[: at + 1])[1][at][other])
            rows[at] = [a - times * b for a, b in zip(rows[at], rows[other], strict=True)]
        orthogonal, factors = _orthogonal(rows[: at + 1])
        here, before = orthogonal[at], orthogonal[at - 1]
        if _dot(here, here) >= (Fraction(3, 4) - factors[at][at - 1] ** 2) * _dot(before, before):
            at += 1
        else:
            rows[at - 1 : at + 1] = rows[at], rows[at - 1]
            at = max(at - 1, 1)
    return _orthogonal(rows)[0]


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
