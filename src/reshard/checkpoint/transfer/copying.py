"""Copies chunks in worker threads: each byte is read, checked, hashed and written in one pass.

Without checksums, long runs of bytes are copied from file to file by the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import CHUNK, checksum
from reshard.checkpoint.integrity.crcs import Part
from reshard.checkpoint.output_files import OutputFiles
from reshard.checkpoint.piece_table import Pieces, PieceTable
from reshard.checkpoint.storage import LocalStorage, Storage
from reshard.checkpoint.transfer.packing import CELLS, Pack, Packed, Placed, joined_writes
from reshard.checkpoint.transfer.source import Source, SourceReads
from reshard.checkpoint.transfer.transfers import CopyChunk, Transfer
from reshard.checkpoint.transfer.windows import (
    Buffers,
    cast,
    collector_paused,
    compare,
    drain,
    fill,
    in_order,
    lead_of,
)
from reshard.dtypes import cast_into, itemsize
from reshard.layout.box import Box
from reshard.layout.coverage import overlapping_pairs

__all__ = ["Copier", "Done", "copy_all", "sums_of"]

WORTH_A_CALL = 1 << 16
"""Runs that are shorter on average are copied faster through memory."""


def zero_copy(
    transfer: Transfer, window: Box, storage: Storage, catalog: Catalog, target: OutputFiles
) -> int:
    """Copy a window where both sides have it in long runs; 0 if that cannot be, else the bytes."""
    usable = isinstance(storage, LocalStorage) and hasattr(os, "copy_file_range")
    if not usable or transfer.have != transfer.want or transfer.is_padded:
        return 0
    source, drains = transfer.source.within(window), transfer.destination.within(window)
    mine, others = overlapping_pairs(source.starts, source.stops, drains.starts, drains.stops)
    starts = np.maximum(source.starts[mine], drains.starts[others])
    stops = np.minimum(source.stops[mine], drains.stops[others])
    reads, writes = source.clipped(mine, starts, stops), drains.clipped(others, starts, stops)
    if not (reads.is_run.all() and writes.is_run.all()) or reads.num_bytes.mean() < WORTH_A_CALL:
        return 0
    assert isinstance(storage, LocalStorage)
    for row in range(len(reads)):
        path = catalog.files[int(reads.files[row])].path
        with storage.using(path) as have, target.using(int(writes.files[row])) as want:
            places = int(reads.offsets[row]), int(writes.offsets[row])
            if not _copy(have.descriptor, want, places, int(reads.num_bytes[row])):
                return 0
    return int(reads.num_bytes.sum())


def _copy(have: int, want: int, places: tuple[int, int], length: int) -> bool:
    """Copy a run; False where the system does not do that between these files."""
    source, target = places
    while length:
        try:
            count = os.copy_file_range(have, want, length, source, target)
        except OSError:
            return False
        if count == 0:
            return False
        source, target, length = source + count, target + count, length - count
    return True


@dataclass(slots=True)
class Done:
    """The journal record of a finished chunk."""

    number: int
    num_bytes: int = 0
    sums: list[tuple[int, int, int, str]] = field(default_factory=list)
    """File, start, stop and checksum of everything that was written."""
    parts: dict[int, int] = field(default_factory=dict)
    """What the chunk adds to the digest value of each tensor, by number of the transfer."""
    crcs: list[Part] = field(default_factory=list)
    """CRC-32 of what was read of torch's records."""

    def to_record(self) -> dict[str, Any]:
        """The record as JSON data."""
        parts = {str(which): f"{value:x}" for which, value in self.parts.items()}
        record = {"chunk": self.number, "bytes": self.num_bytes, "sums": self.sums, "parts": parts}
        return {**record, "crcs": self.crcs} if self.crcs else record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Done:
        """Read what ``to_record`` wrote."""
        parts = {int(which): int(value, 16) for which, value in record["parts"].items()}
        sums = [(file, start, stop, text) for file, start, stop, text in record["sums"]]
        crcs = [(which, start, stop, crc) for which, start, stop, crc in record.get("crcs", ())]
        return cls(record["chunk"], record["bytes"], sums, parts, crcs)


@dataclass(slots=True)
class _Writes:
    """Writes the bytes of one chunk, with their checksums."""

    files: OutputFiles
    done: Done
    checksums: bool

    def write(self, file: int, offset: int, data: memoryview) -> None:
        self.files.write(file, offset, data)
        self.done.num_bytes += len(data)
        if self.checksums:
            self.done.sums += sums_of(file, offset, data)


