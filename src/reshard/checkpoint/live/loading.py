"""``load``: a checkpoint of any format and cut into the tensors of a running job.

    checkpoint.load("ckpt", into=model.state_dict())

Each byte is read once in the whole job. What only one rank wants, it reads straight into its
tensors. Of the rest the ranks share the reading, and what one has read for another goes there as
any other move does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.formats.reader import read_catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums, damage, sum_of
from reshard.checkpoint.integrity.checksums import load as load_checksums
from reshard.checkpoint.integrity.crcs import Crcs, Part, crcs_of
from reshard.checkpoint.live.crc_records import CrcRecords
from reshard.checkpoint.live.entries import Entries, Memory, entries_of
from reshard.checkpoint.live.fetching import Fetched, Fetcher
from reshard.checkpoint.live.match import Fit, Strict, check_strict, fit
from reshard.checkpoint.live.outline import Outline
from reshard.checkpoint.live.own_reads import OwnReader, own_wishes
from reshard.checkpoint.live.ranks import Circle
from reshard.checkpoint.live.read_shares import Batch, Limits, Wish, batches_of
from reshard.checkpoint.live.reports import LoadReport
from reshard.checkpoint.live.scatter import Placer
from reshard.checkpoint.live.small_reads import are_small, place_small, read_small
from reshard.checkpoint.piece_table import Located
from reshard.checkpoint.publish.journal import boot_id
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.storage.local import open_storage
from reshard.checkpoint.transfer.given import as_mesh, as_rules
from reshard.checkpoint.transfer.transfers import Fed, Transfer, source_of
from reshard.dtypes import itemsize
from reshard.errors import DamageError, MemoryCapError, ReshardError
from reshard.layout.spec import TensorSpec
from reshard.planning.names import Feed
from reshard.sharded.content import Group
from reshard.tensors.merging import merge_specs
from reshard.tensors.texts import specs_from_text, specs_to_text
from reshard.text import format_bytes, parse_bytes, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["load"]

SMALLEST_MEMORY = 4 << 20


def load(
    path: str | Path,
    *,
    into: Mapping[Any, Any],
    group: Group = None,
    rules: Rules | str | Path | None = None,
    mesh: Mesh | str | None = None,
    strict: Strict = True,
    cast: bool = False,
    check: bool = True,
    compare_replicas: bool = True,
    memory: int | str = "256MiB",
    timeout: float = 60.0,
) -> LoadReport:
    """Fill the tensors of a state dict from a checkpoint, in place; all ranks of the group call it.

    ``into`` may be nested, and holds DTensors, ShardedTensors or plain tensors, which are whole on
    their rank. ``rules`` and ``mesh`` are for files of ranks that do not say how they were cut.
    Every tensor of ``into`` must be in the checkpoint, under its own name or that of a tensor tied
    to it; ``strict=False`` leaves others as they were, but misspelt names are always errors. Names
    that only the checkpoint has are listed in the report, and are an error with ``strict="exact"``.
    Dtypes must be the same, unless ``cast=True``.
    Digests are compared where the checkpoint has some, unless ``check=False``; where it has none,
    what is stored twice is read twice and must be equal, unless ``compare_replicas=False`` takes
    the first. No rank stages more than ``memory``, or waits for another longer than ``timeout``
    seconds. Whatever is wrong is raised on all ranks alike; what can be known before any tensor is
    changed is raised before.
    """
    began = time.monotonic()
    circle = Circle(group, timeout)
    options = {"path": str(path), "strict": strict, "cast": cast, "check": check,
               "compare_replicas": compare_replicas, "memory": str(memory)}  # fmt: skip
    with ExitStack() as stack:
        here = _Here(circle, into, options, stack)
        agreed = here.agree(lambda storage: _survey(storage, rules, mesh, check, here))
        fitted = fit(agreed.specs, agreed.outline, agreed.memories, strict, cast)
        chosen, outline = fitted.chosen, agreed.outline.joined(fitted.copies)
        wishes = {n: _wish(outline, spec, n, compare_replicas) for n, spec in chosen.items()}
        own, shared = own_wishes(wishes, maps=here.storage.is_local and len(set(agreed.hosts)) == 1)
        crcs = Crcs(outline.catalog.crcs)
        fetcher = Fetcher(
            here.storage, outline.catalog, wishes, circle.rank, outline.digests, crcs or None
        )
        placer = Placer(circle, wishes, chosen, here.entries.tensors, parse_bytes(memory) // 4)
        reader = OwnReader.of(fetcher.source, os.cpu_count() or 1, agreed.hosts.count(boot_id()))
        run = _Run(circle, fetcher, placer, outline, CrcRecords(crcs, wishes), here.checksums)
        small, large = (shared, {}) if are_small(shared) else ({}, shared)
        run.read_own(reader, own, small)
        limits = Limits.of(_share_of(memory), len(circle.ranks))
        for batch in batches_of(large, circle.ranks, limits):
            run.do(batch)
    return _report(run, fitted, here.entries, time.monotonic() - began)


def _share_of(memory: int | str) -> int:
    total = parse_bytes(memory)
    if total < SMALLEST_MEMORY:
        raise MemoryCapError(
            f"{format_bytes(total)} of memory is too little to load a checkpoint: "
            f"give at least {format_bytes(SMALLEST_MEMORY)}"
        )
    return total // 2


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks know of each other and of the checkpoint."""

    specs: dict[str, TensorSpec]
    """Those that all ranks together have."""
    memories: dict[int, Memory]
    """What is tied on each rank."""
    outline: Outline
    hosts: list[str]
    """The host of each rank."""


