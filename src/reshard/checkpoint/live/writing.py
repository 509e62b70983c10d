"""A rank writes the boxes that fall to it, and sums what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from reshard.checkpoint.formats.output import Output, Owned
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.live.views import View, part_of, views_of
from reshard.checkpoint.piece_table import slabs
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.copying import sums_of
from reshard.checkpoint.transfer.reading import in_order
from reshard.dtypes import itemsize
from reshard.layout.box import Box
from reshard.layout.spec import TensorSpec

__all__ = ["Job", "Writer", "Written", "writers_of"]

WORKERS = 2
WINDOW = 8 << 20
"""Bytes that are written at once."""
STEP = 1 << 30
"""Bytes after which ranks hear from each other, so that none waits long in silence."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be saved, the same on all ranks."""

    specs: Mapping[str, TensorSpec]
    owned: Mapping[str, Owned]
    output: Output
    writers: Mapping[int, int]
    """The rank that writes what is known beforehand of each file."""
    objects: Mapping[str, int]
    """The rank that writes each entry that is no tensor."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Some bytes of a file: a part of a tensor, or bytes that are known."""

    file: int
    offset: int
    name: str = ""
    box: Box | None = None
    view: View | None = None
    """What holds the box."""
    data: bytes = b""


@dataclass(slots=True)
class Written:
    """What a rank has written: checksums of it, and its parts of the digests."""

    num_bytes: int = 0
    sums: list[tuple[int, int, int, str]] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """The same as plain data."""
        parts = {name: f"{value:x}" for name, value in self.parts.items()}
        return {"sums": self.sums, "parts": parts}


class Writer:
    """Writes what falls to one rank, in steps."""

    def __init__(
        self,
        job: Job,
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[str, bytes],
        rank: int,
        checksums: bool,
    ) -> None:
        self._job, self._tensors, self._objects, self._rank = job, tensors, objects, rank
        self._checksums = checksums
        self._left = self._writes()
        self._touched: set[int] = set()
        self.done = Written()

    def step(self, target: OutputFiles) -> bool:
        """Write some more and put it on disk; whether there was more."""
        count = max(STEP // WINDOW, 1)
        tasks = list(islice(self._left, count))

        def write(task: _Write, _: None) -> tuple[list[tuple[int, int, int, str]], Any]:
            array = self._array(task)
            data = memoryview(array.reshape(-1).view("u1").data if task.box else task.data)
            target.write(task.file, task.offset, data)
            self._touched.add(task.file)
            return (sums_of(task.file, task.offset, data) if self._checksums else []), array

        for task, (sums, array) in in_order(write, tasks, WORKERS, lambda: None):
            self.done.sums += sums
            self.done.num_bytes += len(task.data) if task.box is None else array.nbytes
            if self._checksums and task.box is not None:
                self._add_digest(task.name, task.box, array)
        for file in sorted(self._touched):
            target.sync_file(file)
        self._touched.clear()
        return bool(tasks)

    def _add_digest(self, name: str, box: Box, array: Any) -> None:
        spec, parts = self._job.specs[name], self.done.parts
        value = digest.part(array, box, spec.shape, spec.dtype)
        parts[name] = (parts.get(name, 0) + value) % digest.MODULUS

    def _writes(self) -> Iterator[_Write]:
        output = self._job.output
        for literal in output.all_literals():
            if self._job.writers[literal.file] == self._rank:
                yield _Write(literal.file, literal.offset, data=literal.data)
        for copy in output.objects:
            if self._job.objects[copy.source.name] == self._rank:
                data = self._objects[copy.source.name]
                yield _Write(copy.file, copy.offset, data=data)
        for name in output.tensors:
            yield from self._boxes(name)

    def _boxes(self, name: str) -> Iterator[_Write]:
        spec, pieces = self._job.specs[name], self._job.output.tensors[name].pieces
        mine = {start for start, _, rank in self._job.owned[name] if rank == self._rank}
        views = views_of(self._tensors[name], spec.shape, self._rank) if mine else []
        size = itemsize(spec.dtype)
        for piece in pieces.pieces:
            at, whole = piece.offset, piece.box
            for box in slabs(whole, WINDOW // size) if whole.start in mine else ():
                view = next(view for view in views if whole in view[0])
                yield _Write(piece.file, at, name, box, view)
                at += box.size * size

    def _array(self, task: _Write) -> Any:
        """A box of this rank's tensor, in row-major order in the memory of the host."""
        if task.box is None or task.view is None:
            return None
        part = part_of(task.view, task.box)
        flat = part.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        return flat.view(f"V{part.element_size()}").reshape(task.box.shape)


def writers_of(output: Output, owned: Mapping[str, Owned], first: int) -> dict[int, int]:
    """The rank of each file: that of its boxes, or the first one."""
    found = dict.fromkeys(range(len(output.files)), first)
    for name, tensor in output.tensors.items():
        by_start = {start: rank for start, _, rank in owned[name]}
        for piece in tensor.pieces.pieces:
            found[piece.file] = by_start[piece.box.start]
    return found
