"""An inspection as text: a table of kinds of tensors, or a tree of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.text import align, and_more, count, format_bytes, shorten

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
    """Everything on a page: tensors that differ only in numbers of their names share a line."""
    lines = [_headline(report), ""]
    groups: dict[tuple[object, ...], list[InspectedTensor]] = {}
    for tensor in report.tensors:
        pattern = _NUMBER.sub("#", tensor.name)
        groups.setdefault((pattern, tensor.shape, tensor.dtype, tensor.layout), []).append(tensor)
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "layout", "size")]
    rows += [_row(group) for group in [*groups.values()][:MAX_ROWS]]
    lines += align(rows, right={4}) if report.tensors else []
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
        f"{report.path}: {report.format}, {count(report.num_tensors, 'tensor')} of "
        f"{format_bytes(report.num_bytes)} in {count(len(report.files), 'file')}, {state}"
    )


def _row(group: Sequence[InspectedTensor]) -> tuple[str, ...]:
    first = group[0]
    size = format_bytes(sum(tensor.num_bytes for tensor in group))
    layout = shorten(_plain(first.layout), MAX_LAYOUT)
    return _plain(_joined([t.name for t in group])), _dims(first.shape), first.dtype, layout, size


def _joined(names: Sequence[str]) -> str:
    """One name for many that differ in their numbers.

    >>> _joined(["layers.0.w", "layers.1.w", "layers.2.w"])
    'layers.{0-2}.w'
    """
    if len(names) == 1:
        return shorten(names[0], MAX_NAME)
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ranges = iter([_range(sorted({int(number) for number in column})) for column in columns])
    return shorten(_NUMBER.sub(lambda _: next(ranges), names[0]), MAX_NAME)


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
        covered = count(report.checksums.num_chunks, "chunk")
        tensors = count(report.checksums.num_digests, "tensor")
        yield f"checksums: yes ({covered}, digests of {tensors})"
    if report.metadata:
        pairs = [f"{key}={shorten(text, 40)}" for key, text in report.metadata.items()]
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
    """A part of dotted names: its children, and the tensor with this name."""

    children: dict[str, _Branch] = field(default_factory=dict)
    tensor: InspectedTensor | None = None
    num_bytes: int = 0
    num_tensors: int = 0

    def add(self, parts: Sequence[str], tensor: InspectedTensor) -> None:
        """Add a tensor below."""
        branch = self
        for part in parts:
            branch.num_bytes += tensor.num_bytes
            branch.num_tensors += 1
            branch = branch.children.setdefault(part, _Branch())
        branch.tensor = tensor
        branch.num_bytes += tensor.num_bytes
        branch.num_tensors += 1


def _drawn(top: _Branch, indent: str) -> Iterator[str]:
    """The lines of a tree; without recursion, because names may be nested deeply."""
    pending = [*reversed([(name, child, indent) for name, child in _folded(top)])]
    while pending:
        name, branch, indent = pending.pop()
        yield f"{indent}{_plain(shorten(name, MAX_NAME))}  {_about(branch)}"
        below = [(part, child, indent + "  ") for part, child in _folded(branch)]
        pending += reversed(below)


def _about(branch: _Branch) -> str:
    tensor = branch.tensor
    if tensor is None or branch.children:
        return f"{format_bytes(branch.num_bytes)}, {count(branch.num_tensors, 'tensor')}"
    layout = shorten(_plain(tensor.layout), MAX_LAYOUT)
    return f"{_dims(tensor.shape)} {tensor.dtype}, {layout}, {format_bytes(tensor.num_bytes)}"


def _folded(branch: _Branch) -> Iterator[tuple[str, _Branch]]:
    """The children; a child with a single child is joined with it: ``self_attn.q_proj``."""
    for name, child in branch.children.items():
        while len(child.children) == 1 and child.tensor is None:
            [(part, child)] = child.children.items()
            name = f"{name}.{part}"
        yield name, child


def _few(names: Iterable[str]) -> str:
    return and_more([shorten(_plain(name), MAX_NAME) for name in names], 5)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "0-d"
