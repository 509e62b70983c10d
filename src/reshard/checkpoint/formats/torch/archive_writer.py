"""The zip archives that ``torch.save`` writes: of a tensor, without its bytes; or of a plain value.

    archive/data.pkl            how to build the tensor from its storage
    archive/.format_version     1
    archive/.storage_alignment  64
    archive/byteorder           little
    archive/data/0              the elements, uncompressed, at a multiple of 64 bytes
    archive/version             3
    the central directory

>>> archive = TensorArchive.of("float32", (2, 3))
>>> archive.data_offset % 64, archive.data_size, len(archive.head) + archive.data_size
(0, 24, 536)

The pickle names classes and functions without importing them. A value is plain data, or one of the
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

from reshard.checkpoint.formats.torch.tensors import STORAGE_DTYPES
from reshard.checkpoint.formats.torch.unpickler import Global
from reshard.dtypes import itemsize
from reshard.layout.box import row_major

__all__ = [
    "ALIGNMENT", "Call", "Fields", "Instance", "Pairs", "Persistent", "Shared", "TensorArchive",
    "pickled", "value_archive",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling a function."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object that is created without calling its class, and then gets a state."""

    of: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object that the reader looks up by id; torch refers to storages in this way."""

    id: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict whose keys are objects, which have no hash before they are read."""

    items: list[tuple[Any, Any]]


class Fields(NamedTuple):
    """A dict of attributes, as the state of an object; many objects share one tuple of names."""

    names: tuple[str, ...]
    values: tuple[Any, ...]


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
        self._names: dict[tuple[str, ...], list[bytes]] = {}
        """The same for all names of ``Fields``, which thousands of objects share."""

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

    def _none(self, value: None) -> None:
        self.out += pickle.NONE

    def _bool(self, value: bool) -> None:
        self.out += pickle.NEWTRUE if value else pickle.NEWFALSE

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

    def _float(self, value: float) -> None:
        self.out += pickle.BINFLOAT + struct.pack(">d", value)

    def _bytes(self, value: bytes) -> None:
        self.out += pickle.BINBYTES + struct.pack("<I", len(value)) + value

    def _str(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        self._memoize(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.out += pickle.MARK
        for one in value:
            self.write(one)
        self.out += _TUPLES.get(len(value), pickle.TUPLE)

    def _list(self, value: list[Any]) -> None:
        self.out += pickle.EMPTY_LIST
        if value:
            self.out += pickle.MARK
            for one in value:
                self.write(one)
            self.out += pickle.APPENDS

    def _items(self, items: Collection[tuple[Any, Any]]) -> None:
        self.out += pickle.EMPTY_DICT
        if items:
            self.out += pickle.MARK
            for key, value in items:
                self.write(key)
                self.write(value)
            self.out += pickle.SETITEMS

    def _fields(self, value: Fields) -> None:
        names = self._names.get(value.names)
        if names is None:
            self._items(tuple(zip(value.names, value.values, strict=True)))
            self._names[value.names] = [self._memo[name] for name in value.names]
            return
        out, memo = self.out, self._memo
        out += pickle.EMPTY_DICT + pickle.MARK
        for name, one in zip(names, value.values, strict=True):
            out += name
            # A .metadata has millions of these: most are known, or numbers.
            kind = type(one)
            if kind is int:
                self._int(one)
            elif kind in _MEMOIZED and (reference := memo.get(one)) is not None:
                out += reference
            else:
                self.write(one)
        out += pickle.SETITEMS

    def _global(self, value: Global) -> None:
        self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        self._memoize(value)

    def _call(self, value: Call) -> None:
        self.write(value.function)
        self.write(value.arguments)
        self.out += pickle.REDUCE

    def _persistent(self, value: Persistent) -> None:
        self.write(value.id)
        self.out += pickle.BINPERSID

    def _shared(self, value: Shared) -> None:
        self.write(value.value)
        self._memoize(value)

    def _instance(self, value: Instance) -> None:
        self.write(value.of)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        state = value.state
        if type(state) is Fields:
            self._fields(state)
        elif state is not None:
            self.write(state)
        if state is not None:
            self.out += pickle.BUILD

    def _memoize(self, value: Any) -> None:
        number = struct.pack("<I", len(self._memo))
        self._memo[value] = pickle.LONG_BINGET + number
        self.out += pickle.LONG_BINPUT + number


_MEMOIZED = frozenset({str, Global, Shared})
_SMALL_INTS = [pickle.BININT1 + bytes([value]) for value in range(256)]
_TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._str,
    bytes: _Writer._bytes,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: lambda writer, value: writer._items(value.items()),
    Pairs: lambda writer, value: writer._items(value.items),
    Fields: _Writer._fields,
    Global: _Writer._global,
    Call: _Writer._call,
    Persistent: _Writer._persistent,
    Instance: _Writer._instance,
    Shared: _Writer._shared,
}


ALIGNMENT = 64
UTF8 = 0x0800
BIG = 0xFFFFFFFF
"""Stands in a 32-bit field whose number is in the 64-bit extra field."""
ZIP64, PADDING = 1, 0x4246
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
    def of(cls, dtype: str, shape: Sequence[int]) -> TensorArchive:
        """The archive of a contiguous tensor."""
        size = prod(shape) * itemsize(dtype)
        members = _Members(_tensor(dtype, tuple(shape)))
        members.add_header("data/0", size, crc=0)
        head = bytes(members.out)
        members.skipped = size
        members.finish()
        return cls(head, size, bytes(members.out[len(head) :]))


def value_archive(value: Any) -> bytes:
    """The archive that ``torch.save`` writes for a plain value."""
    members = _Members(value)
    members.finish()
    return bytes(members.out)


def _tensor(dtype: str, shape: tuple[int, ...]) -> Call:
    """The pickled call that builds the tensor from its storage."""
    strides = row_major(shape)
    count = prod(shape)
    hooks = Call(Global("collections", "OrderedDict"), ())
    known = dtype in STORAGES  # other dtypes have a storage of bytes
    kind = Global("torch", STORAGES[dtype]) if known else Global("torch.storage", "UntypedStorage")
    length = count if known else count * itemsize(dtype)
    storage = Persistent(("storage", kind, "0", "cpu", length))
    arguments = (storage, 0, shape, strides, False, hooks)
    if known:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, Global("torch", dtype)))


