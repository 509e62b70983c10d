"""The build of a conversion: check the source, copy chunks, check and seal the output."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.conversion.plan import ConversionPlan, Stamp
from reshard.checkpoint.conversion.request import Request
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checker,
    Checksums,
    ChunkSum,
    damage,
    sum_of,
)
from reshard.checkpoint.publish.journal import Journal, read_journals
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.storage.output_files import OutputFiles, replace_file
from reshard.checkpoint.transfer.copying import Copier, Done, checksums_of
from reshard.checkpoint.transfer.transfers import CopyChunk, chunks_of
from reshard.checkpoint.transfer.windows import (
    Budget,
    Buffers,
    Meter,
    Source,
    collector_paused,
    in_order,
)
from reshard.errors import DamageError, TargetError, UnfinishedError
from reshard.text import quoted

__all__ = ["Builder", "begin", "check_outside_tensors"]

BLOCK = 1 << 20
CHUNKS = 2
"""The way in which an output is split into chunks: a run is resumed only in the same way."""
SYNC_EVERY = 2 << 30
"""Bytes between two syncs, after which the journal survives a power failure."""


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
        found = sum_of(storage, path, chunk.start, chunk.stop)
        if found != chunk.sum:
            raise DamageError(damage(f"{storage.root}/{path}", chunk, found))

    for _ in in_order(check, _chunks_outside(catalog, sums), workers):
        pass


def wrong_sizes(storage: Storage, sums: Checksums) -> Iterator[tuple[str, int | None, str]]:
    """Files that are missing or not as long as they were written: path, size, message."""
    present = {file.path: file.size for file in storage.list()}
    for path, file in sums.files.items():
        found = present.get(path)
        where = f"{storage.root}/{path}"
        if found is None:
            message = f"is missing: it was written with {file.size} bytes"
            yield path, None, f"{where} {message}; if it is not wanted, delete {SIDECAR}"
        elif found != file.size:
            message = f"has {found} bytes and was written with {file.size}"
            yield path, found, f"{where} {message}: restore it from a copy"


def _chunks_outside(catalog: Catalog, sums: Checksums) -> Iterator[tuple[str, ChunkSum]]:
    """The chunks without a byte of a tensor."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            path = catalog.files[piece.file].path
            pieces.setdefault(path, []).append(piece.span(tensor.dtype))
    for path, file in sums.files.items():
        spans = np.array(sorted(pieces.get(path, ())), dtype=np.int64).reshape(-1, 2)
        # The furthest end of each piece and all before it, as pieces may overlap.
        starts, furthest = spans[:, 0], np.maximum.accumulate(spans[:, 1])
        for index in range(len(file.ends)):
            chunk = file.chunk(index)
            last = int(np.searchsorted(starts, chunk.stop)) - 1
            if last < 0 or furthest[last] <= chunk.start:
                yield path, chunk


def begin(place: Workplace, plan: ConversionPlan, request: Request, budget: Budget) -> int:
    """Start anew, or continue an earlier run; returns the size of the windows to use."""
    found = place.request()
    identity = {**plan.identity(request.checksums), "chunks": CHUNKS}
    if found is None:
        place.begin_anew()
        place.note_request({**identity, "window": budget.window})
        return budget.window
    if not request.resume:
        raise UnfinishedError(
            f"an unfinished conversion to {place.target} exists: give --resume to continue, or "
            f"remove {place.folder} to start again"
        )
    if any(found.get(key) != value for key, value in identity.items()):
        raise TargetError(
            f"the unfinished conversion to {place.target} was of another source, or asked for "
            f"something else: give the same arguments, or remove {place.folder} to start again"
        )
    if not plan.stamp.is_sure:
        raise TargetError(
            f"{plan.catalog.root} reports no versions of its files, so a changed source would "
            f"not be noticed: remove {place.folder} to start again"
        )
    return int(found["window"])


