"""``load``: a checkpoint of any format and cut into the tensors of a running job.

    checkpoint.load("ckpt", into=model.state_dict())

Each byte is read once in the whole job: the ranks share the reading, and what one has read for
another goes there as any other move does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.bytesize import format_bytes, parse_bytes
from reshard.checkpoint import digest, formats
from reshard.checkpoint.checksums import SIDECAR, Checksums, damage, sum_of
from reshard.checkpoint.checksums import load as load_checksums
from reshard.checkpoint.crcs import Crcs, Part, crcs_of
from reshard.checkpoint.given import as_mesh, as_rules
from reshard.checkpoint.live.circle import Circle
from reshard.checkpoint.live.crc_records import CrcRecords
from reshard.checkpoint.live.entries import Entries, Memory, entries_of
from reshard.checkpoint.live.fetching import Fetched, Fetcher
from reshard.checkpoint.live.fitting import Fit, Strict, check_strict, fit
from reshard.checkpoint.live.outline import Outline
from reshard.checkpoint.live.placing import Placer
from reshard.checkpoint.live.reports import LoadReport
from reshard.checkpoint.live.sharing import Batch, Limits, Wish, batches_of
from reshard.checkpoint.located import Located
from reshard.checkpoint.storage import Storage, open_storage
from reshard.checkpoint.transfers import Fed, Transfer, source_of
from reshard.dtypes import itemsize
from reshard.errors import DamageError, MemoryCapError, ReshardError, quoted
from reshard.planning.names import Feed
from reshard.sharded.content import Group
from reshard.spec import TensorSpec
from reshard.tensors.merging import merge_specs
from reshard.tensors.texts import specs_from_text, specs_to_text

if TYPE_CHECKING:
    from reshard.mesh import Mesh
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
    entries, want, memories = _wanted(circle, into, options)
    sums: list[Checksums | None] = []
    data = circle.first_does(lambda: _survey(path, want, rules, mesh, check, sums).to_data())
    outline = Outline.from_data(data)
    fitted = fit(want, outline, memories, strict, cast)
    chosen, outline = fitted.chosen, outline.joined(fitted.copies)
    wishes = {n: _wish(outline, spec, n, compare_replicas) for n, spec in chosen.items()}
    limits = Limits.of(_share_of(memory), len(circle.ranks))
    with _opened(circle, path) as storage:
        crcs = Crcs(outline.catalog.crcs)
        fetcher = Fetcher(
            storage, outline.catalog, wishes, circle.rank, outline.digests, crcs or None
        )
        placer = Placer(circle, wishes, chosen, entries.tensors, parse_bytes(memory) // 4)
        run = _Run(
            circle, fetcher, placer, outline, CrcRecords(crcs, wishes), sums[0] if sums else None
        )
        for batch in batches_of(wishes, circle.ranks, limits):
            run.do(batch)
    return _report(run, fitted, entries, time.monotonic() - began)


def _share_of(memory: int | str) -> int:
    total = parse_bytes(memory)
    if total < SMALLEST_MEMORY:
        raise MemoryCapError(
            f"{format_bytes(total)} of memory is too little to load a checkpoint: "
            f"give at least {format_bytes(SMALLEST_MEMORY)}"
        )
    return total // 2


def _wanted(
    circle: Circle, into: Mapping[Any, Any], options: Mapping[str, Any]
) -> tuple[Entries, dict[str, TensorSpec], dict[int, Memory]]:
    """This rank's entries, the specs that all ranks together have, and what is tied on each."""
    found = []

    def describe() -> list[Any]:
        _share_of(options["memory"])
        check_strict(options["strict"])
        found.append(entries_of(into))
        return [specs_to_text(found[0].specs()), options, found[0].memory().to_data()]

    said = circle.all_do(describe)
    circle.check_alike({rank: one[1] for rank, one in said.items()}, "load")
    specs = {rank: specs_from_text(one[0]) for rank, one in said.items()}
    memories = {rank: Memory.from_data(specs[rank], one[2]) for rank, one in said.items()}
    return found[0], merge_specs(specs), memories


def _survey(
    path: str | Path,
    want: Mapping[str, TensorSpec],
    rules: Rules | str | Path | None,
    mesh: Mesh | str | None,
    check: bool,
    sums: list[Checksums | None],
) -> Outline:
    """What the first rank finds in the checkpoint; its checksums stay with it."""
    with open_storage(path) as storage:
        sums.append(load_checksums(storage) if check else None)
        catalog = formats.read(storage, as_rules(rules, storage), as_mesh(mesh))
        crcs = crcs_of(storage, replace(catalog, objects={}), sums[0]) if check else ()
        return Outline.of(catalog, want.keys(), sums[0].digests if sums[0] else {}, crcs)


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


@contextmanager
def _opened(circle: Circle, path: str | Path) -> Iterator[Storage]:
    """The files, seen by every rank."""
    found: list[Storage] = []

    def open_here() -> None:
        found.append(open_storage(path))

    try:
        circle.all_do(open_here)
        yield found[0]
    finally:
        for storage in found:
            storage.close()


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
