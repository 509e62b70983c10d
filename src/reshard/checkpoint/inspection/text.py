"""An inspection as text: a table of tensors that are alike, or a tree of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.text import format_bytes

if TYPE_CHECKING:
    from reshard.checkpoint.inspection.inspecting import InspectedTensor, Inspection

__all__ = ["table", "tree"]

MAX_ROWS = 60
MAX_LINES = 20
MAX_NAME = 64
MAX_LAYOUT = 48
MAX_TREE = 2000

_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")


def table(report: Inspection) -> str:
    """Everything on a page: layers that are alike share a line."""
    lines = [_headline(report), ""]
    groups: dict[tuple[object, ...], list[InspectedTensor]] = {}
    for tensor in report.tensors:
        pattern = _NUMBER.sub("#", tensor.name)
        groups.setdefault((pattern, tensor.shape, tensor.dtype, tensor.layout), []).append(tensor)
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "cut", "size")]
    rows += [_row(group) for group in [*groups.values()][:MAX_ROWS]]
    lines += _aligned(rows) if report.tensors else []
    if len(groups) > MAX_ROWS:
        lines.append(f"and {len(groups) - MAX_ROWS} more kinds of tensors; --json lists all")
    lines += [*_facts(report), *_findings(report)]
    return "\n".join(lines)


def tree(report: Inspection) -> str:
    """The names as a tree, with the bytes and the number of tensors below each branch."""
    top = _Branch()
    for tensor in report.tensors:
        top.add(tensor.name.split("."), tensor)
    lines = [_headline(report), "", *_drawn(top, "")]
    more = [f"and {len(lines) - MAX_TREE} more lines; --json lists all"]
    lines = lines if len(lines) <= MAX_TREE else lines[:MAX_TREE] + more
    return "\n".join([*lines, *_findings(report)])


def _headline(report: Inspection) -> str:
    state = "damaged" if report.damage else "unsupported" if report.unsupported else "complete"
    return (
        f"{report.path}: {report.format}, {_count(report.num_tensors, 'tensor')} of "
        f"{format_bytes(report.num_bytes)} in {_count(len(report.files), 'file')}, {state}"
    )


def _row(group: Sequence[InspectedTensor]) -> tuple[str, ...]:
    first = group[0]
    size = format_bytes(sum(tensor.num_bytes for tensor in group))
    layout = _shortened(_plain(first.layout), MAX_LAYOUT)
    return _plain(_joined([t.name for t in group])), _dims(first.shape), first.dtype, layout, size


def _joined(names: Sequence[str]) -> str:
    """One name for many that differ in their numbers.

    >>> _joined(["layers.0.w", "layers.1.w", "layers.2.w"])
    'layers.{0-2}.w'
    """
    if len(names) == 1:
        return _shortened(names[0], MAX_NAME)
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ranges = iter([_range(sorted({int(number) for number in column})) for column in columns])
    return _shortened(_NUMBER.sub(lambda _: next(ranges), names[0]), MAX_NAME)


def _range(numbers: Sequence[int]) -> str:
    """A number, or several in braces: ``{0-31}`` or ``{0,2,5}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    shown = ",".join(map(str, numbers[:4]))
    return f"{{{shown}{',...' if len(numbers) > 4 else ''}}}"


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
        what = "hold no tensors" if report.files else "were not read"
        yield f"others   {len(paths)} that {what}: {_few(paths)}"
    if report.checksums is not None:
        covered = _count(report.checksums.num_chunks, "chunk")
        tensors = _count(report.checksums.num_digests, "tensor")
        yield f"checksums: yes ({covered}, digests of {tensors})"
    if report.metadata:
        pairs = [f"{key}={_shortened(text, 40)}" for key, text in report.metadata.items()]
        yield f"says     {_few(pairs)}"


def _findings(report: Inspection) -> Iterator[str]:
    lists = (
        ("damage", report.damage),
        ("unsupported", report.unsupported),
        ("notes", report.notes),
    )
    for title, found in lists:
        if found:
            yield ""
            yield title
            yield from (f"  {_plain(line)}" for line in found[:MAX_LINES])
        if len(found) > MAX_LINES:
            yield f"  and {len(found) - MAX_LINES} more; --json lists all"


@dataclass(slots=True)
class _Branch:
    """A part of dotted names: what lies below it, and the tensor that ends here."""

    children: dict[str, _Branch] = field(default_factory=dict)
    tensor: InspectedTensor | None = None
    num_bytes: int = 0
    num_tensors: int = 0

    def add(self, parts: Sequence[str], tensor: InspectedTensor) -> None:
        """Hang a tensor below."""
        branch = self
        for part in parts:
            branch.num_bytes += tensor.num_bytes
            branch.num_tensors += 1
            branch = branch.children.setdefault(part, _Branch())
        branch.tensor = tensor
        branch.num_bytes += tensor.num_bytes
        branch.num_tensors += 1


def _drawn(top: _Branch, indent: str) -> Iterator[str]:
    """The lines of a tree; names nest as deep as they like, so without recursion."""
    pending = [*reversed([(name, child, indent) for name, child in _folded(top)])]
    while pending:
        name, branch, indent = pending.pop()
        yield f"{indent}{_plain(_shortened(name, MAX_NAME))}  {_about(branch)}"
        below = [(part, child, indent + "  ") for part, child in _folded(branch)]
        pending += reversed(below)


def _about(branch: _Branch) -> str:
    tensor = branch.tensor
    if tensor is None or branch.children:
        return f"{format_bytes(branch.num_bytes)}, {_count(branch.num_tensors, 'tensor')}"
    layout = _shortened(_plain(tensor.layout), MAX_LAYOUT)
    return f"{_dims(tensor.shape)} {tensor.dtype}, {layout}, {format_bytes(tensor.num_bytes)}"


def _folded(branch: _Branch) -> Iterator[tuple[str, _Branch]]:
    """The children, those with a single child joined to it: ``self_attn.q_proj``."""
    for name, child in branch.children.items():
        while len(child.children) == 1 and child.tensor is None:
            [(part, child)] = child.children.items()
            name = f"{name}.{part}"
        yield name, child


def _few(names: Iterable[str]) -> str:
    shown = [_shortened(_plain(name), MAX_NAME) for name in names]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return ", ".join(shown[:5]) + more


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 15]}...{text[-12:]}"


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "0-d"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns below each other, the last one to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, last in rows:
        left = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*left, last.rjust(widths[-1])]))
    return lines
