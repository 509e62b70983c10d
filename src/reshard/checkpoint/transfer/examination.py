"""Reads the tensors of a checkpoint: one in boxes, or all of them in full, for their digests.

with opened("ckpt") as source:
    w = StoredReader(source, source.catalog.tensors["w"])
    for box in w.boxes(num_bytes=8 << 20):
        array = w.read(box, buffers)        # elements as unsigned integers, row-major
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reshard.checkpoint.catalog import StoredTensor
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import load_checksums
from reshard.checkpoint.piece_table import slabs
from reshard.checkpoint.transfer.packing import SMALL, Pack, Packed, batches, tiles
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.checkpoint.transfer.windows import (
    Array,
    Budget,
    Buffers,
    Source,
    fill,
    in_order,
    unequal_replicas,
)
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError
from reshard.layout.box import Box
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["Problem", "StoredReader", "digests_of", "opened"]


@contextmanager
def opened(
    root: str | Path, rules: Rules | str | None = None, mesh: Mesh | str | None = None
) -> Iterator[Source]:
    """Open a checkpoint of any format; damaged headers raise an error."""
    with open_storage(root) as storage:
        checksums = load_checksums(storage)
        catalog = read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        yield Source.of(storage, catalog, checksums)


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


Tell = Callable[[Problem], None]


class StoredReader:
    """Reads one tensor; raises CoverageError if a part of it is not stored."""

    def __init__(self, source: Source, tensor: StoredTensor) -> None:
        self.source, self.tensor = source, tensor
        self._transfer = Transfer.of_read(tensor, tensor.dtype)

    def boxes(self, num_bytes: int) -> Iterator[Box]:
        """The tensor in boxes of at most this many bytes, in the fastest order to read.

        Boxes are parts of pieces, each one run of its file. Tensors with replicas or with padding
        come in whole rows, so that all copies of an element are in memory at once.
        """
        if len(self._transfer.replicas) or self.tensor.zeros:
            yield from self.rows(num_bytes)
            return
        limit = max(num_bytes // itemsize(self.tensor.dtype), 1)
        for piece in self._transfer.source.boxes():
            yield from slabs(piece, limit)

    def rows(self, num_bytes: int) -> Iterable[Box]:
        """The tensor in boxes of at most this many bytes, in row-major order."""
        return self._transfer.windows(num_bytes)

    def read(self, box: Box, buffers: Buffers) -> Array:
        """A box, as unsigned integers of the size of its elements; valid until the next read."""
        return fill(self._transfer, box, buffers, self.source)

    def place(self, index: tuple[int, ...]) -> tuple[str, int]:
        """The file that holds an element, and the byte at which it begins."""
        box = Box(index, tuple(at + 1 for at in index))
        held = self._transfer.source.within(box)
        if not len(held):
            return "(padding)", 0
        return self.source.name(int(held.files[0])), int(held.offsets[0])

    def digest(self, box: Box, buffers: Buffers, tell: Tell) -> int:
        """The digest value of a box; ``tell`` gets other stored copies of it that differ."""
        if box.size == 0:
            return 0
        array = self.read(box, buffers)
        value = digest.part(array, box, self.tensor.shape, self.tensor.dtype)
        unequal = unequal_replicas(self._transfer, box, array, buffers, self.source)
        for where, file, apart in unequal:
            tell(self._disagreement(where, self.source.name(file), apart))
        return value

    def _disagreement(self, box: Box, two: str, apart: Array) -> Problem:
        at = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
        first = tuple(int(index) + low for index, low in zip(at, box.start, strict=True))
        one, offset = self.place(first)
        message = (
            f"{self.source.storage.root}: tensor {quoted(self.tensor.name)} {box}: {one} and {two} "
            f"should hold the same and {int(apart.sum())} elements differ, the first at {first}: "
            "one of them is damaged or from another step"
        )
        where = (offset, offset + itemsize(self.tensor.dtype))
        return Problem("replicas", message, self.tensor.name, one, where, box)


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a tensor that is read and digested at a time."""

    reader: StoredReader
    box: Box


_Task = _Part | list[StoredTensor]
"""A part of a tensor, or a pack of small tensors."""


def digests_of(
    source: Source,
    tensors: Iterable[StoredTensor],
    budget: Budget,
    progress: Callable[[int], None],
    tell: Tell,
) -> dict[str, str]:
    """The digest of each tensor; ``tell`` gets unequal replicas and what cannot be read."""
    values: dict[str, int | None] = {}

    def alone(tensor: StoredTensor, buffers: Buffers) -> int | CheckpointError:
        try:
            reader = StoredReader(source, tensor)
            boxes = reader.boxes(budget.window)
            return digest.combine(reader.digest(box, buffers, tell) for box in boxes)
        except CheckpointError as error:
            return error

    def work(task: _Task, buffers: Buffers) -> Sequence[int | CheckpointError]:
        try:
            if isinstance(task, _Part):
                return [task.reader.digest(task.box, buffers, tell)]
            pack = Pack.of([Packed.of(t.shape, t.dtype, t.pieces) for t in task], buffers.window)
            pack.read(buffers.scratch, source)
            return pack.digests()
        except CheckpointError as error:
            # The tensors of a pack that cannot be read are read one by one, to name the bad one.
            return [error] if isinstance(task, _Part) else [alone(t, buffers) for t in task]

    make = partial(Buffers, budget.window, casts=False)
    tasks = _tasks(source, tensors, budget.window, tell)
    for task, results in in_order(work, tasks, budget.workers, make):
        if isinstance(task, _Part):
            done = [task.reader.tensor]
            progress(task.box.size * itemsize(done[0].dtype))
        else:
            done = task
            progress(sum(tensor.num_bytes for tensor in task))
        for tensor, result in zip(done, results, strict=True):
            value = values.setdefault(tensor.name, 0)
            if value is None:  # after a part that could not be read
                continue
            if isinstance(result, CheckpointError):
                tell(Problem("unreadable", str(result), tensor.name))
                values[tensor.name] = None
            else:
                values[tensor.name] = digest.combine([value, result])
    stored = source.catalog.tensors
    return {
        name: digest.finish(value, stored[name].shape, stored[name].dtype)
        for name, value in values.items()
        if value is not None
    }


def _tasks(
    source: Source, tensors: Iterable[StoredTensor], window: int, tell: Tell
) -> Iterator[_Task]:
    """Small tensors in packs, and the others in boxes, each at most as large as a window."""
    small: list[StoredTensor] = []
    for tensor in tensors:
        if 0 < tensor.num_bytes <= min(SMALL, window) and tiles(tensor.shape, tensor.pieces):
            small.append(tensor)
        else:
            yield from _parts(source, tensor, window, tell)
    yield from batches(small, attrgetter("num_bytes"), window)


def _parts(source: Source, tensor: StoredTensor, window: int, tell: Tell) -> Iterator[_Part]:
    """The boxes of a tensor; an empty tensor has one, so that it has a digest too."""
    try:
        reader = StoredReader(source, tensor)
        if tensor.num_bytes == 0:
            yield _Part(reader, Box.whole(tensor.shape))
        yield from (_Part(reader, box) for box in reader.boxes(window))
    except CheckpointError as error:
        tell(Problem("unreadable", f"{source.storage.root}: {error}", tensor.name))
