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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checksums,
    ChunkSum,
    damage,
    load_checksums,
    sum_of,
)
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.transfer.packing import Pack, batches, is_small
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
from reshard.errors import CheckpointError, DamageError
from reshard.layout.box import Box
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules


Result = TypeVar("Result")


@contextmanager
def opened(
    root: str | Path, rules: Rules | str | None = None, mesh: Mesh | str | None = None
) -> Iterator[Source]:
    """Open a checkpoint of any format; damaged headers raise an error."""
    with open_storage(root) as storage:
        checksums = load_checksums(storage)
        catalog = read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        yield Source.of(storage, catalog, checksums)


def check_outside_tensors(
    storage: Storage, catalog: Catalog, sums: Checksums, workers: int
) -> None:
    """Raise DamageError if a file or tensor is missing, or a byte outside of tensors changed."""
    if all(file.path != SIDECAR for file in storage.list()):  # one file was opened, no folder
        return
    for name in sums.digests:
        if name not in catalog.tensors:
            raise DamageError(
                f"{storage.root}: tensor {quoted(name)} was written and is in no file"
            )
    for _, _, message in wrong_sizes(storage, sums):
        raise DamageError(message)

    def check(task: tuple[str, ChunkSum], _: None) -> None:
        path, chunk = task
        now = sum_of(storage, path, chunk.start, chunk.stop)
        if now != chunk.sum:
            raise DamageError(damage(f"{storage.root}/{path}", chunk, now))

    for _ in in_order(check, _chunks_outside(catalog, sums), workers):
        pass


def wrong_sizes(storage: Storage, sums: Checksums) -> Iterator[tuple[str, int | None, str]]:
    """Files that are missing or not as long as they were written: path, size, message."""
    present = {file.path: file.size for file in storage.list()}
    for path, file in sums.files.items():
        size, where = present.get(path), f"{storage.root}/{path}"
        if size is None:
            message = f"is missing: it was written with {file.size} bytes"
            yield path, None, f"{where} {message}; if it is not wanted, delete {SIDECAR}"
        elif size != file.size:
            message = f"has {size} bytes and was written with {file.size}"
            yield path, size, f"{where} {message}: restore it from a copy"


def _chunks_outside(catalog: Catalog, sums: Checksums) -> Iterator[tuple[str, ChunkSum]]:
    """The chunks without a byte of a tensor."""
    inside = {path: set[int]() for path in sums.files}
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            path = catalog.files[piece.file].path
            if path in inside:
                inside[path].update(sums.files[path].touching(*piece.span(tensor.dtype)))
    for path, file in sums.files.items():
        outside = set(range(len(file.ends))) - inside[path]
        yield from ((path, file.chunk(index)) for index in sorted(outside))


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


def attempt(work: Callable[..., Result], *arguments: Any) -> Result | CheckpointError:
    """The result of a call, or the error that it raises, which is going to be a problem."""
    try:
        return work(*arguments)
    except CheckpointError as error:
        return error


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
        if self._transfer.replicas or self.tensor.zeros:
            yield from self.rows(num_bytes)
            return
        limit = max(num_bytes // itemsize(self.tensor.dtype), 1)
        for piece in self._transfer.source.boxes():
            yield from piece.slabs(limit)

    def rows(self, num_bytes: int) -> Iterable[Box]:
        """The tensor in boxes of at most this many bytes, in row-major order."""
        return self._transfer.windows(num_bytes)

    def read(self, box: Box, buffers: Buffers) -> Array:
        """A box, as unsigned integers of the size of its elements; valid until the next read."""
        return fill(self._transfer, box, buffers, self.source.read_into)

    def place(self, index: tuple[int, ...]) -> tuple[str, int]:
        """The file that holds an element, and the byte at which it begins."""
        box = Box(index, tuple(at + 1 for at in index))
        piece = self._transfer.source.within(box)
        if not len(piece):
            return "(padding)", 0
        return self.source.name(int(piece.files[0])), int(piece.offsets[0])

    def digest(self, box: Box, buffers: Buffers, tell: Tell) -> int:
        """The digest value of a box; ``tell`` gets other stored copies of it that differ."""
        if box.size == 0:
            return 0
        array, name, dtype = self.read(box, buffers), self.tensor.name, self.tensor.dtype
        value = digest.part(array, box, self.tensor.shape, dtype)
        unequal = unequal_replicas(self._transfer, box, array, buffers, self.source.read_into)
        for where, file, apart in unequal:
            at = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
            first = tuple(int(index) + low for index, low in zip(at, where.start, strict=True))
            one, offset = self.place(first)
            message = (
                f"{self.source.storage.root}: tensor {quoted(name)} {where}: {one} and "
                f"{self.source.name(file)} should hold the same and {int(apart.sum())} elements "
                f"differ, the first at {first}: one of them is damaged or from another step"
            )
            place = offset, offset + itemsize(dtype)
            tell(Problem("replicas", message, name, one, place, where))
        return value


class _Digesting(NamedTuple):
    """A box of one tensor, or a pack of small tensors, to be read and digested at a time."""

    tensors: Sequence[StoredTensor]
    num_bytes: int
    reader: StoredReader | None = None
    box: Box = Box((), ())


def digests_of(
    source: Source,
    tensors: Iterable[StoredTensor],
    budget: Budget,
    progress: Callable[[int], None],
    tell: Tell,
) -> dict[str, str]:
    """The digest of each tensor; ``tell`` gets unequal replicas and what cannot be read."""
    values: dict[str, int | None] = {}

    def alone(tensor: StoredTensor, buffers: Buffers) -> int:
        return StoredReader(source, tensor).digest(Box.whole(tensor.shape), buffers, tell)

    def work(task: _Digesting, buffers: Buffers) -> Sequence[int | CheckpointError]:
        if task.reader is not None:
            return [attempt(task.reader.digest, task.box, buffers, tell)]
        try:
            pack = Pack(task.tensors, buffers.window)
            pack.read(buffers.scratch, source.read_into)
            return pack.digests()
        except CheckpointError:  # its tensors are read one by one, to name the bad one
            return [attempt(alone, tensor, buffers) for tensor in task.tensors]

    make = partial(Buffers.of, budget.window, casts=False)
    tasks = _tasks(source, tensors, budget.window, tell)
    for task, results in in_order(work, tasks, budget.workers, make):
        progress(task.num_bytes)
        for tensor, result in zip(task.tensors, results, strict=True):
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
) -> Iterator[_Digesting]:
    """The boxes of large tensors, each at most as large as a window, then small ones in packs."""
    small: list[StoredTensor] = []
    for tensor in tensors:
        if tensor.num_bytes <= window and is_small(tensor):
            small.append(tensor)
            continue
        try:
            reader = StoredReader(source, tensor)
            # An empty tensor has a digest, too.
            for box in reader.boxes(window) if tensor.num_bytes else [Box.whole(tensor.shape)]:
                yield _Digesting([tensor], box.size * itemsize(tensor.dtype), reader, box)
        except CheckpointError as error:
            tell(Problem("unreadable", f"{source.storage.root}: {error}", tensor.name))
    for some in batches(small, attrgetter("num_bytes"), window):
        yield _Digesting(some, sum(tensor.num_bytes for tensor in some))
