"""Pictures and matrices as rectangles with places on a page; the template only prints them.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.show.picture import picture_of
>>> picture = picture_of(Layout(Mesh(tp=2), "tp -"), (8, 8), most=(4, 4))
>>> drawing = drawing_of(picture, {(0,): 210, (1,): 30})
>>> [(rect.label, rect.y, rect.height, rect.hue) for rect in drawing.rects]
[('0', 0.0, 130.0, 210), ('1', 130.0, 130.0, 30)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reshard.layout.mesh import format_ranks
from reshard.show.matrix import Matrix, short_bytes
from reshard.show.picture import Cell, Picture
from reshard.show.plan_text import StackRow
from reshard.text import format_bytes, shorten

__all__ = ["Drawing", "Rect", "Tick", "bars_of", "drawing_of", "matrix_of"]

WIDTH = 400.0
MAX_HEIGHT = 260.0
LETTER = 7.2
"""The width of a character on the page."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle, what is written in it, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str
    hue: int | None = None
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A text at an edge of a drawing."""

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
    slanted: bool = False
    """Whether the texts along the top are too long to stand side by side."""


def drawing_of(picture: Picture, hues: Mapping[tuple[int, ...], int]) -> Drawing:
    """Place the cells of a picture, true to scale."""
    height = 64.0
    if len(picture.shape) == 2:
        shape = picture.shape
        height = min(max(WIDTH * shape[0] / shape[1], WIDTH * 0.3), MAX_HEIGHT)
    xs = [WIDTH * edge / picture.columns[-1] for edge in picture.columns]
    ys = [height * edge / picture.rows[-1] for edge in picture.rows]
    rects = tuple(
        _cell_rect(picture.cells[i][j], picture, (i, j, end), (xs[j], xs[end]), ys[i : i + 2], hues)
        for i, row in enumerate(picture.cells)
        for j, end in _runs(row)
    )
    left = tuple(_ticks(picture.rows, ys, 16))[1:] if len(picture.shape) == 2 else ()
    top = tuple(_ticks(picture.columns, xs, 0))
    gutter = max((len(tick.text) for tick in left), default=0) * LETTER + 8
    return Drawing(WIDTH, round(height, 1), rects, top, left, round(gutter, 1))


def _runs(row: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """Where equal neighbours begin and end."""
    starts = [j for j in range(len(row)) if j == 0 or row[j] != row[j - 1]]
    return pairwise([*starts, len(row)])


def _cell_rect(
    cell: Cell,
    picture: Picture,
    at: tuple[int, int, int],
    across: Sequence[float],
    down: Sequence[float],
    hues: Mapping[tuple[int, ...], int],
) -> Rect:
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
        _cell_title(cell, picture, at),
        hues.get(cell.ranks),
    )


def _cell_title(cell: Cell, picture: Picture, at: tuple[int, int, int]) -> str:
    row, column, end = at
    box = f"{picture.columns[column]}:{picture.columns[end]}"
    if len(picture.shape) == 2:
        box = f"{picture.rows[row]}:{picture.rows[row + 1]}, {box}"
    if not cell.ranks:
        return f"[{box}] is held by no rank"
    ranks = shorten(format_ranks(cell.ranks), 60)
    what = f"{cell.num_parts:,} parts on ranks" if cell.num_parts > 1 else "on ranks"
    return f"[{box}] {what} {ranks}{'' if cell.whole else ', not all of it'}"


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


def matrix_of(matrix: Matrix) -> Drawing:
    """Place a traffic matrix; the colour says whether bytes are first-hand or passed on."""
    width, height = 50.0, 30.0
    largest = max(int(matrix.num_bytes.max(initial=0)), 1)
    rects = []
    for i, source in enumerate(matrix.sources):
        for j, destination in enumerate(matrix.destinations):
            size, first = int(matrix.num_bytes[i, j]), int(matrix.first_hand[i, j])
            title = f"{matrix.kind} {source} to {destination}: {format_bytes(size)}"
            if first < size:
                title += f", {format_bytes(size - first)} of it passed on"
            hue = round(212 - 178 * (size - first) / size) if size else None
            label = short_bytes(size) if size else ""
            strength = round(0.15 + 0.85 * size / largest, 3)
            rects.append(Rect(j * width, i * height, width, height, label, title, hue, strength))
    top = [Tick((j + 0.5) * width, text) for j, text in enumerate(matrix.destinations)]
    left = [Tick((i + 0.5) * height, text) for i, text in enumerate(matrix.sources)]
    longest = max(map(len, matrix.sources), default=0)
    return Drawing(
        width * len(matrix.destinations),
        height * len(matrix.sources),
        tuple(rects),
        tuple(top),
        tuple(left),
        longest * LETTER + 12,
        max(map(len, matrix.destinations), default=0) * LETTER > width,
    )


def bars_of(rows: Sequence[StackRow], num_rounds: int, most: int = 24) -> Drawing:
    """When each of the largest stacks moves: one bar from its first to its last round."""
    largest = sorted(range(len(rows)), key=lambda i: -rows[i].wire_bytes)[:most]
    shown = [rows[i] for i in sorted(largest)]
    width, height = 560.0, 22.0
    top_edges = sorted({round(num_rounds * part / 8) for part in range(9)})
    rects = [
        Rect(
            round(width * row.first_round / max(num_rounds, 1), 2),
            number * height + 3,
            round(max(width * (row.last_round + 1 - row.first_round) / max(num_rounds, 1), 2), 2),
            height - 6,
            "",
            f"{row.name}: rounds {row.rounds}, {format_bytes(row.wire_bytes)}",
            212,
        )
        for number, row in enumerate(shown)
    ]
    left = [Tick((i + 0.5) * height, shorten(row.name, 60)) for i, row in enumerate(shown)]
    gutter = max((len(tick.text) for tick in left), default=0) * LETTER + 4
    places = [width * edge / max(num_rounds, 1) for edge in top_edges]
    top = tuple(_ticks(top_edges, places, 0))
    return Drawing(width, height * len(shown), tuple(rects), top, tuple(left), gutter)
