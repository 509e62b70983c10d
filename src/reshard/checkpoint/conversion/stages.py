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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.conversion.build import Builder, begin, check_outside_tensors
from reshard.checkpoint.conversion.plan import ConversionPlan, plan_conversion
from reshard.checkpoint.conversion.request import LayoutRequest, Request
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity.checksums import SIDECAR, load_checksums
from reshard.checkpoint.output import count_tensor_files
from reshard.checkpoint.publish.journal import ALONE, Team
from reshard.checkpoint.publish.workplace import free_bytes
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.storage.output_files import MAX_COPY, named
from reshard.checkpoint.transfer.windows import Budget, Buffers, collector_paused
from reshard.errors import (
    CheckpointError,
    DamageError,
    MemoryCapError,
    TargetError,
    UnfinishedError,
    UnsupportedError,
)
from reshard.text import Report, count, format_bytes, log, name_list, parse_bytes

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConvertReport(Report):
    """The figures of a conversion, or of its dry run."""

    source: str
    target: str
    format: str
    dry_run: bool
    num_tensors: int
    num_files: int
    """Files that hold tensors, as ``inspect`` counts them."""
    num_others: int
    """Files that are copied unchanged: a config, a tokenizer."""
    unique_bytes: int
    """Bytes of all source tensors that are used, each element once."""
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    """Bytes that an earlier run had already written."""
    memory: int
    """The most bytes of all buffers."""
    workers: int
    disk_needed: int
    disk_free: int | None
    seconds: float | None
    """Duration; None for a dry run."""
    checksums: bool
    was_complete: bool = False
    """Whether an earlier run of the same request had written all of it."""
    left_out: tuple[str, ...] = ()
    """Entries and values that the format cannot hold, parts of tensors that no name takes, and
    files of other tensors in the source folder."""
    left_alone: tuple[str, ...] = ()
    """Files and folders at the destination that were not part of the replaced checkpoint."""
    notes: tuple[str, ...] = ()
    """Remarks on the source and the layouts."""
    rank: int = 0
    num_ranks: int = 1

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed."""
        return self.bytes_read / self.unique_bytes if self.unique_bytes else 1.0

    @property
    def gb_per_second(self) -> float | None:
        """Gigabytes written per second."""
        return self.bytes_written / self.seconds / 1e9 if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        rate = self.gb_per_second
        extra = {"amplification": round(self.amplification, 4), "gb_per_second": rate}
        return {**Report.to_dict(self), **extra}

    def __str__(self) -> str:
        tensors = count(self.num_tensors, "tensor")
        if self.was_complete:
            return f"already complete: {self.target} has {tensors}, written by an earlier run"
        others = f", and {self.num_others} without tensors" if self.num_others else ""
        resumed = format_bytes(self.bytes_resumed)
        resumed = f", and {resumed} by an earlier run" if self.bytes_resumed else ""
        lines = [
            f"{'would write' if self.dry_run else 'wrote'} {tensors} to {self.target}",
            f"  format   {self.format}, {count(self.num_files, 'file')}{others}",
            f"  read     {format_bytes(self.bytes_read)}, {self.amplification:.2f} x the tensors",
            f"  written  {format_bytes(self.bytes_written)}{resumed}",
            f"  memory   {format_bytes(self.memory)} in buffers, workers: {self.workers}",
        ]
        if self.dry_run:
            free = "unknown" if self.disk_free is None else format_bytes(self.disk_free)
            lines.append(f"  disk     {format_bytes(self.disk_needed)} needed, {free} free")
        if self.seconds is not None:
            rate = f", {self.gb_per_second:.2f} GB/s" if self.gb_per_second else ""
            lines.append(f"  time     {self.seconds:.1f} s{rate}")
        if self.left_out:
            reason = "no place in this format, taken by no name, or no part of the source"
            lines.append(f"  left out {name_list(self.left_out)}: {reason}")
        if self.left_alone:
            reason = "no part of the checkpoint that is replaced"
            lines.append(f"  kept     {name_list(self.left_alone)}: {reason}")
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes[:5])])


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
    ``source_mesh`` and ``source_rules`` describe rank files that do not record their layout; if
    these hold replicas, give ``Rules.load(..., replicate=axes)``.
    """
    request = Request(**locals())
    wanted = LayoutRequest.of(request)
    with open_storage(request.src) as storage:
        with collector_paused():
            known = as_rules(source_rules, storage)
            catalog = read_catalog(storage, known, as_mesh(source_mesh))
            plan = plan_conversion(request, wanted, catalog, storage)
        began = time.monotonic()
        conversion = _Conversion(request, plan, storage)
        if dry_run:
            conversion.check()
        else:
            conversion.run()
        report = conversion.report(None if dry_run else time.monotonic() - began)
    log.info("convert %s: %s", src, str(report).partition("\n")[0])
    return report


