"""Builds an output beside its target: prepares files, copies chunks, seals and publishes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.conversion.plan import Job, Stamp
from reshard.checkpoint.conversion.processes import Team
from reshard.checkpoint.formats.output import Literal
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checker,
    Checksums,
    Chunk,
    Recorder,
    damage,
    sum_of,
)
from reshard.checkpoint.integrity.crcs import Crcs, changed, crc_of, crcs_of
from reshard.checkpoint.publish.journal import Journal, read_journals
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.durable import replace_file
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.collector import collector_paused
from reshard.checkpoint.transfer.copying import Copier, Done, SourceFiles, copy_all, sums_of
from reshard.checkpoint.transfer.transfers import Chunk as Work
from reshard.checkpoint.transfer.transfers import Transfer, chunks_of
from reshard.errors import DamageError, TargetError, UnfinishedError
from reshard.text import format_bytes, quoted

__all__ = ["Builder", "Settings", "begin", "request_of"]

BLOCK = 1 << 20
SYNC_EVERY = 2 << 30
"""Bytes after which the journal is made to outlast a power failure."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to build, which does not change what is built."""

    workers: int
    window: int
    checksums: bool = True
    compare_replicas: bool = True
    overwrite: bool = False
    progress: Callable[[int, int], None] | None = None


def request_of(job: Job, checksums: bool) -> dict[str, Any]:
    """What tells one conversion from another."""
    return {"fingerprint": job.fingerprint, "checksums": checksums}


def begin(place: Workplace, job: Job, settings: Settings, resume: bool) -> int:
    """Start, or go on with what an earlier run left; the size of the windows to use."""
    found = place.request()
    request = request_of(job, settings.checksums)
    if found is None:
        place.begin_anew()
        place.note_request({**request, "window": settings.window})
        return settings.window
    if not resume:
        raise UnfinishedError(
            f"an unfinished conversion to {place.target} is there: give --resume to go on, or "
            f"remove {place.folder} to start again"
        )
    if any(found.get(key) != value for key, value in request.items()):
        raise TargetError(
            f"the unfinished conversion to {place.target} was of another source, or asked for "
            f"something else: give the same arguments, or remove {place.folder} to start again"
        )
    if not job.stamp.is_sure:
        raise TargetError(
            f"{job.catalog.root} does not say when its files change, so it may be another one than "
            f"before: remove {place.folder} to start again"
        )
    return int(found["window"])