@dataclass(slots=True)
class Builder:
    """One process that builds an output."""

    request: Request
    plan: ConversionPlan
    storage: Storage
    place: Workplace
    budget: Budget
    source_sums: Checksums | None
    source: Source = field(init=False)
    target: OutputFiles = field(init=False)
    copier: Copier = field(init=False)
    resumed_bytes: int = 0
    num_chunks: int = 0
    """The number of chunks of all processes, once ``copy`` has looked at them."""
    _meter: Meter = field(init=False)
    _prepared: Done = field(default_factory=lambda: Done(-1))
    """What was written besides tensors."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unsynced: int = 0

    def __post_init__(self) -> None:
        total = sum(transfer.target_bytes for transfer in self.plan.transfers)
        self._meter = Meter(self.request.progress, total)
        storage, catalog, sums = self.storage, self.plan.catalog, self.source_sums
        self.source = Source(storage, catalog, sums)
        if self.request.checksums:
            self.source = Source.of(storage, catalog, sums)
            self.source.checker = Checker(self._checked_sums(), storage.root)
        self.target = OutputFiles(self.place.data, self.plan.output.files)
        checksums, compares = self.request.checksums, self.request.compare_replicas
        self.copier = Copier(self.plan.transfers, self.source, self.target, checksums, compares)

    def prepare(self) -> None:
        """Create all files at their full size, and write everything but the tensors."""
        try:
            self.place.check_room(self.plan.output.num_bytes)
            self.place.data.mkdir(exist_ok=True)
            self.target.allocate()
        except TargetError:
            if not read_journals(self.place.folder):  # there is nothing to resume
                self.place.discard()
            raise
        output = self.plan.output
        around = (  # the bytes around small tensors are written with the tensors
            literal
            for transfer in self.plan.transfers
            if not transfer.is_packed(self.budget.window)
            for literal in output.tensors[transfer.name].literals()
        )
        for literal in chain(output.literals, around):
            self._put(literal.file, literal.offset, literal.data)
        for copy in output.objects:
            source = copy.source
            for at, data in self._read(self.source.name(source.file), source.offset, source.size):
                if (crcs := self.source.crcs) is not None:
                    crcs.add(crcs.parts(source.file, source.offset + at, data))
                self._put(copy.file, copy.offset + at, data)
        for file, number in self.plan.others:
            for at, data in self._read(file.path, 0, file.size):
                self._put(number, at, data)
        replace_file(self.place.folder / "prepared", b"")

    def copy(self) -> None:
        """Copy the chunks of this process that are not done yet."""
        with Journal(self.place.folder, self.request.team.rank) as journal:
            done = {record["chunk"]: record["bytes"] for record in self._records()}
            self.resumed_bytes = sum(done.values())
            self._meter(self.resumed_bytes)

            def work(chunk: CopyChunk, buffers: Buffers) -> None:
                self._finished(self.copier.copy(chunk, buffers), journal)

            make = partial(Buffers, self.budget.window, self.plan.casts)
            for _ in in_order(work, self._to_do(done), self.budget.workers, make):
                pass
            self._sync(journal)
        self.source.count(self.source.checker.finish(self.storage))

    def seal(self) -> None:
        """Check that the output is complete and correct, and write its checksums."""
        with collector_paused():
            done = {record["chunk"]: Done.from_record(record) for record in self._records()}
        missing = set(range(self.num_chunks)) - done.keys()
        for chunk in self._chunks() if missing else ():
            if chunk.number in missing:
                name = self.plan.transfers[chunk.windows[0][0]].name
                raise UnfinishedError(
                    f"chunk {chunk.number} (of {quoted(name)}) is not done; continue with --resume"
                )
        if Stamp.of(self.plan.catalog, self.storage) != self.plan.stamp:
            raise DamageError(
                f"{self.storage.root} was changed while it was converted: nothing was published; "
                "convert it again when no process writes to it"
            )
        if self.source.crcs is not None:
            # What all ranks and runs have read; bytes that no output tensor needs are read now.
            for one in done.values():
                self.source.crcs.add(one.crcs)
            self.source.check_crcs()
        sums = self._checked_sums() if self.resumed_bytes else None
        for file in self.plan.catalog.files:
            if sums is not None and file.path in sums.files:
                # An interrupted earlier run may have read it only in part.
                self.source.count(self.source.checker.finish_file(self.storage, file.path))
        if self.request.checksums:
            self._write_sidecar([self._prepared, *done.values()])
        else:
            self.place.note_result(self.plan.identity(checksums=False))
        self._sync_files()
        self.target.sync_folders()
        self.target.close()

    def _write_sidecar(self, done: Iterable[Done]) -> None:
        """Write checksums and digests; unchanged tensors must have the digests of the source."""
        plan = self.plan
        tensors = [(one.name, one.shape, one.want) for one in plan.transfers]
        sums = checksums_of(done, plan.output.files, tensors, plan.identity(checksums=True))
        known = self.source_sums.digests if self.source_sums else {}
        for transfer in plan.transfers:
            found = sums.digests[transfer.name]
            expected = known.get(transfer.name, found)
            if found != expected and plan.is_unchanged(transfer):
                raise self.source.digest_damage(transfer, found, expected)
        replace_file(self.place.data / SIDECAR, sums.to_bytes())

    def _checked_sums(self) -> Checksums | None:
        """The checksums that reads are compared with; None if digests of the output check all."""
        sums = self.source_sums
        if sums is None or not self.request.checksums:
            return None
        has_digests = all(
            self.plan.is_unchanged(one) and one.name in sums.digests for one in self.plan.transfers
        )
        return None if has_digests else sums

    def _chunks(self) -> Iterator[CopyChunk]:
        """The chunks of all processes."""
        return chunks_of(self.plan.transfers, self.budget.window)

    def _to_do(self, done: Collection[int]) -> Iterator[CopyChunk]:
        """The chunks of this process that are not done."""
        for chunk in self._chunks():
            self.num_chunks = chunk.number + 1
            if chunk.number not in done and self.request.team.takes(chunk.number):
                yield chunk

    def _records(self) -> list[dict[str, Any]]:
        return [record for record in read_journals(self.place.folder) if "chunk" in record]

    def _finished(self, done: Done, journal: Journal) -> None:
        journal.append(done.to_record())
        with self._lock:
            self._unsynced += done.num_bytes
            is_time = self._unsynced > SYNC_EVERY
            self._unsynced = 0 if is_time else self._unsynced
        if is_time:
            self._sync(journal)
        self._meter(done.num_bytes)

    def _sync(self, journal: Journal) -> None:
        count = journal.num_records
        self._sync_files()
        journal.synced(count)

    def _sync_files(self) -> None:
        """Put all files on disk. After a failed fsync no earlier write can be trusted."""
        try:
            self.target.sync()
        except OSError as error:
            for path in self.place.folder.glob("journal.*"):
                path.unlink(missing_ok=True)
            raise UnfinishedError(
                f"{error.filename or self.place.data} cannot be put on disk: {error.strerror}; "
                "fix the cause; --resume then copies everything again"
            ) from None

    def _put(self, file: int, offset: int, data: bytes) -> None:
        self.copier.write(self._prepared, file, offset, memoryview(data))

    def _read(self, path: str, start: int, size: int) -> Iterator[tuple[int, bytes]]:
        """A range of a source file in blocks, each with its offset in the range."""
        for at in range(0, size, BLOCK):
            data = self.storage.read(path, start + at, min(BLOCK, size - at))
            self.source.count(len(data))
            yield at, data