class _Members:
    """The members of an archive, which begins with the pickle of a value."""

    def __init__(self, value: Any) -> None:
        self.out = bytearray()
        self.skipped = 0
        """Bytes of the tensor, which are not in ``out``."""
        self._directory = bytearray()
        self._count = 0
        self.add("data.pkl", pickled(value))
        self.add(".format_version", b"1")
        self.add(".storage_alignment", str(ALIGNMENT).encode())
        self.add("byteorder", b"little")

    def add(self, name: str, data: bytes) -> None:
        """Add a member."""
        self.add_header(name, len(data), crc32(data))
        self.out += data

    def add_header(self, name: str, size: int, crc: int) -> None:
        """Add the header of a member, padded so that its bytes are aligned."""
        path = f"archive/{name}".encode()
        at = len(self.out) + self.skipped
        shown, extra = (
            (BIG, struct.pack("<HHQQ", ZIP64, 16, size, size)) if size >= BIG else (size, b"")
        )
        begin = at + 30 + len(path) + len(extra) + 4
        pad = -begin % ALIGNMENT
        extra += struct.pack("<HH", PADDING, pad) + b"Z" * pad
        common = struct.pack(
            "<HHHHHIIIHH", 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra)
        )
        self.out += b"PK\x03\x04" + common + path + extra
        self._list(path, size, crc, at)

    def _list(self, path: bytes, size: int, crc: int, at: int) -> None:
        """Add a member to the central directory."""
        big = [value for value in (size, size, at) if value >= BIG]
        extra = struct.pack(f"<HH{len(big)}Q", ZIP64, 8 * len(big), *big) if big else b""
        shown, where = min(size, BIG), min(at, BIG)
        self._directory += b"PK\x01\x02" + struct.pack(
            "<HHHHHHIIIHHHHHII",
            0, 0, UTF8, 0, 0, 0, crc, shown, shown, len(path), len(extra), 0, 0, 0, 0, where,
        )  # fmt: skip
        self._directory += path + extra
        self._count += 1

    def finish(self) -> None:
        """Add the last member, the central directory, and the records that locate it."""
        self.add("version", b"3\n")
        at, size, count = len(self.out) + self.skipped, len(self._directory), self._count
        self.out += self._directory
        if at >= BIG:
            end = at + size
            self.out += b"PK\x06\x06" + struct.pack(
                "<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, at
            )
            self.out += b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
        self.out += b"PK\x05\x06" + struct.pack(
            "<HHHHIIH", 0, 0, count, count, size, min(at, BIG), 0
        )
