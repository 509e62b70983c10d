"""What ranks tell each other about a call besides its data: messages, causes of failures, tags.

Every message names its call, so that data of two calls never meet. ``docs/protocol.md`` says when
each kind is sent and shows the sequence of a move. A cause says why a call failed, and all ranks of
the call raise it. A tag, such as the number of the training step, is a name that the user gives to
a call: it shows that a rank has left out a call, because the ranks of one call then have different
tags.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from reshard import errors
from reshard.errors import LiveError, ReshardError
from reshard.layout.mesh import format_ranks
from reshard.text import shorten


class Hello(NamedTuple):
    """This rank has entered the call."""

    call: int
    digest: bytes = b""
    """The digest of the plan, which must be the same on all ranks."""
    grad: int = 0
    """Whether the source requires gradients: 0 unknown to this rank, 1 no, 2 yes."""
    tag: int = 0
    """The code of the call's tag; 0 if it has none."""
    finished: int = 0
    """How many of its first calls are over: it reads no message of those any more."""
    on_gpu: int = 0
    """1 if the call moves tensors from GPU to GPU."""
    strided: int = 0
    """1 if some of its tensors are not contiguous, so that all of its messages are staged."""
    table_at: int = 0
    """The address of its table of base addresses, which peers read from its memory. Between GPUs
    the version of the table of GPU memory in ``buffer``."""
    signals: int = 0
    """The shared buffer with the signals of its GPU, if peers read its GPU memory; else 0."""
    eager: int = 0
    """1 if its message of the first round is ready; it then has no Ready of its own."""
    buffer: int = 0
    """The shared buffer of that message; 0 if no part of it is staged."""
    offset: int = 0


class Ready(NamedTuple):
    """This rank's message of a round can be read, or is written into the receiver's tensors."""

    call: int
    round: int
    buffer: int = 0
    """The shared buffer of its staged part; 0 if no part is staged."""
    offset: int = 0


class Released(NamedTuple):
    """This rank has read a peer's message of a round."""

    call: int
    round: int


class Abort(NamedTuple):
    """The call has failed; the text is a `Cause` as JSON."""

    call: int
    text: bytes


class Alive(NamedTuple):
    """A heartbeat: this rank works on the call."""

    call: int


class Waiting(NamedTuple):
    """The peer that this rank waits for, as JSON (`Wait`); empty when it has stopped waiting."""

    call: int
    text: bytes


class Retired(NamedTuple):
    """A shared buffer of this rank is no longer used."""

    call: int
    buffer: int


Control = Hello | Ready | Released | Abort | Alive | Waiting | Retired

MAX_CHARACTERS = 2000
"""A longer text is truncated, so that a cause fits into a message."""
MAX_RANKS = 256
"""Ranks, counted with repetition, of the sessions whose calls a cause names. Above that it names no
calls: a rank skips those calls when it finds the deadlock itself."""

_MAGIC = b"rsh4"
_FIELDS: dict[type, str] = {
    Hello: "Q16sQQQQQQQQQQ",
    Ready: "QQQQ",
    Released: "QQ",
    Retired: "QQ",
    Alive: "Q",
    Abort: "Q",
    Waiting: "Q",
}
"""The fields of each kind in their order; some have a text as their last field."""
_HEADS = {kind: struct.pack("<4sI", _MAGIC, n) for n, kind in enumerate(_FIELDS, 1)}
_PACKED = {kind: struct.Struct("<8s" + fields) for kind, fields in _FIELDS.items()}
_KINDS: dict[bytes, tuple[Any, struct.Struct]]
_KINDS = {head: (kind, struct.Struct("<8x" + _FIELDS[kind])) for kind, head in _HEADS.items()}
_WITH_TEXT: set[type] = {Abort, Waiting}

MAX_TEXT = 6 * MAX_CHARACTERS + 16 * MAX_RANKS + 256
"""Bytes of text in a message: a cause, in which JSON may take 6 bytes per character."""

MAX_MESSAGE = _PACKED[Hello].size + MAX_TEXT
"""No message is longer."""


def encode(message: Any) -> bytes:
    """Encode a message as bytes.

    >>> decode(encode(Ready(7, 0, buffer=3, offset=4096)))
    Ready(call=7, round=0, buffer=3, offset=4096)
    """
    kind = type(message)
    if kind in _WITH_TEXT:
        *numbers, text = message
        head: bytes = _PACKED[kind].pack(_HEADS[kind], *numbers)
        return head + bytes(text[:MAX_TEXT])
    return _PACKED[kind].pack(_HEADS[kind], *message)


def decode(data: bytes) -> Control | None:
    """Decode a message; None for bytes that ``encode`` did not write."""
    known = _KINDS.get(data[:8])
    if known is None:
        return None
    kind, form = known
    message: Control
    if kind in _WITH_TEXT:
        if not form.size <= len(data) <= MAX_MESSAGE:
            return None
        message = kind(*form.unpack_from(data), data[form.size :])
    else:
        if len(data) != form.size:
            return None
        message = tuple.__new__(kind, form.unpack(data))
    return message


