"""Copies the chunks of a plan with a few threads: read, checked, hashed and written in one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import CHUNK, Checker, checksum
from reshard.checkpoint.integrity.crcs import Crcs, Part
from reshard.checkpoint.piece_table import Located, Pieces
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.collector import collector_paused
from reshard.checkpoint.transfer.packing import CELLS, Pack, Packed, Placed, written
from reshard.checkpoint.transfer.transfers import Chunk, Transfer
from reshard.checkpoint.transfer.windows import Buffers, cast, compare, drain, fill, lead_of
from reshard.checkpoint.transfer.zero_copy import zero_copy
from reshard.dtypes import cast_into, itemsize
from reshard.layout.box import Box

__all__ = ["CheckedReads", "Copier", "Done", "SourceFiles", "copy_all"]


@dataclass(slots=True)
class SourceFiles:
    """The files of the source by number, with a count of what was read."""

    storage: Storage
    catalog: Catalog
    checker: Checker | None = None
    crcs: Crcs | None = None
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer; bytes that have a checksum are checked."""
        path = self.catalog.files[file].path
        self.storage.read_into(path, offset, buffer)
        if self.checker is not None:
            self.checker.saw(path, offset, buffer)
        self.count(len(buffer))

    def count(self, num_bytes: int) -> None:
        """Note that so many bytes were read."""
        with self._lock:
            self.num_bytes += num_bytes

    def name(self, file: int) -> str:
        """The path of a file."""
        return self.catalog.files[file].path


@dataclass(slots=True)
class Done:
    """What the journal keeps of a finished chunk."""

    number: int
    num_bytes: int = 0
    sums: list[tuple[int, int, int, str]] = field(default_factory=list)
    """File, first byte, past the last byte, checksum: of everything that was written."""
    parts: dict[int, int] = field(default_factory=dict)
    """What the chunk adds to the digest of each tensor, by number of the transfer."""
    crcs: list[Part] = field(default_factory=list)
    """Parts of the CRC-32 of records of the source."""

    def to_record(self) -> dict[str, Any]:
        """The record of the journal."""
        parts = {str(which): f"{value:x}" for which, value in self.parts.items()}
        record = {"chunk": self.number, "bytes": self.num_bytes, "sums": self.sums, "parts": parts}
        return {**record, "crcs": self.crcs} if self.crcs else record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Done:
        """Read what ``to_record`` gave."""
        parts = {int(which): int(value, 16) for which, value in record["parts"].items()}
        sums = [(file, start, stop, text) for file, start, stop, text in record["sums"]]
        crcs = [(which, start, stop, crc) for which, start, stop, crc in record.get("crcs", ())]
        return cls(record["chunk"], record["bytes"], sums, parts, crcs)


@dataclass(slots=True)
class _Writes:
    """Writes what belongs to one chunk, and sums it."""

    files: OutputFiles
    done: Done
    checksums: bool

    def write(self, file: int, offset: int, data: memoryview) -> None:
        self.files.write(file, offset, data)
        self.done.num_bytes += len(data)
        if self.checksums:
            self.done.sums += sums_of(file, offset, data)