class _Conversion:
    """A conversion that was planned."""

    def __init__(self, request: Request, plan: ConversionPlan, storage: Storage) -> None:
        self.request, self.plan, self.storage = request, plan, storage
        self.place, self.budget = request.place(), request.budget(storage)
        self.identity = plan.identity(request.checksums)
        self.builder: Builder | None = None
        """What writes the output, unless an earlier run has."""
        self.kept: tuple[str, ...] = ()
        """Names of other files at the destination."""

    def check(self) -> None:
        """What a dry run does: refuse a destination that cannot be written."""
        self.kept = self.request.check_destination(self.place, self.plan.paths)
        if self.request.remote is None:
            self.place.check_writable()

    def run(self) -> None:
        """Write and publish the output."""
        request, place, team = self.request, self.place, self.request.team
        if request.remote is not None and team.size > 1:
            raise CheckpointError(
                f"{request.dst} is written by one process: start it once, or give --no-ranks"
            )
        if team.leads:
            place.settle()
        if request.resume and self._is_complete():
            return
        sums = load_checksums(self.storage) if request.checksums else None
        if sums is not None and team.leads:
            check_outside_tensors(self.storage, self.plan.catalog, sums, self.budget.workers)
        builder = Builder(request, self.plan, self.storage, place, self.budget, sums)
        with ExitStack() as stack:
            if team.leads:
                request.check_destination(place, self.plan.paths)
                place.enter()
                stack.callback(place.leave)
                team.forget(place)
            self._agree_on_budget()
            builder.budget = self.budget
            stack.callback(builder.target.close)
            self._build(builder)
        self.builder = builder

    def _agree_on_budget(self) -> None:
        """Use the window size that all ranks, and all runs of one conversion, share."""
        request, plan = self.request, self.plan
        if request.team.leads:
            window = begin(self.place, plan, request, self.budget)
        else:
            window = request.team.wait_for_leader(self.place, plan.fingerprint)
        total, each = parse_bytes(request.memory), worker_bytes(window, plan.casts)
        if each > total:
            raise MemoryCapError(
                f"the conversion was begun with windows of {window} bytes, for which {total} bytes "
                f"of memory are too few: give --memory {each}"
            )
        self.budget = Budget(min(self.budget.workers, total // each), window)

    def _build(self, builder: Builder) -> None:
        """Prepare, copy, seal, publish; rank 0 does the first and the last two.

        The other ranks learn of a failure.
        """
        team, place = self.request.team, self.place
        try:
            with named(place.folder):
                if team.leads:
                    builder.prepare()
                builder.copy()
                if not team.leads:
                    team.wait_for_publish(place)
                    return
                if team.size > 1:
                    team.wait_for_all(place, builder.num_chunks)
                builder.seal()
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

    def _publish(self) -> None:
        """Move the output to its destination."""
        place, remote, paths = self.place, self.request.remote, self.plan.paths
        if remote is None:
            self.kept = place.publish(self.request.overwrite, paths)
            return
        sidecar = [SIDECAR] if (place.data / SIDECAR).exists() else []
        remote.upload(place.data, [*paths, *sidecar], self.identity)
        place.finish()

    def _is_complete(self) -> bool:
        """Whether the destination is the result of this very request, from an earlier run."""
        place, remote = self.place, self.request.remote
        if remote is not None:
            is_result = remote.is_result(self.identity)
        else:
            is_result = place.is_result(self.identity, self.plan.output.files)
        if is_result and self.request.team.leads and place.folder.exists():
            place.enter()
            found = place.request()
            if found is None or found.get("fingerprint") == self.plan.fingerprint:
                place.discard()
            place.leave()
        return is_result

    def report(self, seconds: float | None) -> ConvertReport:
        """The figures of what was done, or would be."""
        request, plan, builder = self.request, self.plan, self.builder
        output, others, transfers = plan.output, plan.others, plan.transfers
        unique_bytes = sum(transfer.source_bytes for transfer in transfers)
        to_read = unique_bytes + sum(copy.source.size for copy in output.objects)
        to_read += sum(file.size for file, _ in others)
        if request.compare_replicas:
            to_read += sum(int(t.replicas.num_bytes.sum()) for t in transfers if len(t.replicas))
        resumed = builder.resumed_bytes if builder else 0
        team = ALONE if request.dry_run else request.team
        return ConvertReport(
            source=request.src,
            target=request.dst,
            format=plan.format,
            dry_run=request.dry_run,
            num_tensors=len(transfers),
            num_files=count_tensor_files(output.files[: len(output.files) - len(others)]),
            num_others=len(others),
            unique_bytes=unique_bytes,
            bytes_read=to_read if request.dry_run else builder.source.num_bytes if builder else 0,
            bytes_written=output.num_bytes - resumed if request.dry_run or builder else 0,
            bytes_resumed=resumed,
            memory=self.budget.workers * worker_bytes(self.budget.window, plan.casts),
            workers=self.budget.workers,
            disk_needed=output.num_bytes,
            disk_free=free_bytes(self.place.folder.parent),
            seconds=seconds,
            checksums=request.checksums,
            was_complete=builder is None and not request.dry_run,
            left_out=output.left_out,
            left_alone=self.kept,
            notes=(*plan.notes, *plan.catalog.notes),
            rank=team.rank,
            num_ranks=team.size,
        )


def worker_bytes(window: int, casts: bool) -> int:
    """The memory of one worker: its buffers, a server's reply, and what hashes, casts and writes
    need."""
    own = window // 2 + min(window, 2 << 20) + min(window, MAX_COPY)
    return Buffers.size_of(window, casts) + window + own
