"""Reads one checkpoint in full: the digest of every tensor, and all problems."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums, ChunkSum, damage
from reshard.checkpoint.transfer.packing import SMALL, Pack, Packed, tiles
from reshard.checkpoint.transfer.source import Source, StoredReader
from reshard.checkpoint.transfer.windows import Budget, Buffers, bits_differ, in_order
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError
from reshard.layout.box import Box
from reshard.text import quoted

__all__ = ["Examination", "Problem", "digests_of", "examine", "tensors_at"]

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]
MAX_PROBLEMS = 1000
"""The most problems that are listed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a checkpoint."""

    kind: str
    """``damage``, ``unreadable``, ``unsupported``, ``hole``, ``replicas``, ``absent``, ``shape``,
    ``dtype``, ``values``, or ``object`` for an entry that is not a tensor."""
    message: str
    tensor: str | None = None
    file: str | None = None
    bytes: tuple[int, int] | None = None
    """The range of the file."""
    box: Box | None = None
    """The region of the tensor."""


@dataclass(slots=True)
class Examination:
    """The digests and problems of one checkpoint."""

    digests: dict[str, str] = field(default_factory=dict)
    """The digest of each tensor that could be read."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    """Bytes of files that were compared with checksums."""

    def add(self, problem: Problem) -> None:
        """Add a problem, unless there are too many."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def examine(
    source: Source, budget: Budget, progress: Progress, found: Examination, is_known: bool = True
) -> None:
    """Read every tensor once and every file in full, and add all problems to ``found``.

    ``is_known`` is false if the catalog could not be read completely.
    """
    damaged: list[tuple[str, ChunkSum, bytes]] = []
    source.checker.report_to(lambda *chunk: damaged.append(chunk))
    tensors = _complete(source, found)
    for name, result in digests_of(source, tensors, budget, progress, found.add):
        found.digests[name] = result
    if source.checksums is None:
        return
    _check_files(source, source.checksums, budget, found)
    # A single file of a checkpoint has only parts of its tensors, which have no digests.
    is_whole = SIDECAR in {file.path for file in source.storage.list()}
    changed = _changed(source.catalog, source.checksums, found.digests) if is_whole else {}
    for problem in _damage(source, damaged, changed):
        found.add(problem)
    if is_whole and is_known:
        _check_digests(source, changed, found)


def _complete(source: Source, found: Examination) -> Iterator[StoredTensor]:
    """The tensors that are complete; the others become problems."""
    for tensor in source.catalog.tensors.values():
        if tiles(tensor.shape, tensor.pieces):
            yield tensor
            continue
        try:
            # First, because it takes bounded time whatever the pieces are.
            holes = tensor.missing()
        except CheckpointError as error:
            found.add(Problem("unreadable", f"{source.storage.root}: {error}", tensor.name))
            continue
        if holes:
            found.add(_hole(source, tensor, holes))
        else:
            yield tensor


def _hole(source: Source, tensor: StoredTensor, holes: Sequence[Box]) -> Problem:
    missing, total = sum(hole.size for hole in holes), prod(tensor.shape)
    message = (
        f"{source.storage.root}: tensor {quoted(tensor.name)} of shape {tensor.shape}: no file "
        f"holds {holes[0]}, {missing} of its {total} elements are missing: is a file of the "
        "checkpoint missing?"
    )
    return Problem("hole", message, tensor.name, box=holes[0])


