"""How two checkpoints differ: in names, shapes, dtypes, values, or only in their layouts.

Tensors whose digests differ are read side by side, window by window, to find where they differ and
by how much. Entries that are not tensors, such as a step or a learning rate, are bytes in .distcp,
plain values in torch.save, and texts in the metadata of safetensors, where reshard writes JSON. Two
sides of one kind are compared as they are, all others as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.checks import shown
from reshard.checkpoint.integrity.checksums import sum_of
from reshard.checkpoint.transfer.examination import Problem, StoredReader, digests_of, opened
from reshard.checkpoint.transfer.windows import (
    Array,
    Budget,
    Buffers,
    Meter,
    Progress,
    Source,
    bits_differ,
    in_order,
)
from reshard.dtypes import cast_into
from reshard.errors import DamageError
from reshard.layout.box import Box
from reshard.text import Report, and_more, count, listed, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules


FORMAT = 1
BLOCK = 1 << 16
"""Elements that are converted to numbers at a time, as numbers take more memory."""


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
class DiffReport(Report):
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
    notes: tuple[str, ...] = ()
    """Remarks, one line each, such as entries that were not compared."""

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors, in any layout, and no other entry differs."""
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
                yield from listed([*map(_shown, names)])
        if self.changed:
            yield f"differ: {len(self.changed)}"
            yield from listed([*map(str, self.changed)])
        if self.objects:
            yield f"entries that are no tensors differ: {len(self.objects)}"
            yield from listed([*map(_shown, self.objects)])
        if self.recut:
            yield f"same values, different layouts ({self.num_recut} of {self.num_equal} tensors)"
        elif self.equal:
            yield f"same values, same layouts ({count(self.num_equal, 'tensor')})"
        else:
            yield f"not the same; {self.num_equal} tensors are equal"
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        data = Report.to_dict(self)
        for each in data["changed"]:
            each["box"] = each["box"] and [*each["box"].values()]
            # JSON has no infinity, and strict readers refuse what Python writes for it.
            each["largest"] = "inf" if each["largest"] == inf else each["largest"]
            each["places"] = [{"file": file, "byte": at} for file, at in each["places"]]
        return {"diff": FORMAT, "equal": self.equal, "recut": self.recut, **data}


def _shown(name: str) -> str:
    """A name, printable, on one line and of bounded length."""
    return quoted(name)[1:-1]


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

    def tell(problem: Problem) -> None:
        raise DamageError(problem.message)

    with opened(a, rules, mesh) as left, opened(b, b_rules, b_mesh) as right:
        budget = Budget.for_reading(memory, left.storage, right.storage)
        mine, theirs = left.catalog.tensors, right.catalog.tensors
        both = [name for name in mine if name in theirs]
        comparable = [name for name in both if _alike(mine[name], theirs[name])]
        meter = Meter(progress, 2 * sum(mine[name].num_bytes for name in comparable))
        digests = []
        for side in (left, right):
            tensors = (side.catalog.tensors[name] for name in comparable)
            digests.append(digests_of(side, tensors, budget, meter, tell))
            side.checker.finish(side.storage)
            side.check_crcs()
        equal = {name for name in comparable if digests[0][name] == digests[1][name]}
        differ = [name for name in both if name not in equal]
        entries, notes = compare_entries(left, right)
        return DiffReport(
            checkpoints=(left.storage.root, right.storage.root),
            formats=(left.catalog.format, right.catalog.format),
            num_files=(len(left.catalog.files), len(right.catalog.files)),
            only=(
                tuple(name for name in mine if name not in theirs),
                tuple(name for name in theirs if name not in mine),
            ),
            changed=tuple(_compared(left, right, name, budget) for name in differ),
            num_equal=len(equal),
            num_recut=sum(mine[name].boxes != theirs[name].boxes for name in equal),
            objects=tuple(entries),
            notes=notes,
        )


def _compared(left: Source, right: Source, name: str, budget: Budget) -> TensorDiff:
    mine, theirs = left.catalog.tensors[name], right.catalog.tensors[name]
    whole = TensorDiff(name, (mine.shape, theirs.shape), (mine.dtype, theirs.dtype))
    is_alike = _alike(mine, theirs)
    if mine.shape != theirs.shape or not (is_alike or all(map(_is_number, whole.dtypes))):
        return whole
    differs = difference(left, right, name, budget)
    if differs is None and is_alike:
        raise DamageError(
            f"tensor {quoted(name)} differed when it was read first and not again: "
            "is another process writing to it?"
        )
    return differs or replace(whole, count=0)