encode_hello: Callable[..., bytes] = partial(_PACKED[Hello].pack, _HEADS[Hello])
"""Encode a Hello from its fields."""

Calls = tuple[tuple[tuple[int, ...], int], ...]
"""Calls by the ranks of their sessions, and their numbers there."""

_ERRORS: dict[str, type[LiveError]] = {
    "lost": errors.PeerLostError,
    "late": errors.MoveTimeoutError,
    "disagree": errors.DisagreementError,
    "tensor": errors.TensorError,
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a call failed: all ranks of the call raise it."""

    kind: str
    """``lost``, ``late``, ``disagree``, ``tensor``, ``error``, or the name of a `ReshardError`."""
    text: str
    tag: int = 0
    """The code of the failed call's tag; 0 if it has none."""
    calls: Calls = ()
    """Calls of other sessions that failed for the same reason; ranks skip them."""

    def to_json(self) -> str:
        """The cause as it is posted and sent, bounded in size."""
        text = shorten(self.text, MAX_CHARACTERS)
        data: dict[str, Any] = {"kind": self.kind, "text": text, "tag": self.tag}
        if 0 < sum(len(ranks) for ranks, _ in self.calls) <= MAX_RANKS:
            data["calls"] = self.calls
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: bytes) -> Cause:
        """Read what ``to_json`` wrote; anything else becomes a cause that quotes it."""
        try:
            data = json.loads(text)
            listed = data.get("calls", [])
            calls = tuple((tuple(map(int, ranks)), int(call)) for ranks, call in listed)
            return cls(str(data["kind"]), str(data["text"]), int(data.get("tag", 0)), calls)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls("error", f"a cause that cannot be read: {text[:200]!r}")

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Cause:
        """The cause for an exception on a rank."""
        if isinstance(error, LiveError):
            kinds = {known: kind for kind, known in _ERRORS.items()}
            return cls(kinds.get(type(error), "error"), str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls("error", f"rank {rank} was interrupted")
        if isinstance(error, ReshardError):
            return cls(type(error).__name__, f"rank {rank} was given a wrong request: {error}")
        return cls("error", f"rank {rank} failed with {error!r}")

    def of_earlier_call(self) -> Cause:
        """The cause of a later call that fails because of this one."""
        earlier = "a move before it failed: "
        return Cause(self.kind, earlier + self.text.removeprefix(earlier))

    def error(self, status: str) -> ReshardError:
        """The exception that a rank raises; ``status`` says how far the rank had come."""
        tail = f" ({status})" if status else ""
        kind = _ERRORS.get(self.kind) or getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, ReshardError)):
            kind = LiveError
        return kind(self.text + tail)


class CallAheadError(Exception):
    """This rank left out the call that failed and is already in a later one, which goes on."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


MAX_COUNT = 1 << 16
MAX_NUMBER = 1 << 46
MAX_TAG = 200


@dataclass(frozen=True, slots=True)
class Tag:
    """A user-given name of a call."""

    text: str
    """The tag in error messages."""
    code: int
    """The tag in control messages: equal for equal calls; for numbers, larger for later calls."""

    @classmethod
    def of(cls, tag: object, count: int) -> Tag:
        """The tag of a call; ``count`` calls before it had the same tag."""
        is_number = isinstance(tag, int) and not isinstance(tag, bool)
        if isinstance(tag, str):
            if len(tag) > MAX_TAG:
                raise LiveError(f"tag= has {len(tag)} characters: {MAX_TAG} at most")
            digest = hashlib.blake2b(tag.encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "big") % MAX_NUMBER
        elif isinstance(tag, int) and is_number:
            if not 0 <= tag < MAX_NUMBER:
                raise LiveError(f"tag={tag}: a number is at least 0 and less than {MAX_NUMBER}")
            value = tag
        else:
            raise LiveError(f"tag= is a {type(tag).__name__}: give a number or a short text")
        code = (value * MAX_COUNT + min(count, MAX_COUNT - 1)) * 2 + int(is_number)
        return cls(describe_code(code) if is_number else f'tag "{tag}"' + _nth(count), code)


def describe_code(code: int) -> str:
    """A tag in an error message of a rank that knows only its code."""
    if not code:
        return "no tag"
    if not code & 1:
        return "another tag"
    tag, count = divmod(code >> 1, MAX_COUNT)
    return f"tag {tag}" + _nth(count)


def _nth(count: int) -> str:
    return f", call {count + 1} with it" if count else ""


def compare_codes(one: int, other: int) -> int | None:
    """1 if the call with the first code is the later one, -1 if it is the earlier one.

    None where that is unknown: only tags that are numbers have an order.
    """
    if not (one & 1 and other & 1):
        return None
    return (one > other) - (one < other)


def ranks_with(ranks: Collection[int], singular: str, plural: str) -> str:
    """Ranks and what is said of them, for errors.

    >>> ranks_with([4], "is", "are"), ranks_with({2, 0, 1}, "is", "are")
    ('rank 4 is', 'ranks 0-2 are')
    """
    many = len(ranks) > 1
    return f"rank{'s' if many else ''} {format_ranks(sorted(ranks))} {plural if many else singular}"
