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
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Global", "Instance", "Persistent", "pickled"]


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function in a module."""

    module: str
    name: str


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


def pickled(value: Any) -> bytes:
    """A value as a pickle of protocol 2, which every Python reads."""
    writer = _Writer()
    writer.out += pickle.PROTO + b"\x02"
    writer.value(value)
    return bytes(writer.out + pickle.STOP)


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._known: dict[Any, int] = {}

    def value(self, value: Any) -> None:
        """Write one value, whatever it is."""
        match value:
            case None:
                self.out += pickle.NONE
            case bool():
                self.out += pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                self._int(value)
            case float():
                self.out += pickle.BINFLOAT + struct.pack(">d", value)
            case str():
                self._text(value)
            case bytes():
                self.out += pickle.BINBYTES + struct.pack("<I", len(value)) + value
            case tuple():
                self._tuple(value)
            case list() | dict():
                self._container(value)
            case _:
                self._object(value)

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

    def _text(self, value: str) -> None:
        if self._recall(value):
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        short = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
        if len(value) > 3:
            self.out += pickle.MARK
        for one in value:
            self.value(one)
        self.out += short.get(len(value), pickle.TUPLE)

    def _container(self, value: list[Any] | dict[Any, Any]) -> None:
        is_list = isinstance(value, list)
        self.out += pickle.EMPTY_LIST if is_list else pickle.EMPTY_DICT
        if not value:
            return
        self.out += pickle.MARK
        for one in value:
            self.value(one)
            if not is_list:
                self.value(value[one])
        self.out += pickle.APPENDS if is_list else pickle.SETITEMS

    def _object(self, value: Any) -> None:
        match value:
            case Global():
                if not self._recall(value):
                    self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
                    self._remember(value)
            case Call():
                self.value(value.function)
                self.value(value.arguments)
                self.out += pickle.REDUCE
            case Persistent():
                self.value(value.id)
                self.out += pickle.BINPERSID
            case Instance():
                self._instance(value)
            case _:
                raise TypeError(f"{type(value).__name__} is not written into pickles")

    def _instance(self, value: Instance) -> None:
        self.value(value.of)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if value.state is not None:
            self.value(value.state)
            self.out += pickle.BUILD

    def _remember(self, value: Any) -> None:
        """Number what is most likely said again."""
        number = self._known[value] = len(self._known)
        self.out += pickle.LONG_BINPUT + struct.pack("<I", number)

    def _recall(self, value: Any) -> bool:
        number = self._known.get(value)
        if number is None:
            return False
        self.out += pickle.LONG_BINGET + struct.pack("<I", number)
        return True
