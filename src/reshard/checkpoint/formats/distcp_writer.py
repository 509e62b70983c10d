"""Plans a ``.distcp`` folder as ``torch.distributed.checkpoint`` writes it, without torch.

Every box is a ``torch.save`` archive in the file of the rank that writes it. ``.metadata`` is a
pickle with the place of every box.

>>> archive = TensorArchive.of("float32", (2, 3))
>>> archive.data_offset % 64, archive.data_size, len(archive.head) + archive.data_size
(0, 24, 536)

The pickles name classes and functions without importing them. A value is plain data, or one of the
ways in which a pickle refers to objects: a global name, a call, an object with a state, a
persistent id.

>>> pickle.loads(pickled({"a": (1, -2, 3_000_000_000), "b": [True, None, "x", 0.5, b"y"]}))
{'a': (1, -2, 3000000000), 'b': [True, None, 'x', 0.5, b'y']}
>>> pickle.loads(pickled(Call(Global("collections", "Counter"), ("aab",))))
Counter({'a': 2, 'b': 1})
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

from reshard.checkpoint.catalog import StoredObject, StoredPiece
from reshard.checkpoint.formats.torch.archive import ALIGNMENT, ArchiveWriter
from reshard.checkpoint.formats.torch.tensors import STORAGE_DTYPES
from reshard.checkpoint.formats.torch.unpickler import Global
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

__all__ = ["distcp"]


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling a function."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """An object that is created without calling its class, and then gets a state."""

    of: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object that the reader looks up by id; torch refers to storages in this way."""

    id: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """An immutable value that occurs in many places: written once, then referred to.

    >>> size = Shared((1, 2))
    >>> one, two = pickle.loads(pickled([size, size]))
    >>> one is two
    True
    """

    value: Any


def pickled(value: Any) -> bytes:
    """A value as a pickle of protocol 2."""
    writer = _Writer()
    writer.out += pickle.PROTO + b"\x02"
    writer.write(value)
    return bytes(writer.out + pickle.STOP)


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._memo: dict[Any, bytes] = {}
        """The instruction that refers to each value of the memo."""

    def write(self, value: Any) -> None:
        """Write one value of any kind."""
        kind = type(value)
        if kind in _MEMOIZED:
            reference = self._memo.get(value)
            if reference is not None:
                self.out += reference
                return
        write = _WRITERS.get(kind)
        if write is None:
            write = next((w for kind, w in _WRITERS.items() if isinstance(value, kind)), None)
        if write is None:
            raise TypeError(f"{type(value).__name__} is not written into pickles")
        write(self, value)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += _SMALL_INTS[value]
        elif -(1 << 31) <= value < 1 << 31:
            self.out += pickle.BININT + value.to_bytes(4, "little", signed=True)
        else:
            data = pickle.encode_long(value)
            short = len(data) < 256
            self.out += pickle.LONG1 if short else pickle.LONG4
            self.out += struct.pack("<B" if short else "<i", len(data)) + data

    def _bytes(self, value: bytes) -> None:
        self.out += pickle.BINBYTES + struct.pack("<I", len(value)) + value

    def _str(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        self._memoize(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.out += pickle.MARK
        self._ended(_TUPLES.get(len(value), pickle.TUPLE), *value)

    def _list(self, value: list[Any]) -> None:
        self.out += pickle.EMPTY_LIST
        if value:
            self.out += pickle.MARK
            self._ended(pickle.APPENDS, *value)

    def _dict(self, value: dict[Any, Any]) -> None:
        self.out += pickle.EMPTY_DICT
        if value:
            self.out += pickle.MARK
            for key, one in value.items():
                self.write(key)
                self.write(one)
            self.out += pickle.SETITEMS

    def _global(self, value: Global) -> None:
        self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        self._memoize(value)

    def _ended(self, instruction: bytes, *values: Any) -> None:
        """Write values, and the instruction that takes them."""
        for value in values:
            self.write(value)
        self.out += instruction

    def _shared(self, value: Shared) -> None:
        self.write(value.value)
        self._memoize(value)

    def _instance(self, value: Instance) -> None:
        self.write(value.of)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if value.state is not None:
            self._ended(pickle.BUILD, value.state)

    def _memoize(self, value: Any) -> None:
        number = struct.pack("<I", len(self._memo))
        self._memo[value] = pickle.LONG_BINGET + number
        self.out += pickle.LONG_BINPUT + number


_MEMOIZED = frozenset({str, Global, Shared})
_SMALL_INTS = [pickle.BININT1 + bytes([value]) for value in range(256)]
_TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, value: writer.out.extend(pickle.NONE),
    bool: lambda writer, value: writer.out.extend(pickle.NEWTRUE if value else pickle.NEWFALSE),
    int: _Writer._int,
    float: lambda writer, value: writer.out.extend(pickle.BINFLOAT + struct.pack(">d", value)),
    str: _Writer._str,
    bytes: _Writer._bytes,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    Global: _Writer._global,
    Call: lambda writer, call: writer._ended(pickle.REDUCE, call.function, call.arguments),
    Persistent: lambda writer, value: writer._ended(pickle.BINPERSID, value.id),
    Instance: _Writer._instance,
    Shared: _Writer._shared,
}


STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """The archive of one tensor: all bytes before and after those of its elements."""

    head: bytes
    data_size: int
    tail: bytes

    @property
    def data_offset(self) -> int:
        """The byte at which the elements begin."""
        return len(self.head)

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.data_size + len(self.tail)

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> TensorArchive:
        """The archive of a contiguous tensor, whose pickle builds it from its storage."""
        size = prod(shape) * itemsize(dtype)
        kind, count, version = Global("torch.storage", "UntypedStorage"), size, 3
        if dtype in STORAGES:  # other dtypes have a storage of bytes
            kind, count, version = Global("torch", STORAGES[dtype]), prod(shape), 2
        storage = Persistent(("storage", kind, "0", "cpu", count))
        hooks = Call(Global("collections", "OrderedDict"), ())
        arguments: tuple[Any, ...] = (storage, 0, shape, row_major(shape), False, hooks)
        arguments += (Global("torch", dtype),) if version == 3 else ()
        rebuild = Global("torch._utils", f"_rebuild_tensor_v{version}")
        archive = ArchiveWriter(pickled(Call(rebuild, arguments)))
        archive.add_header("data/0", size, crc=0)
        head = bytes(archive.out)
        archive.skipped = size
        archive.finish()
        return cls(head, size, bytes(archive.out[len(head) :]))


Path = tuple[str | int, ...]
"""The path to an entry of a nested state dict."""

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = Global(_METADATA, "TensorStorageMetadata")
_CHUNK = Global(_METADATA, "ChunkStorageMetadata")
_INDEX = Global(_METADATA, "MetadataIndex")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_FORMAT = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_BYTES = Instance(Global(_METADATA, "BytesStorageMetadata"))
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))


