"""Plans, layouts and reports as cells of a notebook: HTML with its own styles, and no script.

Notebooks call ``_repr_html_`` of what a cell ends with. A viewer that removes styles still shows
the text; nothing is loaded from anywhere.

>>> from reshard.layout.mesh import Mesh
>>> sample_shape(Layout(Mesh(dp=2, tp=4), "(dp tp) -")), sample_shape(Layout(Mesh(tp=2), "tp:8"))
((8, 8), (32,))
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

from reshard.errors import ReshardError
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import Chunk, Cuts, Cyclic, Packed, Ragged, ZigZag
from reshard.planning.plans import Plan
from reshard.show.holdings import two_dims
from reshard.show.page.document import Document, Move, render_fragment
from reshard.show.page.drawings import Colours
from reshard.show.page.plan_page import document_of, legend_of, run_of, side_of
from reshard.show.plan_text import describe
from reshard.show.run_report import RunReport
from reshard.text import format_shape, shorten

MAX_DRAWN = 2
MAX_ELEMENTS = 1 << 24
MAX_TEXT = 100_000
WHOLE = 8
"""The length that a dim is drawn with where nothing shards it."""


def plan_cell(plan: Plan) -> str:
    """A plan: its figures, the largest tensors before and after, the matrix; all of it as text."""
    document = document_of(plan, most_drawn=MAX_DRAWN, is_page=False)
    return _cell(document, describe(plan), "The plan as text")


def layout_cell(layout: Layout) -> str:
    """A layout, drawn for a small shape that it shards evenly."""
    shape, colours, side = sample_shape(layout), Colours(), None
    if shape is not None:
        # Sizes that the layout gives may fit no shape that all cuts divide.
        with suppress(ReshardError):
            side = side_of(layout, shape, colours, two_dims(shape, [layout]))
    if shape is None or side is None:
        return text_cell(f"{layout} on mesh {layout.mesh}")
    what = "shape" if isinstance(layout, BoxLayout) else f"on {layout.mesh}, drawn for shape"
    move = Move(shorten(str(layout), 80), f"{what} {format_shape(shape)}", side)
    return _cell(Document(moves=[move], legend=legend_of(colours, [move], 1, 1)))


def run_cell(report: RunReport) -> str:
    """A run report: its figures and rounds; all of it as text."""
    text = str(report)
    document = Document(text.partition("\n")[0], run=run_of([report]) if report.rounds else None)
    return _cell(document, text, "The report as text")


def text_cell(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n... print it to see all of it"
    return _cell(Document(), text)


def _cell(document: Document, text: str = "", folded: str = "") -> str:
    """A document and a text, which has a title if it is folded away."""
    return render_fragment("cell.html", doc=document, folded=folded, text=text)


def sample_shape(layout: Layout) -> tuple[int, ...] | None:
    """A small shape that a layout shards evenly; None where there is none to be found."""
    if isinstance(layout, BoxLayout):
        return layout.shape
    words, dims = layout.words, layout.words.dims
    if words.rest is not None and len(dims) < 2:
        dims = words.expand(len(dims) + 1) or dims
    lengths = [_length(cuts, layout) if cuts else WHOLE for cuts in dims]
    if words.flat and lengths:
        lengths[-1] *= _length(words.flat, layout)
    shape = tuple(lengths)
    with suppress(ReshardError):
        layout.dims(shape)
        return shape if 0 < prod(shape) <= MAX_ELEMENTS else None
    return None


def _length(cuts: Cuts, layout: Layout) -> int:
    """A length that all cuts of a dim divide."""
    length, sizes = 1, layout.mesh.axes
    for cut in reversed(cuts):
        match cut:
            case Packed():
                length = max(length, sum(segment.size for segment in cut.segments))
            case Ragged():
                length = sum(cut.sizes)
            case Chunk(axis=axis, unit=unit):
                length *= sizes[axis] * unit
            case Cyclic(axis=axis, block=block):
                length *= sizes[axis] * block * 2
            case ZigZag(axis=axis):
                length *= sizes[axis] * 2
    return length
