"""One checkpoint, read in full: the digest of every tensor, and all that is wrong with it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from reshard.box import Box
from reshard.checkpoint import digest
from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.checksums import SIDECAR, Checksums, Chunk, damage
from reshard.checkpoint.reading import Budget, Source, StoredReader, in_order
from reshard.checkpoint.windows import Buffers, bits_differ
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, quoted

__all__ = ["Examined", "Problem", "digests_of", "examine", "tensors_at"]

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]
MAX_PROBLEMS = 1000
"""The problems that are told one by one; of more than these the first tell enough."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """``damage``, ``unreadable``, ``unsupported``, ``hole``, ``replicas``, ``absent``, ``shape``,
    ``dtype``, ``values``, or ``object`` for an entry that is no tensor."""
    message: str
    tensor: str | None = None
    file: str | None = None
    bytes: tuple[int, int] | None = None
    """The range of the file."""
    box: Box | None = None
    """The region of the tensor."""


@dataclass(slots=True)
class Examined:
    """What was found in one checkpoint."""

    digests: dict[str, str] = field(default_factory=dict)
    """The digest of each tensor that could be read."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    """Bytes of files that were compared with checksums."""

    def add(self, problem: Problem) -> None:
        """Keep a problem, unless there are too many to be read."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def examine(
    source: Source, budget: Budget, progress: Progress, found: Examined, is_known: bool = True
) -> None:
    """Read every tensor once and every file in full, and add what is wrong to ``found``.

    ``is_known`` is false where the catalog could not be read and says nothing of what there is.
    """
    damaged: list[tuple[str, Chunk, bytes]] = []
    source.checker.tell(lambda *chunk: damaged.append(chunk))
    readers = _readers(source, found)
    for name, result in digests_of(readers, budget, progress, found.add):
        found.digests[name] = result
    if source.checksums is None:
        return
    _check_files(source, source.checksums, budget, found)
    # One file of a checkpoint has only parts of its tensors, which have no digests.
    is_whole = SIDECAR in {file.path for file in source.storage.list()}
    changed = _changed(source.catalog, source.checksums, found.digests) if is_whole else {}
    for problem in _damage(source, damaged, changed):
        found.add(problem)
    if is_whole and is_known:
        _check_digests(source, changed, found)


def _readers(source: Source, found: Examined) -> Iterator[StoredReader]:
    for tensor in source.catalog.tensors.values():
        try:
            # First, because it ends soon whatever the pieces are.
            holes = tensor.holes()
            if holes:
                found.add(_hole(source, tensor, holes))
            else:
                yield StoredReader(source, tensor)
        except CheckpointError as error:
            found.add(Problem("unreadable", f"{source.storage.root}: {error}", tensor.name))


def _hole(source: Source, tensor: StoredTensor, holes: Sequence[Box]) -> Problem:
    missing, total = sum(hole.size for hole in holes), prod(tensor.shape)
    message = (
        f"{source.storage.root}: tensor {quoted(tensor.name)} of shape {tensor.shape}: no file "
        f"holds {holes[0]}, {missing} of its {total} elements are missing: is a file of the "
        "checkpoint missing?"
    )
    return Problem("hole", message, tensor.name, box=holes[0])


def digests_of(
    readers: Iterable[StoredReader],
    budget: Budget,
    progress: Progress,
    tell: Callable[[Problem], None],
) -> Iterator[tuple[str, str]]:
    """The digest of each tensor; replicas that disagree and what cannot be read are told."""

    def work(task: tuple[StoredReader, Box], buffers: Buffers) -> int | CheckpointError:
        reader, box = task
        try:
            return _part(reader, box, buffers, tell)
        except CheckpointError as error:
            return error

    tasks = ((reader, box) for reader in readers for box in _boxes(reader, budget.window))
    values: dict[str, int | None] = {}
    last: StoredReader | None = None
    make = lambda: Buffers(budget.window, casts=False)  # noqa: E731
    for (reader, box), result in in_order(work, tasks, budget.workers, make):
        name = reader.tensor.name
        progress(box.size * itemsize(reader.tensor.dtype))
        if last is not None and last is not reader:
            yield from _finished(last, values)
        last = reader
        known = values.setdefault(name, 0)
        if isinstance(result, CheckpointError):
            if known is not None:
                tell(Problem("unreadable", str(result), name))
            values[name] = None
        elif known is not None:
            values[name] = digest.combine([known, result])
    if last is not None:
        yield from _finished(last, values)


def _boxes(reader: StoredReader, num_bytes: int) -> Iterator[Box]:
    """The boxes to read; an empty tensor has one, so that it has a digest too."""
    if reader.tensor.num_bytes == 0:
        yield Box.whole(reader.tensor.shape)
    yield from reader.boxes(num_bytes)


def _finished(reader: StoredReader, values: dict[str, int | None]) -> Iterator[tuple[str, str]]:
    tensor = reader.tensor
    value = values.pop(tensor.name)
    if value is not None:
        yield tensor.name, digest.finish(value, tensor.shape, tensor.dtype)


