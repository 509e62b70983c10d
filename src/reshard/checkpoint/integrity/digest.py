"""The digest of a tensor, which depends on its bits and not on how it is sharded.

``docs/digest.md`` is the specification. The bytes of a tensor, in row-major order, are the digits
of a large integer, ``sum(byte[i] * 256**i)``; the value of the tensor is that integer modulo
``MODULUS``. Each box of a tensor contributes a part of the sum, independent of the other boxes:

>>> w = np.arange(12, dtype=np.float32).reshape(3, 4)
>>> whole = part(w, Box.whole((3, 4)), (3, 4), "float32")
>>> left = part(w[:, :1], Box((0, 0), (3, 1)), (3, 4), "float32")
>>> right = part(w[:, 1:], Box((0, 1), (3, 4)), (3, 4), "float32")
>>> combine([right, left]) == whole
True
>>> whole == int.from_bytes(w.tobytes(), "little") % MODULUS
True

``MODULUS`` is a product of primes below 2**13. Four bytes make a word below 2**32,
and a power of 256 modulo a prime, counted from the middle, is less than 2**12 large, so 512
products add up to less than 2**53, which float64 holds exactly. The first and only costly step is
therefore a matrix product in float64, which numpy leaves to BLAS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import numpy as np

from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major

VERSION = 2
PRIMES = (8147, 8039, 7823, 7727, 7703, 7643, 7607, 7559)
"""The eight largest safe primes below 2**13."""
MODULUS = prod(PRIMES)

WORD = 4
"""Bytes per word; fewer where a contiguous run has no whole number of words."""
COLUMNS = 512
"""Words of one dot product: ``COLUMNS * 2**32 * 2**12 <= 2**53``."""
BLOCK = 1 << 16
"""Words that are widened to float64 at a time: they stay in the cache of a core, and OpenBLAS
multiplies up to 128 rows without copying them first."""
ROWS = 2048
"""Sums that are added at a time: ``ROWS * 2**12 * 2**12`` is far below 2**53."""

Array = np.ndarray[Any, Any]
Dims = tuple[tuple[int, int], ...]
"""The length of each dim, and how many bytes apart its words are in the whole tensor."""

_PRIMES = np.array(PRIMES, dtype=np.float64)[:, np.newaxis]
_INVERSES = 1 / _PRIMES
# The number that is 1 modulo one of the primes and 0 modulo the others.
_UNITS = tuple(MODULUS // p * pow(MODULUS // p, -1, p) for p in PRIMES)


def part(data: Any, box: Box, shape: Sequence[int], dtype: str) -> int:
    """The contribution of a box to the value of a tensor of this shape.

    ``data`` is the box as an array (any strides, elements of the right size), or its bytes in
    row-major order.
    """
    width = itemsize(dtype)
    is_array = isinstance(data, np.ndarray)
    array: Array = data if is_array else np.frombuffer(data, dtype=f"V{width}").reshape(box.shape)
    if array.shape != box.shape or array.itemsize != width:
        raise ValueError(
            f"a box of shape {box.shape} of {dtype} needs elements of {width} bytes, and the array "
            f"has shape {array.shape} and elements of {array.itemsize} bytes"
        )
    steps = tuple(stride * array.itemsize for stride in row_major(shape))
    start = sum(low * step for low, step in zip(box.start, steps, strict=True))
    if array.size == 0:
        return 0
    numbers = array[..., np.newaxis].view(np.uint8)
    merged = _merged(numbers, tuple(zip(numbers.shape, (*steps, 1), strict=True)))
    return _value(*merged) * pow(256, start, MODULUS) % MODULUS


def whole(rows: Array) -> list[int]:
    """The values of many tensors of one size, each a row of bytes; faster than one by one.

    >>> tensors = np.arange(12, dtype=np.uint8).reshape(2, 6)
    >>> whole(tensors)[1] == int.from_bytes(tensors[1].tobytes(), "little") % MODULUS
    True
    """
    short = -rows.shape[1] % WORD
    words = np.pad(rows, ((0, 0), (0, short))) if short else np.ascontiguousarray(rows)
    words = words.view(f"<u{WORD}")
    total = np.zeros((len(PRIMES), len(rows)))
    for at in range(0, words.shape[1], COLUMNS):
        block = words[:, at : at + COLUMNS].astype(np.float64)
        weights = _weights(((block.shape[1], WORD),), COLUMNS)
        shift = np.array([[pow(256, at * WORD, prime)] for prime in PRIMES], dtype=np.float64)
        total = np.fmod(total + np.fmod(weights @ block.T, _PRIMES) * shift, _PRIMES)
    return [_joined(lanes) for lanes in total.T.tolist()]


def combine(parts: Iterable[int]) -> int:
    """The value of boxes that do not overlap, from their parts."""
    return sum(parts) % MODULUS


def finish(value: int, shape: Sequence[int], dtype: str) -> str:
    """The digest of a tensor with this value, as it is stored and shown."""
    sizes = "x".join(map(str, shape))
    text = f"reshard-digest-{VERSION} {dtype} {sizes} {value:x}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _merged(numbers: Array, dims: Dims) -> tuple[Array, Dims]:
    """Join neighbouring dims that are contiguous both in the tensor and in memory."""
    sizes, steps = list(numbers.shape), [step for _, step in dims]
    strides = list(numbers.strides)
    for dim in reversed(range(len(sizes) - 1)):
        after = sizes[dim + 1]
        counts_on = all(each[dim] == after * each[dim + 1] for each in (steps, strides))
        if counts_on or sizes[dim] == 1 or after == 1:
            kept = dim + 1 if after > 1 or sizes[dim] == 1 else dim
            steps[dim], strides[dim] = steps[kept], strides[kept]
            sizes[dim] *= after
            del sizes[dim + 1], steps[dim + 1], strides[dim + 1]
    return numbers.reshape(sizes), tuple(zip(sizes, steps, strict=True))


def _value(words: Array, dims: Dims) -> int:
    """The value of an array of bytes or words whose first word is word 0 of the tensor.

    Bytes that are contiguous in memory and in the tensor are read as words. The last dims, up to
    512 words, become the columns of a matrix; the first dim that does not fit is split into groups
    that do.
    """
    length, step = dims[-1]
    if words.itemsize == step == words.strides[-1] == 1:
        if length > COLUMNS and length % WORD:
            return _split(words, dims, len(dims) - 1, length - length % WORD)
        width = gcd(length, WORD)
        words, dims = words.view(f"<u{width}"), (*dims[:-1], (length // width, width))
    first, inner = len(dims), 1
    while first and inner * dims[first - 1][0] <= COLUMNS:
        first -= 1
        inner *= dims[first][0]
    if first == 0:
        return _joined(_dots(words, dims, 0)[:, 0].tolist())
    length, step = dims[first - 1]
    group = COLUMNS // inner
    if length % group:
        return _split(words, dims, first - 1, length - length % group)
    if group > 1:
        grouped = (length // group, step * group), (group, step)
        dims = (*dims[: first - 1], *grouped, *dims[first:])
        words = words.reshape([length for length, _ in dims])
    if prod(length for length, _ in dims[:first]) > ROWS:
        dim = next(dim for dim, (length, _) in enumerate(dims) if length > 1)
        return _split(words, dims, dim, dims[dim][0] // 2)
    return _contracted(_dots(words, dims, first), dims[:first])


def _split(words: Array, dims: Dims, dim: int, at: int) -> int:
    length, step = dims[dim]
    before, after = np.split(words, [at], axis=dim)
    low = _value(before, (*dims[:dim], (at, step), *dims[dim + 1 :]))
    high = _value(after, (*dims[:dim], (length - at, step), *dims[dim + 1 :]))
    return (low + high * pow(256, at * step, MODULUS)) % MODULUS


def _dots(words: Array, dims: Dims, num_rows: int) -> Array:
    """Dot products of the words of each row with the powers of their positions: primes x rows.

    The first ``num_rows`` dims are rows. The sums are whole numbers between -2**53 and 2**53.
    """
    weights = _weights(dims[num_rows:], COLUMNS)
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
    """Split an array into blocks of at most ``most`` rows, in order."""
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
    """Multiply the sums of the rows by the powers of their positions, and add.

    All numbers stay whole and below 2**53, so float64 is exact here too.
    """
    times = sums * _INVERSES
    np.rint(times, out=times)
    times *= _PRIMES
    rest = np.subtract(sums, times, out=times)  # about half a prime at most, on either side of 0
    rest *= _weights(rows, ROWS)
    return _joined(rest.sum(axis=1).tolist())


def _joined(lanes: Sequence[float]) -> int:
    """The number below MODULUS with these remainders modulo the primes."""
    return sum(int(lane) * unit for lane, unit in zip(lanes, _UNITS, strict=True)) % MODULUS


def _weights(dims: Dims, most: int) -> Array:
    """The powers of 256 at the positions of these dims: primes x positions, at most ``most``."""
    if len(dims) > 1:
        return _all_weights(dims)
    [(length, step)] = dims
    return _all_weights(((most, step),))[:, :length]  # one array for all lengths


@lru_cache(maxsize=96)
def _all_weights(dims: Dims) -> Array:
    """The powers at all positions of these dims, in row-major order, as float64.

    Remainders are centred: at most half the prime, on either side of 0.
    """
    rows = []
    for prime in PRIMES:
        weights = np.ones(1, dtype=np.int64)
        for length, step in dims:
            powers = np.ones(length, dtype=np.int64)  # the powers 0, step, 2 step, ...
            done, factor = 1, pow(256, step, prime)
            while done < length:
                more = min(done, length - done)
                powers[done : done + more] = powers[:more] * pow(factor, done, prime) % prime
                done += more
            weights = np.multiply.outer(weights, powers) % prime
        weights = weights.ravel()
        rows.append(np.where(weights > prime // 2, weights - prime, weights))
    return np.array(rows, dtype=np.float64)
