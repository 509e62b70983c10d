"""``verify``: whether a checkpoint is sound, or two hold equal tensors in any layouts.

One checkpoint is compared with its checksums, every byte of every file, and with its digests, every
tensor; no element may be missing, and replicas must be equal. Two checkpoints are compared by
digests, which are computed from the bytes of both and not taken from their checksums. Tensors whose
digests differ are then read side by side, to find the place. Of entries that are not tensors those
are compared that both have; a note names the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.catalog import Catalog, Crc, StoredTensor
from reshard.checkpoint.conversion.names import rename_tensors
from reshard.checkpoint.differences import compare_entries, difference
from reshard.checkpoint.formats.checks import Findings
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, survey_catalog
from reshard.checkpoint.integrity.checksums import (
    SIDECAR,
    Checksums,
    ChunkSum,
    damage,
    load_checksums,
)
from reshard.checkpoint.integrity.crcs import changed
from reshard.checkpoint.piece_table import tensors_at
from reshard.checkpoint.storage.local import Storage
from reshard.checkpoint.transfer.examination import Problem, attempt, digests_of, wrong_sizes
from reshard.checkpoint.transfer.packing import tiles
from reshard.checkpoint.transfer.windows import (
    Budget,
    Meter,
    Progress,
    Source,
    collector_paused,
    in_order,
)
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, DamageError, NamesError, ReshardError, UnsupportedError
from reshard.text import Report, count, format_bytes, listed, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules


FORMAT = 1
UNSUPPORTED = "unsupported"
MAX_PROBLEMS = 1000


@dataclass(frozen=True, slots=True)
class VerifyReport(Report):
    """The result of ``verify``; true if there is no problem."""

    checkpoints: tuple[str, ...]
    """The paths that were read, one or two."""
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors of the first, each element once."""
    checked_bytes: int
    """Bytes of files that were compared with checksums, in both checkpoints."""
    digest: str
    """One digest of all tensors of the first, equal for equal tensors."""
    digests: Mapping[str, str]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def is_unsupported(self) -> bool:
        """Whether all problems are parts of a kind that is not supported."""
        return not self.ok and all(problem.kind == UNSUPPORTED for problem in self.problems)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        is_one = len(self.checkpoints) == 1
        tensors = f"{self.num_tensors} tensor{'s' * (self.num_tensors != 1)}"
        size = f"{tensors}, {format_bytes(self.num_bytes)}"
        if self.ok:
            words = "sound" if is_one else "equal, bit by bit"
            lines = [f"{words}: {size}, digest {self.digest}"]
        else:
            words = "damaged" if is_one else "not equal"
            words = UNSUPPORTED if self.is_unsupported else words
            lines = [f"{words}: {count(len(self.problems), 'problem')} in {size}:"]
            lines += listed([problem.message for problem in self.problems])
        if self.checked_bytes:
            checked = format_bytes(self.checked_bytes)
            lines.append(f"{checked} of files were compared with their checksums")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        data = Report.to_dict(self)
        for problem in data["problems"]:
            problem["box"] = problem["box"] and [*problem["box"].values()]
        return {"verify": FORMAT, "ok": self.ok, **data}


def verify(
    a: str | Path,
    b: str | Path | None = None,
    *,
    memory: int | str = "256MiB",
    rules: Rules | str | None = None,
    mesh: Mesh | str | None = None,
    b_rules: Rules | str | None = None,
    b_mesh: Mesh | str | None = None,
    names: Names | None = None,
    drop: Sequence[str] = (),
    progress: Progress | None = None,
) -> VerifyReport:
    """Read a checkpoint in full and list its problems, or compare two checkpoints.

    ``rules`` and ``mesh`` describe rank files that do not record their layout. ``names`` and
    ``drop`` are those with which the second was converted from the first: the tensors of the first
    are compared under their new names.
    """
    if b is None and (names is not None or drop):
        raise NamesError("names and drop are about a conversion: give both checkpoints")
    if b is None and (b_rules is not None or b_mesh is not None):
        raise CheckpointError("b_rules and b_mesh are for a second checkpoint: name that one too")
    with collector_paused(), ExitStack() as stack:
        storages = [stack.enter_context(open_storage(root)) for root in (a, b) if root is not None]
        budget = Budget.for_reading(memory, *storages)
        left, *others = map(_Side, storages, (rules, b_rules), (mesh, b_mesh))
        left.rename(names or {}, drop)
        sides = [left, *others]
        meter = Meter(progress, sum(side.num_bytes for side in sides))
        for side in sides:
            side.examine(budget, meter)
        problems = [problem for side in sides for problem in side.problems]
        for right in others:
            problems += _differences(left, right, budget)
        if not others and left.source.checksums is None:
            known = " but the CRC-32 of torch.save: of tensors, not of other bytes"
            rest = known if left.source.crcs else ": a changed byte would not be detected"
            left.notes.append(f"there are no checksums{rest}")
    return VerifyReport(
        checkpoints=tuple(side.root for side in sides),
        num_tensors=len(left.source.catalog.tensors),
        num_bytes=left.num_bytes,
        checked_bytes=sum(side.checked_bytes for side in sides),
        digest=_digest_of_all(left.digests),
        digests=left.digests,
        problems=tuple(problems),
        notes=tuple(note for side in sides for note in side.notes),
    )