def _alike(one: StoredTensor, two: StoredTensor) -> bool:
    return (one.shape, one.dtype) == (two.shape, two.dtype)


@dataclass(frozen=True, slots=True)
class Difference:
    """How one box of two tensors differs; see `TensorDiff`."""

    count: int
    first: tuple[int, ...]
    box: Box
    largest: float | int | None


def difference(left: Source, right: Source, name: str, budget: Budget) -> TensorDiff | None:
    """Compare a tensor that has one shape in both; None if they are equal.

    Tensors of the same dtype are compared bit by bit, others as numbers.
    """
    readers = [StoredReader(side, side.catalog.tensors[name]) for side in (left, right)]
    dtypes = readers[0].tensor.dtype, readers[1].tensor.dtype

    def work(box: Box, buffers: list[Buffers]) -> Difference | None:
        one, two = (reader.read(box, own) for reader, own in zip(readers, buffers, strict=True))
        return between(one, two, dtypes, box)

    def make() -> list[Buffers]:
        return [Buffers.of(budget.window, casts=False) for _ in readers]

    wider = max(readers, key=lambda side: side.tensor.num_bytes)
    windows = in_order(work, wider.rows(budget.window), budget.workers, make)
    parts = [part for _, part in windows if part is not None]
    if not parts:
        return None
    count, first = sum(part.count for part in parts), parts[0].first  # in row-major order
    low = np.min([part.box.start for part in parts], axis=0).tolist()
    high = np.max([part.box.stop for part in parts], axis=0).tolist()
    box = Box(tuple(low), tuple(high))
    largest = max((part.largest for part in parts if part.largest is not None), default=None)
    shapes = readers[0].tensor.shape, readers[1].tensor.shape
    places = tuple(reader.place(first) for reader in readers)
    return TensorDiff(name, shapes, dtypes, count, first, box, largest, places)


def between(left: Array, right: Array, dtypes: tuple[str, str], box: Box) -> Difference | None:
    """How two arrays of raw elements of a box differ; None if they are equal.

    As numbers, all NaNs are equal.
    """
    is_one_dtype = dtypes[0] == dtypes[1]
    apart = bits_differ(left, right) if is_one_dtype else np.empty(left.shape, dtype=bool)
    if is_one_dtype and not apart.any():
        return None
    flat, sides, distances = apart.reshape(-1), (left.reshape(-1), right.reshape(-1)), []
    for at in range(0, flat.size, BLOCK):
        differ, pair = flat[at : at + BLOCK], [side[at : at + BLOCK] for side in sides]
        if not is_one_dtype:
            one, two = _numbers(pair, dtypes)
            differ[...] = (one != two) & ~(np.isnan(one) & np.isnan(two))
        if differ.any() and all(map(_is_number, dtypes)):
            distances += _distance(*_numbers([side[differ] for side in pair], dtypes))
    if not apart.any():
        return None
    low, high = [], []
    for dim in range(apart.ndim):
        other = tuple(d for d in range(apart.ndim) if d != dim)
        here = np.flatnonzero(apart.any(axis=other))
        low.append(int(here[0]) + box.start[dim])
        high.append(int(here[-1]) + 1 + box.start[dim])
    index = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
    first = tuple(int(one) + start for one, start in zip(index, box.start, strict=True))
    count, largest = int(np.count_nonzero(apart)), max(distances, default=None)
    return Difference(count, first, Box(tuple(low), tuple(high)), largest)


def _is_number(dtype: str) -> bool:
    """Whether elements of a dtype can be converted to numbers and subtracted."""
    return dtype not in ("complex32", "float8_e8m0fnu")


