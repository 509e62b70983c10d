"""A picture as lines of text: cells in a frame, as wide as their share of the tensor.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.show.ink import plain
>>> from reshard.show.picture import picture_of
>>> picture = picture_of(Layout(Mesh(dp=2, tp=2), "tp dp"), (8, 6), most=(4, 4))
>>> print(plain(frame(picture, width=24)))
    0        3        6
  0 +--------+--------+
    |   0    |   2    |
  4 +--------+--------+
    |   1    |   3    |
  8 +--------+--------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from reshard.show.ink import Line, Span, hues, tone
from reshard.show.picture import Cell, Picture

__all__ = ["CELL_WIDTH", "frame", "shares"]

MAX_WIDTH = 76
CELL_WIDTH = 7
"""A column is at least so wide, so that a few ranks can be named in it."""
MAX_LINES = 12
"""Lines that few rows are stretched to."""

_CORNERS = {
    "": " ", "ud": "\u2502", "lr": "\u2500", "rd": "\u250c", "ld": "\u2510", "ru": "\u2514",
    "lu": "\u2518", "rud": "\u251c", "lud": "\u2524", "lrd": "\u252c", "lru": "\u2534",
    "lrud": "\u253c",
}  # fmt: skip
"""Corners of a frame by the sides (left, right, up, down) to which they have a line."""


def frame(picture: Picture, width: int, *, unicode: bool = False, tall: bool = False) -> list[Line]:
    """Draw a picture; with ``tall``, few rows are stretched so that they look like areas."""
    is_flat = len(picture.shape) == 1
    gutter = 2 if is_flat else max(len(str(edge)) for edge in picture.rows) + 3
    last = len(str(picture.columns[-1])) - 1
    room = min(width, MAX_WIDTH) - gutter - len(picture.columns) - last
    widths = shares(picture.columns, room, CELL_WIDTH)
    lines = min(MAX_LINES, 4 * len(picture.cells)) if tall and not is_flat else 1
    heights = shares(picture.rows, lines, 1)
    return list(_Frame(picture, widths, heights, gutter, unicode).lines())


def shares(edges: Sequence[int], total: int, least: int) -> list[int]:
    """Divide a length by the sizes between edges, none less than ``least``.

    >>> shares((0, 1, 8), 20, 5)
    [5, 15]
    >>> shares((0, 1, 2, 3), 20, 5)
    [6, 6, 6]
    """
    sizes = [high - low for low, high in pairwise(edges)]
    found = [max(total * size // edges[-1], least) for size in sizes]
    while sum(found) > total and max(found) > least:
        found[found.index(max(found))] -= 1
    return found


@dataclass(frozen=True)
class _Frame:
    picture: Picture
    widths: Sequence[int]
    heights: Sequence[int]
    gutter: int
    unicode: bool

    def lines(self) -> Iterator[Line]:
        """The indices of the columns, then borders and rows in turn."""
        yield [Span(self._header())]
        for row in range(len(self.heights)):
            yield self._border(row)
            for line in range(self.heights[row]):
                yield self._row(row, line == (self.heights[row] - 1) // 2)
        yield self._border(len(self.heights))

    def _header(self) -> str:
        text, at = "", self.gutter
        for edge, width in zip(self.picture.columns, (*self.widths, 0), strict=True):
            if len(text) < at or not text:
                text = text.ljust(at) + str(edge)
            at += width + 1
        return text

    def _row(self, row: int, with_labels: bool) -> Line:
        spans = [Span(" " * self.gutter)]
        for column, width in enumerate(self.widths):
            text = self._labels.get((row, column)) if with_labels else None
            label = text.text(width) if text else ""
            spans.append(self._wall(row, column))
            spans.append(Span(label[:width].center(width), self._colour(row, column)))
        return [*spans, self._wall(row, len(self.widths))]

    def _wall(self, row: int, column: int) -> Span:
        if self._has_wall(row, column):
            return Span("\u2502" if self.unicode else "|")
        return Span(" ", self._colour(row, column))

    def _border(self, row: int) -> Line:
        index = "" if len(self.picture.shape) == 1 else str(self.picture.rows[row])
        spans = [Span(index.rjust(self.gutter - 1) + " ")]
        for column, width in enumerate(self.widths):
            spans.append(Span(self._corner(row, column)))
            if self._has_floor(row, column):
                spans.append(Span(("\u2500" if self.unicode else "-") * width))
            else:
                spans.append(Span(" " * width, self._colour(row, column)))
        return [*spans, Span(self._corner(row, len(self.widths)))]

    def _corner(self, row: int, column: int) -> str:
        sides = (
            ("l", self._has_floor(row, column - 1)),
            ("r", self._has_floor(row, column)),
            ("u", self._has_wall(row - 1, column)),
            ("d", self._has_wall(row, column)),
        )
        found = "".join(side for side, there in sides if there)
        if self.unicode:
            return _CORNERS[found]
        return {"": " ", "ud": "|", "lr": "-"}.get(found, "+")

    def _has_wall(self, row: int, column: int) -> bool:
        """Whether there is a line on the left of a cell."""
        if not 0 <= row < len(self.heights):
            return False
        return self._at(row, column - 1) != self._at(row, column)

    def _has_floor(self, row: int, column: int) -> bool:
        """Whether there is a line above a cell."""
        if not 0 <= column < len(self.widths):
            return False
        return self._at(row - 1, column) != self._at(row, column)

    def _at(self, row: int, column: int) -> Cell | None:
        inside = 0 <= row < len(self.heights) and 0 <= column < len(self.widths)
        return self.picture.cells[row][column] if inside else None

    def _colour(self, row: int, column: int) -> str | None:
        degrees = self._hues.get(self.picture.cells[row][column].ranks)
        return None if degrees is None else tone(degrees)

    @cached_property
    def _hues(self) -> Mapping[tuple[int, ...], int]:
        return hues(self.picture.holders())

    @cached_property
    def _labels(self) -> dict[tuple[int, int], Cell]:
        """The cell of each region that bears its label: its widest one."""
        left = {(i, j) for i, row in enumerate(self.picture.cells) for j in range(len(row))}
        labels = {}
        while left:
            region = _connected(min(left), left, self._at)
            left -= region
            i, j = max(sorted(region), key=lambda at: self.widths[at[1]] * self.heights[at[0]])
            labels[i, j] = self.picture.cells[i][j]
        return labels


def _connected(
    start: tuple[int, int],
    among: set[tuple[int, int]],
    cell: Callable[[int, int], Cell | None],
) -> set[tuple[int, int]]:
    """The places around a start that look the same."""
    found, pending = {start}, [start]
    while pending:
        i, j = pending.pop()
        for place in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if place in among and place not in found and cell(*place) == cell(*start):
                found.add(place)
                pending.append(place)
    return found
