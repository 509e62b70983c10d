"""What a checkpoint holds, as a page: every tensor, how it is sharded, and what is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.checkpoint.inspection import InspectedTensor, Inspection
from reshard.errors import ReshardError
from reshard.layout.layout import Layout
from reshard.show.holdings import num_boxes, two_dims
from reshard.show.name_patterns import named
from reshard.show.page.document import Document, Footer, Move, clean, render_page
from reshard.show.page.drawings import Colours
from reshard.show.page.plan_page import legend_of, side_of
from reshard.show.plan_text import Figure
from reshard.text import count, format_bytes, format_shape, shorten

MAX_DRAWN = 12
MAX_LINES = 200
MAX_BOXES = 20_000


def render_stored(report: Inspection, footer: Footer | None = None) -> str:
    """The page of an inspection."""
    found: dict[object, list[InspectedTensor]] = {}
    for tensor in report.tensors:
        found.setdefault((tensor.shape, tensor.dtype, tensor.layout), []).append(tensor)
    groups = sorted(found.values(), key=lambda group: -_num_bytes(group))
    colours, rows = Colours(), []
    moves: list[Move] = []
    for group in groups:
        move = _move(group, colours) if len(moves) < MAX_DRAWN else None
        first, num_bytes = group[0], _num_bytes(group)
        rows.append([  # the script knows what stands where
            _name(group), format_shape(first.shape), first.dtype,
            shorten(clean(first.layout), 80), "", format_bytes(num_bytes), num_bytes, "", 0, "",
            -1 if move is None else len(moves), len(group), 1,
        ])  # fmt: skip
        moves += [] if move is None else [move]
    size = _num_bytes(report.tensors)
    state = "damaged" if report.damage else "unsupported" if report.unsupported else "complete"
    names = [[clean(tensor.name) for tensor in group] for group in groups]
    document = Document(
        f"{clean(report.path)}: {count(len(report.tensors), 'tensor')} of {format_bytes(size)}, "
        f"{state}",
        list(_cards(report, size, state)),
        {"moves": [], "matrix": None, "groups": rows, "names": names, "stored": True},
        damage=[clean(line) for line in (*report.damage, *report.unsupported)][:MAX_LINES],
        reasons=[clean(note) for note in report.notes],
        moves=moves,
        legend=legend_of(colours, moves, len(moves), len(moves)),
        extra=[(title, lines) for title, lines in _extra(report) if lines],
    )
    return render_page(document, footer or Footer())


def _num_bytes(tensors: Sequence[InspectedTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _move(group: Sequence[InspectedTensor], colours: Colours) -> Move | None:
    first = group[0]
    try:
        layout = Layout.parse(first.layout)
        if num_boxes(layout, first.shape) > MAX_BOXES:
            return None
    except ReshardError:
        return None
    note = f"{format_shape(first.shape)} {first.dtype}, {format_bytes(_num_bytes(group))}"
    side = side_of(layout, first.shape, colours, two_dims(first.shape, [layout]))
    return Move(_name(group), note, side)


def _name(group: Sequence[InspectedTensor]) -> str:
    return named([clean(tensor.name) for tensor in group])


def _cards(report: Inspection, size: int, state: str) -> Iterator[Figure]:
    yield Figure("Tensors", f"{len(report.tensors):,}", clean(report.format))
    yield Figure("Size", format_bytes(size), "each element once")
    stored = sum(file.size for file in report.files)
    yield Figure("Files", f"{len(report.files):,}", format_bytes(stored))
    pieces = sum(tensor.num_pieces for tensor in report.tensors)
    yield Figure("Pieces", f"{pieces:,}", "boxes of tensors in files")
    problems = len(report.damage) + len(report.unsupported)
    yield Figure("State", state, count(problems, "finding") if problems else "nothing is missing")


def _extra(report: Inspection) -> Iterator[tuple[str, list[str]]]:
    """Titles and lines of what is shown when asked for."""
    for title, files in (("file", report.files), ("file without tensors", report.others)):
        several = title.replace("file", "files")
        lines = [f"{clean(file.path)}  {format_bytes(file.size)}" for file in files]
        yield count(len(files), title, several), _cut(lines)
    objects = [f"{clean(name)}  {format_bytes(size)}" for name, size in report.objects.items()]
    yield count(len(objects), "object"), _cut(objects)
    metadata = [f"{clean(name)}: {clean(text, 200)}" for name, text in report.metadata.items()]
    yield "Metadata", _cut(metadata)


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {more:,} more"] if more > 0 else lines
