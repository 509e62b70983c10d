"""Pickles are read here by a machine that cannot call anything: what was pickled, as plain records?

A pickle is a program for a small stack machine, and Python's own runs whatever the program names.
This one knows the instructions that build numbers, texts and containers; where a pickle would call
a function or make an object, it leaves a ``Record`` that says which, with what. A caller says which
names may occur, so nothing is imported or called. What a short input could repeat without end (a
copy of a long list, a long key) is counted, so time and memory are those of the input's size.

>>> import pickle, datetime
>>> print(unpickle(pickle.dumps({"w": [1, 2.5, None]}), allow_none, "a.pkl"))
{'w': [1, 2.5, None]}
>>> unpickle(pickle.dumps(datetime.date(2026, 1, 2)), allow_none, "a.pkl")
Traceback (most recent call last):
reshard.errors.UnsupportedError: a.pkl: names datetime.date, which is not read: nothing was run
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from reshard.errors import DamageError, UnsupportedError
from reshard.text import quoted

__all__ = ["Global", "Record", "allow_none", "unpickle"]

MAX_INTEGER = 256
"""Bytes of an integer; longer ones take long to print and mean nothing here."""

MAX_NAME = 1 << 10
"""Characters of a module's name, and of a name in it."""
COPIES = 4
"""Elements that may be copied for each byte of the input; what torch writes needs none."""
FREE_COPIES = 1 << 12
MAX_KEY = 1 << 60
"""Larger numbers can be chosen to fall all on one place of a dict, which then takes for ever."""
MAX_TUPLE_KEYS = 1 << 13
"""Keys that are tuples, of which the same is true whatever is in them."""

Allowed = Callable[[str, str], bool]
"""Whether a pickle may name this (module, name)."""


class Global:
    """A name that a pickle refers to; it stands for nothing but itself."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def path(self) -> str:
        """Both together; made when asked for, because thousands of names may share one module."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self.path}>"


class Record:
    """What a pickle would have made by calling ``maker`` with ``args``, and the state it would get.

    ``maker`` is None for what a pickle takes from outside of itself (a storage).
    """

    __slots__ = ("args", "items", "maker", "state")

    def __init__(self, maker: Global | None, args: tuple[Any, ...]) -> None:
        self.maker = maker
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []

    @property
    def kind(self) -> str:
        """The path of what would have been called, or ``persistent``."""
        return "persistent" if self.maker is None else self.maker.path

    def field(self, name: str) -> Any:
        """One attribute of the object, None if it was not pickled with it."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"<{self.kind}>"  # what it holds may nest without end


def allow_none(module: str, name: str) -> bool:
    """No names at all: a pickle of plain values."""
    return False


def unpickle(data: bytes, allowed: Allowed, where: str) -> Any:
    """The value of a pickle, with records in the place of objects."""
    machine = _Machine(data, allowed, where)
    try:
        return machine.run()
    except (DamageError, UnsupportedError):
        raise
    except (IndexError, struct.error):
        machine.fail("the pickle is cut short")
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        machine.fail("the pickle makes no sense")
    except MemoryError:
        machine.refuse("the pickle takes more memory than there is")


class _Machine:
    __slots__ = (
        "allowed", "at", "copied", "data", "globals", "marks", "memo", "stack", "tuple_keys",
        "where",
    )  # fmt: skip

    def __init__(self, data: bytes, allowed: Allowed, where: str) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.allowed = allowed
        self.where = where
        self.copied = 0
        self.tuple_keys = 0

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        stack, memo, number = self.stack, self.memo, _NUMBER.unpack_from
        while True:
            at = self.at
            code = data[at]
            if code == _LONG_GET:  # half of all instructions of a large .metadata
                stack.append(memo[number(data, at + 1)[0]])
                self.at = at + 5
                continue
            self.at = at + 1
            if code == _STOP:
                return stack.pop()
            step = steps[code]
            if step is None:
                known = self.refuse if chr(code) in _OTHER_INSTRUCTIONS else self.fail
                known(f"the pickle instruction {code:#04x} is not one of those that store tensors")
            step(self)

    def fail(self, why: str) -> NoReturn:
        raise DamageError(f"{self.where}: byte {self.at} of {len(self.data)}: {why}")

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedError(f"{self.where}: byte {self.at} of {len(self.data)}: {why}")

    def take(self, count: int) -> bytes:
        """The next bytes of the input; what is not there is never allocated."""
        start, stop = self.at, self.at + count
        if stop > len(self.data):
            self.fail("the pickle is cut short")
        self.at = stop
        return self.data[start:stop]

    def spend(self, count: int) -> None:
        """Count elements that are gone through or copied although the input has them only once."""
        self.copied += count
        most = COPIES * len(self.data) + FREE_COPIES
        if self.copied > most:
            self.refuse(
                f"it copies {self.copied} elements, at most {most} for a pickle of its size"
            )

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 4 * MAX_NAME)
        if end < 0:
            self.fail(f"a name without an end, or of more than {MAX_NAME} characters")
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        """What was pushed after the last mark, taken off the stack."""
        mark = self.marks.pop()
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def pop_tuple(self) -> tuple[Any, ...]:
        found = self.stack.pop()
        if type(found) is not tuple:
            self.fail("a call without a tuple of arguments")
        return found

    def find(self, module: object, name: object) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail("a name that is no text")
        if max(len(module), len(name)) > MAX_NAME:
            longest = max(len(module), len(name))
            self.fail(f"a name of {longest} characters, at most {MAX_NAME} are read")
        known = self.globals.get((module, name))
        if known is None:
            if not self.allowed(module, name):
                path = quoted(f"{module}.{name}")[1:-1]
                raise UnsupportedError(
                    f"{self.where}: names {path}, which is not read: nothing was run"
                )
            known = self.globals[module, name] = Global(module, name)
        return known


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value(machine))

    return step


def _number(form: str) -> Callable[[_Machine], None]:
    """Push a number of the input."""
    take = struct.Struct(form)

    def step(machine: _Machine) -> None:
        machine.stack.append(take.unpack_from(machine.data, machine.at)[0])
        machine.at += take.size

    return step


def _counted(form: str, convert: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Push bytes that follow their own length."""
    length = struct.Struct(form)

    def step(machine: _Machine) -> None:
        count = length.unpack_from(machine.data, machine.at)[0]
        machine.at += length.size
        machine.stack.append(convert(machine.take(count)))

    return step


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    if len(data) > MAX_INTEGER:
        raise ValueError
    return int.from_bytes(data, "little", signed=True)


