"""Copies chunks: each byte is read, checked, hashed and written in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import Checksums, Sum, file_sums, sums_of
from reshard.checkpoint.integrity.crcs import Part
from reshard.checkpoint.output import OutputTensor
from reshard.checkpoint.storage.local import StoredFile
from reshard.checkpoint.storage.output_files import BLOCK, OutputFiles
from reshard.checkpoint.transfer.packing import CELLS, Pack, Read, Write, batches, joined_writes
from reshard.checkpoint.transfer.transfers import CopyChunk, Transfer
from reshard.checkpoint.transfer.windows import (
    Buffers,
    Source,
    collector_paused,
    compare,
    fill,
    shaped,
    writable,
)
from reshard.dtypes import cast_into, itemsize
from reshard.layout.box import Box, row_major


@dataclass(slots=True)
class Done:
    """The journal record of a finished chunk."""

    number: int
    num_bytes: int = 0
    sums: list[Sum] = field(default_factory=list)
    parts: Counter[int] = field(default_factory=Counter)
    """What the chunk adds to the digest value of each tensor, by number of the transfer."""
    crcs: list[Part] = field(default_factory=list)
    """CRC-32 of what was read of torch's records."""

    def write(
        self, target: OutputFiles, file: int, offset: int, data: memoryview, checksums: bool
    ) -> None:
        """Write bytes of a file, and record them with their checksums."""
        target.write(file, offset, data)
        self.num_bytes += len(data)
        if checksums:
            self.sums += sums_of(file, offset, data)

    def to_record(self) -> dict[str, Any]:
        parts = {str(which): f"{value:x}" for which, value in self.parts.items()}
        record = {"chunk": self.number, "bytes": self.num_bytes, "sums": self.sums, "parts": parts}
        return {**record, "crcs": self.crcs} if self.crcs else record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Done:
        parts = Counter({int(which): int(text, 16) for which, text in record["parts"].items()})
        sums = [(file, start, stop, text) for file, start, stop, text in record["sums"]]
        crcs = [(which, start, stop, crc) for which, start, stop, crc in record.get("crcs", ())]
        return cls(record["chunk"], record["bytes"], sums, parts, crcs)


def checksums_of(
    done: Iterable[Done],
    files: Sequence[StoredFile],
    tensors: Iterable[tuple[str, Sequence[int], str]],
    request: Mapping[str, Any] | None = None,
) -> Checksums:
    """The sidecar of an output, from all that was written; tensors have name, shape and dtype."""
    sums, values = list[Sum](), Counter[int]()
    for one in done:
        values.update(one.parts)
        sums += one.sums
    digests = {
        name: digest.finish(digest.combine([values[number]]), shape, dtype)
        for number, (name, shape, dtype) in enumerate(tensors)
    }
    return Checksums(file_sums(files, sums), digests, request)


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies any chunk of a plan."""

    transfers: Sequence[Transfer]
    source: Source
    target: OutputFiles
    checksums: bool = True
    compare_replicas: bool = True

    def copy(self, chunk: CopyChunk, buffers: Buffers) -> Done:
        done, limit, small = Done(chunk.number), buffers.num_bytes, list[int]()
        read = partial(self.source.read_into, crcs=done.crcs)
        for which, window in chunk.windows:
            if self.transfers[which].is_packed(limit):
                small.append(which)
            else:
                self._copy_window(which, window, buffers, done, read)
        for numbers in batches(small, lambda which: self.transfers[which].most_bytes, limit):
            self._copy_pack(numbers, buffers, done, read)
        return done

    @collector_paused()
    def _copy_pack(self, numbers: Sequence[int], buffers: Buffers, done: Done, read: Read) -> None:
        """Copy whole small tensors together."""
        transfers = [self.transfers[which] for which in numbers]
        # All of them are packed, so none is a table.
        stored = [one.stored for one in transfers if isinstance(one.stored, StoredTensor)]
        pack = Pack(stored, buffers.window)
        pack.read(buffers.scratch, read)
        if any(transfer.have != transfer.want for transfer in transfers):
            pack = _cast_pack(pack, transfers, buffers)
        if self.checksums:
            done.parts.update(dict(zip(numbers, pack.digests(), strict=True)))
        for file, offset, data in joined_writes(_writes(pack, transfers)):
            done.write(self.target, file, offset, memoryview(data), self.checksums)

    def _copy_window(
        self, which: int, window: Box, buffers: Buffers, done: Done, read: Read
    ) -> None:
        transfer, lead = self.transfers[which], 0
        written, width = transfer.destination.within(window), itemsize(transfer.want)
        if len(written):  # what is written directly has the same alignment as in its file
            strides = np.array(row_major(window.shape), dtype=np.int64)
            place = int(((written.starts[0] - window.start) * strides).sum())
            lead = _lead(int(written.offsets[0]) - place * width, width)
        casts = transfer.have != transfer.want
        array = fill(transfer, window, buffers, read, 0 if casts else lead)
        if self.compare_replicas:
            compare(transfer, window, array, buffers, read, self.source.name)
        if casts:
            stored = array
            array = shaped(buffers.cast[lead:], window, width)
            cast_into(stored, transfer.have, array, transfer.want)
        if self.checksums:
            done.parts[which] += digest.part(array, window, transfer.shape, transfer.want)
        for group in writable(written, buffers.num_bytes):
            views, extent = group.views(array, window), group.extent
            runs = group.runs(views)
            if not runs:
                lead = _lead(extent.start, group.parts.itemsize)
                filled = buffers.scratch[lead : lead + extent.num_bytes]
                for view, part in zip(views, group.arrays(filled), strict=True):
                    part[...] = view
                runs = [(extent.start, filled.data)]
            for offset, memory in runs:
                done.write(self.target, extent.file, offset, memory, self.checksums)


def _lead(offset: int, size: int) -> int:
    """An offset within its block; 0 if elements would not be aligned to their size there."""
    lead = offset % BLOCK
    return lead if lead % size == 0 else 0


def _cast_pack(pack: Pack, transfers: Sequence[Transfer], buffers: Buffers) -> Pack:
    """The pack in the dtypes of the output."""
    written = [one.written for one in transfers if isinstance(one.written, OutputTensor)]
    result = Pack(written, buffers.cast)
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


def _writes(pack: Pack, transfers: Sequence[Transfer]) -> Iterator[Write]:
    """All writes of a pack in the order of the files: boxes, with the bytes around them."""
    tensors = [one.written for one in transfers if isinstance(one.written, OutputTensor)]
    order = [
        (piece.file, piece.offset, number, which)
        for number, tensor in enumerate(tensors)
        for which, piece in enumerate(tensor.pieces)
    ]
    for file, offset, number, which in sorted(order):
        tensor = tensors[number]
        data = pack.bytes_of(number, tensor.pieces[which].box)
        if tensor.around:
            head, tail = tensor.around[which]
            offset, data = offset - len(head), b"".join((head, data, tail))
        yield file, offset, data
