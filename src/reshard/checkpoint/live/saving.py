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
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.live.entries import entries_of
from reshard.checkpoint.live.write_shares import (
    check_copies,
    digests_of,
    plan_save,
    write_share,
)
from reshard.checkpoint.output import count_tensor_files
from reshard.checkpoint.publish.workplace import Workplace
from reshard.checkpoint.storage.local import plain_path
from reshard.checkpoint.storage.output_files import OutputFiles, named, replace_file
from reshard.checkpoint.transfer.copying import Done, checksums_of
from reshard.errors import (
    CheckpointError,
    DisagreementError,
    ReshardError,
    TargetError,
    UnfinishedError,
)
from reshard.layout.boxlist import listed_of
from reshard.layout.spec import TensorSpec
from reshard.sharded.groups import Group
from reshard.tensors.agreement import Agreement
from reshard.tensors.exchanging import merge_specs, specs_from_texts, specs_to_text
from reshard.text import Report, count, format_bytes, log, name_list, quoted

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
    path = str(path) if isinstance(path, Path) else path
    request = {"path": path, "format": format, "overwrite": overwrite, "checksums": checksums}
    saving = _Saving(agreement, request, state_dict)
    written = saving.write()
    specs, files = saving.plan.specs, saving.plan.output.files
    report = SaveReport(
        target=str(path),
        format=format,
        num_tensors=len(specs),
        num_files=count_tensor_files(files),
        unique_bytes=sum(spec.num_bytes for spec in specs.values()),
        bytes_written=sum(written),
        busiest_bytes=max(written),
        seconds=time.monotonic() - began,
        checksums=checksums,
        num_ranks=len(agreement.ranks),
        left_out=() if format == "distcp" else tuple(saving.others),
        left_alone=saving.kept,
    )
    log.info("save: %s", str(report).partition("\n")[0])
    return report


