"""Recovers the layout that the boxes of a tensor follow.

Most files record boxes and not layouts. Axes are called x, y, z and so on; ``rep`` is an axis of
replicas.

>>> recovered((8, 4), [Box((0, 0), (4, 4)), Box((4, 0), (8, 4))])
'x=2: x -'
>>> recovered((8, 4), [Box((0, 0), (3, 4)), Box((3, 0), (8, 4))])
'x=2: x[3,5] -'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from reshard.layout.box import Box
from reshard.layout.coverage import grid_edges

__all__ = ["recovered"]

WHOLE = "whole"
AXES = "xyzuvwabcdefghijklmnopqrst"
MAX_SIZES = 16
"""The most sizes of an uneven dim that are written out."""


def recovered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """A mesh and a layout with these boxes, ``whole``, or else the number of boxes."""
    held = Counter(box for box in boxes if box.size)
    if not held:
        return WHOLE if 0 in shape else "0 boxes"
    copies = set(held.values())
    edges = grid_edges(held)
    if len(copies) > 1 or edges is None or len(edges) > len(AXES):
        return f"{held.total()} boxes"
    axes: dict[str, int] = {}
    words: list[str] = []
    for length, dim in zip(shape, edges, strict=True):
        sizes = [stop - start for start, stop in pairwise(dim)]
        if len(sizes) == 1 and sizes[0] == length:
            words.append("-")
            continue
        axis = AXES[len(axes)]
        axes[axis] = len(sizes)
        word = _word(axis, length, dim[0], sizes)
        if word is None:
            return f"{held.total()} boxes"
        words.append(word)
    if copies != {1}:
        axes["rep"] = copies.pop()
    mesh = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"{mesh}: {' '.join(words) if axes.keys() - {'rep'} else '...'}" if mesh else WHOLE


def _word(axis: str, length: int, start: int, sizes: Sequence[int]) -> str | None:
    """The word for one dim; None if its parts do not cover it or are too many to write out."""
    if start != 0 or sum(sizes) != length:
        return None
    chunk = -(-length // len(sizes))
    if all(size == chunk for size in sizes[:-1]) and sizes[-1] <= chunk:
        return axis
    return f"{axis}[{','.join(map(str, sizes))}]" if len(sizes) <= MAX_SIZES else None
