"""Matches the tensors of a job with those of a checkpoint, in name, shape, dtype and ties.

The first rank reads the headers of the checkpoint, and sends a summary of them as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

from reshard.checkpoint.catalog import Catalog, Crc, StoredPiece, StoredTensor
from reshard.checkpoint.integrity.crcs import Crcs
from reshard.checkpoint.storage.local import StoredFile
from reshard.dtypes import check_cast
from reshard.errors import CheckpointError, DisagreementError, NamesError
from reshard.layout.box import Box
from reshard.layout.spec import TensorSpec
from reshard.text import and_more, quoted

Strict = bool | Literal["exact"]

MOST_NAMED = 5
MOST_COMPARED = 10_000
"""The most names that are compared to find the nearest; each takes 20 microseconds."""
LEAST_LETTERS = 4
"""In parts of a name with fewer letters, one changed letter makes another name, not a typo."""

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Memory:
    """Which tensors of a rank share memory, as tied parameters do."""

    names: Collection[str]
    shared: Mapping[str, str | None]
    """Tensors with all of the memory of an earlier one; None for those without an element."""

    def first(self, name: str) -> str | None:
        """The first tensor with the memory of this one; None if the rank has no element of it."""
        return self.shared.get(name, name if name in self.names else None)

    @cached_property
    def groups(self) -> dict[str, set[str]]:
        """The tensors that share memory, by the first of them."""
        groups: dict[str, set[str]] = {}
        for name, first in self.shared.items():
            if first is not None:
                groups.setdefault(first, {first}).add(name)
        return groups


def catalog_to_data(catalog: Catalog, digests: Mapping[str, str]) -> dict[str, Any]:
    """What a load needs of a catalog, and the digests of tensors, as JSON."""
    tensors = []
    for one in catalog.tensors.values():
        rows = [[p.box.start, p.box.stop, p.file, p.offset, p.strides] for p in one.pieces]
        tensors.append([one.name, one.shape, one.dtype, rows])
    return {
        "root": catalog.root,
        "format": catalog.format,
        "files": [[file.path, file.size] for file in catalog.files],
        "tensors": tensors,
        "notes": list(catalog.notes),
        "digests": dict(digests),
        "crcs": [list(crc) for crc in catalog.crcs],
    }


def _catalog_from_data(data: Mapping[str, Any], names: Collection[str]) -> Catalog:
    """The catalog of the tensors of these names, with the CRC-32 records of their bytes."""
    files = tuple(StoredFile(path, size) for path, size in data["files"])
    tensors = {}
    for name, shape, dtype, rows in data["tensors"]:
        if name in names:
            pieces = (
                StoredPiece(Box(tuple(start), tuple(stop)), file, offset, tuple(strides))
                for start, stop, file, offset, strides in rows
            )
            tensors[name] = StoredTensor(name, tuple(shape), dtype, tuple(pieces))
    records = Crcs(Crc(*one) for one in data["crcs"])
    with_crcs = tensors.values() if data["crcs"] else ()
    spans = ((p.file, *p.span(t.dtype)) for t in with_crcs for p in t.pieces)
    crcs = records.chosen({which for span in spans for which in records.touching(*span)})
    root, notes = data["root"], tuple(data["notes"])
    return Catalog(root, data["format"], files, tensors, crcs=tuple(crcs), notes=notes)


@dataclass(frozen=True, slots=True)
class Match:
    """What is loaded from a checkpoint into the tensors of a job."""

    catalog: Catalog
    """With the tensors that are loaded. Tied tensors that the checkpoint has twice must be equal:
    the pieces of the one are replicas of those of the other."""
    digests: Mapping[str, str]
    chosen: Mapping[str, TensorSpec]
    missing: tuple[str, ...]
    tied: tuple[str, ...]
    """Names whose memory is filled under another name."""
    unwanted: tuple[str, ...]


def match_tensors(
    want: Mapping[str, TensorSpec],
    data: Mapping[str, Any],
    memories: Mapping[int, Memory],
    strict: Strict,
    cast: bool,
) -> Match:
    """What is loaded of the catalog that `catalog_to_data` wrote.

    Names, shapes and dtypes that do not match raise errors.
    """
    catalog, digests = _catalog_from_data(data, want), data["digests"]
    stored, root = dict(catalog.tensors), catalog.root
    unwanted = sorted(name for name, *_ in data["tensors"] if name not in want)
    chosen = {name: spec for name, spec in want.items() if name in stored}
    absent = [name for name in want if name not in stored]
    tied = {name for name in absent if _is_tied(name, chosen, memories)}
    missing = [name for name in absent if name not in tied]
    _check_missing(root, missing, unwanted, strict)
    if strict == "exact" and unwanted:
        names = and_more([*map(quoted, unwanted)], MOST_NAMED)
        raise NamesError(
            f"{root} holds {names}, which the state dict lacks: strict=True loads without"
        )
    for name, spec in chosen.items():
        _check_one(stored[name], spec, root, cast)
    for name, others in _copies(chosen, memories).items():
        copies = [stored[other] for other in others]
        stored[name] = _with_copies(stored[name], copies, digests, root)
        tied.update(others)
    return Match(
        replace(catalog, tensors=stored),
        {name: digest for name, digest in digests.items() if name in stored},
        {name: spec for name, spec in chosen.items() if name not in tied},
        missing=tuple(sorted(missing)),
        tied=tuple(sorted(tied)),
        unwanted=tuple(unwanted),
    )


def _is_tied(name: str, chosen: Mapping[str, TensorSpec], memories: Mapping[int, Memory]) -> bool:
    """Whether all of a tensor's memory is filled under another name, on every rank that has it."""
    groups = [
        memory.groups.get(first, set[str]())
        for memory in memories.values()
        if (first := memory.first(name)) is not None
    ]
    return bool(groups and set.intersection(*groups) & chosen.keys())


