"""``save``: the tensors of a running job into a checkpoint.

    checkpoint.save(model.state_dict(), "ckpt")

Each rank writes its share of the boxes into files in a temporary folder; the first rank publishes
the folder when all ranks have written and everything is on disk. An earlier failure of any rank is
raised on all ranks, and leaves the old content of the destination in place.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reshard.checkpoint.catalog import StoredObject
from reshard.checkpoint.formats.distcp_writer import distcp
from reshard.checkpoint.formats.safetensors.writer import sharded
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums, ChunkSum, Recorder
from reshard.checkpoint.live.entries import Entries, RankBoxes, entries_of
from reshard.checkpoint.live.write_shares import (
    SavePlan,
    Writer,
    main_mesh,
    on_mesh,
    owners_of,
    writers_of,
)
from reshard.checkpoint.output import Wanted, count_tensor_files
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.output_files import OutputFiles, replace_file
from reshard.checkpoint.transfer.copying import Done
from reshard.errors import CheckpointError, DisagreementError, TargetError, UnfinishedError
from reshard.layout.spec import TensorSpec
from reshard.sharded.groups import Group
from reshard.tensors.agreement import Agreement
from reshard.tensors.exchanging import merge_specs, specs_from_texts, specs_to_text
from reshard.text import Report, count, format_bytes, log, name_list, quoted

__all__ = ["SaveReport", "save"]

FORMATS = ("sharded", "distcp")
SEEN_WITHIN = 10.0
"""Seconds in which a new folder becomes visible to other ranks, on a slow file system."""


@dataclass(frozen=True, slots=True)
class SaveReport(Report):
    """The figures of a save; bytes are those of all ranks together."""

    target: str
    format: str
    num_tensors: int
    num_files: int
    """Files that hold tensors."""
    unique_bytes: int
    """Bytes of all tensors, each once."""
    bytes_written: int
    """Bytes of all files."""
    busiest_bytes: int
    """The most bytes that one rank has written."""
    seconds: float
    checksums: bool
    num_ranks: int = 1
    left_out: tuple[str, ...] = ()
    """Entries that are not tensors and that the format cannot hold."""
    left_alone: tuple[str, ...] = ()
    """Files and folders at the destination that were not part of the replaced checkpoint."""

    def __str__(self) -> str:
        files, ranks = count(self.num_files, "file"), f"by {count(self.num_ranks, 'rank')}"
        busiest = f"at most {format_bytes(self.busiest_bytes)} by one"
        lines = [
            f"saved {count(self.num_tensors, 'tensor')} to {self.target}",
            f"  format   {self.format}, {files}{', with checksums' * self.checksums}",
            f"  written  {format_bytes(self.bytes_written)} {ranks}, {busiest}",
            f"  time     {self.seconds:.1f} s",
        ]
        lines += [f"  left out {name_list(self.left_out)}"] if self.left_out else []
        lines += [f"  kept     {name_list(self.left_alone)}"] if self.left_alone else []
        return "\n".join(lines)


def save(
    state_dict: Mapping[Any, Any],
    path: str | Path,
    *,
    group: Group = None,
    format: str = "sharded",
    overwrite: bool = False,
    checksums: bool = True,
    timeout: float = 600.0,
) -> SaveReport:
    """Save the tensors of a state dict in their layouts; all ranks of the group call it.

    ``format`` is sharded (safetensors that torch's reader loads) or distcp. A plain tensor must be
    equal on all ranks that have it. Format distcp keeps entries that are not tensors; otherwise the
    report lists them. All ranks must see the same folder.
    """
    began = time.monotonic()
    agreement = Agreement(group, "saving a checkpoint", timeout, CheckpointError)
    request = {"path": str(path), "format": format, "overwrite": overwrite, "checksums": checksums}
    saved = _described(agreement, state_dict, request)
    plan = _planned(saved, format, agreement)
    written, kept = _write(agreement, Workplace.beside(Path(path)), saved, plan, request)
    report = SaveReport(
        target=str(path),
        format=format,
        num_tensors=len(plan.specs),
        num_files=count_tensor_files(plan.output.files),
        unique_bytes=sum(spec.num_bytes for spec in plan.specs.values()),
        bytes_written=sum(written),
        busiest_bytes=max(written),
        seconds=time.monotonic() - began,
        checksums=checksums,
        num_ranks=len(agreement.ranks),
        left_out=() if format == "distcp" else tuple(saved.others),
        left_alone=kept,
    )
    log.info("save: %s", str(report).partition("\n")[0])
    return report


def _write(
    agreement: Agreement,
    place: Workplace,
    saved: _Saved,
    plan: SavePlan,
    request: Mapping[str, Any],
) -> tuple[list[int], tuple[str, ...]]:
    """Write and publish all files: the bytes that each rank wrote, and names of files kept."""
    overwrite, checksums = request["overwrite"], request["checksums"]
    files = [file.path for file in plan.output.files]
    with _entered(agreement, place, overwrite, files):
        target = OutputFiles(place.data, plan.output.files)
        token = agreement.run_on_first(lambda: _prepare(place, target, plan.output.num_bytes))
        writer = Writer(plan, saved.entries.held, saved.objects, agreement.rank, checksums)
        try:
            agreement.run(lambda: _check_seen(place, token))
            while any(agreement.run(lambda: _step(writer, target)).values()):
                pass
            written = agreement.run(lambda: _write_sums(writer, place, agreement.rank))
            agreement.run_on_first(lambda: _seal(place, target, plan, agreement.ranks, checksums))
        finally:
            target.close()
        kept = agreement.run_on_first(lambda: _publish(place, overwrite, files))
    return [*written.values()], tuple(kept)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What is saved: the entries of this rank, and those of all ranks together."""

    entries: Entries
    objects: Mapping[str, bytes]
    """The entries of this rank that are not tensors, as torch saves them."""
    specs: Mapping[str, TensorSpec]
    others: Mapping[str, tuple[int, int]]
    """The first rank that has each entry that is not a tensor, and its size."""
    keys: Mapping[str, tuple[str | int, ...]]


def _described(
    agreement: Agreement, state_dict: Mapping[Any, Any], request: Mapping[str, Any]
) -> _Saved:
    found: list[tuple[Entries, dict[str, bytes]]] = []
    format = request["format"]

    def describe() -> list[Any]:
        if format not in FORMATS:
            raise CheckpointError(
                f"{quoted(format)} is no format that a job saves: use {' or '.join(FORMATS)}"
            )
        if "://" in request["path"]:
            raise TargetError(
                f"{request['path']} is no folder of this machine: save to one, and upload it then, "
                "or let reshard convert write it there"
            )
        entries = entries_of(state_dict)
        objects = {
            name: _bytes(name, one) if format == "distcp" else b""
            for name, one in entries.others.items()
        }
        found.append((entries, objects))
        sizes = {name: len(data) for name, data in objects.items()}
        return [specs_to_text(entries.specs()), sizes, entries.keys, request]

    answers = agreement.run(describe)
    agreement.check_gathered({rank: one[3] for rank, one in answers.items()})
    described = specs_from_texts({rank: one[0] for rank, one in answers.items()})
    specs = merge_specs(described)
    _check_present(specs, described)
    others: dict[str, tuple[int, int]] = {}
    keys: dict[str, tuple[str | int, ...]] = {}
    for rank, (_, sizes, paths, _) in answers.items():
        for name, size in sizes.items():
            others.setdefault(name, (rank, size))
        keys |= {name: tuple(path) for name, path in paths.items()}
    both = sorted(others.keys() & specs.keys())
    if both:
        raise CheckpointError(f"{quoted(both[0])} is a tensor on some ranks and none on others")
    if not specs and not (others and format == "distcp"):
        entries = count(len(others), "other entry", "other entries")
        more = f' and {entries}, for format="distcp"' if others else ""
        raise CheckpointError(
            f"nothing to save to {request['path']}: the state dict has 0 tensors{more}: is it the "
            "right one?"
        )
    return _Saved(found[0][0], found[0][1], specs, others, keys)


def _check_present(
    specs: Mapping[str, TensorSpec], answers: Mapping[int, Mapping[str, TensorSpec]]
) -> None:
    """Refuse a tensor with a part on a rank that does not have it: that part cannot be written."""
    boxes = RankBoxes()
    for name, spec in specs.items():
        absent = [rank for rank in spec.layout.ranks if name not in answers.get(rank, ())]
        held = boxes.of(spec.layout, spec.shape) if absent else {}
        for rank in absent:
            if rank in held:
                takes_part = (
                    "has no tensor" if rank in answers else "does not save, but has a part of"
                )
                raise DisagreementError(
                    f"rank {rank} {takes_part} {quoted(name)}, which is sharded over it "
                    f"({quoted(spec.layout)}): give it on all {len(held)} ranks that hold it"
                )


def _bytes(name: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise CheckpointError(
            f"{quoted(name)} is a {type(value).__name__}, which cannot be saved "
            f"({type(error).__name__}): take it out of the state dict"
        ) from error
    return buffer.getvalue()


def _planned(saved: _Saved, format: str, agreement: Agreement) -> SavePlan:
    """All files and the place of every box in them; every rank makes the same plan."""
    main = main_mesh(saved.specs)
    specs = {
        name: replace(spec, layout=on_mesh(spec.layout, main))
        for name, spec in sorted(saved.specs.items())
    }
    owned = owners_of(specs)
    wanted = {
        name: Wanted(spec.shape, spec.dtype, spec.layout, owned[name])
        for name, spec in specs.items()
    }
    if format == "distcp":
        objects = [StoredObject(name, 0, 0, size) for name, (_, size) in saved.others.items()]
        output = distcp(wanted, objects, saved.keys)
    else:
        output = sharded(wanted, {}, None if main is None else str(main.mesh))
    writers = writers_of(output, owned, agreement.ranks[0])
    return SavePlan(
        specs, owned, output, writers, {n: rank for n, (rank, _) in saved.others.items()}
    )


@contextmanager
def _entered(
    agreement: Agreement, place: Workplace, overwrite: bool, files: Sequence[str]
) -> Iterator[None]:
    """Hold the folder of the output on the first rank; remove it after a failure."""
    agreement.run_on_first(lambda: _enter(place, overwrite, files))
    try:
        yield
    except BaseException:
        if agreement.is_first:
            with suppress(OSError):  # the first error is the one to report
                if not place.recover():
                    place.discard()
        raise
    finally:
        place.leave()


def _enter(place: Workplace, overwrite: bool, files: Sequence[str]) -> None:
    place.settle()
    place.check_target(overwrite, files)
    place.enter()
    try:
        found = place.request()
        if found is not None and not found.get("saved"):
            raise TargetError(
                f"an unfinished conversion to {place.target} exists: finish it with reshard "
                f"convert --resume, or remove {place.folder}"
            )
        if found is not None:  # left by a save that was killed: nothing of it can be used
            place.discard()
            place.enter()
        place.check_target(overwrite, files)
        place.note_request({"saved": True})
    except BaseException:
        place.leave()
        raise


def _prepare(place: Workplace, target: OutputFiles, num_bytes: int) -> str:
    """Create all files at their full size; returns a token by which other ranks know the folder."""
    place.check_room(num_bytes)
    place.data.mkdir()
    target.allocate()
    token = secrets.token_hex(8)
    replace_file(place.folder / "prepared", token.encode())
    return token


def _check_seen(place: Workplace, token: str) -> None:
    """Refuse a folder that this rank does not share with the first one."""
    deadline = time.monotonic() + SEEN_WITHIN
    while True:
        with suppress(OSError):
            if (place.folder / "prepared").read_text() == token:
                return
        if time.monotonic() > deadline:
            raise TargetError(
                f"{place.folder}, which the first rank has created, is not visible here: save to a "
                "folder that all ranks share"
            )
        time.sleep(0.1)


def _step(writer: Writer, target: OutputFiles) -> bool:
    try:
        return writer.step(target)
    except UnfinishedError as error:
        raise TargetError(f"{str(error).rpartition(';')[0]}; nothing was published") from None


def _write_sums(writer: Writer, place: Workplace, rank: int) -> int:
    """Write the checksums of this rank for the first one; returns the bytes written."""
    data = json.dumps(writer.done.to_record()).encode()
    replace_file(place.folder / f"sums.{rank}", data)
    return writer.done.num_bytes


def _seal(
    place: Workplace, target: OutputFiles, plan: SavePlan, ranks: tuple[int, ...], checksums: bool
) -> None:
    """Check the sizes of all files, and write their checksums."""
    for file in plan.output.files:
        size = (place.data / file.path).stat().st_size
        if size != file.size:
            raise TargetError(f"{place.data / file.path} has {size} bytes and not {file.size}")
    if checksums:
        sums = _sidecar(place, plan, ranks)
        replace_file(place.data / SIDECAR, sums.to_bytes())
    target.sync_folders()


def _sidecar(place: Workplace, plan: SavePlan, ranks: tuple[int, ...]) -> Checksums:
    """The checksums that all ranks have written."""
    recorder, values = Recorder(), [0] * len(plan.specs)
    for rank in ranks:
        done = Done.from_record(json.loads((place.folder / f"sums.{rank}").read_bytes()))
        for file, start, stop, text in done.sums:
            path = plan.output.files[file].path
            recorder.put(path, [ChunkSum(start, stop, bytes.fromhex(text))])
        for number, value in done.parts.items():
            values[number] += value
    digests = {
        name: digest.finish(digest.combine([value]), spec.shape, spec.dtype)
        for (name, spec), value in zip(plan.specs.items(), values, strict=True)
    }
    return Checksums(recorder.finish({file.path: file.size for file in plan.output.files}), digests)


def _publish(place: Workplace, overwrite: bool, files: Sequence[str]) -> list[str]:
    try:
        return list(place.publish(overwrite, files))
    except UnfinishedError as error:
        raise TargetError(f"{str(error).partition(':')[0]}: nothing was published") from None
