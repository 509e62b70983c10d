"""``convert``: a checkpoint cut one way in, the same checkpoint cut another way out.

    convert("ckpt", "ckpt-tp2", mesh="tp=2", rules="llama")            # sharded safetensors
    convert("ckpt", "ckpt-hf", format="full", dtype="bfloat16")         # for from_pretrained
    convert("ckpt", "ckpt-dcp", mesh="dp=8", layouts={"*": "dp ..."}, format="distcp")

Nothing is published before it is complete. What was interrupted goes on with ``resume=True``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.conversion.beside import check_beside
from reshard.checkpoint.conversion.build import Builder, Settings, begin, free_bytes, request_of
from reshard.checkpoint.conversion.layouts import Cut
from reshard.checkpoint.conversion.plan import Job, plan_job
from reshard.checkpoint.conversion.processes import ALONE, Team
from reshard.checkpoint.conversion.report import ConvertReport
from reshard.checkpoint.formats.reader import read_catalog
from reshard.checkpoint.integrity.checksums import load
from reshard.checkpoint.publish.remote import Remote
from reshard.checkpoint.publish.workplace import Workplace, check_places
from reshard.checkpoint.storage.base import Storage, plain_path
from reshard.checkpoint.storage.direct import MAX_COPY
from reshard.checkpoint.storage.durable import named
from reshard.checkpoint.storage.local import open_storage
from reshard.checkpoint.transfer.collector import collector_paused
from reshard.checkpoint.transfer.given import as_mesh, as_rules
from reshard.checkpoint.transfer.reading import Budget
from reshard.checkpoint.transfer.windows import buffer_bytes
from reshard.errors import (
    CheckpointError,
    DamageError,
    MemoryCapError,
    TargetError,
    UnfinishedError,
    UnsupportedError,
)
from reshard.layout.mesh import Mesh
from reshard.rules import Rules
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.planning.names import Names

__all__ = ["convert"]

COPIERS = 4
"""Threads that copy, on any number of cores: some wait for the disk while others reckon."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    mesh: Mesh | str | None = None,
    rules: Rules | str | Path | None = None,
    layouts: Mapping[str, str | Layout] | None = None,
    fsdp: str | None = None,
    replicate: str | None = None,
    format: str | None = None,
    dtype: object = None,
    names: Names | None = None,
    drop: Sequence[str] = (),
    source_mesh: Mesh | str | None = None,
    source_rules: Rules | str | Path | None = None,
    memory: int | str = "256MiB",
    workers: int | None = None,
    checksums: bool = True,
    compare_replicas: bool = True,
    max_shard_size: int | str = "5GB",
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    team: Team = ALONE,
) -> ConvertReport:
    """Write a checkpoint again, cut as a mesh with rules or layouts says.

    ``format`` is full (Hugging Face), sharded (safetensors that torch's reader loads), distcp, or
    ranks (the local tensors of each rank); sharded if there is a mesh. ``layouts`` go by name or
    pattern and win over rules. ``fsdp`` names axes that cut dim 0 further, ``replicate`` axes along
    which the rules replicate all. ``dtype`` is for all floating-point parameters, or ``{pattern:
    dtype}``. ``names`` renames, joins, stacks or takes tensors, as in ``plan``; without them the
    rules' own are taken. Parts of tensors that no name takes are listed in the report. ``drop``
    names tensors, by name or pattern, that are left out as far as no name takes them.
    ``source_mesh`` and ``source_rules`` are for rank files that do not say how they were cut. All
    buffers together take at most ``memory``. ``progress`` is called with bytes done and in all.
    """
    request = _Request(
        src=plain_path(src),
        dst=plain_path(dst),
        memory=memory,
        workers=workers,
        checksums=checksums,
        compare_replicas=compare_replicas,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )
    cut = Cut.of(mesh, rules, layouts, dtype, fsdp, replicate)
    with open_storage(request.src) as storage:
        with collector_paused():
            catalog = read_catalog(storage, as_rules(source_rules, storage), as_mesh(source_mesh))
            job = plan_job(
                catalog, storage, cut, format=format, names=names, drop=drop,
                max_shard_size=parse_bytes(max_shard_size),
            )  # fmt: skip
        if dry_run:
            return _dry_run(request, job, storage)
        return _convert(request, job, storage, team)


@dataclass(frozen=True, slots=True)
class _Request:
    """How the caller wants it done."""

    src: str
    dst: str
    memory: int | str
    workers: int | None
    checksums: bool
    compare_replicas: bool
    resume: bool
    overwrite: bool
    progress: Callable[[int, int], None] | None

    @property
    def is_remote(self) -> bool:
        """Whether the target is reached through fsspec."""
        return "://" in self.dst

    def settings(self, storage: Storage) -> Settings:
        """How to build within the memory that is given."""
        if self.workers is None and not storage.is_local:
            budget = Budget.for_reading(self.memory, storage)
        else:
            budget = Budget.of(self.memory, self.workers or COPIERS)
        return Settings(
            workers=budget.workers,
            window=budget.window,
            checksums=self.checksums,
            compare_replicas=self.compare_replicas,
            overwrite=self.overwrite,
            progress=self.progress,
        )

    def place(self) -> Workplace:
        """Where the output is built."""
        return Remote(self.dst).place() if self.is_remote else Workplace.beside(Path(self.dst))


