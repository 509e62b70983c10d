"""What the first rank has found in a checkpoint, as a text for the others: they open no headers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.box import Box
from reshard.checkpoint.catalog import Catalog, StoredFile, StoredPiece, StoredTensor

__all__ = ["Outline"]


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of a catalog that a load needs."""

    catalog: Catalog
    unwanted: tuple[str, ...] = ()
    """Names of tensors that nobody asked for."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """What the checksums of the checkpoint say of its tensors."""

    def about(self, names: Collection[str]) -> Outline:
        """The part that is about these names."""
        catalog = self.catalog
        wanted = {name: one for name, one in catalog.tensors.items() if name in names}
        made = Catalog(catalog.root, catalog.format, catalog.files, wanted, notes=catalog.notes)
        known = {name: self.digests[name] for name in wanted if name in self.digests}
        return Outline(made, tuple(sorted(catalog.tensors.keys() - wanted.keys())), known)

    def to_data(self) -> dict[str, Any]:
        """The outline as plain data."""
        return {
            "root": self.catalog.root,
            "format": self.catalog.format,
            "files": [[file.path, file.size] for file in self.catalog.files],
            "tensors": [_tensor_data(tensor) for tensor in self.catalog.tensors.values()],
            "notes": list(self.catalog.notes),
            "digests": dict(self.digests),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Outline:
        """Read what ``to_data`` gave."""
        files = tuple(StoredFile(path, size) for path, size in data["files"])
        tensors = {one[0]: _tensor(*one) for one in data["tensors"]}
        notes = tuple(data["notes"])
        catalog = Catalog(data["root"], data["format"], files, tensors, notes=notes)
        return cls(catalog, digests=data["digests"])


def _tensor_data(tensor: StoredTensor) -> list[Any]:
    rows = [[p.box.start, p.box.stop, p.file, p.offset, p.strides] for p in tensor.pieces]
    return [tensor.name, tensor.shape, tensor.dtype, rows]


def _tensor(name: str, shape: list[int], dtype: str, rows: Iterable[list[Any]]) -> StoredTensor:
    pieces = [
        StoredPiece(Box(tuple(start), tuple(stop)), file, offset, tuple(strides))
        for start, stop, file, offset, strides in rows
    ]
    return StoredTensor(name, tuple(shape), dtype, tuple(pieces))
