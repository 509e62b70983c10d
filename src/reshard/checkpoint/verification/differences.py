"""How two checkpoints differ: in names, shapes, dtypes, values, or only in their layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.catalog import StoredTensor
from reshard.checkpoint.transfer.source import Source, StoredReader, opened
from reshard.checkpoint.transfer.workers import Budget, Meter
from reshard.checkpoint.verification.comparison import (
    Difference,
    difference,
    differing_objects,
    is_number,
)
from reshard.checkpoint.verification.examination import Problem, digests_of
from reshard.errors import DamageError
from reshard.layout.box import Box
from reshard.text import count, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["DiffReport", "TensorDiff", "diff"]

FORMAT = 1
SHOWN = 20
"""Names that are printed of each kind of difference."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor that both checkpoints have and that differs."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    count: int | None = None
    """Elements that differ, as numbers where dtypes differ; None where they cannot be compared."""
    first: tuple[int, ...] | None = None
    """The index of the first of them."""
    box: Box | None = None
    """The smallest box around all of them."""
    largest: float | int | None = None
    """The largest absolute difference; None if only NaNs differ, or for dtypes without numbers."""
    places: tuple[tuple[str, int], ...] = ()
    """The file and the byte of the first element that differs, on each side."""

    def __str__(self) -> str:
        name = _shown(self.name)
        if self.shapes[0] != self.shapes[1]:
            return f"{name}: shape {self.shapes[0]} and {self.shapes[1]}"
        apart = "" if self.largest is None else f", by at most {self.largest:.6g}"
        if self.dtypes[0] != self.dtypes[1]:
            values = {None: "", 0: ", the same numbers"}.get(self.count, f", numbers differ{apart}")
            return f"{name}: dtype {self.dtypes[0]} and {self.dtypes[1]}{values}"
        (one, at), (two, other) = self.places
        differ = "1 element differs" if self.count == 1 else f"{self.count} elements differ"
        return (
            f"{name}: {differ}{apart}, all within {self.box}, the first at {self.first} "
            f"({one} byte {at}, {two} byte {other})"
        )


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of ``diff``."""

    checkpoints: tuple[str, str]
    formats: tuple[str, str]
    num_files: tuple[int, int]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of tensors that only the first has, and only the second."""
    changed: tuple[TensorDiff, ...]
    num_equal: int
    """Tensors that are equal, bit by bit."""
    num_recut: int
    """Those of them with different layouts."""
    objects: tuple[str, ...]
    """Entries that are not tensors and that differ, or that one side lacks."""

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors, in any layout."""
        return not (self.only[0] or self.only[1] or self.changed or self.objects)

    @property
    def recut(self) -> bool:
        """Whether both hold the same tensors, and at least one has another layout."""
        return self.equal and self.num_recut > 0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for root, kind, files in zip(self.checkpoints, self.formats, self.num_files, strict=True):
            yield f"{root}: {kind}, {count(files, 'file')}"
        for root, names in zip(self.checkpoints, self.only, strict=True):
            if names:
                yield f"only in {root}: {len(names)}"
                yield from _listed(tuple(map(_shown, names)))
        if self.changed:
            yield f"differ: {len(self.changed)}"
            yield from _listed(tuple(map(str, self.changed)))
        if self.objects:
            yield f"entries that are no tensors differ: {len(self.objects)}"
            yield from _listed(tuple(map(_shown, self.objects)))
        yield self._verdict()

    def _verdict(self) -> str:
        if self.recut:
            return f"same values, different layouts ({self.num_recut} of {self.num_equal} tensors)"
        if self.equal:
            return f"same values, same layouts ({count(self.num_equal, 'tensor')})"
        return f"not the same; {self.num_equal} tensors are equal"

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "diff": FORMAT,
            "equal": self.equal,
            "recut": self.recut,
            "checkpoints": list(self.checkpoints),
            "formats": list(self.formats),
            "num_files": list(self.num_files),
            "only": [list(names) for names in self.only],
            "changed": [_changed(each) for each in self.changed],
            "num_equal": self.num_equal,
            "num_recut": self.num_recut,
            "objects": list(self.objects),
        }


def _shown(name: str) -> str:
    """A name, printable, on one line and of bounded length."""
    return quoted(name)[1:-1]


def _listed(lines: tuple[str, ...]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN} more; --json lists all"


def _changed(each: TensorDiff) -> dict[str, Any]:
    # JSON has no infinity, and strict readers refuse what Python writes for it.
    largest = each.largest
    finite = largest is None or abs(largest) != float("inf")
    return {
        "name": each.name,
        "shapes": [list(shape) for shape in each.shapes],
        "dtypes": list(each.dtypes),
        "count": each.count,
        "first": None if each.first is None else list(each.first),
        "box": None if each.box is None else [list(each.box.start), list(each.box.stop)],
        "largest": largest if finite else "inf",
        "places": [{"file": file, "byte": at} for file, at in each.places],
    }


def diff(
    a: str | Path,
    b: str | Path,
    *,
    memory: int | str = "256MiB",
    rules: Rules | str | None = None,
    mesh: Mesh | str | None = None,
    b_rules: Rules | str | None = None,
    b_mesh: Mesh | str | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoints tensor by tensor.

    Damage raises an error; ``verify`` lists it.
    """
    with opened(a, rules, mesh) as left, opened(b, b_rules, b_mesh) as right:
        budget = Budget.for_reading(memory, left.storage, right.storage)
        mine, theirs = left.catalog.tensors, right.catalog.tensors
        both = [name for name in mine if name in theirs]
        comparable = [name for name in both if _alike(mine[name], theirs[name])]
        meter = Meter(progress, 2 * sum(mine[name].num_bytes for name in comparable))
        digests = [_digests(side, comparable, budget, meter) for side in (left, right)]
        equal = {name for name in comparable if digests[0][name] == digests[1][name]}
        changed = [
            found
            for name in both
            if name not in equal
            for found in _compared(left, right, name, budget)
        ]
        return DiffReport(
            checkpoints=(left.storage.root, right.storage.root),
            formats=(left.catalog.format, right.catalog.format),
            num_files=(len(left.catalog.files), len(right.catalog.files)),
            only=(_without(mine, theirs), _without(theirs, mine)),
            changed=tuple(changed),
            num_equal=len(equal),
            num_recut=sum(_boxes(mine[name]) != _boxes(theirs[name]) for name in equal),
            objects=tuple(differing_objects(left, right)),
        )


