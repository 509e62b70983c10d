"""A conversion as a plan: all that is to be done, known and checked before a byte moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint.catalog import Catalog, StoredFile
from reshard.checkpoint.checksums import SIDECAR
from reshard.checkpoint.cutting import Cut, wanted_of
from reshard.checkpoint.outputs import FORMATS, Output, plan_output, unknown_format
from reshard.checkpoint.renaming import Outline, feeds_for, outlines_of
from reshard.checkpoint.storage import Storage
from reshard.checkpoint.transfers import Transfer, feeding, transfer_of
from reshard.errors import CheckpointError
from reshard.planning.names import Names

__all__ = ["COMMITTED", "Job", "plan_job", "source_stamp"]

COMMITTED = "_RESHARD_COMMITTED"
"""The file that is written last where folders cannot be renamed."""


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What is read, what is written, and what goes where."""

    catalog: Catalog
    format: str
    output: Output
    """All files to be written, the other files of the source among them."""
    transfers: tuple[Transfer, ...]
    others: tuple[tuple[StoredFile, int], ...]
    """Files that are copied as they are, and their numbers in the output."""
    fingerprint: str
    """Changes with the source and with what is asked for."""
    stamp: str
    """Changes with the files of the source."""

    @property
    def unique_bytes(self) -> int:
        """Bytes of the source that are needed, each element once."""
        return sum(int(transfer.source.num_bytes.sum()) for transfer in self.transfers)

    @property
    def replica_bytes(self) -> int:
        """Bytes that the source holds a second time."""
        return sum(int(transfer.replicas.num_bytes.sum()) for transfer in self.transfers)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied without being part of a tensor."""
        objects = sum(copy.source.size for copy in self.output.objects)
        return objects + sum(file.size for file, _ in self.others)

    @property
    def casts(self) -> bool:
        """Whether any tensor changes its dtype."""
        return any(transfer.have != transfer.want for transfer in self.transfers)


def plan_job(
    catalog: Catalog,
    storage: Storage,
    cut: Cut,
    *,
    format: str | None = None,
    names: Names | None = None,
    max_shard_size: int = 5 * 10**9,
) -> Job:
    """Plan a conversion; holes, misfits and unknown names are errors here."""
    is_cut = bool(cut.mesh or cut.layouts or (cut.rules and cut.rules.mesh))
    format = format or ("sharded" if is_cut else "full")
    if format not in FORMATS:
        raise CheckpointError(unknown_format(format))
    if format != "full":
        cut = cut.with_config(storage)
    have = {name: Outline(found.shape, found.dtype) for name, found in catalog.tensors.items()}
    if not have and not catalog.objects:
        raise CheckpointError(f"{catalog.root} holds no tensors: there is nothing to convert")
    names = names or {}
    is_whole = format == "full" or (format == "distcp" and not is_cut)
    wanted = wanted_of(outlines_of(have, names), cut, is_whole)
    output = plan_output(
        format,
        wanted,
        metadata=catalog.metadata,
        objects=tuple(catalog.objects.values()),
        nesting=catalog.nesting,
        mesh=next((str(w.layout.mesh) for w in wanted.values() if w.layout), None),
        max_shard_size=max_shard_size,
    )
    transfers = tuple(_transfers(catalog, output, have, names))
    output, others = _with_others(output, catalog)
    stamp = source_stamp(catalog, storage)
    fingerprint = _fingerprint(stamp, output, names)
    return Job(catalog, format, output, transfers, others, fingerprint, stamp)


def _transfers(
    catalog: Catalog, output: Output, have: Mapping[str, Outline], names: Names
) -> list[Transfer]:
    shapes = {name: tensor.shape for name, tensor in output.tensors.items()}
    found = []
    for name, feeds, zeros in feeds_for(shapes, have, names):
        tensor = output.tensors[name]
        fed = feeding(catalog, feeds)
        found.append(transfer_of(name, tensor.shape, tensor.dtype, fed, tensor.pieces, zeros))
    return found


def _with_others(
    output: Output, catalog: Catalog
) -> tuple[Output, tuple[tuple[StoredFile, int], ...]]:
    """The output with the files of the source that hold no tensors."""
    ours = {file.path for file in output.files} | {SIDECAR, COMMITTED}
    kept = [file for file in catalog.others if file.path not in ours]
    first = len(output.files)
    files = (*output.files, *(StoredFile(file.path, file.size) for file in kept))
    return replace(output, files=files), tuple(zip(kept, range(first, len(files)), strict=True))


def source_stamp(catalog: Catalog, storage: Storage) -> str:
    """A hash of the names, sizes and times of the source's files."""
    hasher = hashlib.blake2b(digest_size=16)
    root = Path(catalog.root)
    for file in (*catalog.files, *catalog.others):
        changed: Any = None
        if storage.is_local:
            changed = (root if root.is_file() else root / file.path).stat().st_mtime_ns
        hasher.update(json.dumps([file.path, file.size, changed]).encode())
    return hasher.hexdigest()


def _fingerprint(stamp: str, output: Output, names: Names) -> str:
    """A hash of the source's stamp and of everything that is known of the output."""
    hasher = hashlib.blake2b(stamp.encode(), digest_size=16)
    hasher.update(repr(sorted(names.items(), key=lambda item: item[0])).encode())
    for made in output.files:
        hasher.update(json.dumps([made.path, made.size]).encode())
    for literal in output.literals:
        hasher.update(json.dumps([literal.file, literal.offset]).encode() + literal.data)
    return hasher.hexdigest()