def digests_of(
    source: Source,
    tensors: Iterable[StoredTensor],
    budget: Budget,
    progress: Progress,
    tell: Callable[[Problem], None],
) -> Iterator[tuple[str, str]]:
    """The digest of each tensor; ``tell`` gets unequal replicas and what cannot be read."""

    def work(task: _Task, buffers: Buffers) -> list[int] | CheckpointError:
        try:
            if isinstance(task, _Part):
                return [_part(task.reader, task.box, buffers, tell)]
            pack = Pack.of([packed_of(tensor) for tensor in task], buffers.window)
            pack.read(buffers.scratch, source)
            return pack.digests()
        except CheckpointError as error:
            return error

    make = lambda: Buffers(budget.window, casts=False)  # noqa: E731
    again: list[StoredTensor] = []
    sums = _DigestSums(tell)
    tasks = _tasks(source, tensors, budget.window, tell)
    for task, result in in_order(work, tasks, budget.workers, make):
        if isinstance(task, _Part):
            progress(task.num_bytes)
            yield from sums.add(task, result)
        elif isinstance(result, CheckpointError):
            again += task
        else:
            progress(sum(tensor.num_bytes for tensor in task))
            for tensor, value in zip(task, result, strict=True):
                yield tensor.name, digest.finish(value, tensor.shape, tensor.dtype)
    # The tensors of a pack that cannot be read are read one by one, to name the bad one.
    alone = (part for tensor in again for part in _parts(source, tensor, budget.window, tell))
    for part, result in in_order(work, alone, 1, make) if again else ():
        progress(part.num_bytes)
        yield from sums.add(part, result)
    yield from sums.finish()


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a tensor that is read and digested at a time."""

    reader: StoredReader
    box: Box

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.size * itemsize(self.reader.tensor.dtype)


_Task = _Part | list[StoredTensor]
"""A part of a tensor, or a pack of small tensors."""


def packed_of(tensor: StoredTensor) -> Packed:
    """A small tensor of a catalog, for a pack."""
    return Packed(tensor.shape, itemsize(tensor.dtype), tensor.num_bytes, tensor.pieces)


def _tasks(
    source: Source,
    tensors: Iterable[StoredTensor],
    window: int,
    tell: Callable[[Problem], None],
) -> Iterator[_Task]:
    """Small tensors in packs, and the others in boxes, each at most as large as a window."""
    pack: list[StoredTensor] = []
    room = window
    for tensor in tensors:
        size = tensor.num_bytes
        if not (0 < size <= min(SMALL, window) and tiles(tensor.shape, tensor.pieces)):
            yield from _parts(source, tensor, window, tell)
            continue
        if size > room:
            yield pack
            pack, room = [], window
        pack.append(tensor)
        room -= size
    if pack:
        yield pack


def _parts(
    source: Source, tensor: StoredTensor, window: int, tell: Callable[[Problem], None]
) -> Iterator[_Part]:
    """The boxes of a tensor; an empty tensor has one, so that it has a digest too."""
    try:
        reader = StoredReader(source, tensor)
        if tensor.num_bytes == 0:
            yield _Part(reader, Box.whole(tensor.shape))
        yield from (_Part(reader, box) for box in reader.boxes(window))
    except CheckpointError as error:
        tell(Problem("unreadable", f"{source.storage.root}: {error}", tensor.name))


class _DigestSums:
    """Adds up the digest values of parts, which come one tensor after the other."""

    def __init__(self, tell: Callable[[Problem], None]) -> None:
        self._tell = tell
        self._tensor: StoredTensor | None = None
        self._value: int | None = 0
        """None after a part could not be read."""

    def add(self, part: _Part, result: list[int] | CheckpointError) -> Iterator[tuple[str, str]]:
        """Add a part; yields the previous tensor when that is complete."""
        tensor = part.reader.tensor
        if tensor is not self._tensor:
            yield from self.finish()
            self._tensor, self._value = tensor, 0
        if isinstance(result, CheckpointError):
            if self._value is not None:
                self._tell(Problem("unreadable", str(result), tensor.name))
            self._value = None
        elif self._value is not None:
            self._value = digest.combine([self._value, *result])

    def finish(self) -> Iterator[tuple[str, str]]:
        """The digest of the last tensor, if there is one and all of it was read."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and self._value is not None:
            yield tensor.name, digest.finish(self._value, tensor.shape, tensor.dtype)


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


def _check_files(source: Source, checksums: Checksums, budget: Budget, found: Examination) -> None:
    """Compare the bytes of every file that were not read yet with its checksums."""
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
    source: Source, checksums: Checksums, present: Mapping[str, int], path: str, found: Examination
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
    """Tensors whose digest differs from the recorded one: recorded digest, present digest."""
    known = checksums.digests
    return {
        name: (known[name], digests[name])
        for name in catalog.tensors
        if name in known and name in digests and known[name] != digests[name]
    }


def _damage(
    source: Source,
    damaged: list[tuple[str, ChunkSum, bytes]],
    changed: Mapping[str, object],
) -> Iterator[Problem]:
    """Changed chunks, with the tensors that have bytes in them."""
    if not damaged:
        return
    listed = sorted(damaged, key=lambda each: (each[0], each[1].start))[:MAX_PROBLEMS]
    touched = tensors_at(source.catalog, listed)
    for (path, chunk, found), names in zip(listed, touched, strict=True):
        sure = [name for name in names if name in changed] or names
        text = damage(f"{source.storage.root}/{path}", chunk, found)
        where = ", ".join(map(quoted, sure[:3])) + (" and more" if len(sure) > 3 else "")
        what = f" (tensor {where})" if sure else ""
        name = sure[0] if sure else None
        yield Problem("damage", text + what, name, path, (chunk.start, chunk.stop))


def tensors_at(catalog: Catalog, damaged: list[tuple[str, ChunkSum, bytes]]) -> list[list[str]]:
    """The names of the tensors with bytes in each of these chunks, which are sorted."""
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


def _check_digests(
    source: Source, changed: Mapping[str, tuple[str, str]], found: Examination
) -> None:
    """Tensors whose digest changed although no chunk did, and tensors that are missing."""
    known = {problem.tensor for problem in found.problems}
    root = source.storage.root
    for name, (was, now) in changed.items():
        if name not in known:
            message = (
                f"{root}: tensor {quoted(name)} has the digest {now} and was written with {was}"
            )
            found.add(Problem("values", message, name))
    for name in source.checksums.digests if source.checksums is not None else ():
        if name not in source.catalog.tensors:
            message = f"{root}: tensor {quoted(name)} was written and is in no file"
            found.add(Problem("absent", message, name))