@dataclass(slots=True)
class _Here:
    """What this rank has, before it knows what the others have."""

    circle: Circle
    into: Mapping[Any, Any]
    options: Mapping[str, Any]
    stack: ExitStack
    """Closes the files."""
    entries: Entries = field(init=False)
    storage: Storage = field(init=False)
    checksums: Checksums | None = None
    """Those of the checkpoint, on the first rank."""

    def agree(self, survey: Callable[[Storage], Outline]) -> _Agreed:
        """What the ranks have, and what is stored.

        All of it is said in one round, so that a load without an exchange has two: this one, and
        one at its end.
        """

        def describe() -> list[Any]:
            _share_of(self.options["memory"])
            check_strict(self.options["strict"])
            self.entries = entries_of(self.into)
            text = specs_to_text(self.entries.specs())
            self.storage = self.stack.enter_context(open_storage(self.options["path"]))
            outline = survey(self.storage).to_data() if self.circle.leads else None
            return [text, self.options, self.entries.memory().to_data(), boot_id(), outline]

        said = self.circle.all_do(describe)
        self.circle.check_alike({rank: one[1] for rank, one in said.items()}, "load")
        described = {rank: specs_from_text(one[0]) for rank, one in said.items()}
        memories = {rank: Memory.from_data(described[rank], one[2]) for rank, one in said.items()}
        specs = merge_specs(described)
        outline = Outline.from_data(said[self.circle.ranks[0]][4]).about(specs)
        return _Agreed(specs, memories, outline, [one[3] for one in said.values()])


def _survey(
    storage: Storage,
    rules: Rules | str | Path | None,
    mesh: Mesh | str | None,
    check: bool,
    here: _Here,
) -> Outline:
    """What the first rank finds in the checkpoint; its checksums stay with it."""
    here.checksums = sums = load_checksums(storage) if check else None
    catalog = read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
    crcs = crcs_of(storage, replace(catalog, objects={}), sums) if check else ()
    return Outline(replace(catalog, crcs=crcs), (), sums.digests if sums else {})


def _wish(outline: Outline, spec: TensorSpec, name: str, compare_replicas: bool) -> Wish:
    """Where a tensor is stored; CoverageError if a part of it is stored nowhere.

    Replicas are forgotten where nobody compares them: a digest tells more, of what is taken.
    """
    stored = outline.catalog.tensors[name]
    source, replicas = source_of(name, stored.shape, [Fed(stored, Feed(name))])
    none = Located.none(len(stored.shape), itemsize(stored.dtype))
    if name in outline.digests or not compare_replicas:
        replicas = none
    transfer = Transfer(
        name, stored.shape, stored.dtype, spec.dtype, source, replicas, none, regions=()
    )
    is_whole = name in outline.digests or bool(outline.catalog.crcs)
    return Wish(transfer, spec.layout, is_whole)


