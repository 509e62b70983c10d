"""``convert``: the four stages of a conversion, request, source, plan and build, in turn.

    convert("ckpt", "ckpt-tp2", mesh="tp=2", rules="llama")            # sharded safetensors
    convert("ckpt", "ckpt-hf", format="full", dtype="bfloat16")         # for from_pretrained
    convert("ckpt", "ckpt-dcp", mesh="dp=8", layouts={"*": "dp ..."}, format="distcp")

An output is published only when it is complete; ``resume=True`` continues an interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.conversion.build import Builder, begin
from reshard.checkpoint.conversion.plan import ConversionPlan, plan_conversion
from reshard.checkpoint.conversion.processes import ALONE, Team
from reshard.checkpoint.conversion.report import ConvertReport
from reshard.checkpoint.conversion.request import Request
from reshard.checkpoint.conversion.source import check_outside_tensors
from reshard.checkpoint.formats.reader import read_catalog
from reshard.checkpoint.integrity.checksums import load_checksums
from reshard.checkpoint.publish.workplace import Workplace, free_bytes
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.direct import MAX_COPY
from reshard.checkpoint.storage.durable import named
from reshard.checkpoint.storage.local import open_storage
from reshard.checkpoint.transfer.arguments import as_mesh, as_rules
from reshard.checkpoint.transfer.windows import buffer_bytes
from reshard.checkpoint.transfer.workers import Budget, collector_paused
from reshard.errors import (
    CheckpointError,
    DamageError,
    MemoryCapError,
    TargetError,
    UnfinishedError,
    UnsupportedError,
)
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules

__all__ = ["convert"]


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
    """Write a checkpoint in another layout, format or dtype, or with other tensor names.

    ``format`` is full (Hugging Face), sharded (the default with a mesh), distcp, or ranks.
    ``layouts`` go by name or pattern and win over ``rules``. ``fsdp`` names axes that also shard
    dim 0, ``replicate`` axes along which the rules shard nothing. ``dtype`` is for all
    floating-point parameters, or ``{pattern: dtype}``. ``names`` (by default the rules' own)
    renames, joins, stacks or takes tensors, and ``drop`` leaves tensors out that no name takes.
    ``source_mesh`` and ``source_rules`` describe rank files that do not record their layout.
    """
    return _run(Request(**locals()))


def _run(request: Request) -> ConvertReport:
    layouts = request.layout_request()
    with open_storage(request.src) as storage:
        with collector_paused():
            rules = as_rules(request.source_rules, storage)
            catalog = read_catalog(storage, rules, as_mesh(request.source_mesh))
            plan = plan_conversion(request, layouts, catalog, storage)
        if request.dry_run:
            return _dry_run(request, plan, storage)
        return _convert(request, plan, storage)


def _dry_run(request: Request, plan: ConversionPlan, storage: Storage) -> ConvertReport:
    place = request.place()
    kept = request.check_destination(place, plan.paths)
    if request.remote is None:
        place.check_writable()
    return _report(request, place, plan, request.budget(storage), left_alone=kept)


def _convert(request: Request, plan: ConversionPlan, storage: Storage) -> ConvertReport:
    started = time.monotonic()
    team = request.team
    if request.remote is not None and team.size > 1:
        raise CheckpointError(
            f"{request.dst} is written by one process: start it once, or give --no-ranks"
        )
    place = request.place()
    budget = request.budget(storage)
    if team.leads:
        place.settle()
    if request.resume and _is_complete(request, plan, place):
        return _report(request, place, plan, budget, time.monotonic() - started)
    sums = load_checksums(storage) if request.checksums else None
    if sums is not None and team.leads:
        check_outside_tensors(storage, plan.catalog, sums)
    with ExitStack() as stack:
        if team.leads:
            request.check_destination(place, plan.paths)
            place.enter()
            stack.callback(place.leave)
            team.forget(place)
        budget = _agreed_budget(request, plan, place, budget)
        builder = Builder(request, plan, storage, place, budget, sums)
        stack.callback(builder.target.close)
        kept = _build(builder)
    seconds = time.monotonic() - started
    return _report(request, place, plan, budget, seconds, builder, left_alone=kept)


def _agreed_budget(
    request: Request, plan: ConversionPlan, place: Workplace, budget: Budget
) -> Budget:
    """The budget with the window size that all ranks, and all runs of one conversion, share."""
    if request.team.leads:
        window = begin(place, plan, request, budget)
    else:
        window = request.team.wait_for_leader(place, plan.fingerprint)
    total, each = parse_bytes(request.memory), worker_bytes(window, plan.casts)
    if each > total:
        raise MemoryCapError(
            f"the conversion was begun with windows of {window} bytes, for which {total} bytes of "
            f"memory are too few: give --memory {each}"
        )
    return replace(budget, window=window, workers=min(budget.workers, total // each))


def _build(builder: Builder) -> tuple[str, ...]:
    """Run all steps; the other ranks learn of a failure."""
    team, place = builder.request.team, builder.place
    try:
        with named(place.folder):
            return _steps(builder)
    except BaseException as error:
        team.note_failure(place, error)
        match error:
            case DamageError() | UnsupportedError() if team.size == 1:
                place.discard()  # a source that cannot be read leaves nothing to resume
            case TargetError() | UnfinishedError() | DamageError() | UnsupportedError():
                pass
            case OSError():  # which every CheckpointError is
                raise UnfinishedError(f"{error}; what was written is kept for --resume") from error
        raise


def _steps(builder: Builder) -> tuple[str, ...]:
    """Prepare, copy, seal, publish; rank 0 does the first and the last two.

    Returns the names of other files at the destination, which are kept.
    """
    team, place, remote = builder.request.team, builder.place, builder.request.remote
    if team.leads:
        builder.prepare()
    builder.copy()
    if not team.leads:
        team.wait_for_publish(place)
        return ()
    if team.size > 1:
        team.wait_for_all(place, builder.num_chunks())
    builder.seal()
    if remote is not None:
        remote.upload(place, builder.plan.output.files, builder.identity)
        return ()
    return place.publish(builder.request.overwrite, builder.plan.paths)


def _is_complete(request: Request, plan: ConversionPlan, place: Workplace) -> bool:
    """Whether the destination is the result of this very request, from an earlier run."""
    identity, remote = plan.identity(request.checksums), request.remote
    if remote is not None:
        is_result = remote.is_result(identity)
    else:
        is_result = place.is_result(identity, plan.output.files)
    if is_result and request.team.leads and place.folder.exists():
        place.enter()
        found = place.request()
        if found is None or found.get("fingerprint") == plan.fingerprint:
            place.discard()
        place.leave()
    return is_result


def worker_bytes(window: int, casts: bool) -> int:
    """The memory of one worker: its buffers, a server's reply, and what hashes, casts and writes
    need.
    """
    own = window // 2 + min(window, 2 << 20) + min(window, MAX_COPY)
    return buffer_bytes(window, casts) + window + own


def _report(
    request: Request,
    place: Workplace,
    plan: ConversionPlan,
    budget: Budget,
    seconds: float | None = None,
    builder: Builder | None = None,
    left_alone: tuple[str, ...] = (),
) -> ConvertReport:
    to_read = plan.unique_bytes + plan.copied_bytes
    to_read += plan.replica_bytes if request.compare_replicas else 0
    resumed = builder.resumed_bytes if builder else 0
    team = ALONE if request.dry_run else request.team
    return ConvertReport(
        source=request.src,
        target=request.dst,
        format=plan.format,
        dry_run=request.dry_run,
        num_tensors=len(plan.transfers),
        num_files=plan.num_files,
        num_others=len(plan.others),
        unique_bytes=plan.unique_bytes,
        bytes_read=to_read if request.dry_run else builder.source.num_bytes if builder else 0,
        bytes_written=plan.output.num_bytes - resumed if request.dry_run or builder else 0,
        bytes_resumed=resumed,
        memory=budget.workers * worker_bytes(budget.window, plan.casts),
        workers=budget.workers,
        disk_needed=plan.output.num_bytes,
        disk_free=free_bytes(place.folder.parent),
        seconds=seconds,
        checksums=request.checksums,
        was_complete=builder is None and not request.dry_run,
        left_out=plan.output.left_out,
        left_alone=left_alone,
        notes=(*plan.notes, *plan.catalog.notes),
        rank=team.rank,
        num_ranks=team.size,
    )
