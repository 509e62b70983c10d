"""``inspect``: the tensors of a checkpoint with their layouts, its files and damage.

    >>> report = inspect("ckpt")                                         # doctest: +SKIP
    >>> report.num_tensors, report.num_bytes, report.damage              # doctest: +SKIP
    (111, 2231111680, ())

Only headers are read, and nothing slow is imported.

Most files record boxes and not layouts, so the layout that the boxes of a tensor follow is
recovered. Its axes are called x, y, z and so on; ``rep`` is an axis of replicas.

    >>> recovered((8, 4), [Box((0, 0), (4, 4)), Box((4, 0), (8, 4))])
    'x=2: x -'
    >>> recovered((8, 4), [Box((0, 0), (3, 4)), Box((3, 0), (8, 4))])
    'x=2: x[3,5] -'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, survey_catalog
from reshard.checkpoint.integrity.checksums import SIDECAR, load_checksums
from reshard.checkpoint.storage.local import StoredFile
from reshard.layout.box import Box
from reshard.layout.coverage import grid_edges
from reshard.show.name_patterns import named
from reshard.text import (
    Report,
    align,
    and_more,
    count,
    format_bytes,
    format_shape,
    listed,
    printable,
    quoted,
    shorten,
)

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules


VERSION = 1
SHOWN_HOLES = 3
WHOLE = "whole"
AXES = "xyzuvwabcdefghijklmnopqrst"
MAX_SIZES = 16
"""The most sizes of an uneven dim that are written out."""
MAX_ROWS = 60
MAX_NAME = 64
MAX_LAYOUT = 48
MAX_TREE = 2000

_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Bytes of the whole tensor, once."""
    num_pieces: int
    layout: str
    """The mesh and layout that the files record, or one that the boxes follow."""
    complete: bool
    replicated: bool
    """Whether some of it is stored more than once."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the checksums of a checkpoint cover."""

    num_chunks: int
    """Ranges of files that have a checksum each."""
    num_digests: int
    """Tensors that have a digest."""


@dataclass(frozen=True, slots=True)
class Inspection(Report):
    """What a checkpoint holds, and its damage; printed, it is a table."""

    path: str
    format: str
    tensors: tuple[InspectedTensor, ...]
    objects: Mapping[str, int]
    """Entries that are not tensors, and their bytes."""
    files: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...]
    """Files that hold no tensors."""
    checksums: Sidecar | None
    """None if the checkpoint has no checksums."""
    metadata: Mapping[str, str]
    damage: tuple[str, ...]
    unsupported: tuple[str, ...]
    """Parts that seem sound but are of a kind that is not supported."""
    notes: tuple[str, ...]

    @property
    def num_tensors(self) -> int:
        """The number of tensors."""
        return len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def ok(self) -> bool:
        """Whether all of it can be read: nothing is damaged, missing or unsupported."""
        return not self.damage and not self.unsupported

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        data = Report.to_dict(self)
        figures = {"ok": self.ok, "num_tensors": self.num_tensors, "num_bytes": self.num_bytes}
        first = {"version": VERSION, "path": data.pop("path"), "format": data.pop("format")}
        return {**first, **figures, **data}

    def tree(self) -> str:
        """The tensors as a tree of their dotted names, with the bytes below each branch."""
        lines = [_headline(self), "", *_tree_lines(self.tensors)]
        if len(lines) > MAX_TREE:
            lines[MAX_TREE:] = [f"and {len(lines) - MAX_TREE} more lines; --json lists all"]
        return "\n".join([*lines, *_findings(self)])

    def __str__(self) -> str:
        """Everything on a page; tensors that differ only in numbers of their names share a line."""
        lines = [_headline(self), ""]
        groups: dict[tuple[str, tuple[int, ...], str, str], list[InspectedTensor]] = {}
        for one in self.tensors:
            pattern = _NUMBER.sub("#", one.name)
            groups.setdefault((pattern, one.shape, one.dtype, one.layout), []).append(one)
        rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "layout", "size")]
        for (_, shape, dtype, _), group in [*groups.items()][:MAX_ROWS]:
            names = named([printable(tensor.name) for tensor in group], width=MAX_NAME)
            size = format_bytes(sum(tensor.num_bytes for tensor in group))
            layout = shorten(printable(group[0].layout), MAX_LAYOUT)
            rows.append((names, format_shape(shape), dtype, layout, size))
        lines += align(rows, right={4}) if self.tensors else []
        if len(groups) > MAX_ROWS:
            lines.append(f"and {len(groups) - MAX_ROWS} more kinds of tensors; --json lists all")
        return "\n".join([*lines, *_facts(self), *_findings(self)])


