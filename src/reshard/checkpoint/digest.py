"""The digest of a tensor: are two tensors equal, bit by bit, however each of them is cut?

``docs/digest.md`` is the specification. A tensor is a row of words of at most 16 bits, and its
value is the polynomial ``sum(word[i] * G**i) % MODULUS``. Each box of it has a part of that sum,
which needs nothing of the others:

>>> w = np.arange(12, dtype=np.float32).reshape(3, 4)
>>> whole = part(w, Box.whole((3, 4)), (3, 4), "float32")
>>> left = part(w[:, :1], Box((0, 0), (3, 1)), (3, 4), "float32")
>>> right = part(w[:, 1:], Box((0, 1), (3, 4)), (3, 4), "float32")
>>> combine([right, left]) == whole
True

How it is fast: a word is below 2**16 and a power of ``G`` modulo a prime, counted from the middle,
is at most 2**28 large, so 512 products add up to less than 2**53, which float64 holds exactly. The
first and only costly step is therefore a matrix product in float64, which numpy leaves to BLAS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from reshard.box import Box, row_major
from reshard.dtypes import itemsize

__all__ = ["MODULUS", "VERSION", "G", "combine", "finish", "part"]

VERSION = 1
PRIMES = (536870723, 536870627, 536870267, 536870219)
"""The four largest safe primes below 2**29."""
MODULUS = prod(PRIMES)
G = 0x243F6A8885A308D313198A2E03724
"""A primitive root of all four, from the digits of pi."""

COLUMNS = 512
"""Words of one dot product: ``COLUMNS * 2**16 * 2**28 <= 2**53``."""
BLOCK = 1 << 16
"""Words that are widened to float64 at a time: they stay in the cache of a core."""
HALF = 1 << 14
"""Powers for the sums of rows are split here, so that products with remainders stay small."""
EVEN = 16
"""Groups below which they are made equal, lest what is left over costs as much as they do. More of
them are of one size whatever the tensor, so that few weights serve all."""
ROWS = 2048
"""Sums that are added up at a time: ``ROWS * 2**28 * HALF <= 2**53``."""

Array = np.ndarray[Any, Any]
Dims = tuple[tuple[int, int], ...]
"""The length of each dim, and how far apart its words are in the whole tensor."""

_PRIMES = np.array(PRIMES, dtype=np.float64)[:, np.newaxis]
_INVERSES = 1 / _PRIMES
# The number that is 1 modulo one of the primes and 0 modulo the others.
_UNITS = tuple(MODULUS // p * pow(MODULUS // p, -1, p) for p in PRIMES)


def part(data: Any, box: Box, shape: Sequence[int], dtype: str) -> int:
    """What a box adds to the value of a tensor of this shape.

    ``data`` is the box as an array (any strides, elements of the right size), or its bytes in
    row-major order.
    """
    words, num_words = _words(data, box.shape, dtype)
    steps = tuple(stride * num_words for stride in row_major(shape))
    start = sum(low * step for low, step in zip(box.start, steps, strict=True))
    if words.size == 0:
        return 0
    array, dims = _merged(words, tuple(zip(words.shape, (*steps, 1), strict=True)))
    return _value(array, dims) * pow(G, start, MODULUS) % MODULUS


def combine(parts: Iterable[int]) -> int:
    """The value of boxes that do not overlap, from their parts."""
    return sum(parts) % MODULUS


def finish(value: int, shape: Sequence[int], dtype: str) -> str:
    """The digest, as it is stored and shown, of a tensor of this value."""
    sizes = "x".join(map(str, shape))
    text = f"reshard-digest-{VERSION} {dtype} {sizes} {value:x}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _words(data: Any, shape: tuple[int, ...], dtype: str) -> tuple[Array, int]:
    """The box as words, with a last dim for the words of an element; and how many these are."""
    width = itemsize(dtype)
    if not isinstance(data, np.ndarray):
        data = np.frombuffer(data, dtype=f"V{width}").reshape(shape)
    if data.shape != shape or data.itemsize != width:
        raise ValueError(
            f"a box of shape {shape} of {dtype} needs elements of {width} bytes, and the array "
            f"has shape {data.shape} and elements of {data.itemsize} bytes"
        )
    word = "<u2" if width > 1 else "u1"
    return data[..., np.newaxis].view(word), max(width // 2, 1)


def _merged(words: Array, dims: Dims) -> tuple[Array, Dims]:
    """Join neighbouring dims that count on without a jump, in the tensor and in memory."""
    sizes, steps = list(words.shape), [step for _, step in dims]
    strides = list(words.strides)
    for dim in reversed(range(len(sizes) - 1)):
        after = sizes[dim + 1]
        counts_on = (
            steps[dim] == after * steps[dim + 1] and strides[dim] == after * strides[dim + 1]
        )
        if counts_on or sizes[dim] == 1 or after == 1:
            kept = dim + 1 if after > 1 or sizes[dim] == 1 else dim
            steps[dim], strides[dim] = steps[kept], strides[kept]
            sizes[dim] *= after
            del sizes[dim + 1], steps[dim + 1], strides[dim + 1]
    return words.reshape(sizes), tuple(zip(sizes, steps, strict=True))


def _value(words: Array, dims: Dims) -> int:
    """The value of an array of words whose first word is word 0 of the tensor.

    The last dims, up to 256 words of them, become the columns of a matrix; the first dim that does
    not fit is cut into groups that do. What is left over of that dim is an array of its own.
    """
    first, inner = len(dims), 1
    while first and inner * dims[first - 1][0] <= COLUMNS:
        first -= 1
        inner *= dims[first][0]
    if first == 0:
        return _joined([int(lane) for lane in _dots(words, dims, 0)[:, 0].tolist()])
    length, step = dims[first - 1]
    group = COLUMNS // inner
    num_groups = -(-length // group)
    if num_groups < EVEN:
        group = -(-length // num_groups)
    main = length // group * group
    before, after = dims[: first - 1], dims[first:]
    at = (slice(None),) * (first - 1)
    grouped = (*before, (main // group, step * group), (group, step), *after)
    body = words[(*at, slice(0, main))].reshape([length for length, _ in grouped])
    value = _sum_of_rows(body, grouped, first)
    if main < length:
        rest = words[(*at, slice(main, length))]
        tail = _value(rest, (*before, (length - main, step), *after))
        value += tail * pow(G, main * step, MODULUS)
    return value % MODULUS


def _sum_of_rows(words: Array, dims: Dims, num_rows: int) -> int:
    """The value of an array whose first ``num_rows`` dims are rows, a few thousand rows a time."""
    rows = prod(length for length, _ in dims[:num_rows])
    if rows <= ROWS:
        return _contracted(_dots(words, dims, num_rows), dims[:num_rows])
    length, step = dims[0]
    if length == 1:
        return _sum_of_rows(words[0], dims[1:], num_rows - 1)
    most = max(ROWS // (rows // length), 1)
    total = 0
    for at in range(0, length, most):
        part = words[at : at + most]
        value = _sum_of_rows(part, ((len(part), step), *dims[1:]), num_rows)
        total += value * pow(G, at * step, MODULUS)
    return total % MODULUS


def _dots(words: Array, dims: Dims, num_rows: int) -> Array:
    """Multiply the words of each row with the powers of their places and add up: primes x rows.

    The first ``num_rows`` dims are rows. The sums are whole numbers between -2**53 and 2**53.
    """
    weights = _column_weights(dims[num_rows:])
    num_columns = weights.shape[1]
    wide = np.empty(max(BLOCK, num_columns))
    sums = np.empty((len(PRIMES), words.size // num_columns))
    at = 0
    for block in _blocks(words, num_rows, BLOCK // num_columns):
        matrix = wide[: block.size]
        np.copyto(matrix.reshape(block.shape), block)
        rows = block.size // num_columns
        np.matmul(weights, matrix.reshape(rows, num_columns).T, out=sums[:, at : at + rows])
        at += rows
    return sums


def _blocks(words: Array, num_rows: int, most: int) -> Iterator[Array]:
    """Cut an array into blocks of at most so many rows, in order."""
    if num_rows == 0:
        yield words
        return
    inner = prod(words.shape[1:num_rows])
    if inner > most:
        for one in words:
            yield from _blocks(one, num_rows - 1, most)
        return
    length = most // inner
    for start in range(0, len(words), length):
        yield words[start : start + length]


def _contracted(sums: Array, rows: Dims) -> int:
    """Multiply the sums of the rows with the powers of their places, and add up.

    All numbers stay whole and at most 2**53 large, so float64 is exact here too.
    """
    times = sums * _INVERSES
    np.rint(times, out=times)
    times *= _PRIMES
    rest = np.subtract(sums, times, out=times)  # at most half a prime, on either side of 0
    pairs = np.matmul(rest[:, np.newaxis], _row_weights(rows))[:, 0].tolist()
    return _joined([int(high) * HALF + int(low) for high, low in pairs])


def _joined(lanes: Sequence[int]) -> int:
    """The number below MODULUS that is like each of these modulo its prime."""
    return sum(lane * unit for lane, unit in zip(lanes, _UNITS, strict=True)) % MODULUS


def _column_weights(dims: Dims) -> Array:
    """The powers at the places of the columns: primes x columns."""
    if len(dims) == 1:  # the first of those for a longer dim
        [(length, step)] = dims
        return _all_column_weights(((COLUMNS, step),))[:, :length]
    return _all_column_weights(dims)


def _row_weights(dims: Dims) -> Array:
    """The powers at the places of the rows, as multiples of HALF and what is left of them."""
    if len(dims) == 1:
        [(length, step)] = dims
        return _all_row_weights(((ROWS, step),))[:, :length]
    return _all_row_weights(dims)


@lru_cache(maxsize=64)
def _all_column_weights(dims: Dims) -> Array:
    return np.array([_weights(prime, dims) for prime in PRIMES])


@lru_cache(maxsize=32)
def _all_row_weights(dims: Dims) -> Array:
    weights = np.array([_weights(prime, dims) for prime in PRIMES])
    high = np.rint(weights / HALF)
    return np.stack([high, weights - high * HALF], axis=-1)


def _weights(prime: int, dims: Dims) -> Array:
    """The powers of G at all places of these dims, in row-major order, as float64.

    They are counted from the middle: at most half the prime large, on either side of 0.
    """
    weights = np.ones(1, dtype=np.int64)
    for length, step in dims:
        weights = np.multiply.outer(weights, _powers(prime, step, length)) % prime
    weights = weights.ravel()
    return np.where(weights > prime // 2, weights - prime, weights).astype(np.float64)


def _powers(prime: int, step: int, length: int) -> Array:
    """The powers 0, step, 2 step, ... of G modulo a prime."""
    powers = np.ones(length, dtype=np.int64)
    done, factor = 1, pow(G, step, prime)
    while done < length:
        more = min(done, length - done)
        powers[done : done + more] = powers[:more] * pow(factor, done, prime) % prime
        done += more
    return powers
