"""Distinct values of integer columns, by sorting; caches of such columns, bounded in bytes.

numpy's own set functions hash, which is slower on large columns of ranks, and load ``numpy.ma`` at
the first call, which costs more than planning a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
V = TypeVar("V")

Ints = NDArray[np.int64]


def distinct(values: Ints) -> Ints:
    """Each value once, in rising order.

    >>> distinct(np.array([7, 3, 7])).tolist()
    [3, 7]
    """
    rising = np.sort(values)
    return rising[_new(rising)]


def distinct_first(values: Ints) -> tuple[Ints, Ints]:
    """Each value once, in rising order, and where it stands first.

    >>> [column.tolist() for column in distinct_first(np.array([7, 3, 7]))]
    [[3, 7], [1, 0]]
    """
    order = np.argsort(values, kind="stable")
    rising = values[order]
    new = _new(rising)
    return rising[new], order[new]


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """Each value once, in rising order, and the number of every value among these.

    >>> [column.tolist() for column in numbered(np.array([7, 3, 7]))]
    [[3, 7], [1, 0, 1]]
    """
    order = np.argsort(values, kind="stable")
    rising = values[order]
    new = _new(rising)
    number = np.empty(len(values), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return rising[new], number


def offsets(counts: Ints | NDArray[np.bool_]) -> Ints:
    """Where each of several ranges begins, one after the other; one more entry ends the last.

    >>> offsets(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def spread(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """All entries of ranges, given where each begins: the number of its range, and the entry.

    >>> [column.tolist() for column in spread(np.array([5, 9]), np.array([2, 1]))]
    [[0, 0, 1], [5, 6, 9]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def blocks(counts: Ints, most: int) -> Iterator[range]:
    """All rows in ranges that have at most so many entries, or one row."""
    ends, first = np.cumsum(counts), 0
    while first < len(ends):
        done = ends[first] - counts[first]
        last = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield range(first, last)
        first = last


def contained(values: Ints, others: Ints) -> NDArray[np.bool_]:
    """For every value, whether it is among the others.

    >>> contained(np.array([[1, 5]]), np.array([5, 6])).tolist()
    [[False, True]]
    """
    rising = np.sort(others)
    if not len(rising):
        return np.zeros(values.shape, dtype=bool)
    at = np.minimum(np.searchsorted(rising, values), len(rising) - 1)
    return np.asarray(rising[at] == values)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, and are equal where these are (the finalizer of splitmix64).

    >>> len({*mixed(np.arange(4, dtype=np.uint64)).tolist()})
    4
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def _new(rising: Ints) -> NDArray[np.bool_]:
    new = np.ones(len(rising), dtype=bool)
    new[1:] = rising[1:] != rising[:-1]
    return new


def drop_oldest(kept: dict[K, V], most: int) -> list[V]:
    """Drop the first entries of a dict until so many are left; gives the values dropped.

    Other threads may add and drop entries meanwhile, so it goes by a copy of the keys.
    """
    keys = [*kept]
    dropped = [kept.pop(key, None) for key in keys[: max(0, len(keys) - most)]]
    return [one for one in dropped if one is not None]


class SizedCache(Generic[K, V]):
    """Values by key; the oldest are dropped once all of them together are too large.

    Dropping the oldest, and not the least recently used, leaves a look-up as quick as that of a
    dict, and safe in threads: a training step repeats the same few moves.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._values: dict[K, tuple[V, int]] = {}
        self._total = 0

    def clear(self) -> None:
        self._values.clear()
        self._total = 0

    def get(self, key: K) -> V | None:
        entry = self._values.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> V:
        """Keep a value of about this size, unless another thread has kept one; gives that kept."""
        kept, size = self._values.setdefault(key, (value, num_bytes))
        if kept is value:
            self._total += size
            if self._total > self.max_bytes:
                self._drop_oldest()
        return kept

    def _drop_oldest(self) -> None:
        """Drop until an eighth is free: not every value that is kept then looks at all of them.

        The newest is dropped only if it is too large on its own.
        """
        sizes = [(key, size) for key, (_, size) in [*self._values.items()]]
        total = sum(size for _, size in sizes)
        for key, size in sizes:
            if total <= (self.max_bytes if key is sizes[-1][0] else self.max_bytes * 7 // 8):
                break
            self._values.pop(key, None)
            total -= size
        self._total = total


def sized_cache(
    max_bytes: int, num_bytes: Callable[..., int]
) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Keep the results of a function of positional arguments; ``num_bytes(result, *arguments)``.

    The result None is not kept.
    """

    def decorate(compute: Callable[P, V]) -> Callable[P, V]:
        cache: SizedCache[Hashable, V] = SizedCache(max_bytes)

        @wraps(compute)
        def call(*args: P.args, **kwargs: P.kwargs) -> V:
            kept = cache.get(args)
            if kept is not None:
                return kept
            result = compute(*args, **kwargs)
            return result if result is None else cache.put(args, result, num_bytes(result, *args))

        return call

    return decorate
