"""Pictures and matrices as coloured rectangles with places on a page, and links between pictures.

Templates only print them.

On one page the same colour means exactly the same set of ranks. There are 16 fills, each plain or
with one of five textures: 96 looks. A page that draws more sets leaves the rest without a colour,
and their cells are told apart by their labels.

A link is a rectangle of the source picture, a rectangle of the destination picture, and the entries
of the traffic matrix that carry what both cover. A page lights up links.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.show.holdings import picture_of
>>> picture = picture_of(Layout(Mesh(tp=2), "tp -"), (8, 8), most=(4, 4))
>>> drawing = drawing_of(picture, Colours())
>>> [(rect.label, rect.y, rect.height, rect.style) for rect in drawing.rects]
[('0', 0.0, 120.0, 'c0'), ('1', 120.0, 120.0, 'c1')]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.layout.columns import Ints
from reshard.layout.mesh import format_ranks
from reshard.planning.cells.transfers import insert_columns
from reshard.planning.classes import Stack
from reshard.planning.flows import Flow
from reshard.planning.names import Feed
from reshard.planning.plans import Plan
from reshard.show.holdings import Cell, Picture
from reshard.show.traffic import Matrix, short_bytes
from reshard.text import format_bytes, shorten

WIDTH = 400.0
MAX_HEIGHT = 240.0
LETTER = 7.3
"""The width of a character on the page."""
MAX_LABELLED = 8
"""Columns of a matrix whose cells are wide enough for numbers."""

LIGHT = (
    "#abdfff", "#ffc4c8", "#b5e6be", "#d2d1ff", "#fdcda6", "#9be8e7", "#f5c6ef", "#dedba1",
    "#80aafa", "#ee8d70", "#3ec4a2", "#c095e8", "#d1a342", "#28bdde", "#e788b2", "#95b960",
)  # fmt: skip
DARK = (
    "#0c4160", "#5e2b30", "#1b4827", "#393763", "#59320c", "#004949", "#532d50", "#433f02",
    "#44629c", "#934d38", "#00755d", "#73538f", "#7f5d08", "#007089", "#8e4969", "#536e29",
)  # fmt: skip
"""Two rows of eight hues, for a light and a dark page. A row has one lightness and one chroma
(OKLCH: 0.88 and 0.075, 0.74 and 0.125; dark 0.36 and 0.075, 0.50 and 0.1); its hues are 135 degrees
apart, so that neighbours look different."""

FILLS = len(LIGHT)
TEXTURES = ("", "M-2,10 L10,-2 M-2,2 L2,-2 M6,10 L10,6", "M-2,-2 L10,10 M6,-2 L10,2 M-2,6 L2,10",
            "M0,4 H8", "M4,0 V8", "M0,4 H8 M4,0 V8")  # fmt: skip
"""Lines of a tile of 8 by 8: none, rising, falling, across, down, a grid."""
LOOKS = FILLS * len(TEXTURES)


@dataclass(slots=True)
class Colours:
    """The looks that a page has given to sets of ranks so far."""

    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def of(self, ranks: tuple[int, ...]) -> int | None:
        """The look of a set of ranks, always the same on a page; None where all are taken."""
        number = self.known.setdefault(ranks, len(self.known))
        return number if number < LOOKS else None

    @property
    def num_left_out(self) -> int:
        """Sets for which there was no look left."""
        return max(len(self.known) - LOOKS, 0)


def palette(dark: bool) -> tuple[str, ...]:
    """The fills in the order in which they are given away."""
    return DARK if dark else LIGHT


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of a picture: ranks that hold a box, its label and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str
    ranks: tuple[int, ...]
    low: tuple[int, int]
    high: tuple[int, int]
    """The rows and columns of the tensor that it covers; a 1-d tensor has one row."""
    look: int | None
    """A number below `LOOKS`, fills first; None where no rank holds it or no colours were left."""
    merged: bool

    @property
    def style(self) -> str:
        fine = " fine" if min(self.width, self.height) < 8 else ""
        colour = "grey" if self.look is None else f"c{self.look}"
        return f"{colour if self.ranks else 'hole'}{fine}"

    @property
    def texture(self) -> int:
        """The number of the texture over the fill; 0 is none."""
        return (self.look or 0) // FILLS


@dataclass(frozen=True, slots=True)
class Tick:
    """A text at a place along an edge of a drawing, or above lanes, in percent of their width."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Rectangles, and the texts along the top and the left edge."""

    width: float
    height: float
    rects: tuple[Rect, ...]
    top: tuple[Tick, ...]
    left: tuple[Tick, ...]
    gutter: float
    """The width of the texts on the left."""
    dims: tuple[int, ...]