def inspect(
    path: str | Path, rules: Rules | str | Path | None = None, mesh: Mesh | str | None = None
) -> Inspection:
    """Describe the checkpoint in a folder, a file or at an address.

    Rules (a family such as ``llama``, or a TOML file) and a mesh describe rank files that do not
    record their layout. Damage and unsupported parts do not raise errors: they are listed in the
    report. A path that is not a checkpoint raises CheckpointError.
    """
    with open_storage(path) as storage:
        catalog, findings = survey_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        sidecar = None
        with findings:
            sums = load_checksums(storage)  # no file is compared with them
            if sums is not None:
                chunks = sum(len(file.ends) for file in sums.files.values())
                sidecar = Sidecar(chunks, len(sums.digests))
    damage = [*findings.damage]
    tensors = tuple(_tensors(catalog, damage))
    return Inspection(
        catalog.root,
        catalog.format,
        tensors,
        {name: entry.size for name, entry in catalog.objects.items()},
        catalog.files,
        tuple(file for file in catalog.others if file.path != SIDECAR),
        sidecar,
        catalog.metadata,
        tuple(damage),
        tuple(findings.unsupported),
        catalog.notes,
    )


def _tensors(catalog: Catalog, damage: list[str]) -> Iterator[InspectedTensor]:
    """All tensors; adds a line for each that is not complete to ``damage``."""
    known: dict[object, tuple[str, tuple[Box, ...], bool]] = {}
    for tensor in catalog.tensors.values():
        boxes = tensor.shape, tuple(piece.box for piece in tensor.pieces)
        if boxes not in known:  # the layers of a model have equal layouts
            known[boxes] = recovered(*boxes), tensor.missing(), bool(tensor.repeated())
        layout, holes, is_replicated = known[boxes]
        if catalog.mesh is not None and tensor.name in catalog.layouts:
            layout = f"{catalog.mesh}: {catalog.layouts[tensor.name]}"
        stored = tensor.shape, tensor.dtype, tensor.num_bytes, len(tensor.pieces)
        yield InspectedTensor(tensor.name, *stored, layout, not holes, is_replicated)
        if holes:
            damage.append(
                f"{catalog.root}: no file holds {and_more(holes, SHOWN_HOLES)} of tensor "
                f"{quoted(tensor.name)} of shape {tensor.shape}: a shard is missing"
            )


