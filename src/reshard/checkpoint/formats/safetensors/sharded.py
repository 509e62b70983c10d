"""Safetensors files that hold boxes of tensors, as torch's distributed checkpoint writes them.

The metadata of each file gives the offset of its tensors in the global ones. Torch does not write
the global shapes: a tensor then reaches as far as its furthest box, and a missing last file is
noticed only with the mesh that saved it. Files that reshard writes have the shapes
(``own_metadata``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add, gt
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.checks import checked_shape
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.safetensors.header import Entry, read_json
from reshard.checkpoint.formats.safetensors.own_metadata import SHARDING
from reshard.checkpoint.formats.safetensors.reader import HeadedFile, common_metadata
from reshard.checkpoint.storage.base import Storage, StoredFile
from reshard.errors import DamageError
from reshard.layout.box import Box, row_major
from reshard.layout.mesh import Mesh
from reshard.text import quoted

__all__ = ["check_counts", "read_sharded"]

_SHARD = re.compile(r"shard-(\d{1,9})-", re.ASCII)


@dataclass(slots=True)
class _Gathered:
    """A tensor while its boxes are being collected."""

    dtype: str
    num_dims: int
    where: str
    pieces: list[StoredPiece] = field(default_factory=list)
    shape: tuple[int, ...] | None = None
    """The global shape, where a file has it."""


def check_counts(
    root: str,
    files: Sequence[StoredFile],
    headed: Sequence[HeadedFile],
    mesh: Mesh | None,
    findings: Findings,
) -> None:
    """Note missing files: reshard writes their number, torch the number of each rank."""
    own = {one.file.path: one.own for one in headed if one.own is not None}
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
    mesh: Mesh | None,
    findings: Findings,
) -> Catalog:
    """The catalog of files whose metadata places their tensors."""
    gathered: dict[str, _Gathered] = {}
    layouts: dict[str, str] = {}
    for number, one in enumerate(headed):
        with findings.noting():
            offsets = _offsets(one)
            for entry in one.header.entries:
                with findings.noting():
                    _gather(gathered, entry, number, one, offsets)
        own = one.own.tensors if one.own else {}
        layouts |= {name: tensor.layout for name, tensor in own.items() if tensor.layout}
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
    used = {one.file for one in headed}
    meshes = [one.own.mesh for one in headed if one.own and one.own.mesh is not None]
    return Catalog(
        storage.root,
        "sharded-safetensors",
        tuple(one.file for one in headed),
        tensors,
        metadata=common_metadata(headed),
        others=tuple(file for file in listed if file not in used),
        mesh=meshes[0] if meshes else None,
        layouts=layouts if meshes else {},
    )


def _offsets(one: HeadedFile) -> dict[str, Any] | None:
    """The offset of each tensor of a file; None for a file that holds whole tensors."""
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
) -> None:
    """Add the box of one file to its tensor."""
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
    own = one.own.tensors.get(entry.name) if one.own else None
    if own is not None and found.shape not in (None, own.shape):
        raise DamageError(
            f"{_named(one.where, entry)} is part of {own.shape}, and of {found.shape} in "
            f"{found.where}"
        )
    found.shape = found.shape if own is None else own.shape
    piece = StoredPiece(Box(start, stop), number, entry.offset, row_major(entry.shape))
    found.pieces.append(piece)


def _start(offsets: dict[str, Any], entry: Entry, where: str) -> tuple[int, ...]:
    place = offsets.get(entry.name)
    if not isinstance(place, dict) or "saved_offsets" not in place:
        raise DamageError(f"{_named(where, entry)} has no saved_offsets in {SHARDING}")
    start = checked_shape(place["saved_offsets"], f"{where}: saved_offsets", entry.name)
    if len(start) != len(entry.shape):
        raise DamageError(
            f"{_named(where, entry)} has the shape {entry.shape} and the offsets {start}"
        )
    return start


def _named(where: str, entry: Entry) -> str:
    return f"{where}: tensor {quoted(entry.name)}"


def _tensor(name: str, found: _Gathered) -> StoredTensor:
    stops = (piece.box.stop for piece in found.pieces)
    reach = tuple(map(max, zip(*stops, strict=True)))
    shape = checked_shape(reach, found.where, name) if found.shape is None else found.shape
    if len(reach) != len(shape) or any(map(gt, reach, shape)):
        raise DamageError(
            f"{found.where}: tensor {quoted(name)} has a box that reaches to {reach}, outside of "
            f"its shape {shape}"
        )
    pieces = sorted(found.pieces, key=lambda piece: piece.box)
    return StoredTensor(name, shape, found.dtype, tuple(pieces))
