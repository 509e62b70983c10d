"""Cells of a class of tensors, and the lines along which ranks share the work on them.

A cell is a box inside one box of the source and one box of the destination. Two geometries with
mostly the same methods produce them: for two regular layouts on separate ranks, or without
replicas, the cells of a rank follow from its own regions by arithmetic (``regular``); for all
others every cell is worked out once (``listed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints
from reshard.layout.coverage import missing_boxes
from reshard.planning.classes import Stack
from reshard.planning.names import Feed
from reshard.planning.sharing import LineSet
from reshard.text import count

__all__ = [
    "Cells",
    "Kinds",
    "Lined",
    "check_coverage",
    "in_want_coordinates",
    "insert_columns",
    "raise_uncovered",
]


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Cells as columns; coordinates have one row per cell and one column per dim."""

    have_region: Ints
    want_region: Ints
    have_low: Ints
    want_low: Ints
    width: Ints
    size: Ints
    """Elements of each cell."""
    have_at: Ints
    """How many elements of its source region come before each cell."""
    want_at: Ints
    """How many elements of its destination region come before each cell."""


@dataclass(frozen=True, eq=False, slots=True)
class Lined:
    """Cells, and the position of each on the line of its senders and on that of its receivers.

    Positions count elements of one tensor; a stack of T tensors is T times as long.
    """

    cells: Cells
    send_line: Ints
    send_at: Ints
    receive_line: Ints
    receive_at: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Kinds:
    """Cells of one kind are on the same two lines."""

    of: Ints
    """The kind of each cell that travels."""
    send: Ints
    """The line of ranks that hold each kind."""
    receive: Ints
    """The line of ranks that want it."""
    held: LineSet
    """The ranks of each kind that hold what they want."""


def check_coverage(stack: Stack, want: Listed, cells: Cells) -> None:
    """Refuse a stack of which some wanted box is not made up of cells."""
    starts = insert_columns(want.starts, stack.feed.want_insert, 0)
    stops = insert_columns(want.stops, stack.feed.want_insert, 1)
    widths = stops - starts
    for dim, segments in enumerate(stack.feed.moves):
        runs = np.array(segments, dtype=np.int64).reshape(-1, 3)
        low = np.maximum(starts[:, dim, None], runs[:, 1])
        high = np.minimum(stops[:, dim, None], runs[:, 1] + runs[:, 2])
        widths[:, dim] = np.maximum(high - low, 0).sum(axis=1)
    provided = np.bincount(cells.want_region, weights=cells.size, minlength=len(want.starts))
    if bool((provided != widths.prod(axis=1)).any()):
        raise_uncovered(stack)


def raise_uncovered(stack: Stack) -> None:
    """Find the first wanted box that no source rank holds, and say so."""
    starts, stops, _, _ = in_want_coordinates(
        listed_of(stack.have.layout, stack.have.shape), stack.feed
    )
    held = [Box(tuple(a), tuple(b)) for a, b in zip(starts, stops, strict=True)]
    want = listed_of(stack.want.layout, stack.want.shape)
    lows = insert_columns(want.starts, stack.feed.want_insert, 0)
    highs = insert_columns(want.stops, stack.feed.want_insert, 1)
    moves = stack.feed.moves
    fed = Box(
        tuple(min((start for _, start, _ in runs), default=0) for runs in moves),
        tuple(max((start + length for _, start, length in runs), default=0) for runs in moves),
    )
    for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
        box = Box(tuple(low), tuple(high))
        missing = missing_boxes(box & fed if moves else box, held)
        if missing:
            ranks = ", ".join(map(str, want.of(number)[:4]))
            lost = stack.have.layout.words.without
            elements = count(sum(each.size for each in missing), "element")
            hint = f"ranks {list(lost)} are lost" if lost else "let some source rank hold it"
            raise CoverageError(
                f"{stack.label}: destination rank {ranks} wants box {missing[0]} of shape "
                f'{stack.want.shape} and no source rank of "{stack.have.layout}" holds it '
                f"({count(len(missing), 'box', 'boxes')}, {elements} missing): {hint}"
            )
    raise CoverageError(f"{stack.label}: some wanted box has no source; please report this case")


def in_want_coordinates(have: Listed, feed: Feed) -> tuple[Ints, Ints, Ints, Ints]:
    """The source boxes where they land: starts, stops, how far they moved, and which box."""
    starts = insert_columns(have.starts, feed.have_insert, 0)
    stops = insert_columns(have.stops, feed.have_insert, 1)
    shift = np.zeros_like(starts)
    box = np.arange(len(starts))
    for dim, segments in enumerate(feed.moves):
        runs = np.array(segments, dtype=np.int64).reshape(-1, 3)
        low = np.maximum(starts[:, dim, None], runs[:, 0])
        high = np.minimum(stops[:, dim, None], runs[:, 0] + runs[:, 2])
        at, run = np.nonzero(low < high)
        starts, stops, shift, box = starts[at], stops[at], shift[at], box[at]
        by = (runs[:, 1] - runs[:, 0])[run]
        starts[:, dim], stops[:, dim] = low[at, run] + by, high[at, run] + by
        shift[:, dim] = by
    return starts, stops, shift, box


def insert_columns(columns: Ints, at: Sequence[int], value: int) -> Ints:
    for dim in at:
        columns = np.insert(columns, dim, value, axis=1)
    return columns
