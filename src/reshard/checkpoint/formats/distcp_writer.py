"""Plans a ``.distcp`` folder as ``torch.distributed.checkpoint`` writes it, without torch.

Every box is a ``torch.save`` archive in the file of the rank that writes it. ``.metadata`` is a
pickle with the place of every box.

>>> head, tail = tensor_archive("float32", (2, 3))
>>> len(head), head[:4], tail[-22:-18]
(512, b'PK\\x03\\x04', b'PK\\x05\\x06')

The pickles name classes and functions without importing them: a value is plain data, or a `Global`
or `Record` as the reader makes it. A record with a state is an object that is created without
calling its class; one without a state is the result of a call.

>>> pickle.loads(pickled([Record(Global("collections", "Counter"), ("aab",)), (1, None, b"y")]))
[Counter({'a': 2, 'b': 1}), (1, None, b'y')]
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

from reshard.checkpoint.catalog import StoredObject, StoredPiece
from reshard.checkpoint.formats.torch.archive import ALIGNMENT, archive_around
from reshard.checkpoint.formats.torch.tensors import STORAGE_DTYPES
from reshard.checkpoint.formats.torch.unpickler import Global, Record
from reshard.checkpoint.output import (
    Literal,
    ObjectCopy,
    Output,
    OutputTensor,
    Wanted,
    owned_boxes,
)
from reshard.checkpoint.storage.local import StoredFile
from reshard.dtypes import itemsize
from reshard.layout.box import Box, row_major


class Shared(Record):
    """An immutable record that occurs in many places: written once, then referred to."""

    __slots__ = ()


def pickled(value: Any) -> bytes:
    pickler = _Pickler()
    pickler.dump(value)
    return pickler.file.getvalue()


class _Pickler(pickle._Pickler):
    """The standard library's pickler, which here writes only plain data and records."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=2)
        self.write = self.file.write
        self._places: dict[Any, bytes] = {}
        """The instruction that refers to each value of the memo."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        kind = type(value)
        if kind in _MEMOIZED and (place := self._places.get(value)) is not None:
            self.write(place)
            return
        if kind not in _STEPS:  # a subclass, such as an OrderedDict
            kind = next(base for base in _STEPS if isinstance(value, base))
        _STEPS[kind](self, value)

    def memoize(self, value: Any) -> None:
        if type(value) in _MEMOIZED:
            number = struct.pack("<I", len(self._places))
            self._places[value] = pickle.LONG_BINGET + number
            self.write(pickle.LONG_BINPUT + number)

    def save_dict(self, value: dict[Any, Any]) -> None:
        save = self.save
        self.write(pickle.EMPTY_DICT + pickle.MARK)
        for key, one in value.items():
            save(key)
            save(one)
        self.write(pickle.SETITEMS)

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINBYTES + struct.pack("<I", len(value)) + value)

    def save_name(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_record(self, record: Record) -> None:
        if record.maker is None:
            self.save(record.args[0])
            self.write(pickle.BINPERSID)
            return
        self.save(record.maker)
        if record.state is None:
            self.save(record.args)
            self.write(pickle.REDUCE)
        else:
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.save(record.state)
            self.write(pickle.BUILD)
        self.memoize(record)


_MEMOIZED = frozenset({str, Global, Shared})
_LIBRARY: Any = pickle._Pickler.dispatch
_STEPS: dict[type, Callable[[Any, Any], None]] = {
    **{kind: _LIBRARY[kind] for kind in (type(None), bool, int, float, str, tuple, list)},
    dict: _Pickler.save_dict,
    bytes: _Pickler.save_bytes,
    Global: _Pickler.save_name,
    Record: _Pickler.save_record,
    Shared: _Pickler.save_record,
}


def tensor_archive(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The archive of a contiguous tensor: all bytes before and after those of its elements.

    Its pickle builds the tensor from its storage.
    """
    size = prod(shape) * itemsize(dtype)
    kind, count, version = Global("torch.storage", "UntypedStorage"), size, 3
    if dtype in _STORAGES:  # other dtypes have a storage of bytes
        kind, count, version = Global("torch", _STORAGES[dtype]), prod(shape), 2
    storage = Record(None, (("storage", kind, "0", "cpu", count),))
    hooks = Record(Global("collections", "OrderedDict"), ())
    arguments: tuple[Any, ...] = (storage, 0, shape, row_major(shape), False, hooks)
    arguments += (Global("torch", dtype),) if version == 3 else ()
    rebuild = Global("torch._utils", f"_rebuild_tensor_v{version}")
    return archive_around(pickled(Record(rebuild, arguments)), size)


