"""Layouts as plain or coloured text: a picture where there can be one, and a table of ranks.

>>> from reshard.layout.mesh import Mesh
>>> print(as_text(Layout(Mesh(dp=2, tp=2), "tp"), (8,), width=30))
tp on mesh dp=2 tp=2, shape 8: 2 parts, each on 2 ranks
<BLANKLINE>
  0            4            8
  +------------+------------+
  |    0,2     |    1,3     |
  +------------+------------+
<BLANKLINE>
ranks  at    local shape  holds
0,2    tp=0  4            [0:4]
1,3    tp=1  4            [4:8]

Lines are spans of text with colours behind them, or the same text plain:

>>> plain([[Span("rank 0", "#ffcc00"), Span(" | ")]])
'rank 0 |'
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, pairwise
from typing import TextIO, TypeAlias

from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import format_ranks
from reshard.show.holdings import Cell, Holdings, Picture, holdings, picture_of
from reshard.text import align, count, format_shape, shorten

MAX_ROWS = 16
MAX_PIECES = 64
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


@dataclass(frozen=True, slots=True)
class Span:
    """Some characters and the colour behind them."""

    text: str
    background: str | None = None
    bold: bool = False


Line: TypeAlias = Sequence[Span]


def draw(
    layout: Layout, shape: Sequence[int], *, width: int = 80, unicode: bool = False
) -> list[Line]:
    """A headline, a picture where there can be one, and a table of the ranks."""
    found = holdings(layout, shape, MAX_ROWS)
    most = (MAX_ROWS, max((min(width, 80) - 10) // (CELL_WIDTH + 1), 1))
    picture = picture_of(layout, shape, most)
    lines: list[Line] = [[Span(_headline(layout, shape, found), bold=True)], []]
    if picture is not None:
        lines += [*frame(picture, width, unicode=unicode, tall=True), []]
    if picture is not None and picture.is_merged:
        lines += [[Span("a..b: parts on ranks a to b, too small to draw one by one")], []]
    return lines + [[Span(line)] for line in table(found, width)]


def as_text(layout: Layout, shape: Sequence[int], width: int = 80) -> str:
    """The same as plain text, for ``layout.draw``."""
    return plain(draw(layout, shape, width=width))


def _headline(layout: Layout, shape: Sequence[int], found: Holdings) -> str:
    """The layout, its mesh and how often everything is held, in a sentence."""
    where = "" if isinstance(layout, BoxLayout) else f" on mesh {layout.mesh}"
    what = "no rank holds any element"
    if found.num_different:
        each, rest = divmod(found.num_ranks, found.num_different)
        ranks = found.num_ranks if rest else each
        evenly = found.num_different > 1 and not rest
        what = f"{count(found.num_different, 'part')}, {'each ' if evenly else ''}on "
        what += count(ranks, "rank")
    if layout.reduce:
        what += f", with a pending {layout.reduce[0]} over {' '.join(layout.reduce[1])}"
    return f"{shorten(str(layout), 60)}{where}, shape {format_shape(shape)}: {what}"


def table(found: Holdings, width: int = 80) -> list[str]:
    """The ranks, their coordinates, and what they hold."""
    if not found.rows:
        return []
    rows = [("ranks", "at", "local shape", "holds")]
    for row in found.rows:
        at = " ".join(f"{axis}={place}" for axis, place in row.coords.items())
        ranks = shorten(format_ranks(row.ranks), 24)
        rows.append((ranks, at, format_shape(row.local_shape), row.text))
    lines = [shorten(line, max(width, 60)) for line in align(rows)]
    if found.num_different > len(found.rows):
        lines.append(f"and {count(found.num_different - len(found.rows), 'more part')}")
    if found.idle:
        verb = "holds" if len(found.idle) == 1 else "hold"
        named = shorten(format_ranks(found.idle), 40)
        lines.append(f"{count(len(found.idle), 'rank')} {verb} nothing: {named}")
    return lines


def pieces_table(layout: Layout, rank: int, shape: Sequence[int]) -> list[str]:
    """What one rank holds, box by box, and where each sits in its local tensor.

    >>> from reshard.layout.mesh import Mesh
    >>> for line in pieces_table(Layout(Mesh(cp=2), "cp~"), 0, (8,)):
    ...     print(line)
    rank 0 at cp=0 of mesh cp=2 holds 4 elements in 2 pieces, local shape 4
    <BLANKLINE>
    box    offset  strides
    [0:2]       0  1
    [6:8]       2  1
    """
    pieces = layout.pieces(rank, shape)
    if not pieces:
        return [f"rank {rank} holds nothing of shape {format_shape(shape)} in layout {layout}"]
    at = " ".join(f"{axis}={place}" for axis, place in (layout.holds(rank) or {}).items())
    num_elements = sum(piece.box.size for piece in pieces)
    first = (
        f"rank {rank}{f' at {at}' * bool(at)} of mesh {layout.mesh} holds "
        f"{count(num_elements, 'element')} in {count(len(pieces), 'piece')}, "
        f"local shape {format_shape(layout.local_shape(rank, shape))}"
    )
    rows = [("box", "offset", "strides")]
    rows += [
        (str(piece.box), str(piece.offset), ",".join(map(str, piece.strides)))
        for piece in pieces[:MAX_PIECES]
    ]
    more = len(pieces) - MAX_PIECES
    return [first, "", *align(rows, right={1}), *([f"and {more:,} more"] if more > 0 else [])]


def frame(picture: Picture, width: int, *, unicode: bool = False, tall: bool = False) -> list[Line]:
    """Draw a picture; with ``tall``, few rows are stretched so that they look like areas."""
    is_flat = len(picture.shape) == 1
    gutter = 2 if is_flat else max(len(str(edge)) for edge in picture.rows) + 3
    last = len(str(picture.columns[-1])) - 1
    room = min(width, MAX_WIDTH) - gutter - len(picture.columns) - last
    widths = _shares(picture.columns, room, CELL_WIDTH)
    lines = min(MAX_LINES, 4 * len(picture.cells)) if tall and not is_flat else 1
    heights = _shares(picture.rows, lines, 1)
    cells = {(i, j): cell for i, row in enumerate(picture.cells) for j, cell in enumerate(row)}
    return list(_Frame(picture, cells, widths, heights, gutter, unicode).lines())


def _shares(edges: Sequence[int], total: int, least: int) -> list[int]:
    """Divide a length by the sizes between edges, none less than ``least``.

    >>> _shares((0, 1, 8), 20, 5), _shares((0, 1, 2, 3), 20, 5)
    ([5, 15], [6, 6, 6])
    """
    sizes = [high - low for low, high in pairwise(edges)]
    found = [max(total * size // edges[-1], least) for size in sizes]
    while sum(found) > total and max(found) > least:
        found[found.index(max(found))] -= 1
    return found


@dataclass(frozen=True)
class _Frame:
    picture: Picture
    cells: Mapping[tuple[int, int], Cell]
    widths: Sequence[int]
    heights: Sequence[int]
    gutter: int
    unicode: bool

    def lines(self) -> Iterator[Line]:
        """The indices of the columns, then borders and rows in turn."""
        header, at = "", self.gutter
        for edge, width in zip(self.picture.columns, (*self.widths, 0), strict=True):
            if len(header) < at or not header:
                header = header.ljust(at) + str(edge)
            at += width + 1
        yield [Span(header)]
        for row, height in enumerate(self.heights):
            yield self._border(row)
            for line in range(height):
                yield self._row(row, line == (height - 1) // 2)
        yield self._border(len(self.heights))

    def _row(self, row: int, with_labels: bool) -> Line:
        spans, shown = [Span(" " * self.gutter)], self._labels if with_labels else {}
        for column, width in enumerate(self.widths):
            label = self._labels[row, column].text(width) if (row, column) in shown else ""
            text = Span(label[:width].center(width), self._colour(row, column))
            spans += [self._wall(row, column), text]
        return [*spans, self._wall(row, len(self.widths))]

    def _wall(self, row: int, column: int) -> Span:
        if self._has_wall(row, column):
            return Span("\u2502" if self.unicode else "|")
        return Span(" ", self._colour(row, column))

    def _border(self, row: int) -> Line:
        index = "" if len(self.picture.shape) == 1 else str(self.picture.rows[row])
        spans = [Span(index.rjust(self.gutter - 1) + " ")]
        for column, width in enumerate(self.widths):
            floor = Span(("\u2500" if self.unicode else "-") * width)
            if not self._has_floor(row, column):
                floor = Span(" " * width, self._colour(row, column))
            spans += [Span(self._corner(row, column)), floor]
        return [*spans, Span(self._corner(row, len(self.widths)))]

    def _corner(self, row: int, column: int) -> str:
        across = self._has_floor(row, column - 1), self._has_floor(row, column)
        down = self._has_wall(row - 1, column), self._has_wall(row, column)
        found = "".join(compress("lrud", (*across, *down)))
        if self.unicode:
            return _CORNERS[found]
        return {"": " ", "ud": "|", "lr": "-"}.get(found, "+")

    def _has_wall(self, row: int, column: int) -> bool:
        """Whether there is a line on the left of a cell."""
        return self.cells.get((row, column - 1)) != self.cells.get((row, column))

    def _has_floor(self, row: int, column: int) -> bool:
        """Whether there is a line above a cell."""
        return self.cells.get((row - 1, column)) != self.cells.get((row, column))

    def _colour(self, row: int, column: int) -> str | None:
        return self._hues.get(self.cells[row, column].ranks)

    @cached_property
    def _hues(self) -> Mapping[tuple[int, ...], str]:
        return hues(self.picture.holders())

    @cached_property
    def _labels(self) -> dict[tuple[int, int], Cell]:
        """The cell of each region of equal neighbours that bears its label: its widest one."""
        left, labels = set(self.cells), {}
        while left:
            first = min(left)
            region, pending = {first}, [first]
            while pending:
                i, j = pending.pop()
                near = {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & left - region
                alike = {place for place in near if self.cells[place] == self.cells[first]}
                region |= alike
                pending += alike
            left -= region
            widest = max(sorted(region), key=lambda at: self.widths[at[1]] * self.heights[at[0]])
            labels[widest] = self.cells[widest]
        return labels


def plain(lines: Iterable[Line]) -> str:
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def coloured(lines: Iterable[Line], file: TextIO, width: int) -> str:
    """The characters with the colours that a terminal can show."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    console = Console(file=file, width=width, highlight=False, soft_wrap=True)
    with console.capture() as captured:
        for line in lines:
            text = Text()
            for span in line:
                front = "black" if span.background else None
                text.append(span.text, Style(color=front, bgcolor=span.background, bold=span.bold))
            console.print(text)
    return captured.get().rstrip("\n")


def wants_colour(file: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the output is a terminal with colours, and the user has not disabled them.

    >>> import io
    >>> wants_colour(io.StringIO(), {})
    False
    """
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return file.isatty()


def hues(holders: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], str]:
    """A light background for each set of ranks; neighbours look different.

    >>> hues([(0,), (1,)])
    {(0,): '#94bfeb', (1,): '#ebbf94'}
    """
    degrees = [(210 + at * 360 // len(holders)) % 360 for at in range(len(holders))]
    tones = [_hex(*colorsys.hls_to_rgb(one / 360, 0.75, 0.68)) for one in degrees]
    return dict(zip(holders, tones, strict=True))


def heat(part: float) -> str:
    """A background for an amount between 0 and 1: the more, the stronger.

    >>> heat(0.0), heat(1.0)
    ('#e7eff9', '#6ea9e7')
    """
    return _hex(*colorsys.hls_to_rgb(211 / 360, 0.94 - 0.27 * part, 0.6 + 0.12 * part))


def _hex(*channels: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
