"""Pictures and matrices as rectangles with places on a page; the template only prints them.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.show.picture import picture_of
>>> picture = picture_of(Layout(Mesh(tp=2), "tp -"), (8, 8), most=(4, 4))
>>> drawing = drawing_of(picture, Colours())
>>> [(rect.label, rect.y, rect.height, str(rect.look)) for rect in drawing.rects]
[('0', 0.0, 120.0, 'c0'), ('1', 120.0, 120.0, 'c1')]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reshard.layout.mesh import format_ranks
from reshard.show.matrix import Matrix, short_bytes
from reshard.show.page.colours import Colours, Look
from reshard.show.picture import Cell, Picture
from reshard.text import format_bytes, shorten

__all__ = ["Drawing", "Entry", "Rect", "Table", "Tick", "drawing_of", "table_of"]

WIDTH = 400.0
MAX_HEIGHT = 240.0
LETTER = 7.3
"""The width of a character on the page."""
MAX_LABELLED = 8
"""Columns of a matrix whose cells are wide enough for numbers."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of a picture: ranks that hold a box, what is written in it and said of it."""

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
    look: Look | None
    """None where no rank holds it, or where there were no colours left."""
    merged: bool

    @property
    def style(self) -> str:
        """The classes of the rectangle on the page."""
        fine = " fine" if min(self.width, self.height) < 8 else ""
        if not self.ranks:
            return f"hole{fine}"
        return f"{self.look or 'grey'}{fine}"


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
    """The room that the texts on the left need."""
    dims: tuple[int, ...]
    """Which dims of the tensor are drawn."""
    ndim: int
    """How many dims the tensor has."""


def drawing_of(picture: Picture, colours: Colours) -> Drawing:
    """Place the cells of a picture, true to scale."""
    height = 64.0
    if len(picture.shape) == 2:
        shape = picture.shape
        height = min(max(WIDTH * shape[0] / shape[1], WIDTH * 0.3), MAX_HEIGHT)
    xs = [WIDTH * edge / picture.columns[-1] for edge in picture.columns]
    ys = [height * edge / picture.rows[-1] for edge in picture.rows]
    rects = tuple(
        _rect(picture, (i, j, end), (xs[j], xs[end]), ys[i : i + 2], colours)
        for i, row in enumerate(picture.cells)
        for j, end in _runs(row)
    )
    left = tuple(_ticks(picture.rows, ys, 16))[1:] if len(picture.shape) == 2 else ()
    top = tuple(_ticks(picture.columns, xs, 0))
    gutter = max((len(tick.text) for tick in left), default=0) * LETTER + 8
    sizes = WIDTH, round(height, 1)
    return Drawing(*sizes, rects, top, left, round(gutter, 1), picture.dims, picture.ndim)


def _runs(row: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """Where equal neighbours begin and end."""
    starts = [j for j in range(len(row)) if j == 0 or row[j] != row[j - 1]]
    return pairwise([*starts, len(row)])


def _rect(
    picture: Picture,
    at: tuple[int, int, int],
    across: Sequence[float],
    down: Sequence[float],
    colours: Colours,
) -> Rect:
    row, column, end = at
    cell = picture.cells[row][column]
    width, height = across[1] - across[0], down[1] - down[0]
    room = int((width - 6) / LETTER)
    label = cell.text(room)
    fits = len(label) <= room and height >= 13
    return Rect(
        round(across[0], 2),
        round(down[0], 2),
        round(width, 2),
        round(height, 2),
        label if fits else "",
        _title(cell, picture, at),
        cell.ranks,
        (picture.rows[row], picture.columns[column]),
        (picture.rows[row + 1], picture.columns[end]),
        colours.of(cell.ranks) if cell.ranks else None,
        cell.num_parts > 1,
    )


def _title(cell: Cell, picture: Picture, at: tuple[int, int, int]) -> str:
    row, column, end = at
    runs = [":"] * picture.ndim
    runs[picture.dims[-1]] = f"{picture.columns[column]}:{picture.columns[end]}"
    if len(picture.shape) == 2:
        runs[picture.dims[0]] = f"{picture.rows[row]}:{picture.rows[row + 1]}"
    box = ", ".join(runs)
    if not cell.ranks:
        return f"[{box}] is held by no rank"
    ranks = shorten(format_ranks(cell.ranks), 60)
    where = f"on rank{'s' if len(cell.ranks) > 1 else ''} {ranks}"
    what = f"{cell.num_parts:,} parts {where}" if cell.num_parts > 1 else where
    return f"[{box}] {what}{'' if cell.whole else ', not all of it'}"


def _ticks(edges: Sequence[int], places: Sequence[float], least: float) -> Iterator[Tick]:
    """The indices at the edges, without those that would overlap."""
    end = float("-inf")
    last = places[-1]
    for edge, place in zip(edges, places, strict=True):
        text = str(edge)
        room = least or len(text) * LETTER + 8
        if place - end >= room and (place == last or last - place >= room):
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
        """Whether anything is passed on."""
        return any(entry.passed for entry in self.entries)


def table_of(matrix: Matrix) -> Table:
    """Place a traffic matrix."""
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
    return Table(
        matrix.kind,
        width,
        height,
        tuple(entries),
        tuple(Tick((j + 0.5) * width, text) for j, text in enumerate(matrix.destinations)),
        tuple(Tick((i + 0.5) * height, text) for i, text in enumerate(matrix.sources)),
        width * len(matrix.destinations),
        height * len(matrix.sources),
        round(max(map(len, matrix.sources), default=0) * LETTER + 12, 1),
        round(longest * 0.71 + 38 if slanted else 42, 1),
        slanted,
    )
