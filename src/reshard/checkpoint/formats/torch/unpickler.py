"""Reads pickles without running them: classes and calls become inert records.

A pickle is a program for a stack machine. This is the pure-Python machine of the standard library,
reduced to the instructions that torch writes. Names become ``Global`` values and calls ``Record``
values, so nothing is imported or called, and names that only an attack has are refused. Work that a
short input can repeat (copies of a long list, long keys) is counted, so time and memory are
proportional to the size of the input.

>>> unpickle(pickle.dumps(eval), "a.pkl")
Traceback (most recent call last):
reshard.errors.UnsupportedError: a.pkl: names builtins.eval, which is not read: nothing was run
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

MAX_NAME = 1 << 10  # characters of the name of a module, and of a name in it
COPIES, FREE_COPIES = 4, 1 << 12
"""Elements that may be copied for each byte of the input, and regardless of its size."""
MAX_KEY = 1 << 60
"""Larger integers can be chosen so that all hash to the same slot of a dict."""
MAX_TUPLE_KEYS = 1 << 13
"""Tuples as keys of dicts, which can be chosen in the same way."""

_HARMLESS = {
    "argparse.Namespace", "types.SimpleNamespace", "collections.OrderedDict",
    "collections.defaultdict", "collections.deque", "collections.Counter", "_codecs.encode",
    "copyreg._reconstructor", "copyreg.__newobj__", "_io.BytesIO", "_io.StringIO",
    *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
    "zoneinfo.ZoneInfo._unpickle", "zoneinfo._common.ZoneInfo._unpickle", "decimal.Decimal",
    "fractions.Fraction", "uuid.UUID", "uuid.SafeUUID", "functools.partial",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in (
        "Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in (
        "set", "frozenset", "slice", "range", "complex", "bytearray", "int", "float", "str",
        "bool", "list", "dict", "tuple", "object", "bytes")),
    "__builtin__.long", "__builtin__.xrange", "__builtin__.unicode",  # protocol 2: int, range, str
}  # fmt: skip
"""Names of the standard library that occur in checkpoints of training runs."""


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class Record:
    """The result of a call that was not made: ``maker(*args)``, its state and its items.

    ``maker`` is None for a persistent id, which torch uses for storages.
    """

    maker: Global | None
    args: tuple[Any, ...] = ()
    state: Any = None
    items: Any = ()

    @property
    def kind(self) -> str:
        return "persistent" if self.maker is None else self.maker.path

    def field(self, name: str) -> Any:
        """One attribute of the object; None if the pickle does not set it."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        if not self.items:  # few have any
            self.items = []
        self.items += items

    def __repr__(self) -> str:
        return f"<{self.kind}>"  # the arguments may nest without end


def unpickle(data: bytes, where: str) -> Any:
    """The value of a pickle, with records in place of objects; ``where`` is for errors."""
    reader = _Unpickler(data, where)
    try:
        return reader.load()
    except (DamageError, UnsupportedError):
        raise
    except (IndexError, struct.error):
        reader.fail("the pickle is truncated")
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError, pickle.PickleError):
        reader.fail("the pickle is malformed")
    except MemoryError:
        reader.refuse("the pickle takes more memory than there is")


