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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_ASCII = {"": " ", "ud": "|", "lr": "-"}


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
    held_by = holdings(layout, shape, MAX_ROWS)
    most = (MAX_ROWS, max((min(width, 80) - 10) // (CELL_WIDTH + 1), 1))
    picture = picture_of(layout, shape, most)
    lines: list[Line] = [[Span(_headline(layout, shape, held_by), bold=True)], []]
    if picture is not None:
        lines += [*frame(picture, width, unicode=unicode, tall=True), []]
        if any(cell.num_parts > 1 for row in picture.cells for cell in row):
            lines += [[Span("a..b: parts on ranks a to b, too small to draw one by one")], []]
    return lines + [[Span(line)] for line in table(held_by, width)]


def as_text(layout: Layout, shape: Sequence[int], width: int = 80) -> str:
    """The same as plain text, for ``layout.draw``."""
    return plain(draw(layout, shape, width=width))


def _headline(layout: Layout, shape: Sequence[int], held_by: Holdings) -> str:
    """The layout, its mesh and how often everything is held, in a sentence."""
    where = "" if isinstance(layout, BoxLayout) else f" on mesh {layout.mesh}"
    what = "no rank holds any element"
    if held_by.num_different:
        each, rest = divmod(held_by.num_ranks, held_by.num_different)
        ranks = count(held_by.num_ranks if rest else each, "rank")
        evenly = "each " if held_by.num_different > 1 and not rest else ""
        what = f"{count(held_by.num_different, 'part')}, {evenly}on {ranks}"
    if layout.reduce:
        what += f", with a pending {layout.reduce[0]} over {' '.join(layout.reduce[1])}"
    return f"{shorten(str(layout), 60)}{where}, shape {format_shape(shape)}: {what}"


def table(held_by: Holdings, width: int = 80) -> list[str]:
    """The ranks, their coordinates, and what they hold."""
    if not held_by.rows:
        return []
    rows = [("ranks", "at", "local shape", "holds")]
    for row in held_by.rows:
        ranks = shorten(format_ranks(row.ranks), 24)
        rows.append((ranks, _coords(row.coords), format_shape(row.local_shape), row.text))
    lines = [shorten(line, max(width, 60)) for line in align(rows)]
    if held_by.num_different > len(held_by.rows):
        lines.append(f"and {count(held_by.num_different - len(held_by.rows), 'more part')}")
    if held_by.idle:
        verb = "holds" if len(held_by.idle) == 1 else "hold"
        ranks = shorten(format_ranks(held_by.idle), 40)
        lines.append(f"{count(len(held_by.idle), 'rank')} {verb} nothing: {ranks}")
    return lines


def _coords(coords: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={at}" for axis, at in coords.items())


def pieces_table(layout: Layout, rank: int, shape: Sequence[int]) -> list[str]:
    """What one rank holds, box by box, and where each sits in its local tensor."""
    pieces = layout.pieces(rank, shape)
    if not pieces:
        return [f"rank {rank} holds nothing of shape {format_shape(shape)} in layout {layout}"]
    at = _coords(layout.holds(rank) or {})
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
    inside = min(width, MAX_WIDTH) - gutter - len(picture.columns) - last
    widths = _shares(picture.columns, inside, CELL_WIDTH)
    num_lines = min(MAX_LINES, 4 * len(picture.cells)) if tall and not is_flat else 1
    heights = _shares(picture.rows, num_lines, 1)
    header, at = "", gutter
    for edge, each in zip(picture.columns, (*widths, 0), strict=True):
        if len(header) < at or not header:
            header = header.ljust(at) + str(edge)
        at += each + 1
    cells = {(i, j): cell for i, row in enumerate(picture.cells) for j, cell in enumerate(row)}
    labels = _labelled(cells, widths, heights)
    colours = hues(sorted({cell.ranks for cell in cells.values() if cell.ranks}))
    lines: list[Line] = [[Span(header)]]
    for row, height in enumerate((*heights, 0)):
        index = "" if is_flat else str(picture.rows[row])
        border = _line(cells, (row - 1, row), widths, set(), colours, unicode)
        lines.append([Span(index.rjust(gutter - 1) + " "), *border])
        for line in range(height):
            texts = labels if line == (height - 1) // 2 else set()
            inner = _line(cells, (row, row), widths, texts, colours, unicode)
            lines.append([Span(" " * gutter), *inner])
    return lines


def _shares(edges: Sequence[int], total: int, least: int) -> list[int]:
    """Divide a length by the sizes between edges, none less than ``least``.

    >>> _shares((0, 1, 8), 20, 5), _shares((0, 1, 2, 3), 20, 5)
    ([5, 15], [6, 6, 6])
    """
    shares = [max(total * (high - low) // edges[-1], least) for low, high in pairwise(edges)]
    while sum(shares) > total and max(shares) > least:
        shares[shares.index(max(shares))] -= 1
    return shares


Place = tuple[int, int]
"""The row and the column of a cell."""


def _labelled(
    cells: Mapping[Place, Cell], widths: Sequence[int], heights: Sequence[int]
) -> set[Place]:
    """The cell of each region of equal neighbours that bears its label: its widest one."""
    left, labelled = set(cells), set()
    while left:
        first = min(left)
        region, pending = {first}, [first]
        while pending:
            i, j = pending.pop()
            near = {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & left - region
            alike = {place for place in near if cells[place] == cells[first]}
            region |= alike
            pending += alike
        left -= region
        labelled.add(max(sorted(region), key=lambda at: widths[at[1]] * heights[at[0]]))
    return labelled


def _line(
    cells: Mapping[Place, Cell],
    rows: tuple[int, int],
    widths: Sequence[int],
    labelled: Collection[Place],
    colours: Mapping[tuple[int, ...], str],
    unicode: bool,
) -> Iterator[Span]:
    """A line between two rows of cells, or inside a row, which then is both of them.

    Cells that differ have a line between them; outside of the picture is another cell.
    """
    above, below = rows
    for column, width in enumerate((*widths, 0)):
        around = [cells.get((row, at)) for row in rows for at in (column - 1, column)]
        differ = [around[a] != around[b] for a, b in ((0, 2), (1, 3), (0, 1), (2, 3))]
        sides, cell = "".join(compress("lrud", differ)), around[3]
        colour = colours.get(cell.ranks) if cell else None
        corner = _CORNERS[sides] if unicode else _ASCII.get(sides, "+")
        yield Span(corner, None if sides or above != below else colour)
        if differ[1]:
            yield Span(("\u2500" if unicode else "-") * width)
        elif width:
            label = cells[below, column].text(width) if (below, column) in labelled else ""
            yield Span(label[:width].center(width), colour)


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