def _digest_of_all(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{digest} {name}\n" for name, digest in sorted(digests.items()))
    data = lines.encode("utf-8", "surrogatepass")  # a name in JSON may be anything
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Side:
    """One of the checkpoints: what could be read of it, and its problems."""

    def __init__(
        self, storage: Storage, rules: Rules | str | None, mesh: Mesh | str | None
    ) -> None:
        self.storage, self.root = storage, storage.root
        self.digests: dict[str, str] = {}
        """The digest of each tensor that could be read."""
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.checked_bytes = 0
        """Bytes of files that were compared with checksums."""
        checksums: Checksums | None = None
        try:
            checksums = load_checksums(storage)
        except (DamageError, UnsupportedError) as error:
            kind = "damage" if isinstance(error, DamageError) else UNSUPPORTED
            self._add(Problem(kind, str(error), file=SIDECAR))
        listed = storage.list() if checksums is not None else ()
        self.is_whole = any(file.path == SIDECAR for file in listed)
        """Whether checksums are of a folder that was opened, not of a single file of it."""
        self.is_known = True
        """Whether the catalog could be read completely."""
        catalog = self._survey(as_rules(rules, storage), as_mesh(mesh), checksums is not None)
        try:
            self.source = Source.of(storage, catalog, checksums)
        except DamageError as error:  # of an entry that is no tensor: the tensors are examined
            self._add(Problem("damage", str(error)))
            source = Source.of(storage, replace(catalog, objects={}), checksums)
            self.source = replace(source, catalog=catalog)

    def _survey(self, rules: Rules | None, mesh: Mesh | None, has_checksums: bool) -> Catalog:
        """Read the headers; what cannot be read becomes problems."""
        if rules is not None and mesh is not None:
            rules.check_mesh(mesh)  # a wrong argument is not damage
        try:
            catalog, findings = survey_catalog(self.storage, rules, mesh)
        except ReshardError as error:
            if not has_checksums:
                raise
            # The checksums show where a changed byte made a header invalid.
            catalog = Catalog(self.root, "unreadable", (), {})
            findings = Findings(damage=[str(error)])
        for line in findings.damage:
            self._add(Problem("unreadable", line))
        for line in findings.unsupported:
            self._add(Problem(UNSUPPORTED, line))
        self.is_known = not findings.any
        return catalog

    def _add(self, problem: Problem) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def rename(self, names: Names, drop: Sequence[str]) -> None:
        """Rename the tensors; recorded digests are those of the old tensors and are not used."""
        if not self.is_known or not (names or drop):
            return
        catalog, sums = self.source.catalog, self.source.checksums
        renamed, rest = rename_tensors(catalog, names, drop)
        if rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            self.notes.append(f"no name takes {rest[0]}{more} of {self.root}")
        self.source = replace(
            self.source,
            catalog=renamed,
            checksums=None if sums is None else replace(sums, digests={}),
        )

    @property
    def num_bytes(self) -> int:
        return self.source.catalog.num_bytes

    def examine(self, budget: Budget, meter: Callable[[int], None]) -> None:
        """Read every tensor once and every file in full, and add all problems."""
        damaged: list[tuple[str, ChunkSum, bytes]] = []
        self.source.checker.report = lambda *chunk: damaged.append(chunk)
        self.digests = digests_of(self.source, self._complete(), budget, meter, self._add)
        if self.source.checksums is not None:
            self._check_files(self.source.checksums, budget)
            self._check_digests(self.source.checksums, damaged)
        crcs, wrong = self.source.crcs, list[tuple[Crc, int]]()
        for which in range(len(crcs)):
            try:
                [(crc, now)] = crcs.values(self.source.unread, [which])
            except CheckpointError as error:
                self._add(Problem("unreadable", str(error)))
                continue
            self.checked_bytes += crc.size
            if crc.value != now:
                wrong.append((crc, now))
        del wrong[MAX_PROBLEMS:]
        texts = changed(self.source.catalog, wrong)
        for (crc, _), (message, names) in zip(wrong, texts, strict=True):
            where = self.source.name(crc.file), (crc.offset, crc.offset + crc.size)
            self._add(Problem("damage", message, names[0] if names else None, *where))

    def _complete(self) -> Iterator[StoredTensor]:
        """The tensors that are complete; the others become problems."""
        for tensor in self.source.catalog.tensors.values():
            try:
                # Before it is read, because this takes bounded time whatever the pieces are.
                holes = () if tiles(tensor.shape, tensor.pieces) else tensor.missing()
            except CheckpointError as error:
                self._add(Problem("unreadable", f"{self.root}: {error}", tensor.name))
                continue
            if not holes:
                yield tensor
                continue
            missing, total = sum(hole.size for hole in holes), prod(tensor.shape)
            message = (
                f"{self.root}: tensor {quoted(tensor.name)} of shape {tensor.shape}: no file "
                f"holds {holes[0]}, {missing} of its {total} elements are missing: is a file of "
                "the checkpoint missing?"
            )
            self._add(Problem("hole", message, tensor.name, box=holes[0]))

    def _check_files(self, checksums: Checksums, budget: Budget) -> None:
        """Compare the bytes of every file that were not read yet with its checksums."""
        right = dict(checksums.files)
        for path, size, message in wrong_sizes(self.storage, checksums):
            expected = right.pop(path).size
            if size is not None:
                where = min(size, expected), max(size, expected)
                self._add(Problem("damage", message, file=path, bytes=where))
            elif self.is_whole:
                self._add(Problem("absent", message, file=path))

        def work(path: str, _: None) -> int | CheckpointError:
            return attempt(self.source.checker.finish, self.storage, path)

        for path, result in in_order(work, right, budget.workers):
            if isinstance(result, CheckpointError):
                self._add(Problem("unreadable", str(result), file=path))
            self.checked_bytes += right[path].size

    def _check_digests(
        self, checksums: Checksums, damaged: list[tuple[str, ChunkSum, bytes]]
    ) -> None:
        """Changed chunks, tensors whose digest changed although no chunk did, missing tensors."""
        catalog, known = self.source.catalog, checksums.digests if self.is_whole else {}
        altered = {
            name: (known[name], self.digests[name])
            for name in catalog.tensors
            if name in known and name in self.digests and known[name] != self.digests[name]
        }
        chunks = sorted(damaged)[:MAX_PROBLEMS]
        numbers = {file.path: number for number, file in enumerate(catalog.files)}
        places = [(numbers.get(path, -1), one.start, one.stop) for path, one, _ in chunks]
        touched = tensors_at(catalog, places) if places else ()
        for (path, chunk, sum_now), names in zip(chunks, touched, strict=True):
            sure = [name for name in names if name in altered] or names
            where = ", ".join(map(quoted, sure[:3])) + " and more" * (len(sure) > 3)
            text = damage(f"{self.root}/{path}", chunk, sum_now) + f" (tensor {where})" * bool(sure)
            name = sure[0] if sure else None
            self._add(Problem("damage", text, name, path, (chunk.start, chunk.stop)))
        if not self.is_known:
            return
        blamed = {problem.tensor for problem in self.problems}
        for name, (was, now) in altered.items():
            if name not in blamed:
                words = f"has the digest {now} and was written with {was}"
                self._add(Problem("values", f"{self.root}: tensor {quoted(name)} {words}", name))
        for name in known:
            if name not in catalog.tensors:
                words = f"{self.root}: tensor {quoted(name)} was written and is in no file"
                self._add(Problem("absent", words, name))


def _differences(left: _Side, right: _Side, budget: Budget) -> Iterator[Problem]:
    """Tensors and entries that one checkpoint lacks, or whose values differ."""
    mine, theirs = left.source.catalog.tensors, right.source.catalog.tensors
    for here, there, tensors, others in ((left, right, mine, theirs), (right, left, theirs, mine)):
        for name in tensors:
            if name not in others and there.is_known:
                words = f"tensor {quoted(name)} is in {here.root} and not in {there.root}"
                yield Problem("absent", words, name)
    both = (name for name in mine if name in theirs)
    yield from filter(None, (_difference(left, right, name, budget) for name in both))
    if left.is_known and right.is_known:
        try:
            entries, notes = compare_entries(left.source, right.source)
        except CheckpointError as error:
            yield Problem("unreadable", str(error))
            return
        left.notes += notes
        for name, (one, two) in entries.items():
            words = f", which is no tensor, differs: {one} in {left.root}, {two} in {right.root}"
            if one is None or two is None:
                here, there = (left, right) if two is None else (right, left)
                words = f" is in {here.root} and not in {there.root}"
            yield Problem("object", f"entry {quoted(name)}{words}")


def _difference(left: _Side, right: _Side, name: str, budget: Budget) -> Problem | None:
    """How a tensor differs: in shape, dtype or elements, with the bytes of both."""
    mine, theirs = (side.source.catalog.tensors[name] for side in (left, right))
    for kind in ("shape", "dtype"):
        one, two = getattr(mine, kind), getattr(theirs, kind)
        if one != two:
            words = f"has {kind} {one} in {left.root} and {two} in {right.root}"
            return Problem(kind, f"tensor {quoted(name)} {words}", name)
    one, two = left.digests.get(name), right.digests.get(name)
    if one is None or two is None or one == two:
        return None  # what could not be read is a problem already
    apart = difference(left.source, right.source, name, budget)
    if apart is None:
        words = "differed when it was read first and not again: is another process writing to it?"
        return Problem("values", f"tensor {quoted(name)} {words}", name)
    (file, offset), (other, place) = apart.places
    message = (
        f"tensor {quoted(name)} differs in {apart.count} of {prod(mine.shape)} elements, all "
        f"within {apart.box}, the first at {apart.first}: {left.root}/{file} byte {offset}, "
        f"{right.root}/{other} byte {place}"
    )
    element = offset, offset + itemsize(mine.dtype)
    return Problem("values", message, name, file, element, apart.box)
