"""``inspect``: the tensors of a checkpoint with their layouts, its files and damage.

    >>> report = inspect("ckpt")                                         # doctest: +SKIP
    >>> report.num_tensors, report.num_bytes, report.damage              # doctest: +SKIP
    (111, 2231111680, ())

Only headers are read, and nothing slow is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.catalog import Catalog, StoredTensor
from reshard.checkpoint.formats.reader import survey_catalog
from reshard.checkpoint.inspection.layouts import recovered
from reshard.checkpoint.integrity.checksums import SIDECAR, load_checksums
from reshard.checkpoint.storage.base import Storage, StoredFile
from reshard.checkpoint.storage.local import open_storage
from reshard.checkpoint.transfer.arguments import as_mesh, as_rules
from reshard.layout.box import Box
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["InspectedTensor", "Inspection", "inspect"]

VERSION = 1
SHOWN_HOLES = 3

Boxes = tuple[tuple[int, ...], tuple[Box, ...]]
"""A shape and the boxes of its pieces."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The layout that the boxes of a tensor follow, missing boxes, and boxes stored twice."""

    layout: str
    holes: tuple[Box, ...]
    doubled: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Bytes of the whole tensor, once."""
    num_pieces: int
    layout: str
    """The mesh and layout that the files record, or one that the boxes follow."""
    complete: bool
    replicated: bool
    """Whether some of it is stored more than once."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the checksums of a checkpoint cover."""

    num_chunks: int
    """Ranges of files that have a checksum each."""
    num_digests: int
    """Tensors that have a digest."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds, and its damage; printed, it is a table."""

    path: str
    format: str
    tensors: tuple[InspectedTensor, ...]
    objects: Mapping[str, int]
    """Entries that are not tensors, and their bytes."""
    files: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...]
    """Files that hold no tensors."""
    checksums: Sidecar | None
    """None if the checkpoint has no checksums."""
    metadata: Mapping[str, str]
    damage: tuple[str, ...]
    notes: tuple[str, ...]
    unsupported: tuple[str, ...] = ()
    """Parts that seem sound but are of a kind that is not supported."""

    @property
    def num_tensors(self) -> int:
        """The number of tensors."""
        return len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def ok(self) -> bool:
        """Whether all of it can be read: nothing is damaged, missing or unsupported."""
        return not self.damage and not self.unsupported

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "version": VERSION,
            "path": self.path,
            "format": self.format,
            "ok": self.ok,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "objects": dict(self.objects),
            "files": [asdict(file) for file in self.files],
            "others": [asdict(file) for file in self.others],
            "checksums": None if self.checksums is None else asdict(self.checksums),
            "metadata": dict(self.metadata),
            "damage": list(self.damage),
            "unsupported": list(self.unsupported),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def tree(self) -> str:
        """The tensors as a tree of their dotted names, with the bytes below each branch."""
        from reshard.checkpoint.inspection.text import tree

        return tree(self)

    def __str__(self) -> str:
        from reshard.checkpoint.inspection.text import table

        return table(self)


def inspect(
    path: str | Path, rules: Rules | str | Path | None = None, mesh: Mesh | str | None = None
) -> Inspection:
    """Describe the checkpoint in a folder, a file or at an address.

    Rules (a family such as ``llama``, or a TOML file) and a mesh describe rank files that do not
    record their layout. Damage and unsupported parts do not raise errors: they are listed in the
    report. A path that is not a checkpoint raises CheckpointError.
    """
    with open_storage(path) as storage:
        catalog, findings = survey_catalog(storage, as_rules(rules, storage), as_mesh(mesh))
        checksums = None
        with findings.noting():
            checksums = _sidecar(storage)
    known: dict[Boxes, Coverage] = {}
    tensors, damage = [], [*findings.damage]
    for tensor in catalog.tensors.values():
        boxes = tensor.shape, tuple(piece.box for piece in tensor.pieces)
        coverage = known.get(boxes)
        if coverage is None:  # the layers of a model have equal layouts
            coverage = known[boxes] = Coverage(
                recovered(*boxes), tensor.missing(), tensor.repeated()
            )
        tensors.append(_inspected(tensor, catalog, coverage))
        damage += _missing(catalog, tensor, coverage.holes)
    return Inspection(
        catalog.root,
        catalog.format,
        tuple(tensors),
        {name: found.size for name, found in catalog.objects.items()},
        catalog.files,
        tuple(file for file in catalog.others if file.path != SIDECAR),
        checksums,
        catalog.metadata,
        tuple(damage),
        catalog.notes,
        tuple(findings.unsupported),
    )


def _sidecar(storage: Storage) -> Sidecar | None:
    """The size of the checksums; no file is compared with them."""
    found = load_checksums(storage)
    if found is None:
        return None
    return Sidecar(sum(len(file.ends) for file in found.files.values()), len(found.digests))


def _inspected(tensor: StoredTensor, catalog: Catalog, coverage: Coverage) -> InspectedTensor:
    layout = coverage.layout
    if catalog.mesh is not None and tensor.name in catalog.layouts:
        layout = f"{catalog.mesh}: {catalog.layouts[tensor.name]}"
    return InspectedTensor(
        tensor.name,
        tensor.shape,
        tensor.dtype,
        tensor.num_bytes,
        len(tensor.pieces),
        layout,
        complete=not coverage.holes,
        replicated=bool(coverage.doubled),
    )


def _missing(catalog: Catalog, tensor: StoredTensor, holes: tuple[Box, ...]) -> Iterator[str]:
    """One line about the missing boxes of a tensor, if there are any."""
    if not holes:
        return
    shown = ", ".join(map(str, holes[:SHOWN_HOLES]))
    more = f" and {len(holes) - SHOWN_HOLES} more" if len(holes) > SHOWN_HOLES else ""
    yield (
        f"{catalog.root}: no file holds {shown}{more} of tensor {quoted(tensor.name)} of shape "
        f"{tensor.shape}: a shard is missing"
    )