def _convert(request: _Request, job: Job, storage: Storage, team: Team) -> ConvertReport:
    started = time.monotonic()
    if request.is_remote and team.size > 1:
        raise CheckpointError(
            f"{request.dst} is written by one process: start it once, or give --no-ranks"
        )
    place = request.place()
    settings = request.settings(storage)
    if team.leads:
        place.settle()
    if request.resume and _is_complete(request, job, place, team):
        return _report(request, place, job, settings, time.monotonic() - started, team)
    sums = load(storage) if request.checksums else None
    if sums is not None and team.leads:
        check_beside(storage, job.catalog, sums)
    with ExitStack() as stack:
        if team.leads:
            _check_target(request, job, place)
            place.enter()
            stack.callback(place.leave)
            team.forget(place)
        settings = _agreed(request, job, place, settings, team)
        builder = Builder(job, storage, place, settings, team, sums)
        stack.callback(builder.target.close)
        kept = _build(builder, request)
    seconds = time.monotonic() - started
    return _report(request, place, job, settings, seconds, team, builder, left_alone=kept)


def _agreed(
    request: _Request, job: Job, place: Workplace, settings: Settings, team: Team
) -> Settings:
    """The settings with the windows that all ranks, and all runs of one conversion, share."""
    if team.leads:
        window = begin(place, job, settings, request.resume)
    else:
        window = team.wait_for_leader(place, job.fingerprint)
    total, each = parse_bytes(request.memory), worker_bytes(window, job.casts)
    if each > total:
        raise MemoryCapError(
            f"the conversion was begun with windows of {window} bytes, for which {total} bytes of "
            f"memory are too few: give --memory {each}"
        )
    return replace(settings, window=window, workers=min(settings.workers, total // each))


def _build(builder: Builder, request: _Request) -> tuple[str, ...]:
    """All steps; what fails is told to the other ranks."""
    team, place = builder.team, builder.place
    try:
        with named(place.folder):
            return _steps(builder, request)
    except BaseException as error:
        team.note_failure(place, error)
        match error:
            case DamageError() | UnsupportedError() if team.size == 1:
                place.discard()  # of a source that cannot be read nothing can be resumed
            case TargetError() | UnfinishedError() | DamageError() | UnsupportedError():
                pass
            case OSError():  # which every CheckpointError is
                raise UnfinishedError(f"{error}; what was written is kept for --resume") from error
        raise


def _steps(builder: Builder, request: _Request) -> tuple[str, ...]:
    """Prepare, copy, seal, publish; rank 0 does the first and the last ones.

    Returns the names of other files at the target, which are kept.
    """
    team, place = builder.team, builder.place
    if team.leads:
        builder.prepare()
    builder.copy()
    if not team.leads:
        team.wait_for_publish(place)
        return ()
    if team.size > 1:
        team.wait_for_all(place, builder.num_chunks())
    builder.seal()
    if request.is_remote:
        Remote(request.dst).upload(
            place, builder.job.output.files, request_of(builder.job, request.checksums)
        )
        return ()
    return builder.publish()


def _check_target(request: _Request, job: Job, place: Workplace) -> tuple[str, ...]:
    """Refuse a target that cannot be written; the names of other files there, which are kept."""
    if request.is_remote:
        Remote(request.dst).check_absent(request.src, request.overwrite or request.resume)
        return ()
    check_places(request.src, place.target)
    return place.check_target(request.overwrite, job.paths).kept


def _is_complete(request: _Request, job: Job, place: Workplace, team: Team) -> bool:
    """Whether the target is the result of this very request, of an earlier run."""
    wanted = request_of(job, request.checksums)
    if request.is_remote:
        is_result = Remote(request.dst).is_result(wanted)
    else:
        is_result = place.is_result(wanted, job.output.files)
    if is_result and team.leads and place.folder.exists():
        place.enter()
        found = place.request()
        if found is None or found.get("fingerprint") == job.fingerprint:
            place.discard()
        place.leave()
    return is_result


def worker_bytes(window: int, casts: bool) -> int:
    """What one worker takes: its buffers, a reply of a server, and what hashes, casts and writes
    need.
    """
    own = window // 2 + min(window, 2 << 20) + min(window, MAX_COPY)
    return buffer_bytes(window, casts) + window + own


def _dry_run(request: _Request, job: Job, storage: Storage) -> ConvertReport:
    place = request.place()
    kept = _check_target(request, job, place)
    if not request.is_remote:
        place.check_writable()
    settings = request.settings(storage)
    return _report(request, place, job, settings, None, ALONE, dry_run=True, left_alone=kept)


def _report(
    request: _Request,
    place: Workplace,
    job: Job,
    settings: Settings,
    seconds: float | None,
    team: Team,
    builder: Builder | None = None,
    dry_run: bool = False,
    left_alone: tuple[str, ...] = (),
) -> ConvertReport:
    to_read = job.unique_bytes + job.copied_bytes
    to_read += job.replica_bytes if request.compare_replicas else 0
    folder = place.folder.parent
    exists = next(path for path in (folder, *folder.parents) if path.exists())
    resumed = builder.resumed_bytes if builder else 0
    return ConvertReport(
        source=request.src,
        target=request.dst,
        format=job.format,
        dry_run=dry_run,
        num_tensors=len(job.transfers),
        num_files=job.num_files,
        num_others=len(job.others),
        unique_bytes=job.unique_bytes,
        bytes_read=to_read if dry_run else builder.source.num_bytes if builder else 0,
        bytes_written=job.output.num_bytes - resumed if dry_run or builder else 0,
        bytes_resumed=resumed,
        memory=settings.workers * worker_bytes(settings.window, job.casts),
        workers=settings.workers,
        disk_needed=job.output.num_bytes,
        disk_free=free_bytes(exists),
        seconds=seconds,
        checksums=request.checksums,
        was_complete=builder is None and not dry_run,
        left_out=job.output.left_out,
        left_alone=left_alone,
        notes=(*job.notes, *job.catalog.notes),
        rank=team.rank,
        num_ranks=team.size,
    )
