"""The build of a conversion: check the source, copy chunks, check and seal the output, publish it.

Of the ranks that convert together every one copies its share of the chunks; rank 0 does the rest.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from reshard.checkpoint.conversion.plan import ConversionPlan, stamp_of
from reshard.checkpoint.conversion.request import Request
from reshard.checkpoint.integrity.checksums import SIDECAR, Checker, Checksums, load_checksums
from reshard.checkpoint.publish.journal import Journal, read_journals
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.local import REQUEST, Storage
from reshard.checkpoint.storage.output_files import MAX_COPY, OutputFiles, named, replace_file
from reshard.checkpoint.storage.remote import RemoteTarget
from reshard.checkpoint.transfer.copying import Copier, Done, checksums_of
from reshard.checkpoint.transfer.examination import check_outside_tensors
from reshard.checkpoint.transfer.transfers import CopyChunk, chunks_of
from reshard.checkpoint.transfer.windows import (
    REMOTE_WORKERS,
    Budget,
    Buffers,
    Meter,
    Source,
    collector_paused,
    in_order,
)
from reshard.errors import (
    CheckpointError,
    DamageError,
    MemoryCapError,
    TargetError,
    UnfinishedError,
    UnsupportedError,
)
from reshard.text import parse_bytes, quoted

COPIERS = 4
"""Copying threads, on any number of cores: some wait for the disk while others compute."""
BLOCK = 1 << 20
CHUNKS = 2
"""The way in which an output is split into chunks: a run is resumed only in the same way."""
SYNC_EVERY = 2 << 30
"""Bytes between two syncs, after which the journal survives a power failure."""


class Conversion:
    """A conversion that was planned, on one of the processes that run it."""

    _target: OutputFiles

    def __init__(self, request: Request, plan: ConversionPlan, storage: Storage) -> None:
        self.request, self.plan, self.storage = request, plan, storage
        self._remote = RemoteTarget(request.dst) if "://" in request.dst else None
        path = Path(request.dst)
        if self._remote is not None:  # built in the temporary folder, in the same one each time
            address = self._remote.address.encode(errors="surrogateescape")
            name = hashlib.blake2b(address, digest_size=8).hexdigest()
            path = Path(tempfile.gettempdir()) / f"reshard-{name}"
        self.place = Workplace(path)
        workers = request.workers or (COPIERS if storage.is_local else REMOTE_WORKERS)
        self.budget = Budget.of(request.memory, workers)
        self.source = Source(storage, plan.catalog)
        self._checked: Checksums | None = None
        """The checksums that reads are compared with; None if digests of the output check all."""
        self._identity = {"fingerprint": plan.fingerprint, "checksums": request.checksums}
        """What distinguishes this conversion from another one to the same destination."""
        self.has_built = False
        """Whether the output was written now, and not by an earlier run."""
        self.kept: tuple[str, ...] = ()
        """Names of other files at the destination."""
        self.resumed_bytes = 0
        self._num_chunks = 0
        """The number of chunks of all processes, once `_copy` has looked at them."""
        self._prepared = Done(-1)
        """What was written besides tensors."""

    def check(self) -> None:
        """What a dry run does: refuse a destination that cannot be written."""
        self.kept = self._check_destination()
        if self._remote is None:
            self.place.check_writable()

    def run(self) -> None:
        """Write and publish the output."""
        request, plan, place, team = self.request, self.plan, self.place, self.request.team
        if self._remote is not None and team.size > 1:
            raise CheckpointError(
                f"{request.dst} is written by one process: start it once, or give --no-ranks"
            )
        if team.leads:
            place.settle()
        if request.resume and self._is_complete():
            return
        if request.checksums:
            self._load_checksums()
        with ExitStack() as stack:
            if team.leads:
                self._check_destination()
                place.enter()
                stack.callback(place.leave)
                team.forget(place)
            self._agree_on_budget()
            self._target = OutputFiles(place.data, plan.output.files)
            stack.callback(self._target.close)
            self._build()
        self.has_built = True

    def worker_bytes(self, window: int) -> int:
        """The memory of a worker: buffers, a server's reply, what hashes, casts and writes need."""
        own = window // 2 + min(window, 2 << 20) + min(window, MAX_COPY)
        return Buffers.size_of(window, self.plan.casts) + window + own

    def _check_destination(self) -> tuple[str, ...]:
        """Refuse a destination that cannot be written; the names of other files there, kept."""
        request = self.request
        if self._remote is not None:
            _check_apart(request.src, self._remote.address)
            self._remote.check_absent(request.overwrite or request.resume)
            return ()
        _check_apart(request.src, str(self.place.target))
        return self.place.check_target(request.overwrite, self.plan.paths).kept

    def _is_complete(self) -> bool:
        """Whether the destination is the result of this very request, from an earlier run."""
        place, identity = self.place, self._identity
        if self._remote is not None:
            is_result = self._remote.is_result(identity)
        else:
            is_result = place.is_result(identity, self.plan.output.files)
        if is_result and self.request.team.leads and place.folder.exists():
            place.enter()
            unfinished = place.request()
            if unfinished is None or unfinished.get("fingerprint") == self.plan.fingerprint:
                place.discard()
            place.leave()
        return is_result

    def _load_checksums(self) -> None:
        """Load the checksums of the source, and compare the bytes outside of its tensors."""
        plan, storage, sums = self.plan, self.storage, load_checksums(self.storage)
        self.source = Source.of(storage, plan.catalog, sums)
        if sums is None:
            return
        if self.request.team.leads:
            check_outside_tensors(storage, plan.catalog, sums, self.budget.workers)
        if not all(one.is_unchanged and one.name in sums.digests for one in plan.transfers):
            self._checked = sums
        self.source.checker = Checker(self._checked, storage.root)

    def _agree_on_budget(self) -> None:
        """Use the window size that all ranks, and all runs of one conversion, share."""
        team = self.request.team
        if team.leads:
            window = self._begin()
        else:
            window = team.wait_for_leader(self.place, self.plan.fingerprint)
        total, each = parse_bytes(self.request.memory), self.worker_bytes(window)
        if each > total:
            raise MemoryCapError(
                f"the conversion was begun with windows of {window} bytes, for which {total} bytes "
                f"of memory are too few: give --memory {each}"
            )
        self.budget = Budget(min(self.budget.workers, total // each), window)

    def _begin(self) -> int:
        """Start anew, or continue an earlier run; returns the size of the windows to use."""
        place, unfinished = self.place, self.place.request()
        identity = {**self._identity, "chunks": CHUNKS}
        if unfinished is None:
            place.begin_anew()
            place.note_request({**identity, "window": self.budget.window})
            return self.budget.window
        if not self.request.resume:
            raise UnfinishedError(
                f"an unfinished conversion to {place.target} exists: give --resume to continue, or "
                f"remove {place.folder} to start again"
            )
        if any(unfinished.get(key) != value for key, value in identity.items()):
            raise TargetError(
                f"the unfinished conversion to {place.target} was of another source, or asked for "
                f"something else: give the same arguments, or remove {place.folder} to start again"
            )
        _, is_sure = self.plan.stamp
        if not is_sure:
            raise TargetError(
                f"{self.storage.root} reports no versions of its files, so a changed source would "
                f"not be noticed: remove {place.folder} to start again"
            )
        return int(unfinished["window"])

    def _build(self) -> None:
        """Prepare, copy, seal, publish. The other ranks learn of a failure."""
        team, place = self.request.team, self.place
        try:
            with named(place.folder):
                if team.leads:
                    self._prepare()
                self._copy()
                if not team.leads:
                    team.wait_for_publish(place)
                    return
                if team.size > 1:
                    team.wait_for_all(place, self._num_chunks)
                self._seal()
                self._publish()
        except BaseException as error:
            team.note_failure(place, error)
            match error:
                case DamageError() | UnsupportedError() if team.size == 1:
                    place.discard()  # a source that cannot be read leaves nothing to resume
                case TargetError() | UnfinishedError() | DamageError() | UnsupportedError():
                    pass
                case OSError():  # which every CheckpointError is
                    kept = f"{error}; what was written is kept for --resume"
                    raise UnfinishedError(kept) from error
            raise

    def _prepare(self) -> None:
        """Create all files at their full size, and write everything but the tensors."""
        place, output = self.place, self.plan.output
        try:
            place.check_room(output.num_bytes)
            place.data.mkdir(exist_ok=True)
            self._target.allocate()
        except TargetError:
            if not read_journals(place.folder):  # there is nothing to resume
                place.discard()
            raise
        for file, offset, data in self._known_bytes():
            checksums = self.request.checksums
            self._prepared.write(self._target, file, offset, memoryview(data), checksums)
        replace_file(place.folder / "prepared", b"")

    def _known_bytes(self) -> Iterator[tuple[int, int, bytes]]:
        """Everything but the tensors: file, offset and bytes."""
        plan, crcs = self.plan, self.source.crcs
        # The bytes around small tensors are written with the tensors.
        packed = {one.name for one in plan.transfers if one.is_packed(self.budget.window)}
        yield from plan.output.all_literals(packed)
        for copy in plan.output.objects:
            one = copy.source
            for at, data in self._read(self.source.name(one.file), one.offset, one.size):
                crcs.add(crcs.parts(one.file, one.offset + at, data))
                yield copy.file, copy.offset + at, data
        for number, file in enumerate(plan.others, len(plan.output.files) - len(plan.others)):
            for at, data in self._read(file.path, 0, file.size):
                yield number, at, data

    def _read(self, path: str, start: int, size: int) -> Iterator[tuple[int, bytes]]:
        """A range of a source file in blocks, each with its offset in the range."""
        for at in range(0, size, BLOCK):
            data = self.storage.read(path, start + at, min(BLOCK, size - at))
            self.source.count(len(data))
            yield at, data

    def _copy(self) -> None:
        """Copy the chunks of this process that are not done yet."""
        request = self.request
        options = request.checksums, request.compare_replicas
        copier = Copier(self.plan.transfers, self.source, self._target, *options)
        meter, unsynced = Meter(request.progress, self.plan.output.num_bytes), 0
        with Journal(self.place.folder, request.team.rank) as journal:
            done = {record["chunk"]: record["bytes"] for record in read_journals(self.place.folder)}
            self.resumed_bytes = sum(done.values())
            meter(self._prepared.num_bytes + self.resumed_bytes)

            def work(chunk: CopyChunk, buffers: Buffers) -> int:
                copied = copier.copy(chunk, buffers)
                journal.append(copied.to_record())
                return copied.num_bytes

            make = partial(Buffers.of, self.budget.window, self.plan.casts)
            with closing(in_order(work, self._to_do(done), self.budget.workers, make)) as results:
                for _, num_bytes in results:
                    unsynced += num_bytes
                    if unsynced > SYNC_EVERY:
                        self._sync(journal)
                        unsynced = 0
                    meter(num_bytes)
            self._sync(journal)
        self.source.count(self.source.checker.finish(self.storage))

    def _chunks(self) -> Iterator[CopyChunk]:
        return chunks_of(self.plan.transfers, self.budget.window)

    def _to_do(self, done: Collection[int]) -> Iterator[CopyChunk]:
        team = self.request.team
        for chunk in self._chunks():
            self._num_chunks = chunk.number + 1
            if chunk.number not in done and chunk.number % team.size == team.rank:
                yield chunk

    def _sync(self, journal: Journal) -> None:
        count = journal.num_records
        self._sync_files()
        journal.synced(count)

    def _sync_files(self) -> None:
        """Put all files on disk. After a failed fsync no earlier write can be trusted."""
        try:
            self._target.sync()
        except OSError as error:
            for path in self.place.folder.glob("journal.*"):
                path.unlink(missing_ok=True)
            raise UnfinishedError(
                f"{error.filename or self.place.data} cannot be put on disk: {error.strerror}; "
                "fix the cause; --resume then copies everything again"
            ) from None

    def _seal(self) -> None:
        """Check that the output is complete and correct, and write its checksums."""
        plan, source = self.plan, self.source
        with collector_paused():
            records = read_journals(self.place.folder)
            done = {record["chunk"]: Done.from_record(record) for record in records}
        if missing := set(range(self._num_chunks)) - done.keys():
            chunk = next(chunk for chunk in self._chunks() if chunk.number in missing)
            name = plan.transfers[chunk.windows[0][0]].name
            raise UnfinishedError(
                f"chunk {chunk.number} (of {quoted(name)}) is not done; continue with --resume"
            )
        if stamp_of(plan.catalog, self.storage) != plan.stamp:
            raise DamageError(
                f"{self.storage.root} was changed while it was converted: nothing was published; "
                "convert it again when no process writes to it"
            )
        # What all ranks and runs have read; bytes that no output tensor needs are read now.
        for one in done.values():
            source.crcs.add(one.crcs)
        source.check_crcs()
        checked = self._checked.files if self._checked is not None and self.resumed_bytes else ()
        for file in plan.catalog.files:
            if file.path in checked:  # an interrupted earlier run may have read it only in part
                source.count(source.checker.finish(self.storage, file.path))
        if self.request.checksums:
            path, data = SIDECAR, self._checksums([self._prepared, *done.values()]).to_bytes()
        else:
            path, data = REQUEST, json.dumps(self._identity).encode()
        replace_file(self.place.data / path, data)
        self._sync_files()
        self._target.sync_folders()
        self._target.close()

    def _checksums(self, done: list[Done]) -> Checksums:
        """Checksums and digests; unchanged tensors must have the digests of the source."""
        plan, known = self.plan, self.source.checksums
        expected = known.digests if known is not None else {}
        tensors = [(one.name, one.shape, one.want) for one in plan.transfers]
        sums = checksums_of(done, plan.output.files, tensors, self._identity)
        for transfer in plan.transfers:
            name, digest = transfer.name, sums.digests[transfer.name]
            if transfer.is_unchanged and expected.get(name, digest) != digest:
                self.source.blame_digest(transfer, digest, expected[name])
        return sums

    def _publish(self) -> None:
        place, paths = self.place, self.plan.paths
        if self._remote is None:
            self.kept = place.publish(self.request.overwrite, paths)
            return
        sidecar = [SIDECAR] if (place.data / SIDECAR).exists() else []
        self._remote.upload(place.data, [*paths, *sidecar], self._identity)
        place.finish()


def _check_apart(source: str, target: str) -> None:
    """Refuse a destination that is the source, is inside it, or contains it."""
    places = [one if "://" in one else str(Path(one).resolve()) for one in (source, target)]
    have, want = (f"{place.rstrip('/')}/" for place in places)
    if have.startswith(want) or want.startswith(have):
        raise TargetError(
            f"the destination {target} and the source {source} are the same or contain each other: "
            "choose a destination outside of the source"
        )
