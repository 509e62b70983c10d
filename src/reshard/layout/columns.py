"""Distinct values of integer columns, by sorting.

numpy's own set functions hash, which is slower on large columns of ranks, and load ``numpy.ma`` at
the first call, which costs more than planning a whole model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "contained", "distinct", "distinct_first", "numbered"]

Ints = NDArray[np.int64]


def distinct(values: Ints) -> Ints:
    """Each value once, in rising order.

    >>> distinct(np.array([7, 3, 7])).tolist()
    [3, 7]
    """
    rising = np.sort(values)
    found: Ints = rising[_new(rising)]
    return found


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


def contained(values: Ints, others: Ints) -> NDArray[np.bool_]:
    """For every value, whether it is among the others.

    >>> contained(np.array([[1, 5]]), np.array([5, 6])).tolist()
    [[False, True]]
    """
    rising = np.sort(others)
    if not len(rising):
        return np.zeros(values.shape, dtype=bool)
    at = np.minimum(np.searchsorted(rising, values), len(rising) - 1)
    found: NDArray[np.bool_] = rising[at] == values
    return found


def _new(rising: Ints) -> NDArray[np.bool_]:
    new = np.ones(len(rising), dtype=bool)
    new[1:] = rising[1:] != rising[:-1]
    return new
