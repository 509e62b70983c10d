"""Does the source hold all that the destination wants? If not: which box is missing?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.errors import CoverageError
from reshard.layout.box import Box
from reshard.layout.boxlist import Listed, listed_of
from reshard.layout.columns import Ints
from reshard.layout.coverage import missing_boxes
from reshard.planning.cells.geometry import Cells
from reshard.planning.classes import Stack
from reshard.planning.names import Feed

__all__ = ["check_coverage", "in_want_coordinates", "insert_columns", "raise_uncovered"]


def check_coverage(stack: Stack, want: Listed, cells: Cells) -> None:
    """Refuse a stack of which some wanted box is not made up of cells."""
    provided = np.bincount(cells.want_region, weights=cells.size, minlength=len(want.starts))
    if bool((provided != _needed(want, stack.feed)).any()):
        raise_uncovered(stack)


def _needed(want: Listed, feed: Feed) -> Ints:
    """How many elements of each wanted box the feed should provide."""
    starts = insert_columns(want.starts, feed.want_insert, 0)
    stops = insert_columns(want.stops, feed.want_insert, 1)
    widths = stops - starts
    for dim, segments in enumerate(feed.moves):
        runs = np.array(segments, dtype=np.int64).reshape(-1, 3)
        low = np.maximum(starts[:, dim, None], runs[:, 1])
        high = np.minimum(stops[:, dim, None], runs[:, 1] + runs[:, 2])
        widths[:, dim] = np.maximum(high - low, 0).sum(axis=1)
    needed: Ints = widths.prod(axis=1)
    return needed


def raise_uncovered(stack: Stack) -> None:
    """Find the first wanted box that no source rank holds, and say so."""
    starts, stops, _, _ = in_want_coordinates(
        listed_of(stack.have.layout, stack.have.shape), stack.feed
    )
    held = [Box(tuple(a), tuple(b)) for a, b in zip(starts, stops, strict=True)]
    want = listed_of(stack.want.layout, stack.want.shape)
    lows = insert_columns(want.starts, stack.feed.want_insert, 0)
    highs = insert_columns(want.stops, stack.feed.want_insert, 1)
    fed = [_span(segments) for segments in stack.feed.moves]
    for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
        box = Box(tuple(low), tuple(high))
        if fed:
            box = box & Box(tuple(a for a, _ in fed), tuple(b for _, b in fed))
        missing = missing_boxes(box, held)
        if missing:
            ranks = ", ".join(map(str, want.of(number)[:4]))
            lost = stack.have.layout.words.without
            hint = f"ranks {list(lost)} are lost" if lost else "let some source rank hold it"
            raise CoverageError(
                f"{stack.label}: destination rank {ranks} wants box {missing[0]} of shape "
                f'{stack.want.shape} and no source rank of "{stack.have.layout}" holds it '
                f"({len(missing)} boxes, {sum(m.size for m in missing)} elements missing): {hint}"
            )
    raise CoverageError(f"{stack.label}: some wanted box has no source; please report this case")


def _span(segments: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    starts = [start for _, start, _ in segments]
    stops = [start + length for _, start, length in segments]
    return min(starts, default=0), max(stops, default=0)


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