class _Unpickler(pickle._Unpickler):
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, where: str) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self.read = file.read
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self._file, self._size, self._where = file, len(data), where
        self._globals: dict[tuple[str, str], Global] = {}
        self._copied = self._tuple_keys = 0

    def load(self) -> Any:
        read, steps = self.read, _STEPS
        try:
            while True:
                steps[read(1)[0]](self)
        except _Stop as stop:
            return stop.value

    def fail(self, why: str, kind: type[Exception] = DamageError) -> NoReturn:
        raise kind(f"{self._where}: byte {self._file.tell()} of {self._size}: {why}")

    def refuse(self, why: str) -> NoReturn:
        self.fail(why, UnsupportedError)

    def spend(self, count: int) -> None:
        """Count elements that are visited or copied although the input has them only once."""
        self._copied += count
        most = COPIES * self._size + FREE_COPIES
        if self._copied > most:
            self.refuse(
                f"it copies {self._copied} elements, at most {most} for a pickle of its size"
            )

    def readline(self) -> bytes:
        line = self._file.readline(4 * MAX_NAME)
        if not line.endswith(b"\n"):
            self.fail(f"a name without an end, or of more than {MAX_NAME} characters")
        return line

    def find_class(self, module: str, name: str) -> Global:
        """A name that a training run may have; one that only an attack has is an error."""
        longest = max(len(module), len(name))
        if longest > MAX_NAME:
            self.fail(f"a name of {longest} characters, at most {MAX_NAME} are read")
        known = self._globals.get((module, name))
        if known is None:
            top = module.partition(".")[0]
            is_library = top in sys.stdlib_module_names or top in ("__builtin__", "nt")
            known = self._globals[module, name] = Global(module, name)
            if is_library and known.path not in _HARMLESS:
                raise UnsupportedError(
                    f"{self._where}: names {quoted(known.path)[1:-1]}, which is not read: nothing "
                    "was run"
                )
        return known

    def persistent_load(self, pid: Any) -> Record:
        return Record(None, (pid,))

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def load_dict(self) -> None:
        pairs = self.pop_mark()
        self.append({})
        self._set_items(pairs)

    def _set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if len(pairs) % 2:
            self.fail("a key without a value")
        if type(target) is Record:
            target.extend([*zip(pairs[::2], pairs[1::2], strict=True)])
            return
        if type(target) is not dict:
            self.fail("values are stored in what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str:
                self._check_key(key)
            target[key] = value

    def _check_key(self, key: Any) -> None:
        """Refuse keys that may take long to hash: tuples of tuples, or chosen to collide."""
        parts = key if type(key) is tuple else (key,)
        if parts is key:
            self.spend(len(parts))
            self._tuple_keys += 1
            if self._tuple_keys > MAX_TUPLE_KEYS:
                self.refuse(f"more than {MAX_TUPLE_KEYS} keys of dicts are tuples")
        for part in parts:
            if type(part) not in _SIMPLE:
                self.fail(f"a {type(key).__name__} as the key of a dict")
            if type(part) is int and abs(part) >= MAX_KEY:
                self.refuse(f"a number of {part.bit_length()} bits as the key of a dict")

    def load_reduce(self, *keywords: Any) -> None:
        args = self.stack.pop()
        if type(args) is not tuple:
            self.fail("a call without a tuple of arguments")
        if keywords:
            self.spend(len(args))
            args = (*args, *keywords)
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        self.load_reduce(self.stack.pop())

    def _call(self, maker: Any, args: tuple[Any, ...]) -> Any:
        """The value of a call whose result is a plain tuple, dict or bytes; else a record."""
        if type(maker) is not Global:
            self.fail("a call of what is no name")
        match maker.module, maker.name, args:
            case "torch", "Size", (list() as sizes,):
                self.spend(len(sizes))
                return tuple(sizes)
            case "torch", "Size", (tuple() as sizes,):
                return sizes
            case "collections", "OrderedDict", ():
                return {}
            case "_codecs", _, (text, "latin1"):  # bytes, in protocol 2
                self.spend(len(text))
                return text.encode("latin1")
            case "builtins" | "__builtin__", "bytes", ():
                return b""
        return Record(maker, args)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Record:
            target.state = state
        elif type(target) is not dict:  # attributes of an OrderedDict are not needed
            self.fail("a state for what is no record")

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(Record(Global("builtins", "frozenset"), (items,)))

    def load_bytearray(self) -> None:
        _LIBRARY[pickle.BINBYTES8[0]](self)
        self.stack[-1] = Record(Global("builtins", "bytearray"), (self.stack[-1],))

    def load_other(self) -> None:
        code = self._file.getbuffer()[self._file.tell() - 1]
        known = self.refuse if code in pickle._Unpickler.dispatch else self.fail
        known(f"the pickle instruction {code:#04x} is not one of those that store tensors")


_SIMPLE = frozenset({str, int, float, bool, type(None), bytes, Record, Global})
_Stop: Any = vars(pickle)["_Stop"]
_LIBRARY: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
_STEPS: list[Callable[[Any], Any]] = [_Unpickler.load_other] * 256
for _code in b"\x80(012N\x88\x89JKMG\x8aX\x8c\x8dBC\x8e]})\x85\x86\x87tlaec\x93Qhjqr\x94.":
    _STEPS[_code] = _LIBRARY[_code]  # of the standard library: they only build plain values
for _name, _step in {
    pickle.FRAME: lambda reader: reader.read(8),
    pickle.SETITEM: _Unpickler.load_setitem,
    pickle.SETITEMS: lambda reader: reader._set_items(reader.pop_mark()),
    pickle.DICT: _Unpickler.load_dict,
    pickle.REDUCE: _Unpickler.load_reduce,
    pickle.NEWOBJ: _Unpickler.load_reduce,
    pickle.NEWOBJ_EX: _Unpickler.load_newobj_ex,
    pickle.BUILD: _Unpickler.load_build,
    # Sets become records, as in protocol 2: elements are not hashed, nothing is allocated.
    pickle.EMPTY_SET: lambda reader: reader.append(Record(Global("builtins", "set"))),
    pickle.ADDITEMS: _LIBRARY[pickle.APPENDS[0]],
    pickle.FROZENSET: _Unpickler.load_frozenset,
    pickle.BYTEARRAY8: _Unpickler.load_bytearray,
}.items():
    _STEPS[_name[0]] = _step