def _part(reader: StoredReader, box: Box, buffers: Buffers, tell: Callable[[Problem], None]) -> int:
    tensor = reader.tensor
    if box.size == 0:
        return 0
    array = reader.read(box, buffers)
    value = digest.part(array, box, tensor.shape, tensor.dtype)
    if reader.has_replicas:
        for replica in reader.replicas(box, buffers):
            inside = replica.box.shift([-low for low in box.start])
            limits = zip(inside.start, inside.stop, strict=True)
            here: Any = (*(slice(low, high) for low, high in limits), ...)
            apart = bits_differ(array[here], replica.array)
            if apart.any():
                tell(_disagreement(reader, replica.box, replica.file, apart))
    return value


def _disagreement(reader: StoredReader, box: Box, file: int, apart: Array) -> Problem:
    at = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
    first = tuple(int(index) + low for index, low in zip(at, box.start, strict=True))
    one, offset = reader.place(first)
    two = reader.source.name(file)
    width = itemsize(reader.tensor.dtype)
    message = (
        f"{reader.source.storage.root}: tensor {quoted(reader.tensor.name)} {box}: {one} and {two} "
        f"should hold the same and {int(apart.sum())} elements differ, the first at {first}: "
        "one of them is damaged or from another step"
    )
    where = (offset, offset + width)
    return Problem("replicas", message, reader.tensor.name, one, where, box)


def _check_files(source: Source, checksums: Checksums, budget: Budget, found: Examined) -> None:
    """Compare what was not read yet of every file with its checksums."""
    present = {file.path: file.size for file in source.storage.list()}

    def work(path: str, _: None) -> CheckpointError | None:
        try:
            source.checker.finish_file(source.storage, path)
        except CheckpointError as error:
            return error
        return None

    whole = [
        path for path in checksums.files if _has_its_size(source, checksums, present, path, found)
    ]
    for path, error in in_order(work, whole, budget.workers, lambda: None):
        if error is not None:
            found.add(Problem("unreadable", str(error), file=path))
        found.checked_bytes += checksums.files[path].size


def _has_its_size(
    source: Source, checksums: Checksums, present: Mapping[str, int], path: str, found: Examined
) -> bool:
    root, size, known = source.storage.root, checksums.files[path].size, present.get(path)
    if known == size:
        return True
    if known is None and SIDECAR not in present:  # a single file was opened, not its folder
        return False
    if known is None:
        message = f"{root}/{path} is missing: it was written with {size} bytes"
        found.add(Problem("absent", message, file=path))
        return False
    message = f"{root}/{path} has {known} bytes and was written with {size}: restore it from a copy"
    found.add(Problem("damage", message, file=path, bytes=(min(known, size), max(known, size))))
    return False


def _changed(
    catalog: Catalog, checksums: Checksums, digests: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Tensors whose digest is not the one that was written: what it was, what it is."""
    known = checksums.digests
    return {
        name: (known[name], digests[name])
        for name in catalog.tensors
        if name in known and name in digests and known[name] != digests[name]
    }


def _damage(
    source: Source,
    damaged: list[tuple[str, Chunk, bytes]],
    changed: Mapping[str, object],
) -> Iterator[Problem]:
    """Changed chunks, with the tensors that lie in them."""
    told = sorted(damaged, key=lambda each: (each[0], each[1].start))[:MAX_PROBLEMS]
    touched = tensors_at(source.catalog, told)
    for (path, chunk, found), names in zip(told, touched, strict=True):
        sure = [name for name in names if name in changed] or names
        text = damage(f"{source.storage.root}/{path}", chunk, found)
        where = ", ".join(map(quoted, sure[:3])) + (" and more" if len(sure) > 3 else "")
        what = f" (tensor {where})" if sure else ""
        name = sure[0] if sure else None
        yield Problem("damage", text + what, name, path, (chunk.start, chunk.stop))


def tensors_at(catalog: Catalog, damaged: list[tuple[str, Chunk, bytes]]) -> list[list[str]]:
    """The names of the tensors that have bytes in each of these chunks, which rise."""
    names: list[list[str]] = [[] for _ in damaged]
    ends = [(path, chunk.stop) for path, chunk, _ in damaged]
    hit = {path for path, _ in ends}
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            path = catalog.files[piece.file].path
            start, stop = piece.span(tensor.dtype)
            at = bisect_right(ends, (path, start)) if path in hit else len(ends)
            while at < len(ends) and damaged[at][0] == path and damaged[at][1].start < stop:
                if names[at][-1:] != [tensor.name]:
                    names[at].append(tensor.name)
                at += 1
    return names


def _check_digests(source: Source, changed: Mapping[str, tuple[str, str]], found: Examined) -> None:
    """Tensors that are not what was written, although every chunk that we know of is."""
    told = {problem.tensor for problem in found.problems}
    root = source.storage.root
    for name, (was, now) in changed.items():
        if name not in told:
            message = (
                f"{root}: tensor {quoted(name)} has the digest {now} and was written with {was}"
            )
            found.add(Problem("values", message, name))
    for name in source.checksums.digests if source.checksums is not None else ():
        if name not in source.catalog.tensors:
            message = f"{root}: tensor {quoted(name)} was written and is in no file"
            found.add(Problem("absent", message, name))
