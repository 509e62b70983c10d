"""Pickles written by hand, so that classes can be named without being imported.

A value is plain data, or one of the three ways in which pickle speaks of objects: a name (of a
class or a function), a call, and an object with a state. What torch's classes look like inside is
the concern of ``distcp``.

>>> import pickle
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
        """Both, joined by a dot; thousands of names may share one module."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Call:
    """What a function gives for these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made without calling its class, and then given a state."""

    of: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """What the reader knows under this id; torch names storages so."""

    id: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict whose keys are objects: they are equal or not only once they are read."""

    items: list[tuple[Any, Any]]


class Fields(NamedTuple):
    """A dict of names, as the state of an object: smaller than one where there are many."""

    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """A value that never changes and stands in many places: written once, and then named.

    >>> import pickle
    >>> size = Shared((1, 2))
    >>> one, two = pickle.loads(pickled([size, size]))
    >>> one is two
    True
    """

    value: Any


def pickled(value: Any) -> bytes:
    """A value as a pickle of protocol 2, which every Python reads."""
    writer = _Writer()
    writer.out += pickle.PROTO + b"\x02"
    writer.value(value)
    return bytes(writer.out + pickle.STOP)


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._known: dict[Any, bytes] = {}
        """How each value that was written before is named."""
        self._keys: dict[tuple[str, ...], list[bytes]] = {}
        """The same of all names of fields together: thousands of objects have the same ones."""

    def value(self, value: Any) -> None:
        """Write one value, whatever it is."""
        kind = type(value)
        if kind in _NAMED:
            name = self._known.get(value)
            if name is not None:
                self.out += name
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

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.out += pickle.MARK
        for one in value:
            self.value(one)
        self.out += _SHORT.get(len(value), pickle.TUPLE)

    def _list(self, value: list[Any]) -> None:
        self.out += pickle.EMPTY_LIST
        if value:
            self.out += pickle.MARK
            for one in value:
                self.value(one)
            self.out += pickle.APPENDS

    def _dict(self, value: dict[Any, Any]) -> None:
        self._items(value.items())

    def _pairs(self, value: Pairs) -> None:
        self._items(value.items)

    def _items(self, items: Collection[tuple[Any, Any]]) -> None:
        self.out += pickle.EMPTY_DICT
        if items:
            self.out += pickle.MARK
            for key, value in items:
                self.value(key)
                self.value(value)
            self.out += pickle.SETITEMS

    def _fields(self, value: Fields) -> None:
        keys = self._keys.get(value.names)
        if keys is None:
            self._items(tuple(zip(value.names, value.values, strict=True)))
            self._keys[value.names] = [self._known[name] for name in value.names]
            return
        self.out += pickle.EMPTY_DICT + pickle.MARK
        for key, one in zip(keys, value.values, strict=True):
            self.out += key
            self.value(one)
        self.out += pickle.SETITEMS

    def _global(self, value: Global) -> None:
        self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _call(self, value: Call) -> None:
        self.value(value.function)
        self.value(value.arguments)
        self.out += pickle.REDUCE

    def _persistent(self, value: Persistent) -> None:
        self.value(value.id)
        self.out += pickle.BINPERSID

    def _shared(self, value: Shared) -> None:
        self.value(value.value)
        self._remember(value)

    def _instance(self, value: Instance) -> None:
        self.value(value.of)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if value.state is not None:
            self.value(value.state)
            self.out += pickle.BUILD

    def _remember(self, value: Any) -> None:
        """Number what is most likely said again."""
        number = struct.pack("<I", len(self._known))
        self._known[value] = pickle.LONG_BINGET + number
        self.out += pickle.LONG_BINPUT + number


_NAMED = frozenset({str, Global, Shared})
"""What is named where it stands again."""
_SHORT = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._text,
    bytes: _Writer._bytes,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    Pairs: _Writer._pairs,
    Fields: _Writer._fields,
    Global: _Writer._global,
    Call: _Writer._call,
    Persistent: _Writer._persistent,
    Instance: _Writer._instance,
    Shared: _Writer._shared,
}
