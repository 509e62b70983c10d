"""What a checkpoint holds, as a page: every tensor, how it is sharded, and what is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from reshard.errors import ReshardError
from reshard.layout.layout import Layout
from reshard.show.name_patterns import named
from reshard.show.page.colours import Colours
from reshard.show.page.document import Card, Document, Footer, Move, clean, render_page
from reshard.show.page.plan_page import legend_of, side_of, two_dims
from reshard.show.picture import num_boxes
from reshard.text import count, format_bytes, format_shape, shorten

__all__ = ["render_stored"]

MAX_DRAWN = 12
MAX_LINES = 200
MAX_BOXES = 20_000
"""Boxes of a layout that is drawn."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint, as an inspection describes it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def layout(self) -> str: ...


class StoredFile(Protocol):
    """A file and its size."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...


class Stored(Protocol):
    """An inspection of a checkpoint, as far as the page shows it."""

    @property
    def path(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def tensors(self) -> Sequence[StoredTensor]: ...
    @property
    def files(self) -> Sequence[StoredFile]: ...
    @property
    def others(self) -> Sequence[StoredFile]: ...
    @property
    def objects(self) -> Mapping[str, int]: ...
    @property
    def damage(self) -> Sequence[str]: ...
    @property
    def unsupported(self) -> Sequence[str]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


Groups = list[list[StoredTensor]]


def render_stored(report: Stored, footer: Footer | None = None) -> str:
    """The page of an inspection."""
    groups = _groups(report.tensors)
    colours = Colours()
    moves, number = _moves(groups, colours)
    size = sum(tensor.num_bytes for tensor in report.tensors)
    state = "damaged" if report.damage else "unsupported" if report.unsupported else "complete"
    document = Document(
        f"{clean(report.path)}: {count(len(report.tensors), 'tensor')} of {format_bytes(size)}, "
        f"{state}",
        list(_cards(report, size, state)),
        _data(groups, number),
        damage=[clean(line) for line in (*report.damage, *report.unsupported)][:MAX_LINES],
        reasons_title="Notes",
        reasons=[clean(note) for note in report.notes],
        moves_title="How the tensors are stored",
        moves=moves,
        legend=legend_of(colours, moves, len(moves), len(moves)),
        groups=len(groups),
        stored=True,
        extra=[(title, lines) for title, lines in _extra(report) if lines],
    )
    return render_page(document, footer or Footer())


def _groups(tensors: Sequence[StoredTensor]) -> Groups:
    """Tensors with the same shape, dtype and layout, the largest group first."""
    found: dict[object, list[StoredTensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.shape, tensor.dtype, tensor.layout), []).append(tensor)
    return sorted(found.values(), key=lambda group: -sum(tensor.num_bytes for tensor in group))


def _moves(groups: Groups, colours: Colours) -> tuple[list[Move], dict[int, int]]:
    """Drawings of the largest groups that have a layout, and which group each is of."""
    moves: list[Move] = []
    number: dict[int, int] = {}
    for at, group in enumerate(groups):
        layout = _layout(group[0])
        if layout is None or len(moves) == MAX_DRAWN:
            continue
        number[at] = len(moves)
        note = f"{format_shape(group[0].shape)} {group[0].dtype}, {_size(group)}"
        shape = group[0].shape
        dims = two_dims(shape, [layout]) if len(shape) > 2 else None
        moves.append(Move(_name(group), note, side_of(layout, shape, colours, dims)))
    return moves, number


def _layout(tensor: StoredTensor) -> Layout | None:
    """The layout as a value, where the text is one and not too fine to draw."""
    try:
        layout = Layout.parse(tensor.layout)
        return layout if num_boxes(layout, tensor.shape) <= MAX_BOXES else None
    except ReshardError:
        return None


def _cards(report: Stored, size: int, state: str) -> Iterator[Card]:
    yield Card("Tensors", f"{len(report.tensors):,}", clean(report.format))
    yield Card("Size", format_bytes(size), "each element once")
    stored = sum(file.size for file in report.files)
    yield Card("Files", f"{len(report.files):,}", format_bytes(stored))
    pieces = sum(tensor.num_pieces for tensor in report.tensors)
    yield Card("Pieces", f"{pieces:,}", "boxes of tensors in files")
    problems = len(report.damage) + len(report.unsupported)
    yield Card("State", state, count(problems, "finding") if problems else "nothing is missing")


def _data(groups: Groups, number: Mapping[int, int]) -> dict[str, Any]:
    """What the script of the page works with."""
    return {
        "moves": [],
        "matrix": None,
        "groups": [_group(group, number.get(at, -1)) for at, group in enumerate(groups)],
        "names": [[clean(tensor.name) for tensor in group] for group in groups],
        "stored": True,
    }


def _group(group: Sequence[StoredTensor], move: int) -> list[Any]:
    first, size = group[0], sum(tensor.num_bytes for tensor in group)
    return [
        _name(group), format_shape(first.shape), first.dtype, shorten(clean(first.layout), 80), "",
        format_bytes(size), size, "", 0, "", move, len(group), 1,
    ]  # fmt: skip


def _name(group: Sequence[StoredTensor]) -> str:
    return named([clean(tensor.name) for tensor in group])


def _size(group: Sequence[StoredTensor]) -> str:
    return format_bytes(sum(tensor.num_bytes for tensor in group))


def _extra(report: Stored) -> Iterator[tuple[str, list[str]]]:
    for title, files in (("Files", report.files), ("Files without tensors", report.others)):
        lines = [f"{clean(file.path)}  {format_bytes(file.size)}" for file in files[:MAX_LINES]]
        yield count(len(files), title.lower().removesuffix("s")), _cut(lines, len(files))
    objects = [f"{clean(name)}  {format_bytes(size)}" for name, size in report.objects.items()]
    yield count(len(objects), "object"), _cut(objects[:MAX_LINES], len(objects))
    metadata = [f"{clean(name)}: {clean(text, 200)}" for name, text in report.metadata.items()]
    yield "Metadata", _cut(metadata[:MAX_LINES], len(metadata))


def _cut(lines: list[str], total: int) -> list[str]:
    return [*lines, f"and {total - len(lines):,} more"] if total > len(lines) else lines