@dataclass(slots=True)
class _Run:
    """A load under way."""

    circle: Circle
    fetcher: Fetcher
    placer: Placer
    outline: Outline
    records: CrcRecords
    checksums: Checksums | None
    bytes_read: int = 0
    _gap_bytes: int = 0
    _values: dict[str, int] = field(default_factory=dict)
    _done: int = 0

    def read_own(
        self, reader: OwnReader, own: Mapping[str, Wish], small: Mapping[str, Wish]
    ) -> None:
        """Read what no other rank wants into this rank's tensors, and what is small for all."""
        if not own and not small:
            return

        def read() -> list[Any]:
            reader.read(own, self.placer.views)
            texts = read_small(small, self.fetcher.source) if self.circle.leads else {}
            return [self.fetcher.num_bytes, texts]

        count, total = len(own) + len(small), len(self.fetcher.wishes)
        try:
            said = self.circle.all_do(read)
        except ReshardError as error:
            raise type(error)(
                f"{error}; up to {count} of {total} tensors were already changed: load again "
                "before use"
            ) from error.__cause__
        place_small(small, said[self.circle.ranks[0]][1], self.placer.views)
        self.bytes_read = sum(one[0] for one in said.values())
        self._done += count

    def do(self, batch: Batch) -> None:
        """Read a batch, check it, and bring it to where it belongs."""
        found: list[Fetched] = []

        def fetch() -> dict[str, Any]:
            fetched, values = self.fetcher.fetch(batch)
            found.extend(fetched)
            parts = {name: f"{value:x}" for name, value in values.items()}
            crcs = self.fetcher.crc_parts()
            return {"bytes": self.fetcher.num_bytes, "parts": parts, "crcs": crcs}

        try:
            said = self.circle.all_do(fetch)
            self._check(batch, [one["parts"] for one in said.values()])
            self._check_crcs(batch, [one["crcs"] for one in said.values()])
            self.bytes_read = sum(one["bytes"] for one in said.values()) + self._gap_bytes
            self.placer.place(batch, found)
        except ReshardError as error:
            raise self._with_progress(error) from error.__cause__
        self._done += len(batch.finished)

    def _check(self, batch: Batch, parts: list[Mapping[str, str]]) -> None:
        """Compare the digests of the tensors that are now read whole."""
        for told in parts:
            for name, text in told.items():
                self._values[name] = self._values.get(name, 0) + int(text, 16)
        bad = [name for name in batch.finished if not self._is_right(name)]
        if bad:
            self.circle.first_does(lambda: self._blame(bad[0]))

    def _check_crcs(self, batch: Batch, parts: list[list[Part]]) -> None:
        """Compare the CRC-32 of the records that are now read; the first rank reads their gaps."""
        for some in parts if self.circle.leads else ():
            self.records.crcs.add(some)
        ready = self.records.finished(batch.finished)
        if ready:
            storage, catalog = self.fetcher.storage, self.outline.catalog
            compare = lambda: self.records.compare(storage, catalog, ready)  # noqa: E731
            self._gap_bytes += self.circle.first_does(compare)

    def _is_right(self, name: str) -> bool:
        if name not in self.outline.digests:
            return True
        transfer = self.fetcher.wishes[name].transfer
        value = digest.combine([self._values.pop(name, 0)])
        found = digest.finish(value, transfer.shape, transfer.have)
        return found == self.outline.digests[name]

    def _blame(self, name: str) -> None:
        """Name the bytes that changed since the checksums were written."""
        storage, transfer = self.fetcher.storage, self.fetcher.wishes[name].transfer
        files = self.checksums.files if self.checksums else {}
        for number in sorted(set(transfer.source.files.tolist())):
            path = self.outline.catalog.files[number].path
            sums = files.get(path)
            for index in range(len(sums.ends)) if sums else ():
                assert sums is not None
                chunk = sums.chunk(index)
                found = sum_of(storage, path, chunk.start, chunk.stop)
                if found != chunk.sum:
                    where = f"tensor {quoted(name)}: {storage.where(path)}"
                    raise DamageError(damage(where, chunk, found))
        raise DamageError(
            f"tensor {quoted(name)} of {storage.root} has not the digest that its {SIDECAR} says: "
            "the files changed since they were written"
        )

    def _with_progress(self, error: ReshardError) -> ReshardError:
        """The same error, and how much of ``into`` is no longer what it was."""
        if not self._done:
            return error
        total = len(self.fetcher.wishes)
        made: ReshardError = type(error)(
            f"{error}; {self._done} of {total} tensors were already loaded: load again before use"
        )
        return made


def _report(run: _Run, fitted: Fit, entries: Entries, seconds: float) -> LoadReport:
    outline = run.outline
    return LoadReport(
        source=outline.catalog.root,
        format=outline.catalog.format,
        num_tensors=len(fitted.chosen),
        unique_bytes=sum(wish.num_bytes for wish in run.fetcher.wishes.values()),
        bytes_read=run.bytes_read,
        bytes_moved=run.placer.bytes_moved,
        seconds=seconds,
        checked=bool(outline.digests),
        num_ranks=len(run.circle.ranks),
        missing=fitted.missing,
        tied=fitted.tied,
        unexpected=outline.unwanted,
        left_alone=tuple(entries.others),
        notes=outline.catalog.notes,
    )
