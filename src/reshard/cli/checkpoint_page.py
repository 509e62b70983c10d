"""What a checkpoint holds, as a page: every tensor, how it is sharded, and what is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from reshard.checkpoint.inspection import InspectedTensor, Inspection
from reshard.errors import ReshardError
from reshard.layout.layout import Layout
from reshard.show.holdings import num_boxes, two_dims
from reshard.show.name_patterns import named
from reshard.show.page.document import Document, Footer, Move, Side, clean, render_page
from reshard.show.page.drawings import Colours
from reshard.show.page.plan_page import legend_of, side_of
from reshard.show.plan_text import Figure
from reshard.text import count, format_bytes, format_shape, shorten

MAX_DRAWN = 12
MAX_LINES = 200
MAX_BOXES = 20_000


def render_stored(report: Inspection, footer: Footer | None = None) -> str:
    """The page of an inspection."""
    alike: dict[object, list[InspectedTensor]] = {}
    for tensor in report.tensors:
        alike.setdefault((tensor.shape, tensor.dtype, tensor.layout), []).append(tensor)
    groups = sorted(alike.values(), key=lambda group: -_num_bytes(group))
    names = [[clean(tensor.name) for tensor in group] for group in groups]
    colours, rows = Colours(), []
    moves: list[Move] = []
    for group, listed in zip(groups, names, strict=True):
        first, num_bytes, name = group[0], _num_bytes(group), named(listed)
        shape, size = format_shape(first.shape), format_bytes(num_bytes)
        side = _side(first, colours) if len(moves) < MAX_DRAWN else None
        rows.append([  # the script knows what stands where
            name, shape, first.dtype, shorten(clean(first.layout), 80), "", size, num_bytes,
            "", 0, "", -1 if side is None else len(moves), len(group), 1,
        ])  # fmt: skip
        if side is not None:
            moves.append(Move(name, f"{shape} {first.dtype}, {size}", side))
    size, tensors = format_bytes(_num_bytes(report.tensors)), len(report.tensors)
    state = "damaged" if report.damage else "unsupported" if report.unsupported else "complete"
    document = Document(
        f"{clean(report.path)}: {count(tensors, 'tensor')} of {size}, {state}",
        _cards(report, size, state),
        {"moves": [], "matrix": None, "groups": rows, "names": names, "stored": True},
        damage=[clean(line) for line in (*report.damage, *report.unsupported)][:MAX_LINES],
        reasons=[clean(note) for note in report.notes],
        moves=moves,
        legend=legend_of(colours, moves, len(moves), len(moves)),
        extra=_extra(report),
    )
    return render_page(document, footer or Footer())


def _num_bytes(tensors: Sequence[InspectedTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _side(tensor: InspectedTensor, colours: Colours) -> Side | None:
    """The layout of a tensor; None where it has no text, or too many boxes."""
    with suppress(ReshardError):
        layout = Layout.parse(tensor.layout)
        if num_boxes(layout, tensor.shape) <= MAX_BOXES:
            return side_of(layout, tensor.shape, colours, two_dims(tensor.shape, [layout]))
    return None


def _cards(report: Inspection, size: str, state: str) -> list[Figure]:
    stored = sum(file.size for file in report.files)
    pieces = sum(tensor.num_pieces for tensor in report.tensors)
    problems = len(report.damage) + len(report.unsupported)
    findings = count(problems, "finding") if problems else "nothing is missing"
    return [
        Figure("Tensors", f"{len(report.tensors):,}", clean(report.format)),
        Figure("Size", size, "each element once"),
        Figure("Files", f"{len(report.files):,}", format_bytes(stored)),
        Figure("Pieces", f"{pieces:,}", "boxes of tensors in files"),
        Figure("State", state, findings),
    ]


def _extra(report: Inspection) -> list[tuple[str, list[str]]]:
    """Titles and lines of what is shown when asked for."""
    files, others = (
        [f"{clean(file.path)}  {format_bytes(file.size)}" for file in group]
        for group in (report.files, report.others)
    )
    objects = [f"{clean(name)}  {format_bytes(size)}" for name, size in report.objects.items()]
    metadata = [f"{clean(name)}: {clean(text, 200)}" for name, text in report.metadata.items()]
    others_title = count(len(others), "file without tensors", "files without tensors")
    parts = [
        (count(len(files), "file"), files),
        (others_title, others),
        (count(len(objects), "object"), objects),
        ("Metadata", metadata),
    ]
    for _, lines in parts:
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES:,} more"]
    return [(title, lines) for title, lines in parts if lines]
