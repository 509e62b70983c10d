"""Layouts as text: a picture where there can be one, and a table of who holds what.

>>> from reshard.layout.mesh import Mesh
>>> from reshard.show.ink import plain
>>> print(plain(draw(Layout(Mesh(dp=2, tp=2), "tp"), (8,), width=30)))
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
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import format_ranks
from reshard.show.frame import CELL_WIDTH, frame
from reshard.show.holdings import Holding, Holdings, holdings
from reshard.show.ink import Line, Span, plain
from reshard.show.picture import picture_of
from reshard.text import align, count, format_shape, shorten

__all__ = ["as_text", "draw", "headline", "pieces_table", "table"]

MAX_ROWS = 16
"""Rows of a picture and of a table."""
MAX_PIECES = 64


def draw(
    layout: Layout, shape: Sequence[int], *, width: int = 80, unicode: bool = False
) -> list[Line]:
    """A headline, a picture where there can be one, and a table of the ranks."""
    found = holdings(layout, shape, MAX_ROWS)
    most = (MAX_ROWS, max((min(width, 80) - 10) // (CELL_WIDTH + 1), 1))
    picture = picture_of(layout, shape, most)
    lines: list[Line] = [[Span(headline(layout, shape, found), bold=True)], []]
    if picture is not None:
        lines += [*frame(picture, width, unicode=unicode, tall=True), []]
        if picture.is_merged:
            lines += [[Span("a..b: parts on ranks a to b, too small to draw one by one")], []]
    return lines + [[Span(line)] for line in table(found, width)]


def as_text(layout: Layout, shape: Sequence[int], width: int = 80) -> str:
    """The same as plain text, for ``layout.draw``."""
    return plain(draw(layout, shape, width=width))


def headline(layout: Layout, shape: Sequence[int], found: Holdings) -> str:
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
    rows = [("ranks", "at", "local shape", "holds"), *map(_row, found.rows)]
    lines = [shorten(line, max(width, 60)) for line in align(rows)]
    if found.num_different > len(found.rows):
        lines.append(f"and {count(found.num_different - len(found.rows), 'more part')}")
    if found.idle:
        verb = "holds" if len(found.idle) == 1 else "hold"
        named = shorten(format_ranks(found.idle), 40)
        lines.append(f"{count(len(found.idle), 'rank')} {verb} nothing: {named}")
    return lines


def _row(holding: Holding) -> tuple[str, ...]:
    return (
        shorten(format_ranks(holding.ranks), 24),
        " ".join(f"{axis}={at}" for axis, at in holding.coords.items()),
        format_shape(holding.local_shape),
        holding.text,
    )


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
    coords = layout.holds(rank)
    if not pieces:
        return [f"rank {rank} holds nothing of shape {format_shape(shape)} in layout {layout}"]
    at = " ".join(f"{axis}={place}" for axis, place in (coords or {}).items())
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
