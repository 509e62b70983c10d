"""Matches the tensors of a job with those of a checkpoint: names, shapes, dtypes, ties.

The first rank reads the headers of the checkpoint and sends the others a summary as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from reshard.checkpoint.catalog import Catalog, Crc, StoredPiece, StoredTensor
from reshard.checkpoint.integrity.crcs import Crcs
from reshard.checkpoint.live.entries import Memory
from reshard.checkpoint.storage import StoredFile
from reshard.dtypes import check_cast
from reshard.errors import CheckpointError, DisagreementError, NamesError
from reshard.layout.box import Box
from reshard.layout.spec import TensorSpec
from reshard.text import and_more, quoted

__all__ = ["CatalogSummary", "Match", "Strict", "check_strict", "match_tensors"]


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    """The part of a catalog that a load needs."""

    catalog: Catalog
    unwanted: tuple[str, ...] = ()
    """Names of tensors that are not loaded."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digests of tensors in the checksums of the checkpoint."""

    def about(self, names: Collection[str]) -> CatalogSummary:
        """The summary of these tensors only."""
        catalog = self.catalog
        wanted = {name: one for name, one in catalog.tensors.items() if name in names}
        part = Catalog(
            catalog.root,
            catalog.format,
            catalog.files,
            wanted,
            crcs=tuple(_touched(wanted, catalog.crcs)),
            notes=catalog.notes,
        )
        known = {name: self.digests[name] for name in wanted if name in self.digests}
        return CatalogSummary(part, tuple(sorted(catalog.tensors.keys() - wanted.keys())), known)

    def joined(self, copies: Mapping[str, Sequence[str]]) -> CatalogSummary:
        """The summary with the pieces of the copies of tensors added to them, as replicas."""
        tensors = dict(self.catalog.tensors)
        for name, others in copies.items():
            pieces = (piece for one in (name, *others) for piece in tensors[one].pieces)
            tensors[name] = replace(tensors[name], pieces=tuple(dict.fromkeys(pieces)))
        return replace(self, catalog=replace(self.catalog, tensors=tensors))

    def to_data(self) -> dict[str, Any]:
        """The summary as JSON data."""
        return {
            "root": self.catalog.root,
            "format": self.catalog.format,
            "files": [[file.path, file.size] for file in self.catalog.files],
            "tensors": [_tensor_data(tensor) for tensor in self.catalog.tensors.values()],
            "notes": list(self.catalog.notes),
            "digests": dict(self.digests),
            "crcs": [list(crc) for crc in self.catalog.crcs],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CatalogSummary:
        """Read what ``to_data`` wrote."""
        files = tuple(StoredFile(path, size) for path, size in data["files"])
        tensors = {one[0]: _tensor(*one) for one in data["tensors"]}
        notes = tuple(data["notes"])
        crcs = tuple(Crc(*one) for one in data["crcs"])
        catalog = Catalog(data["root"], data["format"], files, tensors, crcs=crcs, notes=notes)
        return cls(catalog, digests=data["digests"])


def _touched(tensors: Mapping[str, StoredTensor], crcs: Collection[Crc]) -> Iterable[Crc]:
    """The CRC-32 records with bytes of these tensors."""
    if not crcs:
        return ()
    known = Crcs(crcs)
    spans = ((p.file, *p.span(t.dtype)) for t in tensors.values() for p in t.pieces)
    return known.chosen({which for span in spans for which in known.touching(*span)})


def _tensor_data(tensor: StoredTensor) -> list[Any]:
    rows = [[p.box.start, p.box.stop, p.file, p.offset, p.strides] for p in tensor.pieces]
    return [tensor.name, tensor.shape, tensor.dtype, rows]


def _tensor(name: str, shape: list[int], dtype: str, rows: Iterable[list[Any]]) -> StoredTensor:
    pieces = [
        StoredPiece(Box(tuple(start), tuple(stop)), file, offset, tuple(strides))
        for start, stop, file, offset, strides in rows
    ]
    return StoredTensor(name, tuple(shape), dtype, tuple(pieces))


Strict = bool | Literal["exact"]

MOST_NAMED = 5
MOST_COMPARED = 10_000
"""The most names that are compared to find the nearest; each takes 20 microseconds."""
LEAST_LETTERS = 4
"""In parts of a name with fewer letters, one changed letter makes another name, not a typo."""

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Match:
    """What is loaded from a checkpoint into the tensors of a job."""

    chosen: Mapping[str, TensorSpec]
    missing: tuple[str, ...]
    """Names that the checkpoint lacks and that are not tied to one that it has."""
    tied: tuple[str, ...]
    """Names whose memory is filled under another name."""
    copies: Mapping[str, Sequence[str]]
    """The tied names that the checkpoint has too, by the name that is loaded: they share memory in
    the job, and must be equal in the checkpoint.
    """


def check_strict(strict: object) -> None:
    """Refuse unknown values of ``strict``."""
    if strict not in (True, False, "exact"):
        raise CheckpointError(f'strict={quoted(strict)} is not known: use True, False or "exact"')


def match_tensors(
    want: Mapping[str, TensorSpec],
    summary: CatalogSummary,
    memories: Mapping[int, Memory],
    strict: Strict,
    cast: bool,
) -> Match:
    """What is loaded; names, shapes and dtypes that do not match raise errors."""
    stored = summary.catalog.tensors
    chosen = {name: spec for name, spec in want.items() if name in stored}
    absent = [name for name in want if name not in stored]
    tied = tuple(name for name in absent if _is_tied(name, chosen, memories))
    missing = [name for name in absent if name not in set(tied)]
    root, unwanted = summary.catalog.root, summary.unwanted
    misspelt = dict(_misspelt(missing, unwanted))
    if missing and (strict or misspelt):
        raise _lacking(root, [*misspelt] if not strict else missing, misspelt, unwanted)
    if strict == "exact" and unwanted:
        names = and_more([*map(quoted, unwanted)], MOST_NAMED)
        raise NamesError(
            f"{root} holds {names}, which the state dict lacks: strict=True loads without"
        )
    for name, spec in chosen.items():
        _check_one(name, spec, summary, cast)
    copies = _copies(chosen, memories)
    for name, others in copies.items():
        for other in others:
            _check_same(name, other, summary)
            del chosen[other]
    tied = (*tied, *(other for others in copies.values() for other in others))
    return Match(chosen, tuple(sorted(missing)), tied, copies)


def _is_tied(name: str, chosen: Mapping[str, TensorSpec], memories: Mapping[int, Memory]) -> bool:
    """Whether all of a tensor's memory is filled under another name, on every rank that has it."""
    others: set[str] | None = None
    for memory in memories.values():
        if name in memory.names and name not in memory.empty:
            same = memory.other_names(name)
            others = same if others is None else others & same
    return bool(others and others & chosen.keys())


def _copies(
    chosen: Mapping[str, TensorSpec], memories: Mapping[int, Memory]
) -> dict[str, list[str]]:
    """Names that share memory, by the first of them; all ranks must agree."""
    copies: dict[str, list[str]] = {}
    groups = dict.fromkeys(group for memory in memories.values() for group in memory.groups)
    for group in groups:
        first, *others = sorted(group & chosen.keys()) or [""]
        for other in others:
            apart = [r for r, memory in memories.items() if not memory.has_as_one(first, other)]
            if apart:
                raise DisagreementError(
                    f"{quoted(first)} and {quoted(other)} are one memory on some ranks and two on "
                    f"rank {apart[0]}: tie them on all ranks, or on none"
                )
            if other not in copies.setdefault(first, []):
                copies[first].append(other)
    return {first: others for first, others in copies.items() if others}


def _check_same(one: str, two: str, summary: CatalogSummary) -> None:
    """Refuse tied tensors that are known to differ; others are compared when they are read."""
    dtypes = [summary.catalog.tensors[name].dtype for name in (one, two)]
    digests = [summary.digests.get(name) for name in (one, two)]
    if digests[0] != digests[1] or dtypes[0] != dtypes[1]:
        raise CheckpointError(
            f"tensors {quoted(one)} and {quoted(two)} are one memory in the state dict and differ "
            f"in {summary.catalog.root}: untie them, or leave one of them out"
        )


def _misspelt(missing: Sequence[str], unwanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names that the checkpoint lacks, each with an unused name that differs by one typo."""
    by_digits: dict[tuple[str, ...], list[str]] = {}
    for name in unwanted if missing else ():
        by_digits.setdefault(tuple(_DIGITS.findall(name)), []).append(name)
    for name in missing:
        alike = by_digits.get(tuple(_DIGITS.findall(name)), ())
        near = next((other for other in alike if _is_typo(name, other)), None)
        if near is not None:
            yield name, near


def _is_typo(one: str, two: str) -> bool:
    """Whether names differ by one letter added, removed or changed, or by two swapped letters.

    >>> _is_typo("lm_head.weight", "lm_haed.weight"), _is_typo("a.q.weight", "a.k.weight")
    (True, False)
    """
    if abs(len(one) - len(two)) > 1:
        return False
    first = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if first is None:
        first = min(len(one), len(two))
    rest, other = one[first:], two[first:]
    swapped = rest[:2] == other[1::-1] and rest[2:] == other[2:] and len(rest) > 1
    if not (rest[1:] == other[1:] or rest[1:] == other or rest == other[1:] or swapped):
        return False
    start, stop = one.rfind(".", 0, first) + 1, one.find(".", first)
    return len(one[start : stop if stop >= 0 else None]) >= LEAST_LETTERS


def _lacking(
    root: str, missing: Sequence[str], misspelt: Mapping[str, str], unwanted: Sequence[str]
) -> NamesError:
    near = {name: misspelt.get(name) or _nearest(name, unwanted) for name in missing[:MOST_NAMED]}
    hints = [f"{quoted(name)} ({quoted(other)} is near)" if other else quoted(name)
             for name, other in near.items()]  # fmt: skip
    advice = "rename it in the state dict" if misspelt else "strict=False loads the rest"
    hints += missing[MOST_NAMED:]  # only counted
    return NamesError(f"{root} lacks {and_more(hints, MOST_NAMED)}: {advice}")


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The most similar name with the same numbers, among the first 10,000."""
    digits = _DIGITS.findall(name)
    alike = [other for other in names if _DIGITS.findall(other) == digits]
    found = get_close_matches(name, alike[:MOST_COMPARED], n=1)
    return found[0] if found else None


def _check_one(name: str, spec: TensorSpec, summary: CatalogSummary, cast: bool) -> None:
    have, root = summary.catalog.tensors[name], summary.catalog.root
    if have.shape != spec.shape:
        raise CheckpointError(
            f"tensor {quoted(name)} has shape {have.shape} in {root} and {spec.shape} in the state "
            "dict: is it of another model, or a shard? A plain tensor counts as the whole tensor; "
            "give shards as DTensors or ShardedTensors"
        )
    if have.dtype != spec.dtype and not cast:
        raise CheckpointError(
            f"tensor {quoted(name)} is {have.dtype} in {root} and {spec.dtype} in the state dict: "
            "cast=True rounds while loading"
        )
    check_cast(have.dtype, spec.dtype, f"tensor {quoted(name)} of {root}")
