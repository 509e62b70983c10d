"""Control messages: what ranks send each other about a call besides its data.

    message  sent when the sender                     the receiver
    -------  --------------------                     ------------
    Hello    has entered the call                     waits for one of every peer: the handshake
    Ready    has made its message of a round ready    reads it, or finds it in its tensors
    Released has read a message                       reuses the memory of that message
    Abort    knows that the call has failed           raises the same cause
    Alive    is in the middle of long work            does not time out
    Waiting  has waited for a peer for a while        finds the rank that holds up all others
    Retired  frees a shared buffer                    unmaps it

Every message names its call, so that data of two calls never meet. The first 16 bytes are the same
for all kinds, the rest depends on the kind; a text may follow. ``docs/protocol.md`` shows the
sequence of a move.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, cast

from reshard.live.session.cause import MAX_CHARACTERS, MAX_RANKS

__all__ = [
    "MAX_MESSAGE", "Abort", "Alive", "Control", "Hello", "Ready", "Released", "Retired", "Waiting",
    "decode", "encode",
]  # fmt: skip


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
_KINDS = {head: (kind, struct.Struct("<8x" + _FIELDS[kind])) for kind, head in _HEADS.items()}
_WITH_TEXT: set[type] = {Abort, Waiting}

MAX_TEXT = 6 * MAX_CHARACTERS + 16 * MAX_RANKS + 256
"""Bytes of text in a message: a cause, in which JSON may take 6 bytes per character."""

MAX_MESSAGE = _PACKED[Hello].size + MAX_TEXT
"""No message is longer."""


def encode(message: Control) -> bytes:
    """Encode a message as bytes.

    >>> decode(encode(Ready(7, 0, buffer=3, offset=4096)))
    Ready(call=7, round=0, buffer=3, offset=4096)
    """
    kind = type(message)
    if kind in _WITH_TEXT:
        *numbers, text = message
        return _PACKED[kind].pack(_HEADS[kind], *numbers) + text[:MAX_TEXT]  # type: ignore[index]
    return _PACKED[kind].pack(_HEADS[kind], *message)


def decode(data: bytes) -> Control | None:
    """Decode a message; None for bytes that ``encode`` did not write."""
    found = _KINDS.get(data[:8])
    if found is None:
        return None
    kind, form = found
    size, message = form.size, cast(Any, kind)
    if len(data) == size and kind not in _WITH_TEXT:
        return cast(Control, tuple.__new__(message, form.unpack(data)))
    if kind not in _WITH_TEXT or not size <= len(data) <= MAX_MESSAGE:
        return None
    return cast(Control, message(*form.unpack_from(data), data[size:]))
