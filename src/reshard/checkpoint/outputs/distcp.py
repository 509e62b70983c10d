"""A ``.distcp`` folder as ``torch.distributed.checkpoint`` writes it, without torch.

Every box is a zip file as of ``torch.save``, one after the other in the file of the rank that owns
it. ``.metadata`` is a pickle that says which box lies where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias

from reshard.box import Box, row_major
from reshard.checkpoint.catalog import StoredFile, StoredObject, StoredPiece
from reshard.checkpoint.located import Pieces
from reshard.checkpoint.outputs.archives import ALIGNMENT, Archive
from reshard.checkpoint.outputs.output import (
    Literal,
    ObjectCopy,
    Output,
    OutputTensor,
    Wanted,
    owned_boxes,
)
from reshard.checkpoint.outputs.pickles import Call, Global, Instance, Shared, pickled
from reshard.dtypes import itemsize

__all__ = ["distcp"]

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry of a nested state dict."""

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = Global(_METADATA, "TensorStorageMetadata")
_CHUNK = Global(_METADATA, "ChunkStorageMetadata")
_INDEX = Global(_METADATA, "MetadataIndex")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_FORMAT = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))


class _Ranks:
    """The files of the ranks, as far as they are filled."""

    def __init__(self) -> None:
        self.literals: list[Literal] = []
        self.numbers: dict[int, int] = {}
        self.sizes: list[int] = []

    def file(self, rank: int) -> int:
        """The number of a rank's file."""
        if rank not in self.numbers:
            self.numbers[rank] = len(self.sizes)
            self.sizes.append(0)
        return self.numbers[rank]

    def add(self, rank: int, size: int) -> tuple[int, int, int]:
        """Room for so many bytes at the end of a rank's file: which, where, and what is skipped."""
        file = self.file(rank)
        skipped = -self.sizes[file] % ALIGNMENT
        offset = self.sizes[file] + skipped
        self.sizes[file] = offset + size
        return file, offset, skipped


def distcp(
    tensors: Mapping[str, Wanted],
    objects: Sequence[StoredObject] = (),
    nesting: Mapping[str, Path] | None = None,
) -> Output:
    """The files of the ranks, and the ``.metadata`` that finds everything in them."""
    ranks, made = _Ranks(), dict[str, OutputTensor]()
    states: dict[str, Any] = {}
    places: dict[Instance, Instance] = {}
    archives: dict[tuple[str, tuple[int, ...]], Archive] = {}
    names = _file_names(tensors)
    for number, (name, wanted) in enumerate(tensors.items()):
        pieces, chunks = list[StoredPiece](), list[Instance]()
        around: list[tuple[bytes, bytes]] = []
        for start, stop, rank in owned_boxes(name, wanted, number):
            box = Box(start, stop)
            key = (wanted.dtype, box.shape)
            archive = archives[key] = archives.get(key) or Archive.of(*key)
            file, offset, skipped = ranks.add(rank, archive.size)
            around.append((bytes(skipped) + archive.head, archive.tail))
            data = offset + archive.data_offset
            pieces.append(StoredPiece(box, file, data, row_major(box.shape)))
            places[_index(name, start, len(chunks))] = _place(names[rank], offset, archive.size)
            chunks.append(_chunk(start, box.shape))
        size = itemsize(wanted.dtype)
        placed = Pieces(len(wanted.shape), size, tuple(pieces), tuple(around))
        made[name] = OutputTensor(name, wanted.shape, wanted.dtype, placed)
        states[name] = _tensor(wanted, chunks)
    copies = _add_objects(ranks, objects, names, states, places)
    files = [StoredFile(names[rank], ranks.sizes[at]) for rank, at in ranks.numbers.items()]
    metadata = pickled(_metadata(states, places, nesting or {}))
    literals = (*ranks.literals, Literal(len(files), 0, metadata))
    return Output((*files, StoredFile(".metadata", len(metadata))), made, literals, copies)


def _file_names(tensors: Mapping[str, Wanted]) -> dict[int, str]:
    layouts = {wanted.layout for wanted in tensors.values() if wanted.layout is not None}
    ranks = {0}.union(*(layout.ranks for layout in layouts))
    return {rank: f"__{rank}_0.distcp" for rank in ranks}


def _add_objects(
    ranks: _Ranks,
    objects: Sequence[StoredObject],
    names: Mapping[int, str],
    states: dict[str, Any],
    places: dict[Instance, Instance],
) -> tuple[ObjectCopy, ...]:
    """Entries that are no tensors go into the first file, byte by byte as they were."""
    first = next(iter(ranks.numbers), 0)
    copies = []
    for entry in objects:
        file, offset, skipped = ranks.add(first, entry.size)
        if skipped:
            ranks.literals.append(Literal(file, offset - skipped, bytes(skipped)))
        copies.append(ObjectCopy(entry, file, offset))
        states[entry.name] = Instance(Global(_METADATA, "BytesStorageMetadata"))
        index = Instance(_INDEX, _Fields(fqn=entry.name, offset=None, index=None))
        places[index] = _place(names[first], offset, entry.size)
    return tuple(copies)


class _Fields(dict[str, Any]):
    """The fields of an object; as part of a key it is only equal to itself."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _metadata(
    states: dict[str, Any], places: dict[Instance, Instance], nesting: Mapping[str, Path]
) -> Instance:
    return Instance(
        Global(_METADATA, "Metadata"),
        {
            "state_dict_metadata": states,
            "planner_data": {name: nesting.get(name, (name,)) for name in states},
            "storage_data": places,
            "storage_meta": None,
            "version": "1.0.0",
        },
    )


def _tensor(wanted: Wanted, chunks: list[Instance]) -> Instance:
    return Instance(
        _TENSOR,
        {
            "properties": _properties(wanted.dtype),
            "size": _size(wanted.shape),
            "chunks": chunks,
        },
    )


@cache
def _properties(dtype: str) -> Instance:
    state = (Global("torch", dtype), _STRIDED, False, _FORMAT, False)
    return Instance(Global(_METADATA, "TensorProperties"), state)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Instance:
    fields = {"offsets": _size(offsets), "sizes": _size(sizes)}
    return Instance(_CHUNK, fields)


def _index(name: str, offset: tuple[int, ...], number: int) -> Instance:
    return Instance(_INDEX, _Fields(fqn=name, offset=_size(offset), index=number))


def _place(path: str, offset: int, length: int) -> Instance:
    fields = {"relative_path": path, "offset": offset, "length": length}
    return Instance(_PLACE, fields)


@lru_cache(maxsize=1 << 16)
def _size(values: tuple[int, ...]) -> Shared:
    return Shared(Call(_SIZE, (values,)))
