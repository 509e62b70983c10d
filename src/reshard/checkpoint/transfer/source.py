"""A checkpoint opened for reading: bytes are compared with its checksums as they are read.

with opened("ckpt") as source:
    w = StoredReader(source, source.catalog.tensors["w"])
    for box in w.boxes(num_bytes=8 << 20):
        array = w.read(box, buffers)        # elements as unsigned integers, row-major
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checker,
    Checksums,
    damage,
    load_checksums,
    sum_of,
)
from reshard.checkpoint.integrity.crcs import Crcs, Part, changed, crc_of, crcs_of
from reshard.checkpoint.piece_table import slabs
from reshard.checkpoint.storage import Storage
from reshard.checkpoint.transfer.transfers import SourceTensor, Transfer, source_of
from reshard.checkpoint.transfer.windows import Buffers, Replica, fill, replicas_of
from reshard.dtypes import itemsize
from reshard.errors import DamageError
from reshard.layout.box import Box
from reshard.planning.names import Feed
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["Source", "SourceReads", "StoredReader", "opened"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Source:
    """The files of a checkpoint by number, with its checksums and a count of the bytes read."""

    storage: Storage
    catalog: Catalog
    checksums: Checksums | None = None
    checker: Checker = field(default_factory=lambda: Checker(None, ""))
    """Compares what is read with the checksums."""
    crcs: Crcs | None = None
    """The CRC-32 records of torch's files, for files that have no checksums of ours."""
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, storage: Storage, catalog: Catalog, checksums: Checksums | None) -> Source:
        """A source whose bytes are all compared with what is known of them."""
        has_records = bool(catalog.crcs or catalog.objects)
        crcs = Crcs(crcs_of(storage, catalog, checksums)) if has_records else None
        return cls(storage, catalog, checksums, Checker(checksums, storage.root), crcs)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        self.fill(file, offset, buffer)
        if self.crcs is not None:
            self.crcs.add(self.crcs.parts(file, offset, buffer))

    def fill(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, without the CRC-32."""
        path = self.name(file)
        self.storage.read_into(path, offset, buffer)
        self.checker.check(path, offset, buffer)
        self.count(len(buffer))

    def count(self, num_bytes: int) -> None:
        """Add to the count of bytes read."""
        with self._lock:
            self.num_bytes += num_bytes

    def name(self, file: int) -> str:
        """The path of a file."""
        return self.catalog.files[file].path

    def check_crcs(self, which: Collection[int] | None = None) -> None:
        """Raise DamageError if a CRC-32 record, of those read in part or of these, has changed.

        Bytes of a record that were not read yet are read now.
        """
        for crc, now in self.crcs.values(self.unread, which) if self.crcs is not None else ():
            if crc.value != now:
                raise DamageError(changed(self.catalog, crc, now))

    def unread(self, file: int, start: int, stop: int) -> int:
        """The CRC-32 of bytes that were not read yet."""
        self.count(stop - start)
        return crc_of(self.storage, self.name(file), start, stop)

    def digest_damage(self, transfer: Transfer, found: str, expected: str) -> DamageError:
        """The error for a tensor whose digest is wrong; names the damaged chunk if there is one."""
        files = self.checksums.files if self.checksums else {}
        for number in sorted(set(transfer.source.files.tolist())):
            path = self.name(number)
            sums = files.get(path)
            for chunk in map(sums.chunk, range(len(sums.ends))) if sums else ():
                now = sum_of(self.storage, path, chunk.start, chunk.stop)
                if now != chunk.sum:
                    where = f"tensor {quoted(transfer.name)}: {self.storage.where(path)}"
                    return DamageError(damage(where, chunk, now))
        return DamageError(
            f"tensor {quoted(transfer.name)} of {self.storage.root} has the digest {found} and its "
            f"{SIDECAR} says {expected}: the files changed since they were written"
        )


@dataclass(slots=True)
class SourceReads:
    """Reads a source and collects the CRC-32 of what is read, instead of adding it up."""

    source: Source
    crcs: list[Part] = field(default_factory=list)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        self.source.fill(file, offset, buffer)
        if self.source.crcs is not None:
            self.crcs += self.source.crcs.parts(file, offset, buffer)

    def name(self, file: int) -> str:
        """The path of a file."""
        return self.source.name(file)


@contextmanager
def opened(
    root: str | Path, rules: Rules | str | None = None, mesh: Mesh | str | None = None
) -> Iterator[Source]:
    """Open a checkpoint of any format; damaged headers raise an error."""
    with open_storage(root) as storage:
        checksums = load_checksums(storage)
        catalog = read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        yield Source.of(storage, catalog, checksums)


class StoredReader:
    """Reads one tensor; raises CoverageError if a part of it is not stored."""

    def __init__(self, source: Source, tensor: StoredTensor) -> None:
        self.source = source
        self.tensor = tensor
        whole = SourceTensor(tensor, Feed(tensor.name))
        have, replicas = source_of(tensor.name, tensor.shape, [whole], tensor.zeros)
        self._transfer = Transfer.of_read(
            tensor, have, replicas, tensor.dtype, is_padded=bool(tensor.zeros)
        )

    @property
    def has_replicas(self) -> bool:
        """Whether some elements are stored more than once."""
        return len(self._transfer.replicas) > 0

    def boxes(self, num_bytes: int) -> Iterator[Box]:
        """The tensor in boxes of at most this many bytes, in the fastest order to read.

        Boxes are parts of pieces, each one run of its file. Tensors with replicas or with padding
        come in whole rows, so that all copies of an element are in memory at once.
        """
        if self.has_replicas or self.tensor.zeros:
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

    def replicas(self, box: Box, buffers: Buffers) -> Iterator[Replica]:
        """The other stored copies of parts of a box, one at a time."""
        return replicas_of(self._transfer, box, buffers, self.source)

    def place(self, index: tuple[int, ...]) -> tuple[str, int]:
        """The file that holds an element, and the byte at which it begins."""
        box = Box(index, tuple(at + 1 for at in index))
        held = self._transfer.source.within(box)
        if not len(held):
            return "(padding)", 0
        return self.source.name(int(held.files[0])), int(held.offsets[0])