_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = Global(_METADATA, "TensorStorageMetadata")
_CHUNK = Global(_METADATA, "ChunkStorageMetadata")
_INDEX = Global(_METADATA, "MetadataIndex")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_FORMAT = Record(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_BYTES = Shared(Global(_METADATA, "BytesStorageMetadata"))
_STRIDED = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",))


class _Plan:
    """The files of the ranks, filled so far, and what ``.metadata`` says of them."""

    def __init__(self) -> None:
        self.literals: list[Literal] = []
        self.numbers: dict[int, int] = {}
        """The number of the file of each rank."""
        self.sizes: list[int] = []
        self.states: dict[str, Any] = {}
        self.places: dict[Record, Record] = {}

    def add(
        self, rank: int, size: int, name: str, start: Shared | None = None, chunk: int | None = None
    ) -> tuple[int, int, int]:
        """Append an entry to a rank's file: the file, the offset, and the padding before it."""
        if rank not in self.numbers:
            self.numbers[rank] = len(self.sizes)
            self.sizes.append(0)
        file = self.numbers[rank]
        skipped = -self.sizes[file] % ALIGNMENT
        offset = self.sizes[file] + skipped
        self.sizes[file] = offset + size
        index = Record(_INDEX, state={"fqn": name, "offset": start, "index": chunk})
        place = {"relative_path": f"__{rank}_0.distcp", "offset": offset, "length": size}
        self.places[index] = Record(_PLACE, state=place)
        return file, offset, skipped

    def add_bytes(self, name: str, size: int, data: bytes = b"") -> tuple[int, int]:
        """Append an entry that is no tensor to the first file: the file and the offset."""
        file, offset, skipped = self.add(next(iter(self.numbers), 0), size, name)
        if skipped or data:
            self.literals.append(Literal(file, offset - skipped, bytes(skipped) + data))
        self.states[name] = _BYTES
        return file, offset


def distcp(
    tensors: Mapping[str, Wanted],
    objects: Sequence[StoredObject] = (),
    nesting: Mapping[str, tuple[str | int, ...]] | None = None,
    values: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Output:
    """The files of the ranks, and the ``.metadata`` that finds everything in them."""
    plan, outputs = _Plan(), dict[str, OutputTensor]()
    for number, (name, wanted) in enumerate(tensors.items()):
        pieces, chunks = list[StoredPiece](), list[Shared]()
        around: list[tuple[bytes, bytes]] = []
        for start, stop, rank in owned_boxes(name, wanted, number):
            box, strides, chunk, head, tail = _planned(wanted.dtype, start, stop)
            size = len(head) + box.size * itemsize(wanted.dtype) + len(tail)
            file, offset, skipped = plan.add(rank, size, name, _size(start), len(chunks))
            around.append((_padded(head, skipped), tail))
            pieces.append(StoredPiece(box, file, offset + len(head), strides))
            chunks.append(chunk)
        outputs[name] = OutputTensor(
            name, wanted.shape, wanted.dtype, tuple(pieces), around=tuple(around)
        )
        described = {"properties": _properties(wanted.dtype), "size": _size(wanted.shape)}
        plan.states[name] = Record(_TENSOR, state={**described, "chunks": chunks})
    copies = [ObjectCopy(one, *plan.add_bytes(one.name, one.size)) for one in objects]
    for name, value in (values or {}).items():
        data, _ = archive_around(pickled(value))  # as torch.save writes it
        plan.add_bytes(name, len(data), data)
    files = [StoredFile(f"__{rank}_0.distcp", plan.sizes[at]) for rank, at in plan.numbers.items()]
    state = {
        "state_dict_metadata": plan.states,
        "planner_data": {name: (nesting or {}).get(name, (name,)) for name in plan.states},
        "storage_data": plan.places,
        "storage_meta": None,
        "version": "1.0.0",
        **(extras or {}),
    }
    metadata = pickled(Record(Global(_METADATA, "Metadata"), state=state))
    literals = (*plan.literals, Literal(len(files), 0, metadata))
    return Output((*files, StoredFile(".metadata", len(metadata))), outputs, literals, (*copies,))


@lru_cache(maxsize=4096)
def _planned(
    dtype: str, start: tuple[int, ...], stop: tuple[int, ...]
) -> tuple[Box, tuple[int, ...], Shared, bytes, bytes]:
    """A box, its strides, its chunk in the metadata, both ends of its archive.

    They are equal in many tensors.
    """
    box = Box(start, stop)
    chunk = Shared(_CHUNK, state={"offsets": _size(start), "sizes": _size(box.shape)})
    return box, row_major(box.shape), chunk, *tensor_archive(dtype, box.shape)


@lru_cache(maxsize=1 << 14)
def _padded(head: bytes, skipped: int) -> bytes:
    """The bytes before the elements of a box, after padding; one object for many tensors."""
    return bytes(skipped) + head


@cache
def _properties(dtype: str) -> Shared:
    state = (Global("torch", dtype), _STRIDED, False, _FORMAT, False)
    return Shared(Global(_METADATA, "TensorProperties"), state=state)


@lru_cache(maxsize=1 << 16)
def _size(values: tuple[int, ...]) -> Shared:
    return Shared(_SIZE, (values,))