def drawing_of(picture: Picture, colours: Colours) -> Drawing:
    height, is_flat = 64.0, len(picture.shape) == 1
    if not is_flat:
        height = min(max(WIDTH * picture.shape[0] / picture.shape[1], WIDTH * 0.3), MAX_HEIGHT)
    xs = [WIDTH * edge / picture.columns[-1] for edge in picture.columns]
    ys = [height * edge / picture.rows[-1] for edge in picture.rows]
    rects = tuple(_rects(picture, xs, ys, colours))
    left = () if is_flat else tuple(_ticks(picture.rows, ys, 16))[1:]
    top = tuple(_ticks(picture.columns, xs, 0))
    gutter = round(max((len(tick.text) for tick in left), default=0) * LETTER + 8, 1)
    return Drawing(WIDTH, round(height, 1), rects, top, left, gutter, picture.dims)


def _rects(
    picture: Picture, xs: Sequence[float], ys: Sequence[float], colours: Colours
) -> Iterator[Rect]:
    """Equal neighbours in a row are one rectangle."""
    for i, row in enumerate(picture.cells):
        end = 0
        for cell, same in groupby(row):
            first, end = end, end + len([*same])
            low = picture.rows[i], picture.columns[first]
            high = picture.rows[i + 1], picture.columns[end]
            width, height = xs[end] - xs[first], ys[i + 1] - ys[i]
            most = int((width - 6) / LETTER)
            label = cell.text(most)
            if len(label) > most or height < 13:
                label = ""
            x, y, width, height = (round(at, 2) for at in (xs[first], ys[i], width, height))
            look = colours.of(cell.ranks) if cell.ranks else None
            title = _title(cell, picture, low, high)
            yield Rect(
                x, y, width, height, label, title, cell.ranks, low, high, look, cell.num_parts > 1
            )


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks in a sentence, shortened where they are many.

    >>> rank_list([3]), rank_list(range(8))
    ('rank 3', 'ranks 0-7')
    """
    return f"rank{'s' * (len(ranks) > 1)} {shorten(format_ranks(ranks), 60)}"


def _title(cell: Cell, picture: Picture, low: tuple[int, int], high: tuple[int, int]) -> str:
    runs = [":"] * picture.ndim
    for at, dim in enumerate(picture.dims, start=2 - len(picture.dims)):
        runs[dim] = f"{low[at]}:{high[at]}"
    box = ", ".join(runs)
    if not cell.ranks:
        return f"[{box}] is held by no rank"
    parts = f"{cell.num_parts:,} parts " if cell.num_parts > 1 else ""
    return f"[{box}] {parts}on {rank_list(cell.ranks)}{'' if cell.whole else ', not all of it'}"


def _ticks(edges: Sequence[int], places: Sequence[float], least: float) -> Iterator[Tick]:
    """The indices at the edges, without those that would overlap."""
    end, last = float("-inf"), places[-1]
    for edge, place in zip(edges, places, strict=True):
        text = str(edge)
        width = least or len(text) * LETTER + 8
        if place - end >= width and (place == last or last - place >= width):
            end = place
            yield Tick(round(place, 1), text)


@dataclass(frozen=True, slots=True)
class Entry:
    """A cell of the traffic matrix."""

    x: float
    y: float
    label: str
    title: str
    strength: float
    """Its bytes, as a share of the largest entry; 0 where nothing travels."""
    passed: float
    """The share of its bytes that is passed on, not sent by a source."""


@dataclass(frozen=True, slots=True)
class Table:
    """The traffic matrix with its labels."""

    kind: str
    cell_width: float
    cell_height: float
    entries: tuple[Entry, ...]
    """Row by row; one for each pair, so that its place is its number."""
    top: tuple[Tick, ...]
    left: tuple[Tick, ...]
    width: float
    height: float
    gutter: float
    head: float
    """The room that the texts along the top need."""
    slanted: bool
    """Whether these are too long to stand side by side."""

    @property
    def passes(self) -> bool:
        return any(entry.passed for entry in self.entries)


def table_of(matrix: Matrix) -> Table:
    longest = max(map(len, matrix.destinations), default=0) * LETTER
    width = 46.0 if len(matrix.destinations) <= MAX_LABELLED else 26.0
    slanted = longest > width - 4
    if slanted and width < 40:
        width = 19.0  # so that the labels need not be made smaller
    height = 24.0 if width > 20 else 19.0
    largest = max(int(matrix.num_bytes.max(initial=0)), 1)
    entries = []
    for i, source in enumerate(matrix.sources):
        for j, destination in enumerate(matrix.destinations):
            size, first = int(matrix.num_bytes[i, j]), int(matrix.first_hand[i, j])
            title = f"{matrix.kind} {source} to {destination}: {format_bytes(size)}"
            if first < size:
                title += f", {format_bytes(size - first)} of it passed on"
            label = short_bytes(size) if size and width > 40 else ""
            strength = round(0.2 + 0.8 * size / largest, 3) if size else 0.0
            passed = round((size - first) / size, 3) if size else 0.0
            entries.append(Entry(j * width, i * height, label, title, strength, passed))
    top = tuple(Tick((j + 0.5) * width, text) for j, text in enumerate(matrix.destinations))
    left = tuple(Tick((i + 0.5) * height, text) for i, text in enumerate(matrix.sources))
    gutter = round(max(map(len, matrix.sources), default=0) * LETTER + 12, 1)
    head = round(longest * 0.71 + 38 if slanted else 42, 1)
    sizes = width * len(top), height * len(left)
    return Table(
        matrix.kind, width, height, tuple(entries), top, left, *sizes, gutter, head, slanted
    )


MAX_ROWS = 50_000
"""Rows of a plan that are looked at for one stack. With more, all groups of ranks that hold a piece
and exchange anything with a group that wants it count as its senders."""
MAX_COMPARED = 4_000_000
"""Pairs of cells and rectangles that are compared."""

Mask = NDArray[np.bool_]
Boxes = tuple[Ints, Ints]
"""Starts and stops: a row for each box, a column for each dim of its tensor."""


class Link(NamedTuple):
    """Two rectangles that share elements."""

    have: int
    want: int
    entries: tuple[int, ...]
    """Entries of the traffic matrix, as row * columns + column."""


def links_of(plan: Plan, stack: Stack, source: Drawing, to: Drawing, matrix: Matrix) -> list[Link]:
    """The links of one drawn stack, in the order of its source rectangles."""
    have, want = _boxes_of(source, stack.have.shape), _boxes_of(to, stack.want.shape)
    pairs = np.argwhere(_shared(stack.feed, have, want)).tolist()
    entries: dict[tuple[int, int], set[int]] = {(h, w): set() for h, w in pairs}
    flows = [flow for flow in plan.flows if flow.stack is stack]
    num_compared = sum(flow.geometry.num_cells() for flow in flows) * (len(have[0]) + len(want[0]))
    # Cells are counted before they are listed.
    if num_compared <= MAX_COMPARED and sum(map(_num_rows, flows)) <= MAX_ROWS:
        for entry, here, there in _carriers(plan, flows, have, want, matrix):
            for (h, w), some in entries.items():
                some.update(entry[here[:, h] & there[:, w]].tolist())
    elif matrix.num_bytes.size:
        # Every entry with traffic from a group that holds a piece to one that wants it.
        for (h, w), some in entries.items():
            holders, takers = (np.array(r.ranks, int) for r in (source.rects[h], to.rects[w]))
            rows = matrix.row_of[np.searchsorted(plan.world, holders)]
            columns = matrix.column_of[np.searchsorted(plan.world, takers)]
            possible = np.zeros(matrix.num_bytes.shape, dtype=bool)
            possible[np.ix_(rows, columns)] = True
            some.update(np.flatnonzero(possible & (matrix.num_bytes > 0)).tolist())
    return [Link(h, w, tuple(sorted(some))) for (h, w), some in entries.items()]


def _boxes_of(drawing: Drawing, shape: tuple[int, ...]) -> Boxes:
    low = np.zeros((len(drawing.rects), len(shape)), dtype=np.int64)
    high = np.tile(np.array(shape, dtype=np.int64), (len(drawing.rects), 1))
    for at, dim in enumerate(drawing.dims, start=2 - len(drawing.dims)):
        low[:, dim] = [rect.low[at] for rect in drawing.rects]
        high[:, dim] = [rect.high[at] for rect in drawing.rects]
    return low, high


def _overlaps(boxes: Boxes, others: Boxes) -> Mask:
    """Which boxes (rows) have elements in common with which others (columns)."""
    (low, high), (other_low, other_high) = boxes, others
    sides = np.minimum(high[:, None], other_high) - np.maximum(low[:, None], other_low)
    return np.asarray((sides > 0).all(axis=2))


def _shared(feed: Feed, have: Boxes, want: Boxes) -> Mask:
    """Which source boxes (rows) have elements in common with which destination boxes (columns)."""
    if not feed.moves:
        return _overlaps(have, want)
    (low, high), (to_low, to_high) = (
        (insert_columns(boxes[0], insert, 0), insert_columns(boxes[1], insert, 1))
        for boxes, insert in ((have, feed.have_insert), (want, feed.want_insert))
    )
    shared = np.ones((len(low), len(to_low)), dtype=bool)
    for dim, runs in enumerate(feed.moves):
        here = np.zeros_like(shared)
        for source, destination, length in runs:
            start = np.maximum(low[:, dim], source) + destination - source
            stop = np.minimum(high[:, dim], source + length) + destination - source
            first = np.maximum(start[:, None], to_low[:, dim])
            here |= np.minimum(stop[:, None], to_high[:, dim]) > first
        shared &= here
    return shared


def _num_rows(flow: Flow) -> int:
    """How many rows a flow has if its lines are listed rank by rank."""
    lines = flow.geometry.wanting.counts[flow.parts().line]
    return int(lines.sum()) * flow.geometry.num_addends


def _carriers(
    plan: Plan, flows: Sequence[Flow], have: Boxes, want: Boxes, matrix: Matrix
) -> Iterator[tuple[Ints, Mask, Mask]]:
    """What moves, as entries of the matrix and the boxes on both sides that each touches."""
    size = matrix.num_bytes.size
    for flow in flows:
        feed = flow.stack.feed
        for rows in flow.everything():
            moved = rows.moved()
            row = matrix.row_of[np.searchsorted(plan.world, moved.source)]
            column = matrix.column_of[np.searchsorted(plan.world, moved.destination)]
            entry = row * matrix.num_bytes.shape[1] + column
            cell, entry = np.divmod(np.unique(moved.runs.cell * size + entry), size)
            cells = moved.cells.take(cell)
            here = _touched(have, cells.have_low, cells.width, feed.have_insert)
            yield entry, here, _touched(want, cells.want_low, cells.width, feed.want_insert)


def _touched(boxes: Boxes, low: Ints, width: Ints, insert: Sequence[int]) -> Mask:
    """Which cells touch which boxes, in the dims of the tensor that has these boxes."""
    low = np.delete(low, insert, axis=1)
    return _overlaps((low, low + np.delete(width, insert, axis=1)), boxes)