def sums_of(file: int, offset: int, data: memoryview) -> list[tuple[int, int, int, str]]:
    """The checksums of bytes that are written to a file: file, start, stop, checksum."""
    starts = range(0, len(data), CHUNK)
    parts = [(at, data[at : at + CHUNK]) for at in starts]
    return [
        (file, offset + at, offset + at + len(part), checksum(part).hex()) for at, part in parts
    ]


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies any chunk of a plan."""

    transfers: Sequence[Transfer]
    source: Source
    target: OutputFiles
    checksums: bool = True
    compare_replicas: bool = True

    @property
    def casts(self) -> bool:
        """Whether any tensor changes its dtype."""
        return any(transfer.have != transfer.want for transfer in self.transfers)

    def copy(self, chunk: CopyChunk, buffers: Buffers) -> Done:
        """Copy one chunk."""
        done = Done(chunk.number)
        writes = _Writes(self.target, done, self.checksums)
        reads = SourceReads(self.source, done.crcs)
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
            elif not self._zero_copied(transfer, window, done):
                self._copy_window(which, transfer, window, buffers, reads, writes)
        if pack:
            self._copy_pack(pack, buffers, reads, writes)
        return done

    @collector_paused()
    def _copy_pack(
        self, numbers: Sequence[int], buffers: Buffers, reads: SourceReads, writes: _Writes
    ) -> None:
        """Copy whole small tensors together."""
        transfers = [self.transfers[which] for which in numbers]
        pack = Pack.of([_packed(t, t.have, t.stored) for t in transfers], buffers.window)
        pack.read(buffers.scratch, reads)
        if any(transfer.have != transfer.want for transfer in transfers):
            pack = _cast_pack(pack, transfers, buffers)
        if self.checksums:
            writes.done.parts |= zip(numbers, pack.digests(), strict=True)
        for one in joined_writes(_placed(pack, transfers)):
            writes.write(one.file, one.offset, memoryview(one.data))

    def _copy_window(
        self,
        which: int,
        transfer: Transfer,
        window: Box,
        buffers: Buffers,
        reads: SourceReads,
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

    def _zero_copied(self, transfer: Transfer, window: Box, done: Done) -> bool:
        """Whether the kernel copied the window from file to file."""
        if self.checksums or (self.compare_replicas and len(transfer.replicas)):
            return False
        copied = zero_copy(transfer, window, self.source.storage, self.source.catalog, self.target)
        if copied:
            done.num_bytes += copied
            self.source.count(copied)
        return copied > 0


def _packed(transfer: Transfer, dtype: str, held: PieceTable | Pieces) -> Packed:
    assert isinstance(held, Pieces)
    width = itemsize(dtype)
    return Packed(transfer.shape, width, prod(transfer.shape) * width, held.pieces)


def _cast_pack(pack: Pack, transfers: Sequence[Transfer], buffers: Buffers) -> Pack:
    """The pack in the dtypes of the output."""
    result = Pack.of([_packed(t, t.want, t.written) for t in transfers], buffers.cast)
    kinds = groupby(range(len(transfers)), key=lambda n: (transfers[n].have, transfers[n].want))
    for (have, want), group in kinds:
        numbers = [*group]
        source, target = (
            each.buffer[each.starts[numbers[0]] : each.starts[numbers[-1] + 1]]
            for each in (pack, result)
        )
        if have == want:
            target[...] = source
        else:
            cells = CELLS[itemsize(have)], CELLS[itemsize(want)]
            cast_into(source.view(cells[0]), have, target.view(cells[1]), want)
    return result


def _placed(pack: Pack, transfers: Sequence[Transfer]) -> Iterator[Placed]:
    """All writes of a pack in the order of the files: boxes, with the bytes around them."""
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
    chunks: Iterator[CopyChunk],
    *,
    workers: int,
    window_bytes: int,
    finished: Callable[[Done], None],
) -> None:
    """Copy all chunks; each worker calls ``finished`` as soon as it has copied one."""

    def work(chunk: CopyChunk, buffers: Buffers) -> None:
        finished(copier.copy(chunk, buffers))

    buffers = partial(Buffers, window_bytes, copier.casts)
    for _ in in_order(work, chunks, workers, buffers):
        pass
