"""Writes pickles that name classes and functions without importing them.

A value is plain data, or one of the ways in which a pickle refers to objects: a global name, a
call, an object with a state, a persistent id.

>>> pickle.loads(pickled({"a": (1, -2, 3_000_000_000), "b": [True, None, "x", 0.5, b"y"]}))
{'a': (1, -2, 3000000000), 'b': [True, None, 'x', 0.5, b'y']}
>>> pickle.loads(pickled(Call(Global("collections", "Counter"), ("aab",))))
Counter({'a': 2, 'b': 1})
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Call", "Fields", "Global", "Instance", "Pairs", "Persistent", "Shared", "pickled"]


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """The name of a class or function in a module."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Module and name, joined by a dot."""
        return f"{self.module}.{self.name}"


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
            self.out += pickle.BININT1 + struct.pack("<B", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += pickle.BININT + struct.pack("<i", value)
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
        self.out += pickle.EMPTY_DICT + pickle.MARK
        for name, one in zip(names, value.values, strict=True):
            self.out += name
            self.write(one)
        self.out += pickle.SETITEMS

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
        if value.state is not None:
            self.write(value.state)
            self.out += pickle.BUILD

    def _memoize(self, value: Any) -> None:
        number = struct.pack("<I", len(self._memo))
        self._memo[value] = pickle.LONG_BINGET + number
        self.out += pickle.LONG_BINPUT + number


_MEMOIZED = frozenset({str, Global, Shared})
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
