"""Plans a ``.distcp`` folder as ``torch.distributed.checkpoint`` writes it, without torch.

Every box is a ``torch.save`` archive in the file of the rank that writes it. ``.metadata`` is a
pickle with the place of every box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeAlias

from reshard.checkpoint.catalog import StoredObject, StoredPiece
from reshard.checkpoint.formats.output import (
    Literal,
    ObjectCopy,
    Output,
    OutputTensor,
    Wanted,
    owned_boxes,
)
from reshard.checkpoint.formats.torch.archive_writer import (
    ALIGNMENT,
    Call,
    Fields,
    Instance,
    Pairs,
    Shared,
    TensorArchive,
    pickled,
    value_archive,
)
from reshard.checkpoint.formats.torch.unpickler import Global
from reshard.checkpoint.piece_table import Pieces
from reshard.checkpoint.storage import StoredFile
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major

__all__ = ["distcp"]

Path: TypeAlias = tuple[str | int, ...]
"""The path to an entry of a nested state dict."""

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = Global(_METADATA, "TensorStorageMetadata")
_CHUNK = Global(_METADATA, "ChunkStorageMetadata")
_INDEX = Global(_METADATA, "MetadataIndex")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_INDEX_NAMES = ("fqn", "offset", "index")
_PLACE_NAMES = ("relative_path", "offset", "length")
_FORMAT = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_BYTES = Instance(Global(_METADATA, "BytesStorageMetadata"))
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))


class _Ranks:
    """The files of the ranks, filled so far."""

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
        """Append bytes to a rank's file: the file, the offset, and the padding before it."""
        file = self.file(rank)
        skipped = -self.sizes[file] % ALIGNMENT
        offset = self.sizes[file] + skipped
        self.sizes[file] = offset + size
        return file, offset, skipped


