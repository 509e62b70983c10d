"""``load``: a checkpoint of any format and layout into the tensors of a running job.

    checkpoint.load("ckpt", into=model.state_dict())

Each byte is read once in the whole job. A rank reads what only it needs directly into its tensors.
The ranks share the reading of the rest, and send each other what they have read with live moves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, read_catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import Checksums, load_checksums
from reshard.checkpoint.integrity.crcs import Crcs, Part, crcs_of
from reshard.checkpoint.live.direct_reads import ReadRequest, read_direct, split_requests
from reshard.checkpoint.live.entries import Entries, entries_of
from reshard.checkpoint.live.matching import Memory, Strict, catalog_to_data, match_tensors
from reshard.checkpoint.live.shared_reads import (
    Limits,
    Share,
    SharedReads,
    are_small,
    batches_of,
    copy_small,
    read_small,
)
from reshard.checkpoint.publish.journal import boot_id
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.checkpoint.transfer.windows import Source
from reshard.errors import CheckpointError, MemoryCapError, ReshardError, TensorError
from reshard.layout.layout import Layout
from reshard.live.inputs.memory import check_overlaps
from reshard.sharded.groups import Group
from reshard.tensors.agreement import Agreement
from reshard.tensors.exchanging import merge_specs, specs_from_texts, specs_to_text
from reshard.text import Report, count, format_bytes, log, name_list, parse_bytes, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules


SMALLEST_MEMORY = 4 << 20


@dataclass(frozen=True, slots=True)
class LoadReport(Report):
    """The figures of a load; bytes are those of all ranks together."""

    source: str
    format: str
    num_tensors: int
    unique_bytes: int
    """Bytes of the stored tensors that any rank needs, each once."""
    bytes_read: int
    bytes_moved: int
    """Bytes that were sent from the rank that read them to another."""
    seconds: float
    checked: bool
    """Whether there were digests, which were compared."""
    num_ranks: int = 1
    missing: tuple[str, ...] = ()
    """Names that the checkpoint lacks (``strict=False``): these tensors are unchanged."""
    tied: tuple[str, ...] = ()
    """Names whose memory was loaded under another name, to which they are tied."""
    unexpected: tuple[str, ...] = ()
    """Names that only the checkpoint has."""
    left_alone: tuple[str, ...] = ()
    """Entries of the state dict that are not tensors."""
    notes: tuple[str, ...] = ()

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed."""
        return self.bytes_read / self.unique_bytes if self.unique_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**Report.to_dict(self), "amplification": round(self.amplification, 4)}

    def __str__(self) -> str:
        read = f"{format_bytes(self.bytes_read)}, {self.amplification:.2f} x what is needed"
        lines = [
            f"loaded {count(self.num_tensors, 'tensor')} from {self.source}",
            f"  format   {self.format}{', checked' * self.checked}",
            f"  read     {read}, by {count(self.num_ranks, 'rank')}",
            f"  moved    {format_bytes(self.bytes_moved)} between ranks",
            f"  time     {self.seconds:.1f} s",
        ]
        for label, names in (
            ("missing", self.missing),
            ("tied", self.tied),
            ("unused", self.unexpected),
            ("no tensor", self.left_alone),
        ):
            lines += [f"  {label:<8} {name_list(names)}"] if names else []
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes[:5])])