def _distance(left: Array, right: Array) -> list[float | int]:
    """The largest distance, in a list that is empty if all are NaN; exact for integers."""
    if left.dtype.kind in "iu" and right.dtype.kind in "iu":
        if left.dtype != right.dtype:  # numpy would subtract some as float64
            return [int(np.abs(left.astype(object) - right.astype(object)).max())]
        high, low = np.maximum(left, right), np.minimum(left, right)
        return [int((high - low).view(f"u{left.itemsize}").max())]  # it may wrap around once
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.abs(left - right)
    far = far[~np.isnan(far)]
    return [float(far.max())] if len(far) else []


def _numbers(pair: Sequence[Array], dtypes: tuple[str, str]) -> list[Array]:
    """Raw elements as numbers: as integers, which are exact, where both sides are such."""
    are_whole = all(dtype.startswith(("int", "uint", "bool")) for dtype in dtypes)
    numbers = []
    for side, dtype in zip(pair, dtypes, strict=True):
        want = "complex128" if dtype.startswith("complex") else "float64"
        if are_whole:
            want = "uint8" if dtype == "bool" else dtype
        numbers.append(np.empty(side.shape, want))
        cast_into(side, dtype, numbers[-1], want)
    return numbers


Entries = Mapping[str, tuple[str | None, str | None]]
"""Entries that differ, each as it is on both sides, for a message; None where it is absent."""


def compare_entries(left: Source, right: Source) -> tuple[Entries, tuple[str, ...]]:
    """Entries that are not tensors and that differ, and a note on those that are not compared.

    One that a side lacks differs only between two sides of one kind which both have entries: other
    kinds cannot hold every entry.
    """
    mine, theirs = left.catalog, right.catalog
    rest = {*mine.left_out, *theirs.left_out}
    if mine.objects and theirs.objects:
        sizes = [{n: f"{one.size} bytes" for n, one in c.objects.items()} for c in (mine, theirs)]
        entries = _differing(sizes, lambda n: _object_sum(left, n) == _object_sum(right, n))
    elif mine.values and theirs.values:
        texts = [{n: shown(one) for n, one in c.values.items()} for c in (mine, theirs)]
        entries = _differing(texts, lambda n: _same(mine.values[n], theirs.values[n]))
    else:
        names = _names(mine), _names(theirs)
        one, two = (_texts(side, names[0] & names[1]) for side in (left, right))
        both = one.keys() & two.keys()
        texts = [{name: quoted(side[name]) for name in both} for side in (one, two)]
        entries = _differing(texts, lambda n: one[n] == two[n])
        rest |= (names[0] | names[1]) - both
    what = and_more([quoted(name) for name in sorted(rest)], 3, "entries")
    note = f"not compared, as no tensors and not plain values on both sides: {what}"
    return entries, (note,) if rest else ()


def _differing(sides: Sequence[Mapping[str, str]], are_equal: Callable[[str], bool]) -> Entries:
    """The entries that only one side has or that differ; each side has a text for every entry."""
    mine, theirs = sides
    return {
        name: (mine.get(name), theirs.get(name))
        for name in sorted({*mine, *theirs})
        if name not in mine or name not in theirs or not are_equal(name)
    }


def _names(catalog: Catalog) -> set[str]:
    """The names of all entries that are not tensors."""
    metadata = catalog.metadata.keys() - {"format"}  # which says who wrote a safetensors file
    return {*catalog.objects, *catalog.values, *metadata}


def _texts(side: Source, names: set[str]) -> Mapping[str, str]:
    """The entries of these names that JSON can represent."""
    catalog = side.catalog
    objects = {name: one for name, one in catalog.objects.items() if name in names}
    texts = {name: text for name, text in catalog.metadata.items() if name in names}
    if objects:
        from reshard.checkpoint.formats.torch.tensors import object_texts

        texts |= object_texts(side.storage, replace(catalog, objects=objects))
    return texts


def _object_sum(side: Source, name: str) -> tuple[int, bytes]:
    entry = side.catalog.objects[name]
    end = entry.offset + entry.size
    return entry.size, sum_of(side.storage, side.name(entry.file), entry.offset, end)


def _same(one: Any, two: Any) -> bool:
    """Whether two plain values are equal, types included; all NaNs are equal.

    >>> _same([1, float("nan")], [1, float("nan")]), _same(1, True), _same((1,), [1])
    (True, False, False)
    """
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool(one == two) or (isinstance(one, float) and isnan(one) and isnan(two))