def distcp(
    tensors: Mapping[str, Wanted],
    objects: Sequence[StoredObject] = (),
    nesting: Mapping[str, Path] | None = None,
    values: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Output:
    """The files of the ranks, and the ``.metadata`` that finds everything in them."""
    ranks, outputs = _Ranks(), dict[str, OutputTensor]()
    states: dict[str, Any] = {}
    places = Pairs([])
    names = _file_names(tensors)
    for number, (name, wanted) in enumerate(tensors.items()):
        pieces, chunks = list[StoredPiece](), list[Shared]()
        around: list[tuple[bytes, bytes]] = []
        for start, stop, rank in owned_boxes(name, wanted, number):
            planned = _planned(wanted.dtype, start, stop)
            file, offset, skipped = ranks.add(rank, planned.size)
            around.append((planned.head(skipped), planned.tail))
            at = offset + planned.data_offset
            pieces.append(StoredPiece(planned.box, file, at, planned.strides))
            index = Instance(_INDEX, Fields(_INDEX_NAMES, (name, planned.start, len(chunks))))
            places.items.append((index, _place(names[rank], offset, planned.size)))
            chunks.append(planned.chunk)
        size = itemsize(wanted.dtype)
        placed = Pieces(len(wanted.shape), size, tuple(pieces), tuple(around))
        outputs[name] = OutputTensor(name, wanted.shape, wanted.dtype, placed)
        states[name] = _tensor(wanted, chunks)
    copies = _add_objects(ranks, objects, names, states, places)
    _add_values(ranks, values or {}, names, states, places)
    files = [StoredFile(names[rank], ranks.sizes[at]) for rank, at in ranks.numbers.items()]
    metadata = pickled(_metadata(states, places, nesting or {}, extras or {}))
    literals = (*ranks.literals, Literal(len(files), 0, metadata))
    return Output((*files, StoredFile(".metadata", len(metadata))), outputs, literals, copies)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A box as it is written, the same for thousands of tensors."""

    box: Box
    strides: tuple[int, ...]
    chunk: Shared
    start: Shared
    size: int
    """Bytes of the archive."""
    data_offset: int
    tail: bytes
    heads: dict[int, bytes]

    def head(self, skipped: int) -> bytes:
        """The bytes before the elements, with padding of this length before them."""
        known = self.heads.get(skipped)
        if known is None:
            known = self.heads[skipped] = bytes(skipped) + self.heads[0]
        return known


@lru_cache(maxsize=4096)
def _planned(dtype: str, start: tuple[int, ...], stop: tuple[int, ...]) -> _Planned:
    box = Box(start, stop)
    shape = box.shape
    archive = TensorArchive.of(dtype, shape)
    chunk = Fields(("offsets", "sizes"), (_size(start), _size(shape)))
    return _Planned(
        box, row_major(shape), Shared(Instance(_CHUNK, chunk)), _size(start),
        archive.size, archive.data_offset, archive.tail, {0: archive.head},
    )  # fmt: skip


def _file_names(tensors: Mapping[str, Wanted]) -> dict[int, str]:
    layouts = {wanted.layout for wanted in tensors.values() if wanted.layout is not None}
    ranks = {0}.union(*(layout.ranks for layout in layouts))
    return {rank: f"__{rank}_0.distcp" for rank in ranks}


def _add_objects(
    ranks: _Ranks,
    objects: Sequence[StoredObject],
    names: Mapping[int, str],
    states: dict[str, Any],
    places: Pairs,
) -> tuple[ObjectCopy, ...]:
    """Copy objects unchanged to the end of the first file."""
    first = next(iter(ranks.numbers), 0)
    copies = []
    for entry in objects:
        file, offset, skipped = ranks.add(first, entry.size)
        if skipped:
            ranks.literals.append(Literal(file, offset - skipped, bytes(skipped)))
        copies.append(ObjectCopy(entry, file, offset))
        states[entry.name] = _BYTES
        places.items.append((_bytes_index(entry.name), _place(names[first], offset, entry.size)))
    return tuple(copies)


def _add_values(
    ranks: _Ranks,
    values: Mapping[str, Any],
    names: Mapping[int, str],
    states: dict[str, Any],
    places: Pairs,
) -> None:
    """Append plain values to the first file, each as ``torch.save`` writes it."""
    first = next(iter(ranks.numbers), 0)
    for name, value in values.items():
        data = value_archive(value)
        file, offset, skipped = ranks.add(first, len(data))
        ranks.literals.append(Literal(file, offset - skipped, bytes(skipped) + data))
        states[name] = _BYTES
        places.items.append((_bytes_index(name), _place(names[first], offset, len(data))))


def _bytes_index(name: str) -> Instance:
    return Instance(_INDEX, Fields(_INDEX_NAMES, (name, None, None)))


def _metadata(
    states: dict[str, Any],
    places: Pairs,
    nesting: Mapping[str, Path],
    extras: Mapping[str, Any],
) -> Instance:
    return Instance(
        Global(_METADATA, "Metadata"),
        {
            "state_dict_metadata": states,
            "planner_data": {name: nesting.get(name, (name,)) for name in states},
            "storage_data": places,
            "storage_meta": None,
            "version": "1.0.0",
            **extras,
        },
    )


def _tensor(wanted: Wanted, chunks: list[Shared]) -> Instance:
    values = (_properties(wanted.dtype), _size(wanted.shape), chunks)
    return Instance(_TENSOR, Fields(("properties", "size", "chunks"), values))


@cache
def _properties(dtype: str) -> Shared:
    state = (Global("torch", dtype), _STRIDED, False, _FORMAT, False)
    return Shared(Instance(Global(_METADATA, "TensorProperties"), state))


def _place(path: str, offset: int, length: int) -> Instance:
    return Instance(_PLACE, Fields(_PLACE_NAMES, (path, offset, length)))


@lru_cache(maxsize=1 << 16)
def _size(values: tuple[int, ...]) -> Shared:
    return Shared(Call(_SIZE, (values,)))
