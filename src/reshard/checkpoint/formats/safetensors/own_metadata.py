"""The metadata that reshard adds to its safetensors files: global shapes, layouts, mesh and rank.

Every safetensors file that reshard writes as one of several carries in ``__metadata__`` the key
``reshard``, whose value is JSON:

    {"version": 1,                  readers refuse a version they do not know
     "file": 3, "files": 4,         this file's number, from 1, and how many there are
     "mesh": "tp=4",                the mesh that the tensors are sharded over; absent: unknown
     "rank": 2,                     the rank whose tensors these are; absent: of no single rank
     "tensors": {                   every tensor of this file
       "w": {"shape": [8, 4],       its global shape
             "layout": "tp -"}}}    its layout on that mesh; absent: unknown

Torch's readers ignore it. The offset of a tensor in the global one is in torch's own key
``DCP_SHARDING_INFO`` (``{"w": {"saved_offsets": [4, 0]}}``); in a file without that key it
follows from rank, mesh and layout, which also covers local tensors joined from several boxes.

>>> own = OwnMetadata(3, 4, "tp=4", 2, {"w": OwnTensor((8, 4), "tp -")})
>>> OwnMetadata.parse(own.to_text(), "a.safetensors") == own
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.checkpoint.formats.checks import checked_shape, shown
from reshard.checkpoint.formats.safetensors.header import read_json
from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

__all__ = ["KEY", "SHARDING", "OwnMetadata", "OwnTensor", "offsets_text"]

KEY = "reshard"
SHARDING = "DCP_SHARDING_INFO"
"""Torch's key for the offsets of a file's tensors."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """The global shape of a tensor, and its layout if known."""

    shape: tuple[int, ...]
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class OwnMetadata:
    """The metadata of one file of a set."""

    file: int
    """Its number, from 1."""
    files: int
    """The number of files."""
    mesh: str | None = None
    rank: int | None = None
    tensors: Mapping[str, OwnTensor] = field(default_factory=dict)

    def to_text(self) -> str:
        """The value of the key ``reshard``."""
        data: dict[str, Any] = {"version": VERSION, "file": self.file, "files": self.files}
        if self.mesh is not None:
            data["mesh"] = self.mesh
        if self.rank is not None:
            data["rank"] = self.rank
        data["tensors"] = {name: _described(tensor) for name, tensor in self.tensors.items()}
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, where: str) -> OwnMetadata:
        """Read what ``to_text`` wrote."""
        where = f'{where}: "{KEY}" of its __metadata__'
        raw = read_json(text.encode("utf-8", "surrogatepass"), where)
        if raw.get("version") != VERSION:
            raise UnsupportedError(
                f"{where} has version {shown(raw.get('version'))} and this reshard reads "
                f"{VERSION}: use a newer reshard"
            )
        match raw:
            case {"file": int(file), "files": int(files), "tensors": dict(tensors)}:
                pass
            case _:
                raise DamageError(f"{where} lacks file, files or tensors")
        mesh, rank = raw.get("mesh"), raw.get("rank")
        if not (mesh is None or isinstance(mesh, str)) or not (rank is None or type(rank) is int):
            raise DamageError(f"{where}: mesh is a text and rank a number")
        if not 1 <= file <= files:
            raise DamageError(f"{where} is about file {file} of {files}")
        found = {name: _tensor(name, value, where) for name, value in tensors.items()}
        return cls(file, files, mesh, rank, found)


def offsets_text(offsets: Mapping[str, tuple[int, ...]]) -> str:
    """The value of torch's key: the offset of each tensor of a file in the global one.

    >>> offsets_text({"w": (4, 0)})
    '{"w": {"saved_offsets": [4, 0]}}'
    """
    return json.dumps({name: {"saved_offsets": list(at)} for name, at in offsets.items()})


def _described(tensor: OwnTensor) -> dict[str, Any]:
    layout = {} if tensor.layout is None else {"layout": tensor.layout}
    return {"shape": list(tensor.shape), **layout}


def _tensor(name: str, value: object, where: str) -> OwnTensor:
    if not isinstance(value, dict):
        raise DamageError(f"{where}: tensor {quoted(name)} is not described by an object")
    layout = value.get("layout")
    if not (layout is None or isinstance(layout, str)):
        raise DamageError(f"{where}: the layout of tensor {quoted(name)} is no text")
    return OwnTensor(checked_shape(value.get("shape"), where, name), layout)