def _without(names: Mapping[str, object], others: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _alike(one: StoredTensor, two: StoredTensor) -> bool:
    return (one.shape, one.dtype) == (two.shape, two.dtype)


def _boxes(tensor: StoredTensor) -> frozenset[Box]:
    return frozenset(piece.box for piece in tensor.pieces if piece.box.size)


def _digests(side: Source, names: list[str], budget: Budget, meter: Meter) -> dict[str, str]:
    """The digests of these tensors; raises DamageError."""
    tensors = (side.catalog.tensors[name] for name in names)
    found = dict(digests_of(side, tensors, budget, meter, _raise))
    side.checker.finish(side.storage)
    side.check_crcs()
    return found


def _raise(problem: Problem) -> None:
    raise DamageError(problem.message)


def _compared(left: Source, right: Source, name: str, budget: Budget) -> Iterator[TensorDiff]:
    mine, theirs = left.catalog.tensors[name], right.catalog.tensors[name]
    shapes, dtypes = (mine.shape, theirs.shape), (mine.dtype, theirs.dtype)
    if mine.shape != theirs.shape or not (_alike(mine, theirs) or all(map(is_number, dtypes))):
        yield TensorDiff(name, shapes, dtypes)
        return
    readers = StoredReader(left, mine), StoredReader(right, theirs)
    found: Difference | None = difference(*readers, budget)
    if found is None and not _alike(mine, theirs):
        yield TensorDiff(name, shapes, dtypes, 0)
        return
    if found is None:
        raise DamageError(
            f"tensor {quoted(name)} differed when it was read first and not again: "
            "is another process writing to it?"
        )
    places = tuple(reader.place(found.first) for reader in readers)
    yield TensorDiff(
        name, shapes, dtypes, found.count, found.first, found.box, found.largest, places
    )