def load(
    path: str | Path,
    into: Mapping[Any, Any],
    *,
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
    their rank. What other ranks of a tensor's mesh hold is not loaded. ``rules`` and ``mesh``
    describe rank files that do not record their layout. Every tensor of ``into`` must be in the
    checkpoint, under its own name or that of a tensor tied to it; ``strict=False`` leaves missing
    ones unchanged, but misspelt names are always errors. Names that only the checkpoint has are
    listed in the report, and are errors with ``strict="exact"``. Dtypes must be equal, unless
    ``cast=True``. Digests are compared if the checkpoint has any, unless ``check=False``; if it has
    none, replicas are read and must be equal, unless ``compare_replicas=False`` takes the first. No
    rank stages more than ``memory``, or waits for another longer than ``timeout`` seconds. Errors
    are raised on all ranks alike, and before any tensor is changed if they can be known by then.
    """
    path = str(path) if isinstance(path, Path) else path
    options = {"path": path, "strict": strict, "cast": cast, "check": check,
               "compare_replicas": compare_replicas, "memory": str(memory)}  # fmt: skip
    began = time.monotonic()
    agreement = Agreement(group, "loading a checkpoint", timeout, CheckpointError)

    def catalog_of(storage: Storage) -> Catalog:
        return read_catalog(storage, as_rules(rules, storage), as_mesh(mesh))

    with ExitStack() as stack:
        loading = _Loading(agreement, options, stack, into, catalog_of)
        loading.read()
    report = loading.report(time.monotonic() - began)
    log.info("load %s: %s", path, str(report).partition("\n")[0])
    return report


def _check_memory(entries: Entries, names: Collection[str], rank: int) -> None:
    """Refuse tensors that overlap themselves or one another: one load would undo the other."""
    parts = {
        name if len(local.parts) == 1 else f"{name}, part {number}": part
        for name, local in entries.local.items()
        for number, part in enumerate(local.parts)
        if name in names
    }
    check_overlaps(dict(enumerate(parts.values())), ({}, parts), rank)


class _Loading:
    def __init__(
        self,
        agreement: Agreement,
        options: Mapping[str, Any],
        stack: ExitStack,
        into: Mapping[Any, Any],
        catalog_of: Callable[[Storage], Catalog],
    ) -> None:
        """Match the tensors of all ranks with the checkpoint; the stack closes its files.

        CoverageError if a part of a tensor is not stored. Nothing is read yet. The ranks gather
        everything in one agreement: a load without an exchange has only one more, at its end.
        """
        self.agreement, self.options = agreement, options
        self.checksums: Checksums | None = None  # the first rank has them
        answers = agreement.run(lambda: self._describe(stack, into, catalog_of))
        texts, requests, shared, hosts, catalogs, overlaps = (
            {rank: answer[part] for rank, answer in answers.items()} for part in range(6)
        )
        agreement.check_gathered(requests)
        self.hosts = [*hosts.values()]
        described = specs_from_texts(texts)
        specs = merge_specs(described)
        memories = {rank: Memory(described[rank], some) for rank, some in shared.items()}
        data, strict, cast = catalogs[agreement.ranks[0]], options["strict"], options["cast"]
        self.match = match_tensors(specs, data, memories, strict, cast)
        if any(overlaps.values()):  # perhaps of tensors that are not loaded
            chosen = self.match.chosen
            agreement.run(lambda: _check_memory(self.entries, chosen, agreement.rank))
        self.requests = self._requests()
        catalog, digests = self.match.catalog, self.match.digests
        self.source = Source(self.storage, catalog, self.checksums, crcs=Crcs(catalog.crcs))
        self._records = {name: self._records_of(name) for name in self.requests if catalog.crcs}
        self._unread = Counter(which for some in self._records.values() for which in some)
        """The number of tensors with bytes in each CRC-32 record that are not read yet."""
        local, share = self.entries.local, parse_bytes(options["memory"]) // 4
        self.shared = SharedReads(self.source, self.requests, digests, agreement, local, share)
        self.bytes_read = 0
        self._values = Counter[str]()  # the digest values so far
        self._done = 0

    def _describe(
        self, stack: ExitStack, into: Mapping[Any, Any], catalog_of: Callable[[Storage], Catalog]
    ) -> list[Any]:
        """What this rank tells the others; the first rank also what the checkpoint holds."""
        if (total := parse_bytes(self.options["memory"])) < SMALLEST_MEMORY:
            raise MemoryCapError(
                f"{format_bytes(total)} of memory is too little to load a checkpoint: "
                f"give at least {format_bytes(SMALLEST_MEMORY)}"
            )
        strict = self.options["strict"]
        if strict not in (True, False, "exact"):
            raise CheckpointError(
                f'strict={quoted(strict)} is not known: use True, False or "exact"'
            )
        self.entries = entries_of(into)
        text = specs_to_text(self.entries.specs())
        self.storage = stack.enter_context(open_storage(self.options["path"]))
        data = None
        if self.agreement.is_first:  # it keeps the checksums
            check, storage = self.options["check"], self.storage
            self.checksums = sums = load_checksums(storage) if check else None
            catalog = catalog_of(storage)
            crcs = crcs_of(storage, replace(catalog, objects={}), sums) if check else ()
            digests = sums.digests if sums else {}
            data = catalog_to_data(replace(catalog, crcs=crcs), digests)
        has_overlaps = False
        try:
            _check_memory(self.entries, self.entries.tensors, self.agreement.rank)
        except TensorError:
            has_overlaps = True
        memory = self.entries.shared_memory()
        return [text, self.options, memory, boot_id(), data, has_overlaps]

    def _requests(self) -> dict[str, ReadRequest]:
        catalog, requests = self.match.catalog, {}

        @cache
        def in_group(layout: Layout) -> Layout:
            """A layout without ranks that do not load: their part of the tensor is not read."""
            others = frozenset(layout.ranks).difference(self.agreement.ranks)
            return layout.without(others) if others else layout

        for name, spec in self.match.chosen.items():
            has_digest = name in self.match.digests
            # Replicas that a digest would check better are not compared, and left out.
            is_compared = self.options["compare_replicas"] and not has_digest
            transfer = Transfer.of_read(catalog.tensors[name], spec.dtype, is_compared)
            is_whole = has_digest or bool(catalog.crcs)
            requests[name] = ReadRequest(transfer, in_group(spec.layout), is_whole)
        return requests

    def read(self) -> None:
        # Let autograd know of the changes: reads into memory and moves do not count as one.
        local, tensors = self.entries.local, self.entries.tensors
        names = tensors.keys() & {*self.match.chosen, *self.match.tied}
        changed = (one for name in names for one in (tensors[name], *local[name].parts))
        increment_version([one for one in changed if not one.is_inference()])
        maps = self.storage.is_local and len(set(self.hosts)) == 1
        own, shared = split_requests(self.requests, maps)
        small, large = (shared, {}) if are_small(shared) else ({}, shared)
        if own or small:
            self._read_own(own, small)
        ranks = self.agreement.ranks
        limits = Limits.of(parse_bytes(self.options["memory"]) // 2, len(ranks))
        for batch in batches_of(large, ranks, limits):
            self._read_batch(batch)

    def _read_own(self, own: Mapping[str, ReadRequest], small: Mapping[str, ReadRequest]) -> None:
        """Read what only this rank needs into its tensors, and small tensors for all ranks."""
        hosts = zip(self.agreement.ranks, self.hosts, strict=True)
        here = [rank for rank, host in hosts if host == boot_id()]
        place = here.index(self.agreement.rank), len(here)

        def read() -> list[Any]:
            read_direct(self.source, own, self.shared.views, place)
            text = read_small(small, self.source) if small and self.agreement.is_first else ""
            return [self.source.num_bytes, text]

        count = len(own) + len(small)
        with self._noting(f"up to {count} of {len(self.requests)} tensors were already changed"):
            answers = self.agreement.run(read)
        copy_small(small, answers[self.agreement.ranks[0]][1], self.shared.views)
        self.bytes_read = sum(one[0] for one in answers.values())
        self._done += count

    def _read_batch(self, batch: Sequence[Share]) -> None:
        """Read a batch, check it, and send it to the ranks that need it."""

        def read() -> list[Any]:
            values, crcs = self.shared.read(batch)
            parts = {name: f"{value:x}" for name, value in values.items()}
            return [self.source.num_bytes, parts, crcs]

        finished = [share.name for share in batch if share.is_last]
        done = f"{self._done} of {len(self.requests)} tensors were already loaded"
        with self._noting(done if self._done else ""):
            num_bytes, parts, crcs = zip(*self.agreement.run(read).values(), strict=True)
            self._check_digests(finished, parts)
            self.bytes_read = sum(num_bytes) + self._check_crcs(finished, crcs)
            self.shared.move(batch)
        self._done += len(finished)

    @contextmanager
    def _noting(self, done: str) -> Iterator[None]:
        """Add to an error what was done before it."""
        try:
            yield
        except ReshardError as error:
            if not done:
                raise
            raise type(error)(f"{error}; {done}: load again before use") from error.__cause__

    def _check_digests(self, names: Iterable[str], parts: Iterable[Mapping[str, str]]) -> None:
        """Compare the digests of tensors that are completely read now."""
        for one in parts:
            self._values.update({name: int(text, 16) for name, text in one.items()})
        for name in names:
            expected, transfer = self.match.digests.get(name), self.requests[name].transfer
            value = digest.combine([self._values.pop(name, 0)])
            now = digest.finish(value, transfer.shape, transfer.have)
            if expected is not None and now != expected:
                self.agreement.run_on_first(
                    partial(self.source.blame_digest, transfer, now, expected)
                )

    def _records_of(self, name: str) -> set[int]:
        """The CRC-32 records that have bytes of a tensor."""
        transfer, crcs = self.requests[name].transfer, self.source.crcs
        tables = filter(None, (transfer.source, transfer.replicas))
        pieces = (piece for table in tables for piece in table.pieces())
        spans = ((piece.file, *piece.span(transfer.have)) for piece in pieces)
        return {which for span in spans for which in crcs.touching(*span)}

    def _check_crcs(self, names: Iterable[str], parts: Iterable[list[Part]]) -> int:
        """Compare the CRC-32 records that are complete now; the bytes of gaps that this reads."""
        for some in parts if self.agreement.is_first else ():
            self.source.crcs.add(some)
        read = Counter(which for name in names for which in self._records.get(name, ()))
        self._unread.subtract(read)
        ready = sorted(which for which in read if not self._unread[which])

        def compare() -> int:
            before = self.source.num_bytes
            self.source.check_crcs(ready)
            return self.source.num_bytes - before

        return int(self.agreement.run_on_first(compare)) if ready else 0

    def report(self, seconds: float) -> LoadReport:
        catalog, match = self.match.catalog, self.match
        return LoadReport(
            source=catalog.root,
            format=catalog.format,
            num_tensors=len(match.chosen),
            unique_bytes=sum(request.num_bytes for request in self.requests.values()),
            bytes_read=self.bytes_read,
            bytes_moved=self.shared.bytes_moved,
            seconds=seconds,
            checked=bool(match.digests),
            num_ranks=len(self.agreement.ranks),
            missing=match.missing,
            tied=match.tied,
            unexpected=match.unwanted,
            left_alone=tuple(self.entries.others),
            notes=catalog.notes,
        )