@dataclass(slots=True)
class Builder:
    """One process that builds an output."""

    job: Job
    storage: Storage
    place: Workplace
    settings: Settings
    team: Team
    source_sums: Checksums | None
    source: SourceFiles = field(init=False)
    target: OutputFiles = field(init=False)
    recorder: Recorder = field(default_factory=Recorder)
    resumed_bytes: int = 0
    written_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unsynced: int = 0
    _total: int = 0
    _num_chunks: int | None = None

    def __post_init__(self) -> None:
        self._total = sum(transfer.target_bytes for transfer in self.job.transfers)
        self.source = SourceFiles(self.storage, self.job.catalog, self._checker(), self._crcs())
        self.target = OutputFiles(self.place.data, self.job.output.files)

    def prepare(self) -> None:
        """Make all files at their full size, with all that is known beforehand."""
        needed = self.job.output.num_bytes
        try:
            check_room(self.place, needed)
            self.place.data.mkdir(exist_ok=True)
            self.target.allocate()
        except TargetError:
            if not read_journals(self.place.folder):  # there is nothing to resume
                self.place.discard()
            raise
        for literal in self._literals():
            self._put(literal.file, literal.offset, memoryview(literal.data))
        for copy in self.job.output.objects:
            source = copy.source
            for at, data in self._read(self.source.name(source.file), source.offset, source.size):
                if self.source.crcs is not None:
                    parts = self.source.crcs.parts(source.file, source.offset + at, data)
                    self.source.crcs.add(parts)
                self._put(copy.file, copy.offset + at, memoryview(data))
        for file, number in self.job.others:
            for at, data in self._read(file.path, 0, file.size):
                self._put(number, at, memoryview(data))
        replace_file(self.place.folder / "prepared", b"")

    def _literals(self) -> Iterator[Literal]:
        """What is known beforehand, but for what is around small tensors: that goes with them."""
        output = self.job.output
        yield from output.literals
        for transfer in self.job.transfers:
            if not transfer.is_packed(self.settings.window):
                yield from output.tensors[transfer.name].literals()

    def copy(self) -> None:
        """Copy all chunks that fall to this process and are not done yet."""
        with Journal(self.place.folder, self.team.rank) as journal:
            done = {record["chunk"]: record for record in self._records()}
            self.resumed_bytes = sum(record["bytes"] for record in done.values())
            self.written_bytes = self.resumed_bytes
            self._report(0)
            copier = Copier(
                self.job.transfers,
                self.source,
                self.target,
                self.settings.checksums,
                self.settings.compare_replicas,
            )
            copy_all(
                copier,
                self._to_do(set(done)),
                workers=self.settings.workers,
                window_bytes=self.settings.window,
                finished=lambda chunk: self._finished(chunk, journal),
            )
            self._sync(journal)
        if self.source.checker is not None:
            self.source.count(self.source.checker.finish(self.storage))

    def seal(self) -> None:
        """Check that all is there and right, and write the checksums beside it."""
        with collector_paused():
            chunks = {record["chunk"]: Done.from_record(record) for record in self._records()}
            self._check_all_done(set(chunks))
        self._check_source()
        self._check_crcs(chunks.values())
        self._check_resumed()
        if self.settings.checksums:
            values = [0] * len(self.job.transfers)
            for done in chunks.values():
                for file, start, stop, text in done.sums:
                    path = self.job.output.files[file].path
                    self.recorder.put(path, [Chunk(start, stop, bytes.fromhex(text))])
                for which, value in done.parts.items():
                    values[which] = (values[which] + value) % digest.MODULUS
            self._write_sidecar(values)
        else:
            self.place.note_result(self._request())
        self._sync_files()
        self.target.sync_folders()
        self.target.close()

    def publish(self) -> tuple[str, ...]:
        """Put the output in its place; the names of other files there, which are kept."""
        return self.place.publish(self.settings.overwrite, self.job.paths)

    def _request(self) -> dict[str, Any]:
        return request_of(self.job, self.settings.checksums)

    def _write_sidecar(self, values: list[int]) -> None:
        digests = {}
        for transfer, value in zip(self.job.transfers, values, strict=True):
            digests[transfer.name] = digest.finish(value, transfer.shape, transfer.want)
            self._check_digest(transfer, digests[transfer.name])
        sizes = {file.path: file.size for file in self.job.output.files}
        sums = Checksums(self.recorder.finish(sizes), digests, self._request())
        replace_file(self.place.data / SIDECAR, sums.to_bytes())

    def _check_digest(self, transfer: Transfer, found: str) -> None:
        """Compare what was copied with what the source's checksums say of it."""
        expected = self.source_sums.digests.get(transfer.name) if self.source_sums else None
        if expected is None or not self._is_plain(transfer) or found == expected:
            return
        for number in sorted(set(transfer.source.files.tolist())):
            self._find_damage(transfer.name, self.job.catalog.files[number].path)
        raise DamageError(
            f"tensor {quoted(transfer.name)} of {self.storage.root} has the digest {found} and its "
            f"{SIDECAR} says {expected}: the files changed since they were written"
        )

    def _find_damage(self, name: str, path: str) -> None:
        """Name the bytes of a source file that changed since its checksums were written."""
        sums = self.source_sums.files.get(path) if self.source_sums else None
        for index in range(len(sums.ends)) if sums else ():
            assert sums is not None
            chunk = sums.chunk(index)
            found = sum_of(self.storage, path, chunk.start, chunk.stop)
            if found != chunk.sum:
                where = f"tensor {quoted(name)}: {self.storage.root}/{path}"
                raise DamageError(damage(where, chunk, found))

    def _is_plain(self, transfer: Transfer) -> bool:
        """Whether an output tensor is a source tensor as it was, so that digests are comparable."""
        return transfer.name not in self.job.renamed and transfer.have == transfer.want

    def _checker(self) -> Checker | None:
        """A check of all that is read, where digests of the output do not tell."""
        sums = self.source_sums
        if sums is None or not self.settings.checksums:
            return None
        told = all(self._is_plain(t) and t.name in sums.digests for t in self.job.transfers)
        return None if told else Checker(sums, self.storage.root)

    def _crcs(self) -> Crcs | None:
        """What torch wrote down of files that have no checksums of ours."""
        if not self.settings.checksums:
            return None
        return Crcs(crcs_of(self.storage, self.job.catalog, self.source_sums)) or None

    def _check_crcs(self, chunks: Iterable[Done]) -> None:
        """Compare what all ranks and runs have read with the CRC-32 of torch's files.

        Bytes of a record that no tensor of the output needs are read for it, the others are not
        read again.
        """
        crcs = self.source.crcs
        if crcs is None:
            return
        for done in chunks:
            crcs.add(done.crcs)
        for crc, now in crcs.values(self._unread):
            if crc.value != now:
                raise DamageError(changed(self.job.catalog, crc, now))

    def _unread(self, file: int, start: int, stop: int) -> int:
        self.source.count(stop - start)
        return crc_of(self.storage, self.job.catalog.files[file].path, start, stop)

    def _check_resumed(self) -> None:
        """Compare what an earlier run read only in part before it was stopped."""
        if self.source.checker is None or not self.resumed_bytes or self.source_sums is None:
            return
        for file in self.job.catalog.files:
            if file.path in self.source_sums.files:
                count = self.source.checker.finish_file(self.storage, file.path)
                self.source.count(count)

    def _to_do(self, done: set[int]) -> Iterator[Work]:
        count = 0
        for chunk in chunks_of(self.job.transfers, self.settings.window):
            count += 1
            if chunk.number not in done and self.team.takes(chunk.number):
                yield chunk
        self._num_chunks = count

    def _check_all_done(self, done: set[int]) -> None:
        if done.issuperset(range(self.num_chunks())):
            return
        for chunk in chunks_of(self.job.transfers, self.settings.window):
            if chunk.number not in done:
                name = self.job.transfers[chunk.windows[0][0]].name
                raise UnfinishedError(
                    f"chunk {chunk.number} (of {quoted(name)}) is not done; --resume goes on"
                )

    def _check_source(self) -> None:
        """Refuse what was made of files that changed meanwhile."""
        if Stamp.of(self.job.catalog, self.storage) != self.job.stamp:
            raise DamageError(
                f"{self.storage.root} was changed while it was converted: nothing was published; "
                "convert it again when nobody writes to it"
            )

    def num_chunks(self) -> int:
        """How many chunks there are in all."""
        if self._num_chunks is None:
            self._num_chunks = sum(1 for _ in chunks_of(self.job.transfers, self.settings.window))
        return self._num_chunks

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
        self._report(done.num_bytes)

    def _sync(self, journal: Journal) -> None:
        count = journal.num_records
        self._sync_files()
        journal.synced(count)

    def _sync_files(self) -> None:
        """Put all files on disk. After a disk has failed to, nothing of before can be trusted."""
        try:
            self.target.sync()
        except OSError as error:
            for path in self.place.folder.glob("journal.*"):
                path.unlink(missing_ok=True)
            raise UnfinishedError(
                f"{error.filename or self.place.data} cannot be put on disk: {error.strerror}; "
                "when that is mended, "
                "--resume copies everything again"
            ) from None

    def _report(self, num_bytes: int) -> None:
        with self._lock:
            self.written_bytes += num_bytes
            if self.settings.progress is not None:
                self.settings.progress(self.written_bytes, self._total)

    def _put(self, file: int, offset: int, data: memoryview) -> None:
        self.target.write(file, offset, data)
        if self.settings.checksums:
            for number, start, stop, text in sums_of(file, offset, data):
                path = self.job.output.files[number].path
                self.recorder.put(path, [Chunk(start, stop, bytes.fromhex(text))])

    def _read(self, path: str, start: int, size: int) -> Iterator[tuple[int, bytes]]:
        """A range of a source file, block by block, each with its place in the range."""
        for at in range(0, size, BLOCK):
            data = self.storage.read(path, start + at, min(BLOCK, size - at))
            self.source.count(len(data))
            yield at, data


def check_room(place: Workplace, needed: int) -> None:
    """Refuse to begin what cannot end: is there room for the output?"""
    present = sum(path.stat().st_blocks * 512 for path in place.data.rglob("*") if path.is_file())
    free = free_bytes(place.folder)
    if needed - present > free:
        raise TargetError(
            f"{format_bytes(needed)} are needed at {place.target.parent} and {format_bytes(free)} "
            "are free: free some space, or choose another target"
        )


def free_bytes(folder: os.PathLike[str]) -> int:
    """Bytes that can still be written there."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
