"""Safetensors files that hold boxes of tensors, as torch's distributed checkpoint writes them.

Each file says in its metadata where its tensors begin in the global ones. Torch does not say how
large those are: then a tensor reaches as far as its furthest box, and a last file that is missing
cannot be noticed from the files alone, but by who knows the mesh. Files that reshard writes say it
(see ``own_metadata``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add, gt
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.checks import checked_shape
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.safetensors.files import HeadedFile, common_metadata
from reshard.checkpoint.formats.safetensors.header import Entry, read_json
from reshard.checkpoint.formats.safetensors.own_metadata import KEY, SHARDING, OwnMetadata
from reshard.checkpoint.storage.base import Storage, StoredFile
from reshard.errors import DamageError
from reshard.layout.box import Box, row_major
from reshard.layout.mesh import Mesh
from reshard.text import quoted

__all__ = ["check_counts", "own_of", "read_sharded"]

_SHARD = re.compile(r"shard-(\d{1,9})-", re.ASCII)


@dataclass(slots=True)
class _Gathered:
    """A tensor while its boxes are being collected."""

    dtype: str
    num_dims: int
    where: str
    pieces: list[StoredPiece] = field(default_factory=list)
    shape: tuple[int, ...] | None = None
    """The global shape, where a file says it."""

    def extent(self) -> tuple[int, ...]:
        """How far the boxes reach."""
        return tuple(map(max, zip(*(piece.box.stop for piece in self.pieces), strict=True)))


def own_of(headed: Sequence[HeadedFile], findings: Findings) -> dict[str, OwnMetadata]:
    """What reshard said about its own files, by path."""
    found = {}
    for one in headed:
        text = one.header.metadata.get(KEY)
        if text is not None:
            with findings.noting():
                found[one.file.path] = OwnMetadata.parse(text, one.where)
    return found


def check_counts(
    root: str,
    files: Sequence[StoredFile],
    own: Mapping[str, OwnMetadata],
    mesh: Mesh | None,
    findings: Findings,
) -> None:
    """Notice files that are missing: reshard's are counted, torch's are numbered by rank."""
    counts = {said.files: path for path, said in own.items()}
    if len(counts) > 1:
        (one, first), (two, second), *_ = counts.items()
        findings.found(f"{root}/{first} is one of {one} files and {second} one of {two}")
        return
    numbers = {said.file for said in own.values()}
    total = next(iter(counts), 0)
    if not own:
        matches = [_SHARD.match(file.path) for file in files]
        numbers = {int(match[1]) for match in matches if match}
        total = max(max(numbers), mesh.num_ranks if mesh else 0) if numbers else 0
    absent = islice((n for n in range(1, total + 1) if n not in numbers), 4)
    named = ", ".join(map(str, absent))
    if named:
        have = f"{len(numbers)} of {total} are there"
        findings.found(f"{root}: shard {named} of {total} is missing ({have})")


def read_sharded(
    storage: Storage,
    listed: Sequence[StoredFile],
    headed: Sequence[HeadedFile],
    own: Mapping[str, OwnMetadata],
    mesh: Mesh | None,
    findings: Findings,
) -> Catalog:
    """The catalog of files whose metadata places their tensors."""
    gathered: dict[str, _Gathered] = {}
    layouts: dict[str, str] = {}
    for number, one in enumerate(headed):
        said = own.get(one.file.path)
        with findings.noting():
            offsets = _offsets(one)
            for entry in one.header.entries:
                with findings.noting():
                    _gather(gathered, entry, number, one, offsets, said)
        layouts |= _layouts(said)
    tensors = {}
    for name, found in gathered.items():
        with findings.noting():
            tensors[name] = _tensor(name, found)
    if mesh is None and any(found.shape is None for found in gathered.values()):
        findings.note(
            "the files do not say how large their tensors are: shapes reach as far as the boxes "
            "found, so a last shard that is missing would not be noticed; it is with the mesh that "
            "saved them (--mesh, in convert --from-mesh)"
        )
    used = {one.file.path for one in headed}
    others = tuple(file for file in listed if file.path not in used)
    meshes = [said.mesh for said in own.values() if said.mesh is not None]
    return Catalog(
        storage.root,
        "sharded-safetensors",
        tuple(one.file for one in headed),
        tensors,
        metadata=common_metadata(headed),
        others=others,
        mesh=meshes[0] if meshes else None,
        layouts=layouts if meshes else {},
    )


def _layouts(said: OwnMetadata | None) -> dict[str, str]:
    tensors = said.tensors if said else {}
    return {name: t.layout for name, t in tensors.items() if t.layout is not None}


def _offsets(one: HeadedFile) -> dict[str, Any] | None:
    """Where the tensors of a file begin, by name; None for a file that holds whole tensors."""
    text = one.header.metadata.get(SHARDING)
    if text is None:
        return None
    where = f"{one.where}: {SHARDING}"
    return read_json(text.encode("utf-8", "surrogatepass"), where)


def _gather(
    gathered: dict[str, _Gathered],
    entry: Entry,
    number: int,
    one: HeadedFile,
    offsets: dict[str, Any] | None,
    said: OwnMetadata | None,
) -> None:
    start = (0,) * len(entry.shape) if offsets is None else _start(offsets, entry, one.where)
    stop = checked_shape(tuple(map(add, start, entry.shape)), one.where, entry.name)
    found = gathered.get(entry.name)
    if found is None:
        found = gathered[entry.name] = _Gathered(entry.dtype, len(start), one.where)
    if (found.dtype, found.num_dims) != (entry.dtype, len(start)):
        raise DamageError(
            f"{_named(one.where, entry)} is {entry.dtype} of {len(start)} dims and {found.dtype} "
            f"of {found.num_dims} in {found.where}: one of them is not of this checkpoint"
        )
    own = said.tensors.get(entry.name) if said else None
    if own is not None and found.shape not in (None, own.shape):
        raise DamageError(
            f"{_named(one.where, entry)} is part of {own.shape}, and of {found.shape} in "
            f"{found.where}"
        )
    found.shape = found.shape if own is None else own.shape
    piece = StoredPiece(Box(start, stop), number, entry.offset, row_major(entry.shape))
    found.pieces.append(piece)


def _start(offsets: dict[str, Any], entry: Entry, where: str) -> tuple[int, ...]:
    said = offsets.get(entry.name)
    if not isinstance(said, dict) or "saved_offsets" not in said:
        raise DamageError(f"{_named(where, entry)} has no saved_offsets in {SHARDING}")
    start = checked_shape(said["saved_offsets"], f"{where}: saved_offsets", entry.name)
    if len(start) != len(entry.shape):
        raise DamageError(
            f"{_named(where, entry)} has the shape {entry.shape} and the offsets {start}"
        )
    return start


def _named(where: str, entry: Entry) -> str:
    return f"{where}: tensor {quoted(entry.name)}"


def _tensor(name: str, found: _Gathered) -> StoredTensor:
    reach = found.extent()
    shape = checked_shape(reach, found.where, name) if found.shape is None else found.shape
    if len(reach) != len(shape) or any(map(gt, reach, shape)):
        raise DamageError(
            f"{found.where}: tensor {quoted(name)} has a box that reaches to {reach}, outside of "
            f"its shape {shape}"
        )
    return StoredTensor(name, shape, found.dtype, tuple(sorted(found.pieces, key=_by_box)))


def _by_box(piece: StoredPiece) -> Box:
    return piece.box