class _Saving:
    """A save in progress; every rank makes the same plan."""

    def __init__(
        self, agreement: Agreement, request: Mapping[str, Any], state_dict: Mapping[Any, Any]
    ) -> None:
        self.agreement, self.request = agreement, request
        answers = agreement.run(lambda: self._describe(state_dict))
        texts, sizes, paths, requests, digests = (
            {rank: answer[part] for rank, answer in answers.items()} for part in range(5)
        )
        agreement.check_gathered(requests)
        described = specs_from_texts(texts)
        specs = merge_specs(described)
        _check_present(specs, described)
        check_copies(digests)
        self.others: dict[str, tuple[int, int]] = {}
        """The first rank that has each entry that is not a tensor, and its size."""
        keys: dict[str, tuple[str | int, ...]] = {}
        for rank in answers:
            for name, size in sizes[rank].items():
                self.others.setdefault(name, (rank, size))
            keys |= {name: tuple(path) for name, path in paths[rank].items()}
        self._check_entries(specs)
        self.plan = plan_save(specs, self.others, keys, request["format"], agreement.ranks[0])
        self.kept: tuple[str, ...] = ()
        """Names of other files at the destination."""
        self._paths = [file.path for file in self.plan.output.files]
        self._target = OutputFiles(self.place.data, self.plan.output.files)
        self._done, local, sums = Done(agreement.rank), self._entries.local, request["checksums"]
        self._steps = write_share(self.plan, self._target, local, self._objects, self._done, sums)

    def _describe(self, state_dict: Mapping[Any, Any]) -> list[Any]:
        """What this rank tells the others."""
        path, format = self.request["path"], self.request["format"]
        if format not in FORMATS:
            raise CheckpointError(
                f"{quoted(format)} is no format that a job saves: use {' or '.join(FORMATS)}"
            )
        if "://" in plain_path(path):
            raise TargetError(
                f"{path} is no folder of this machine: save to one, and upload it then, "
                "or let reshard convert write it there"
            )
        self._entries = entries = entries_of(state_dict)
        self._objects = {
            name: _bytes(name, one) if format == "distcp" else b""
            for name, one in entries.others.items()
        }
        sizes = {name: len(data) for name, data in self._objects.items()}
        several = len(self.agreement.ranks) > 1
        digests = digests_of(entries.local, self.agreement.rank) if several else {}
        self.place = Workplace(Path(plain_path(path)))
        return [specs_to_text(entries.specs()), sizes, entries.keys, self.request, digests]

    def _check_entries(self, specs: Mapping[str, TensorSpec]) -> None:
        """Refuse an entry that is not a tensor on all ranks, and a state dict without tensors."""
        both = sorted(self.others.keys() & specs.keys())
        if both:
            raise CheckpointError(f"{quoted(both[0])} is a tensor on some ranks and none on others")
        if not specs and not (self.others and self.request["format"] == "distcp"):
            entries = count(len(self.others), "other entry", "other entries")
            more = f' and {entries}, for format="distcp"' if self.others else ""
            raise CheckpointError(
                f"nothing to save to {self.request['path']}: the state dict has 0 tensors{more}: "
                "is it the right one?"
            )

    def write(self) -> list[int]:
        """Write and publish all files; the bytes that each rank wrote."""
        self._run_on_first(self._enter)
        try:
            token = self._run_on_first(self._prepare)
            with closing(self._target):
                self._run(lambda: self._check_seen(token))
                while any(self._run(self._step).values()):
                    pass
                written = self._run(self._write_sums)
                self._run_on_first(self._seal)
            self.kept = tuple(self._run_on_first(self._publish))
        except BaseException:
            if self.agreement.is_first:
                with suppress(OSError):  # the first error is the one to report
                    if not self.place.recover():
                        self.place.discard()
            raise
        finally:
            self.place.leave()
        return [*written.values()]

    def _run(self, step: Callable[[], Any]) -> dict[int, Any]:
        """Run a step on all ranks, with a TargetError instead of an error of the file system."""

        def attempt() -> Any:
            try:
                with named(self.place.folder):
                    return step()
            except OSError as error:
                if isinstance(error, ReshardError):
                    raise
                raise TargetError(
                    f"{error}; saving to {self.place.target} failed: is there room for it, and may "
                    "this process write there?"
                ) from error

        return self.agreement.run(attempt)

    def _run_on_first(self, step: Callable[[], Any]) -> Any:
        first = self.agreement.ranks[0]
        return self._run(lambda: step() if self.agreement.is_first else None)[first]

    def _enter(self) -> None:
        place, overwrite = self.place, self.request["overwrite"]
        place.settle()
        place.check_target(overwrite, self._paths)
        place.enter()
        try:
            unfinished = place.request()
            if unfinished is not None and not unfinished.get("saved"):
                raise TargetError(
                    f"an unfinished conversion to {place.target} exists: finish it with reshard "
                    f"convert --resume, or remove {place.folder}"
                )
            if unfinished is not None:  # left by a save that was killed, and of no use
                place.discard()
                place.enter()
            place.check_target(overwrite, self._paths)
            place.note_request({"saved": True})
        except BaseException:
            place.leave()
            raise

    def _prepare(self) -> str:
        """Create all files at full size; returns a token by which other ranks know the folder."""
        self.place.check_room(self.plan.output.num_bytes)
        self.place.data.mkdir()
        self._target.allocate()
        token = secrets.token_hex(8)
        replace_file(self.place.folder / "prepared", token.encode())
        return token

    def _check_seen(self, token: str) -> None:
        """Refuse a folder that this rank does not share with the first one."""
        deadline = time.monotonic() + SEEN_WITHIN
        while True:
            with suppress(OSError):
                if (self.place.folder / "prepared").read_text() == token:
                    return
            if time.monotonic() > deadline:
                raise TargetError(
                    f"{self.place.folder}, which the first rank has created, is not visible here: "
                    "save to a folder that all ranks share"
                )
            time.sleep(0.1)

    def _step(self) -> bool:
        try:
            return next(self._steps)
        except UnfinishedError as error:
            raise TargetError(f"{str(error).rpartition(';')[0]}; nothing was published") from None

    def _write_sums(self) -> int:
        """Write the checksums of this rank for the first one; returns the bytes written."""
        data = json.dumps(self._done.to_record()).encode()
        replace_file(self.place.folder / f"sums.{self.agreement.rank}", data)
        return self._done.num_bytes

    def _seal(self) -> None:
        """Check the sizes of all files, and write their checksums."""
        place, files = self.place, self.plan.output.files
        for file in files:
            size = (place.data / file.path).stat().st_size
            if size != file.size:
                raise TargetError(f"{place.data / file.path} has {size} bytes and not {file.size}")
        if self.request["checksums"]:
            texts = [(place.folder / f"sums.{rank}").read_bytes() for rank in self.agreement.ranks]
            done = (Done.from_record(json.loads(text)) for text in texts)
            tensors = [(name, spec.shape, spec.dtype) for name, spec in self.plan.specs.items()]
            replace_file(place.data / SIDECAR, checksums_of(done, files, tensors).to_bytes())
        self._target.sync_folders()

    def _publish(self) -> list[str]:
        try:
            return list(self.place.publish(self.request["overwrite"], self._paths))
        except UnfinishedError as error:
            raise TargetError(f"{str(error).partition(':')[0]}: nothing was published") from None


def _check_present(
    specs: Mapping[str, TensorSpec], answers: Mapping[int, Mapping[str, TensorSpec]]
) -> None:
    """Refuse a tensor with a part on a rank that does not have it: that part cannot be written."""
    for name, spec in specs.items():
        absent = [rank for rank in spec.layout.ranks if name not in answers.get(rank, ())]
        holders = {*listed_of(spec.layout, spec.shape).holders.tolist()} if absent else set[int]()
        rank = next((rank for rank in absent if rank in holders), None)
        if rank is not None:
            lacks = "has no tensor" if rank in answers else "does not save, but has a part of"
            raise DisagreementError(
                f"rank {rank} {lacks} {quoted(name)}, which is sharded over it "
                f"({quoted(spec.layout)}): give it on all {len(holders)} ranks that hold it"
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
