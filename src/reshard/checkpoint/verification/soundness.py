"""``verify``: whether a checkpoint is sound, or two hold equal tensors in any layouts.

One checkpoint is compared with its checksums, every byte of every file, and with its digests, every
tensor; no element may be missing, and replicas must be equal. Two checkpoints are compared by
digests, which are computed from the bytes of both and not taken from their checksums. Tensors whose
digests differ are then read side by side, to find the place. Entries that are not tensors are
compared byte by byte, if both have any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.catalog import Catalog, Crc, StoredTensor
from reshard.checkpoint.conversion.names import Outline, left_over, rename_tensors
from reshard.checkpoint.formats.checks import Findings
from reshard.checkpoint.formats.reader import as_mesh, as_rules, open_storage, survey_catalog
from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums, load_checksums
from reshard.checkpoint.integrity.crcs import Crcs, changed, tensors_of
from reshard.checkpoint.storage import Storage
from reshard.checkpoint.transfer.source import Source, StoredReader
from reshard.checkpoint.transfer.windows import Budget, Meter, collector_paused
from reshard.checkpoint.verification.differences import Difference, difference, differing_objects
from reshard.checkpoint.verification.examination import Examination, Problem, examine
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, DamageError, NamesError, ReshardError, UnsupportedError
from reshard.text import count, format_bytes, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules

__all__ = ["VerifyReport", "verify"]

FORMAT = 1
UNSUPPORTED = "unsupported"
SHOWN = 20
"""Problems that are printed one by one."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
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

    def _repr_html_(self) -> str:
        """The report as a cell of a notebook."""
        from reshard.show.page.notebook import text_cell

        return text_cell(str(self))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        size = f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)}"
        if self.ok:
            words = "sound" if len(self.checkpoints) == 1 else "equal, bit by bit"
            yield f"{words}: {size}, digest {self.digest}"
        else:
            words = "damaged" if len(self.checkpoints) == 1 else "not equal"
            words = UNSUPPORTED if self.is_unsupported else words
            yield f"{words}: {count(len(self.problems), 'problem')} in {size}:"
            yield from (f"  {problem.message}" for problem in self.problems[:SHOWN])
            if len(self.problems) > SHOWN:
                yield f"  and {len(self.problems) - SHOWN} more; --json lists all"
        if self.checked_bytes:
            yield f"{format_bytes(self.checked_bytes)} of files were compared with their checksums"
        yield from self.notes

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "verify": FORMAT,
            "ok": self.ok,
            "checkpoints": list(self.checkpoints),
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "checked_bytes": self.checked_bytes,
            "digest": self.digest,
            "digests": dict(self.digests),
            "problems": [_problem(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def _problem(problem: Problem) -> dict[str, Any]:
    box = problem.box
    return {
        "kind": problem.kind,
        "message": problem.message,
        "tensor": problem.tensor,
        "file": problem.file,
        "bytes": None if problem.bytes is None else list(problem.bytes),
        "box": None if box is None else [list(box.start), list(box.stop)],
    }


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
    with collector_paused(), open_storage(a) as storage:
        budget = Budget.for_reading(memory, storage)
        left = _Side(storage, rules, mesh)
        if b is None:
            left.examine(budget, Meter(progress, left.num_bytes))
            _note_unchecked(left)
            return _report([left], left.found.problems)
        with open_storage(b) as other:
            budget = Budget.for_reading(memory, storage, other)
            right = _Side(other, b_rules, b_mesh)
            left.rename(names or {}, drop)
            meter = Meter(progress, left.num_bytes + right.num_bytes)
            left.examine(budget, meter)
            right.examine(budget, meter)
            problems = [*left.found.problems, *right.found.problems]
            problems += _differences(left, right, budget)
            return _report([left, right], problems)


def _note_unchecked(side: _Side) -> None:
    """Note that there are no checksums to compare with."""
    if side.source.checksums is not None:
        return
    side.found.notes.append(
        "there are no checksums but the CRC-32 of torch.save: of tensors, not of other bytes"
        if side.source.crcs
        else "there are no checksums: a changed byte would not be detected"
    )


class _Side:
    """One of the checkpoints: what could be read of it, and its problems."""

    def __init__(
        self, storage: Storage, rules: Rules | str | None, mesh: Mesh | str | None
    ) -> None:
        self.storage = storage
        self.found = Examination()
        checksums: Checksums | None = None
        try:
            checksums = load_checksums(storage)
        except DamageError as error:
            self.found.add(Problem("damage", str(error), file=SIDECAR))
        except UnsupportedError as error:
            self.found.add(Problem(UNSUPPORTED, str(error), file=SIDECAR))
        catalog, findings = _survey(storage, rules, mesh, is_checked=checksums is not None)
        for line in findings.damage:
            self.found.add(Problem("unreadable", line))
        for line in findings.unsupported:
            self.found.add(Problem(UNSUPPORTED, line))
        self.is_known = not findings.any
        self.source = Source.of(storage, catalog, checksums)

    def rename(self, names: Names, drop: Sequence[str]) -> None:
        """Rename the tensors; recorded digests are those of the old tensors and are not used."""
        if not self.is_known or not (names or drop):
            return
        catalog, sums = self.source.catalog, self.source.checksums
        outlines = {name: Outline(one.shape, one.dtype) for name, one in catalog.tensors.items()}
        rest = left_over(outlines, names, drop)
        if rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            self.found.notes.append(f"no name takes {rest[0]}{more} of {self.storage.root}")
        self.source = replace(
            self.source,
            catalog=rename_tensors(catalog, names, drop),
            checksums=None if sums is None else replace(sums, digests={}),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors to be read."""
        return self.source.catalog.num_bytes

    def examine(self, budget: Budget, meter: Callable[[int], None]) -> None:
        """Read all of the checkpoint."""
        examine(self.source, budget, meter, self.found, is_known=self.is_known)
        for crc, now in self._values():
            self.found.checked_bytes += crc.size
            if crc.value != now:
                message = changed(self.source.catalog, crc, now)
                names = tensors_of(self.source.catalog, crc)
                where = self.source.name(crc.file), (crc.offset, crc.offset + crc.size)
                self.found.add(Problem("damage", message, names[0] if names else None, *where))

    def _values(self) -> Iterator[tuple[Crc, int]]:
        """All CRC-32 records with their present value; what cannot be read is a problem."""
        crcs = self.source.crcs or Crcs(())
        for which in range(len(crcs)):
            try:
                yield from crcs.values(self.source.unread, [which])
            except CheckpointError as error:
                self.found.add(Problem("unreadable", str(error)))

    def reader(self, tensor: StoredTensor) -> StoredReader:
        """A reader of one tensor."""
        return StoredReader(self.source, tensor)


def _survey(
    storage: Storage, rules: Rules | str | None, mesh: Mesh | str | None, is_checked: bool
) -> tuple[Catalog, Findings]:
    """What can be read of a checkpoint, and the problems of its headers."""
    given, over = as_rules(rules, storage), as_mesh(mesh)
    if given is not None and over is not None:
        given.check_mesh(over)  # a wrong argument is not damage
    try:
        with collector_paused():
            return survey_catalog(storage, given, over)
    except ReshardError as error:
        if not is_checked:
            raise
        # The checksums show where a changed byte made a header invalid.
        return Catalog(storage.root, "unreadable", (), {}), Findings(damage=[str(error)])


def _differences(left: _Side, right: _Side, budget: Budget) -> Iterator[Problem]:
    """Tensors and entries that one checkpoint lacks, or whose values differ."""
    mine, theirs = left.source.catalog.tensors, right.source.catalog.tensors
    for here, there, tensors, others in ((left, right, mine, theirs), (right, left, theirs, mine)):
        for name in tensors:
            if name not in others and there.is_known:
                words = f"tensor {quoted(name)} is in {here.storage.root} and not in "
                yield Problem("absent", words + there.storage.root, name)
    for name, tensor in mine.items():
        if name in theirs:
            yield from _difference(left, right, tensor, theirs[name], budget)
    if left.is_known and right.is_known:
        for name in differing_objects(left.source, right.source):
            yield _object(left, right, name)


def _object(left: _Side, right: _Side, name: str) -> Problem:
    """An entry that is not a tensor and differs, or that one side lacks."""
    for here, there in ((left, right), (right, left)):
        if name not in there.source.catalog.objects:
            where = f"is in {here.storage.root} and not in {there.storage.root}"
            return Problem("object", f"entry {quoted(name)} {where}")
    sizes = [side.source.catalog.objects[name].size for side in (left, right)]
    where = f"{sizes[0]} bytes in {left.storage.root}, {sizes[1]} in {right.storage.root}"
    return Problem("object", f"entry {quoted(name)}, which is no tensor, differs: {where}")


def _difference(
    left: _Side, right: _Side, mine: StoredTensor, theirs: StoredTensor, budget: Budget
) -> Iterator[Problem]:
    name = mine.name
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        kind = "shape" if mine.shape != theirs.shape else "dtype"
        ours, others = getattr(mine, kind), getattr(theirs, kind)
        where = f"in {left.storage.root} and {others} in {right.storage.root}"
        yield Problem(kind, f"tensor {quoted(name)} has {kind} {ours} {where}", name)
        return
    one, two = left.found.digests.get(name), right.found.digests.get(name)
    if one is None or two is None or one == two:
        return  # what could not be read is a problem already
    readers = left.reader(mine), right.reader(theirs)
    found = difference(*readers, budget)
    if found is None:
        words = "differed when it was read first and not again: is another process writing to it?"
        yield Problem("values", f"tensor {quoted(name)} {words}", name)
    else:
        yield _located(*readers, found)


def _located(left: StoredReader, right: StoredReader, found: Difference) -> Problem:
    """Where two tensors differ: elements, and bytes of both sides."""
    tensor = left.tensor
    places = [reader.place(found.first) for reader in (left, right)]
    files = [
        f"{reader.source.storage.root}/{file} byte {offset}"
        for reader, (file, offset) in zip((left, right), places, strict=True)
    ]
    total = tensor.num_bytes // itemsize(tensor.dtype)
    message = (
        f"tensor {quoted(tensor.name)} differs in {found.count} of {total} elements, all within "
        f"{found.box}, the first at {found.first}: {files[0]}, {files[1]}"
    )
    file, offset = places[0]
    where = (offset, offset + itemsize(tensor.dtype))
    return Problem("values", message, tensor.name, file, where, found.box)


def _report(sides: list[_Side], problems: list[Problem]) -> VerifyReport:
    first = sides[0]
    return VerifyReport(
        checkpoints=tuple(side.storage.root for side in sides),
        num_tensors=len(first.source.catalog.tensors),
        num_bytes=first.num_bytes,
        checked_bytes=sum(side.found.checked_bytes for side in sides),
        digest=_digest_of_all(first.found.digests),
        digests=first.found.digests,
        problems=tuple(problems),
        notes=tuple(note for side in sides for note in side.found.notes),
    )


def _digest_of_all(digests: Mapping[str, str]) -> str:
    text = "".join(f"{digest} {name}\n" for name, digest in sorted(digests.items()))
    data = text.encode("utf-8", "surrogatepass")  # a name in JSON may be anything
    return hashlib.blake2b(data, digest_size=16).hexdigest()