@dataclass(slots=True)
class CheckedReads:
    """Reads of the source, with the CRC-32 of what is read where the source has one to compare."""

    source: SourceFiles
    crcs: list[Part]

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer."""
        self.source.read_into(file, offset, buffer)
        if self.source.crcs is not None:
            self.crcs += self.source.crcs.parts(file, offset, buffer)

    def name(self, file: int) -> str:
        """The path of a file."""
        return self.source.name(file)


def sums_of(file: int, offset: int, data: memoryview) -> list[tuple[int, int, int, str]]:
    """The checksums of bytes that are written to a file."""
    starts = range(0, len(data), CHUNK)
    parts = [(at, data[at : at + CHUNK]) for at in starts]
    return [
        (file, offset + at, offset + at + len(part), checksum(part).hex()) for at, part in parts
    ]


@dataclass(frozen=True, slots=True)
class Copier:
    """What a worker needs to copy any chunk."""

    transfers: Sequence[Transfer]
    source: SourceFiles
    target: OutputFiles
    checksums: bool = True
    compare_replicas: bool = True

    @property
    def casts(self) -> bool:
        """Whether any tensor changes its dtype."""
        return any(transfer.have != transfer.want for transfer in self.transfers)

    def copy(self, chunk: Chunk, buffers: Buffers) -> Done:
        """Copy one chunk."""
        done = Done(chunk.number)
        writes = _Writes(self.target, done, self.checksums)
        reads = CheckedReads(self.source, done.crcs)
        pack: list[int] = []
        room = buffers.num_bytes
        for which, window in chunk.windows:
            transfer = self.transfers[which]
            if transfer.is_packed(buffers.num_bytes):
                size = transfer.most_bytes
                if pack and size > room:
                    self._copy_pack(pack, buffers, reads, writes)
                    pack, room = [], buffers.num_bytes
                pack.append(which)
                room -= size
            elif not self._passed_through(transfer, window, done):
                self._copy_window(which, transfer, window, buffers, reads, writes)
        if pack:
            self._copy_pack(pack, buffers, reads, writes)
        return done

    def _copy_pack(
        self, numbers: Sequence[int], buffers: Buffers, reads: CheckedReads, writes: _Writes
    ) -> None:
        """Copy whole small tensors together."""
        with collector_paused():
            self._copy_packed(numbers, buffers, reads, writes)

    def _copy_packed(
        self, numbers: Sequence[int], buffers: Buffers, reads: CheckedReads, writes: _Writes
    ) -> None:
        transfers = [self.transfers[which] for which in numbers]
        pack = Pack.of([_packed(t, t.have, t.stored) for t in transfers], buffers.window)
        pack.read(buffers.scratch, reads)
        if any(transfer.have != transfer.want for transfer in transfers):
            pack = _cast_pack(pack, transfers, buffers)
        if self.checksums:
            writes.done.parts |= zip(numbers, pack.digests(), strict=True)
        for one in written(_placed(pack, transfers)):
            writes.write(one.file, one.offset, memoryview(one.data))

    def _copy_window(
        self,
        which: int,
        transfer: Transfer,
        window: Box,
        buffers: Buffers,
        reads: CheckedReads,
        writes: _Writes,
    ) -> None:
        lead = lead_of(transfer, window)
        casts = transfer.have != transfer.want
        array = fill(transfer, window, buffers, reads, 0 if casts else lead)
        if self.compare_replicas and len(transfer.replicas):
            compare(transfer, window, array, buffers, reads)
        array = cast(transfer, window, array, buffers, lead)
        if self.checksums:
            value = digest.part(array, window, transfer.shape, transfer.want)
            parts = writes.done.parts
            parts[which] = (parts.get(which, 0) + value) % digest.MODULUS
        drain(transfer, window, array, buffers, writes)

    def _passed_through(self, transfer: Transfer, window: Box, done: Done) -> bool:
        """Whether the system copied the window by itself, without us seeing its bytes."""
        if self.checksums or (self.compare_replicas and len(transfer.replicas)):
            return False
        copied = zero_copy(transfer, window, self.source.storage, self.source.catalog, self.target)
        if copied:
            done.num_bytes += copied
            self.source.count(copied)
        return copied > 0


def _packed(transfer: Transfer, dtype: str, held: Located | Pieces) -> Packed:
    assert isinstance(held, Pieces)
    width = itemsize(dtype)
    return Packed(transfer.shape, width, prod(transfer.shape) * width, held.pieces)


def _cast_pack(pack: Pack, transfers: Sequence[Transfer], buffers: Buffers) -> Pack:
    """The same tensors in the dtypes of the output."""
    made = Pack.of([_packed(t, t.want, t.written) for t in transfers], buffers.cast)
    kinds = groupby(range(len(transfers)), key=lambda n: (transfers[n].have, transfers[n].want))
    for (have, want), group in kinds:
        numbers = [*group]
        source, target = (
            each.buffer[each.starts[numbers[0]] : each.starts[numbers[-1] + 1]]
            for each in (pack, made)
        )
        if have == want:
            target[...] = source
        else:
            cells = CELLS[itemsize(have)], CELLS[itemsize(want)]
            cast_into(source.view(cells[0]), have, target.view(cells[1]), want)
    return made


def _placed(pack: Pack, transfers: Sequence[Transfer]) -> Iterator[Placed]:
    """All that is written of a pack, in the order of files: boxes, and what is around them."""
    order = [
        (piece.file, piece.offset, number, which)
        for number, transfer in enumerate(transfers)
        for which, piece in enumerate(_written(transfer).pieces)
    ]
    for file, offset, number, which in sorted(order):
        held = _written(transfers[number])
        data = pack.bytes_of(number, held.pieces[which].box)
        if held.around:
            head, tail = held.around[which]
            yield Placed(file, offset - len(head), b"".join((head, data, tail)))
        else:
            yield Placed(file, offset, data)


def _written(transfer: Transfer) -> Pieces:
    assert isinstance(transfer.written, Pieces)
    return transfer.written


def copy_all(
    copier: Copier,
    chunks: Iterator[Chunk],
    *,
    workers: int,
    window_bytes: int,
    finished: Callable[[Done], None],
) -> None:
    """Copy all chunks with so many threads; the first error stops all and is raised."""
    lock, errors = threading.Lock(), list[BaseException]()

    def next_chunk() -> Chunk | None:
        with lock:
            return None if errors else next(chunks, None)

    def work() -> None:
        try:
            buffers = Buffers(window_bytes, copier.casts)
            while (chunk := next_chunk()) is not None:
                finished(copier.copy(chunk, buffers))
        except BaseException as error:
            with lock:
                errors.append(error)

    threads = [threading.Thread(target=work, name=f"reshard-copy-{n}") for n in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        with lock:
            errors.append(error)
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
