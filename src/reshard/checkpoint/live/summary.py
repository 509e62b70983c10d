"""What the first rank has found in a checkpoint, as JSON for the others: they read no headers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.checkpoint.catalog import Catalog, Crc, StoredPiece, StoredTensor
from reshard.checkpoint.integrity.crcs import Crcs
from reshard.checkpoint.storage.base import StoredFile
from reshard.layout.box import Box

__all__ = ["CatalogSummary"]


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