def _copies(
    chosen: Mapping[str, TensorSpec], memories: Mapping[int, Memory]
) -> dict[str, list[str]]:
    """Names that share memory, by the first of them; all ranks must agree."""
    copies: dict[str, dict[str, None]] = {}
    groups = (frozenset(one) for memory in memories.values() for one in memory.groups.values())
    for group in dict.fromkeys(groups):
        name, *others = sorted(group & chosen.keys()) or [""]
        for other in others:
            apart = [r for r, one in memories.items() if one.first(name) != one.first(other)]
            if apart:
                raise DisagreementError(
                    f"{quoted(name)} and {quoted(other)} are one memory on some ranks and two on "
                    f"rank {apart[0]}: tie them on all ranks, or on none"
                )
            copies.setdefault(name, {})[other] = None
    return {name: [*others] for name, others in copies.items()}


def _with_copies(
    tensor: StoredTensor, copies: Sequence[StoredTensor], digests: Mapping[str, str], root: str
) -> StoredTensor:
    """A tensor with the pieces of those tied to it, which are compared as replicas when read."""
    name, digest = tensor.name, digests.get(tensor.name)
    for other in copies:
        if other.dtype != tensor.dtype or digests.get(other.name) != digest:
            raise CheckpointError(
                f"tensors {quoted(name)} and {quoted(other.name)} are one memory in the state dict "
                f"and differ in {root}: untie them, or leave one of them out"
            )
    pieces = dict.fromkeys(piece for one in (tensor, *copies) for piece in one.pieces)
    return replace(tensor, pieces=tuple(pieces))


def _check_missing(
    root: str, missing: Sequence[str], unwanted: Sequence[str], strict: Strict
) -> None:
    """Refuse names that the checkpoint lacks; if not strict, only those that look misspelt.

    The error shows the nearest name that is not used and has the same numbers.
    """
    by_digits: dict[tuple[str, ...], list[str]] = {}
    for name in unwanted if missing else ():
        by_digits.setdefault(tuple(_DIGITS.findall(name)), []).append(name)
    alike = {name: by_digits.get(tuple(_DIGITS.findall(name)), []) for name in missing}
    typos = {name: [one for one in alike[name] if _is_typo(name, one)] for name in missing}
    lacking = [name for name in missing if strict or typos[name]]
    if not lacking:
        return
    hints = []
    for name in lacking[:MOST_NAMED]:
        near = typos[name] or get_close_matches(name, alike[name][:MOST_COMPARED], n=1)
        hints.append(f"{quoted(name)} ({quoted(near[0])} is near)" if near else quoted(name))
    advice = "strict=False loads the rest"
    if any(typos.values()):
        advice = "rename it in the state dict"
    hints += lacking[MOST_NAMED:]  # only counted
    raise NamesError(f"{root} lacks {and_more(hints, MOST_NAMED)}: {advice}")


def _is_typo(one: str, two: str) -> bool:
    """Whether names differ by one letter added, removed or changed, or by two swapped letters.

    >>> _is_typo("lm_head.weight", "lm_haed.weight"), _is_typo("a.q.weight", "a.k.weight")
    (True, False)
    """
    if abs(len(one) - len(two)) > 1:
        return False
    pairs = enumerate(zip(one, two, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
    rest, other = one[first:], two[first:]
    is_swap = len(rest) > 1 and rest[:2] == other[1::-1] and rest[2:] == other[2:]
    if not (is_swap or rest[1:] == other[1:] or rest[1:] == other or rest == other[1:]):
        return False
    part = one[one.rfind(".", 0, first) + 1 :].partition(".")[0]
    return len(part) >= LEAST_LETTERS


def _check_one(have: StoredTensor, spec: TensorSpec, root: str, cast: bool) -> None:
    name = have.name
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