def _ignore_frame(machine: _Machine) -> None:
    machine.take(8)


def _ignore_protocol(machine: _Machine) -> None:
    machine.take(1)


def _mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))


def _pop(machine: _Machine) -> None:
    # A mark on top of the stack is what is popped then.
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pop_mark(machine: _Machine) -> None:
    machine.since_mark()


def _last(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return step


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _extend(machine, machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    _extend(machine, machine.stack[-1], values)


def _extend(machine: _Machine, target: Any, values: list[Any]) -> None:
    if type(target) is list:
        target.extend(values)
    elif type(target) is Record:
        target.items.extend(values)
    else:
        machine.fail("values are appended to what is no list")


def _set_item(machine: _Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _update(machine, machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    pairs = machine.since_mark()
    _update(machine, machine.stack[-1], pairs)


def _update(machine: _Machine, target: Any, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        machine.fail("a key without a value")
    if type(target) is Record:
        target.items.extend(zip(pairs[::2], pairs[1::2], strict=True))
        return
    if type(target) is not dict:
        machine.fail("values are stored in what is no dict")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        target[_key(machine, key)] = value


def _key(machine: _Machine, key: Any) -> Any:
    """A key that hashes in no time: tuples within tuples would take time without end."""
    if type(key) is str:
        return key
    parts = (key,)
    if type(key) is tuple:
        parts = key
        machine.spend(len(parts))
        machine.tuple_keys += 1
        if machine.tuple_keys > MAX_TUPLE_KEYS:
            machine.refuse(f"more than {MAX_TUPLE_KEYS} keys of dicts are tuples")
    for part in parts:
        if type(part) not in _SIMPLE:
            machine.fail(f"a {type(key).__name__} as the key of a dict")
        if type(part) is int and abs(part) >= MAX_KEY:
            machine.refuse(f"a number of {part.bit_length()} bits as the key of a dict")
    return key


def _dict(machine: _Machine) -> None:
    pairs = machine.since_mark()
    machine.stack.append({})
    _update(machine, machine.stack[-1], pairs)


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(machine.find(module, machine.line()))


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    machine.stack.append(machine.find(machine.stack.pop(), name))


def _reduce(machine: _Machine) -> None:
    args = machine.pop_tuple()
    machine.stack.append(_record(machine, machine.stack.pop(), args))


def _new_with_keywords(machine: _Machine) -> None:
    keywords = machine.stack.pop()
    args = machine.pop_tuple()
    machine.spend(len(args))
    machine.stack.append(_record(machine, machine.stack.pop(), (*args, keywords)))


def _record(machine: _Machine, kind: Any, args: tuple[Any, ...]) -> Any:
    """What a call gives: a tuple, dict or bytes for what is just that, else a record."""
    if type(kind) is not Global:
        machine.fail("a call of what is no name")
    if kind.module == "torch" and kind.name == "Size" and len(args) == 1:
        if type(args[0]) is list:
            machine.spend(len(args[0]))
            return tuple(args[0])
        if type(args[0]) is tuple:
            return args[0]
    if kind.module == "collections" and kind.name == "OrderedDict" and not args:
        return {}
    if kind.module == "_codecs" and len(args) == 2 and args[1] == "latin1":
        machine.spend(len(args[0]))
        return args[0].encode("latin1")  # how old protocols spell bytes
    if kind.name == "bytes" and kind.module in ("builtins", "__builtin__") and not args:
        return b""
    return Record(kind, args)


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is Record:
        target.state = state
    elif type(target) is not dict:  # an OrderedDict may have attributes, which nobody needs
        machine.fail("a state for what is no record")


def _get(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.at]])
    machine.at += 1


def _put(form: str) -> Callable[[_Machine], None]:
    take = struct.Struct(form)

    def step(machine: _Machine) -> None:
        machine.memo[take.unpack_from(machine.data, machine.at)[0]] = machine.stack[-1]
        machine.at += take.size

    return step


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


_STOP, _LONG_GET = ord("."), ord("j")
_NUMBER = struct.Struct("<I")
_OTHER_INSTRUCTIONS = frozenset("FILSTUVPgiop\x82\x83\x84\x97\x98")
"""Those that Python knows and torch does not write: of protocols 0 and 1, of buffers outside."""
_SIMPLE = frozenset({str, int, float, bool, type(None), bytes, Record, Global})
_INSTRUCTIONS: dict[str, Callable[[_Machine], None]] = {
    "\x80": _ignore_protocol, "\x95": _ignore_frame, "(": _mark, "0": _pop,
    "1": _pop_mark,
    "2": _push(lambda machine: machine.stack[-1]),
    "N": _push(lambda machine: None),
    "\x88": _push(lambda machine: True), "\x89": _push(lambda machine: False),
    "J": _number("<i"), "K": _number("<B"), "M": _number("<H"), "G": _number(">d"),
    "\x8a": _counted("<B", _integer), "\x8b": _counted("<I", _integer),
    "X": _counted("<I", _text), "\x8c": _counted("<B", _text), "\x8d": _counted("<Q", _text),
    "B": _counted("<I", bytes), "C": _counted("<B", bytes), "\x8e": _counted("<Q", bytes),
    "\x96": _counted("<Q", bytes),
    "]": lambda machine: machine.stack.append([]), "}": lambda machine: machine.stack.append({}),
    ")": lambda machine: machine.stack.append(()),
    "\x8f": _push(lambda machine: []),
    "\x85": _last(1), "\x86": _last(2), "\x87": _last(3),
    "t": _push(lambda machine: tuple(machine.since_mark())),
    "l": _push(lambda machine: machine.since_mark()), "d": _dict,
    "\x91": _push(lambda machine: machine.since_mark()),
    "a": _append, "e": _appends, "\x90": _appends, "s": _set_item, "u": _set_items,
    "c": _global, "\x93": _stack_global,
    "R": _reduce, "\x81": _reduce, "\x92": _new_with_keywords, "b": _build,
    "Q": _push(lambda machine: Record(None, (machine.stack.pop(),))),
    "h": _get, "q": _put("<B"), "r": _put("<I"), "\x94": _memoize,
}  # fmt: skip
"""What each instruction does; sets are read as lists."""
_STEPS = [_INSTRUCTIONS.get(chr(code)) for code in range(256)]