def recovered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """A mesh and a layout with these boxes, ``whole``, or else the number of boxes."""
    stored = Counter(box for box in boxes if box.size)
    if not stored:
        return WHOLE if 0 in shape else "0 boxes"
    no_layout = f"{stored.total()} boxes"
    copies, edges = set(stored.values()), grid_edges(stored)
    if len(copies) > 1 or edges is None or len(edges) > len(AXES):
        return no_layout
    axes: dict[str, int] = {}
    words: list[str] = []
    for length, dim in zip(shape, edges, strict=True):
        sizes = [stop - start for start, stop in pairwise(dim)]
        if (dim[0], dim[-1]) != (0, length):  # a part is missing
            return no_layout
        if len(sizes) == 1:
            words.append("-")
            continue
        axis = AXES[len(axes)]
        axes[axis] = len(sizes)
        chunk = -(-length // len(sizes))
        if any(size != chunk for size in sizes[:-1]) or sizes[-1] > chunk:
            if len(sizes) > MAX_SIZES:
                return no_layout
            axis = f"{axis}[{','.join(map(str, sizes))}]"
        words.append(axis)
    if copies != {1}:
        axes["rep"] = copies.pop()
    mesh = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"{mesh}: {' '.join(words) if axes.keys() - {'rep'} else '...'}" if mesh else WHOLE


def _headline(report: Inspection) -> str:
    state = "damaged" if report.damage else "unsupported" if report.unsupported else "complete"
    return (
        f"{report.path}: {report.format}, {count(report.num_tensors, 'tensor')} of "
        f"{format_bytes(report.num_bytes)} in {count(len(report.files), 'file')}, {state}"
    )


def _facts(report: Inspection) -> Iterator[str]:
    yield ""
    if report.objects:
        size = format_bytes(sum(report.objects.values()))
        yield f"objects  {len(report.objects)} that are no tensors, {size}: {_few(report.objects)}"
    if report.files:
        sizes = [file.size for file in report.files]
        least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
        each = f", each {least}" if least == most else f", from {least} to {most}"
        yield f"files    {len(sizes)} of {format_bytes(sum(sizes))}{each if len(sizes) > 1 else ''}"
    if report.others:
        paths = [file.path for file in report.others]
        what = "without tensors" if report.files else "not read"
        yield f"others   {len(paths)} {what}: {_few(paths)}"
    if report.checksums is not None:
        covered = count(report.checksums.num_chunks, "chunk")
        tensors = count(report.checksums.num_digests, "tensor")
        yield f"checksums: yes ({covered}, digests of {tensors})"
    if report.metadata:
        pairs = [f"{key}={shorten(text, 40)}" for key, text in report.metadata.items()]
        yield f"metadata {_few(pairs)}"


def _findings(report: Inspection) -> Iterator[str]:
    for title in ("damage", "unsupported", "notes"):
        lines: tuple[str, ...] = getattr(report, title)
        if lines:
            yield from ("", title, *listed([*map(printable, lines)]))


def _few(names: Iterable[str]) -> str:
    return and_more([shorten(printable(name), MAX_NAME) for name in names], 5)


_Named: TypeAlias = "list[tuple[list[str], InspectedTensor]]"
"""Tensors, each with the parts of its name."""


def _tree_lines(tensors: Iterable[InspectedTensor]) -> Iterator[str]:
    """The lines of a tree of dotted names; without recursion, because they may be nested deeply."""
    top = _children([(tensor.name.split("."), tensor) for tensor in tensors], 0)
    pending = [(child, 0, 0) for child in reversed(top)]
    while pending:
        group, start, depth = pending.pop()
        stop, children = start + 1, _children(group, start + 1)
        while len(children) == 1 and len(children[0]) == len(group):  # self_attn.q_proj
            stop, children = stop + 1, _children(group, stop + 1)
        pending += [(child, stop, depth + 1) for child in reversed(children)]
        parts, tensor = group[0]
        about = format_bytes(sum(one.num_bytes for _, one in group))
        if children:
            about += f", {count(len(group), 'tensor')}"
        else:
            layout = shorten(printable(tensor.layout), MAX_LAYOUT)
            about = f"{format_shape(tensor.shape)} {tensor.dtype}, {layout}, {about}"
        yield f"{'  ' * depth}{printable(shorten('.'.join(parts[start:stop]), MAX_NAME))}  {about}"


def _children(group: _Named, at: int) -> list[_Named]:
    """Tensors grouped by one part of their names, without those whose names end before it."""
    children: dict[str, _Named] = {}
    for parts, tensor in group:
        if len(parts) > at:
            children.setdefault(parts[at], []).append((parts, tensor))
    return [*children.values()]
