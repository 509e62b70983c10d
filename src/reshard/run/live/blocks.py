"""Which boxes of which tensors are the rows of a plan? All rows at once, as columns.

A row is a range of a stacked cell: elements ``start`` to ``stop`` of so many tensors with a cell of
the same shape in each. What can be addressed is a box of one tensor, so every row becomes blocks:

    two tensors, cell 2 x 3, elements 4 to 12     -> tensor 0: row 1, columns 1 to 3
    0 1 2 | 3[4 5]    [6 7 8 | 9 10 11]              tensor 1: all of it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.columns import Ints

__all__ = ["Blocks", "blocks_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """Boxes of single tensors inside their cells, in the order of the rows."""

    row: Ints
    tensor: Ints
    """Which tensor of the stack."""
    low: Ints
    """Where each block starts in its cell, one column per dim."""
    width: Ints


def blocks_of(cell_width: Ints, num_tensors: int, start: Ints, stop: Ints) -> Blocks:
    """Cut ranges of stacked cells into blocks; ``cell_width`` has one row per range.

    >>> blocks = blocks_of(np.array([[2, 3]]), 2, np.array([4]), np.array([12]))
    >>> blocks.tensor.tolist(), blocks.low.tolist(), blocks.width.tolist()
    ([0, 1], [[1, 1], [0, 0]], [[1, 2], [2, 3]])
    """
    stacked = np.insert(cell_width, 0, num_tensors, axis=1)
    row, low, width = _flat_boxes(stacked, start, stop)
    counts = width[:, 0]
    old = np.repeat(np.arange(len(row)), counts)
    within = np.arange(len(old)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Blocks(row[old], low[old, 0] + within, low[old, 1:], width[old, 1:])


def _flat_boxes(shapes: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges of flattened boxes as boxes: the range each is of, its start and its width.

    Dim by dim: what covers whole indices is a box; a ragged head and a ragged tail are ranges of
    one index, which the next dim cuts further.
    """
    num_dims = shapes.shape[1]
    todo = _Ranges(np.arange(len(start)), start, stop, np.zeros_like(shapes), np.zeros_like(start))
    done: list[tuple[Ints, Ints, Ints, Ints]] = []
    for dim in range(num_dims):
        inner = np.prod(shapes[:, dim + 1 :], axis=1, dtype=np.int64)[todo.row]
        first, last = todo.start // inner, (todo.stop - 1) // inner
        body_from = -(-todo.start // inner)
        body_to = todo.stop // inner
        body = np.flatnonzero(body_from < body_to)
        low, width = todo.low[body], shapes[todo.row[body]]
        low[:, dim] = body_from[body]
        width[:, :dim] = 1
        width[:, dim] = (body_to - body_from)[body]
        at = todo.at[body] + body_from[body] * inner[body]
        done.append((todo.row[body], at, low, width))
        head = np.flatnonzero(todo.start % inner != 0)
        tail = np.flatnonzero(
            (todo.stop % inner != 0) & ((first < last) | (todo.start % inner == 0))
        )
        todo = _Ranges.join(
            todo.inside(head, dim, first, inner), todo.inside(tail, dim, last, inner)
        )
    row, at, low, width = (np.concatenate(columns) for columns in zip(*done, strict=True))
    order = np.lexsort((at, row))
    return row[order], low[order], width[order]


@dataclass(frozen=True, eq=False, slots=True)
class _Ranges:
    """Ranges inside one index of all dims so far: that index, and where it begins."""

    row: Ints
    start: Ints
    stop: Ints
    low: Ints
    at: Ints

    def inside(self, which: Ints, dim: int, index: Ints, inner: Ints) -> _Ranges:
        """The part of some ranges that lies within one index of a dim."""
        at = index[which] * inner[which]
        low = self.low[which]
        low[:, dim] = index[which]
        return _Ranges(
            self.row[which],
            np.maximum(self.start[which] - at, 0),
            np.minimum(self.stop[which] - at, inner[which]),
            low,
            self.at[which] + at,
        )

    @staticmethod
    def join(one: _Ranges, other: _Ranges) -> _Ranges:
        """Both, one after the other."""
        return _Ranges(
            np.concatenate([one.row, other.row]),
            np.concatenate([one.start, other.start]),
            np.concatenate([one.stop, other.stop]),
            np.concatenate([one.low, other.low]),
            np.concatenate([one.at, other.at]),
        )