class _Plan:
    """The files of the ranks, filled so far, and what ``.metadata`` says of them."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.literals: list[Literal] = []
        self.numbers: dict[int, int] = {}
        self.sizes: list[int] = []
        self.states: dict[str, Any] = {}
        self.places: dict[Instance, Instance] = {}

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
        index = Instance(_INDEX, {"fqn": name, "offset": start, "index": chunk})
        place = {"relative_path": self.names[rank], "offset": offset, "length": size}
        self.places[index] = Instance(_PLACE, place)
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
    nesting: Mapping[str, Path] | None = None,
    values: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Output:
    """The files of the ranks, and the ``.metadata`` that finds everything in them."""
    layouts = {wanted.layout for wanted in tensors.values() if wanted.layout is not None}
    ranks = {0}.union(*(layout.ranks for layout in layouts))
    plan, outputs = _Plan({rank: f"__{rank}_0.distcp" for rank in ranks}), dict[str, OutputTensor]()
    for number, (name, wanted) in enumerate(tensors.items()):
        pieces, chunks = list[StoredPiece](), list[Shared]()
        around: list[tuple[bytes, bytes]] = []
        for start, stop, rank in owned_boxes(name, wanted, number):
            box, strides, chunk, archive = _planned(wanted.dtype, start, stop)
            file, offset, skipped = plan.add(rank, archive.size, name, _size(start), len(chunks))
            around.append((_padded(archive.head, skipped), archive.tail))
            pieces.append(StoredPiece(box, file, offset + archive.data_offset, strides))
            chunks.append(chunk)
        outputs[name] = OutputTensor(
            name, wanted.shape, wanted.dtype, tuple(pieces), around=tuple(around)
        )
        described = {"properties": _properties(wanted.dtype), "size": _size(wanted.shape)}
        plan.states[name] = Instance(_TENSOR, {**described, "chunks": chunks})
    copies = [ObjectCopy(one, *plan.add_bytes(one.name, one.size)) for one in objects]
    for name, value in (values or {}).items():
        writer = ArchiveWriter(pickled(value))  # as torch.save writes it
        writer.finish()
        plan.add_bytes(name, len(writer.out), bytes(writer.out))
    files = [StoredFile(plan.names[rank], plan.sizes[at]) for rank, at in plan.numbers.items()]
    paths = nesting or {}
    state = {
        "state_dict_metadata": plan.states,
        "planner_data": {name: paths.get(name, (name,)) for name in plan.states},
        "storage_data": plan.places,
        "storage_meta": None,
        "version": "1.0.0",
        **(extras or {}),
    }
    metadata = pickled(Instance(Global(_METADATA, "Metadata"), state))
    literals = (*plan.literals, Literal(len(files), 0, metadata))
    return Output((*files, StoredFile(".metadata", len(metadata))), outputs, literals, (*copies,))


@lru_cache(maxsize=4096)
def _planned(
    dtype: str, start: tuple[int, ...], stop: tuple[int, ...]
) -> tuple[Box, tuple[int, ...], Shared, TensorArchive]:
    """A box with its strides, its chunk in the metadata, and its archive: equal in many tensors."""
    box = Box(start, stop)
    chunk = Instance(_CHUNK, {"offsets": _size(start), "sizes": _size(box.shape)})
    return box, row_major(box.shape), Shared(chunk), TensorArchive.of(dtype, box.shape)


@lru_cache(maxsize=1 << 14)
def _padded(head: bytes, skipped: int) -> bytes:
    """The bytes before the elements of a box, after padding; one object for many tensors."""
    return bytes(skipped) + head


@cache
def _properties(dtype: str) -> Shared:
    state = (Global("torch", dtype), _STRIDED, False, _FORMAT, False)
    return Shared(Instance(Global(_METADATA, "TensorProperties"), state))


@lru_cache(maxsize=1 << 16)
def _size(values: tuple[int, ...]) -> Shared:
    return Shared(Call(_SIZE, (values,)))
