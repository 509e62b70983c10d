"""``convert``: the four stages of a conversion, request, source, plan and build, in turn.

    convert("ckpt", "ckpt-tp2", mesh="tp=2", rules="llama")            # sharded safetensors
    convert("ckpt", "ckpt-hf", format="full", dtype="bfloat16")         # for from_pretrained
    convert("ckpt", "ckpt-dcp", mesh="dp=8", layouts={"*": "dp ..."}, format="distcp")

An output is published only when it is complete; ``resume=True`` continues an interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.conversion.build import Conversion
from reshard.checkpoint.conversion.plan import plan_conversion
from reshard.checkpoint.conversion.request import Request
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.output import count_tensor_files
from reshard.checkpoint.publish.journal import ALONE, Team
from reshard.checkpoint.publish.workplace import free_bytes
from reshard.checkpoint.transfer.windows import collector_paused
from reshard.text import Report, count, format_bytes, log, name_list

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules


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
    disk_free: int
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
            needed, free = format_bytes(self.disk_needed), format_bytes(self.disk_free)
            lines.append(f"  disk     {needed} needed, {free} free")
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
    with open_storage(request.src) as storage:
        with collector_paused():
            known = as_rules(source_rules, storage)
            catalog = read_catalog(storage, known, as_mesh(source_mesh))
            plan = plan_conversion(request, catalog, storage)
        began = time.monotonic()
        conversion = Conversion(request, plan, storage)
        if dry_run:
            conversion.check()
        else:
            conversion.run()
        report = _report(request, conversion, None if dry_run else time.monotonic() - began)
    log.info("convert %s: %s", src, str(report).partition("\n")[0])
    return report


def _report(request: Request, conversion: Conversion, seconds: float | None) -> ConvertReport:
    plan, budget, is_dry = conversion.plan, conversion.budget, request.dry_run
    output, others, transfers = plan.output, plan.others, plan.transfers
    unique_bytes = sum(transfer.source_bytes for transfer in transfers)
    bytes_read = bytes_written = 0
    if is_dry:
        bytes_read = unique_bytes + sum(copy.source.size for copy in output.objects)
        bytes_read += sum(file.size for file in others)
        if request.compare_replicas:
            bytes_read += sum(int(t.replicas.num_bytes.sum()) for t in transfers if t.replicas)
        bytes_written = output.num_bytes
    elif conversion.has_built:
        bytes_read = conversion.source.num_bytes
        bytes_written = output.num_bytes - conversion.resumed_bytes
    team = ALONE if is_dry else request.team
    return ConvertReport(
        source=request.src,
        target=request.dst,
        format=plan.format,
        dry_run=is_dry,
        num_tensors=len(transfers),
        num_files=count_tensor_files(output.files[: len(output.files) - len(others)]),
        num_others=len(others),
        unique_bytes=unique_bytes,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        bytes_resumed=conversion.resumed_bytes,
        memory=budget.workers * conversion.worker_bytes(budget.window),
        workers=budget.workers,
        disk_needed=output.num_bytes,
        disk_free=free_bytes(conversion.place.folder.parent),
        seconds=seconds,
        checksums=request.checksums,
        was_complete=not conversion.has_built and not is_dry,
        left_out=output.left_out,
        left_alone=conversion.kept,
        notes=(*plan.notes, *plan.catalog.notes),
        rank=team.rank,
        num_ranks=team.size,
    )
