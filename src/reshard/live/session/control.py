"""Control messages: what ranks tell each other about a call besides its data.

    sender                                   receiver
    ------                                   --------
    Hello    I have entered the call         waits for the Hello of every peer: the handshake
    Ready    my message of a round is there  copies it, or finds that it was written already
    Released I have read your message        may reuse the memory that the message was in
    Abort    the call has failed             raises the same cause
    Alive    I am still working              does not time out
    Waiting  whom I wait for                 names the rank that holds up all others
    Retired  a shared buffer is unused       unmaps it

Every message names its call, so that data of two calls never meet. The first 24 bytes are the same
for all kinds, the rest depends on the kind; a text may follow. ``docs/protocol.md`` shows the
sequence of a move.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from reshard.live.session.cause import MAX_CHARACTERS, MAX_RANKS

__all__ = [
    "MAX_MESSAGE",
    "Abort",
    "Alive",
    "Control",
    "Hello",
    "Ready",
    "Released",
    "Retired",
    "Waiting",
    "decode",
    "encode",
]


class Hello(NamedTuple):
    """This rank has entered the call."""

    call: int
    digest: bytes = b""
    """Of the plan: ranks must run the same one."""
    grad: int = 0
    """What it knows of gradients: 0 nothing, 1 not wanted, 2 wanted."""
    tag: int = 0
    """The code of the call's tag; 0 if it has none."""
    finished: int = 0
    """How many of its first calls are over: it reads nothing of those any more."""
    on_gpu: int = 0
    """1 if its tensors go from GPU to GPU in this call."""
    strided: int = 0
    """1 if some of its tensors are not contiguous, so that all of its messages are staged."""
    table_at: int = 0
    """The address of its table of base addresses, which peers read from its memory."""
    eager: int = 0
    """1 if its message of the first round is there already, ..."""
    buffer: int = 0
    """... in this shared buffer (0: none of it is staged), ..."""
    offset: int = 0
    """... at this offset."""


class Ready(NamedTuple):
    """This rank's message of a round is there."""

    call: int
    round: int
    buffer: int = 0
    """The shared buffer that its staged part is in; 0 if nothing is staged."""
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
    """A heartbeat: this rank is at work in the call."""

    call: int


class Waiting(NamedTuple):
    """Whom this rank waits for in the call, as JSON; empty if it does not wait any more."""

    call: int
    text: bytes


class Retired(NamedTuple):
    """A shared buffer of this rank is no longer used."""

    call: int
    buffer: int


Control = Hello | Ready | Released | Abort | Alive | Waiting | Retired

_MAGIC = b"rsh3"
_HEAD = "<4sIQ"
_FORMS: dict[type, struct.Struct] = {
    Hello: struct.Struct(_HEAD + "16sQQQQQQQQQ"),
    Ready: struct.Struct(_HEAD + "QQQ"),
    Released: struct.Struct(_HEAD + "Q"),
    Retired: struct.Struct(_HEAD + "Q"),
    Alive: struct.Struct(_HEAD),
    Abort: struct.Struct(_HEAD),
    Waiting: struct.Struct(_HEAD),
}
"""The numbers of each kind, in the order of its fields; a text follows some."""
_KINDS = dict(enumerate(_FORMS, 1))
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_HEADS = {struct.pack("<4sI", _MAGIC, number): kind for number, kind in _KINDS.items()}
_WITH_TEXT: set[type] = {Abort, Waiting}

MAX_TEXT = 6 * MAX_CHARACTERS + 16 * MAX_RANKS + 256
"""Bytes of text in a message: a cause, of which JSON may spend 6 bytes on a character."""

MAX_MESSAGE = _FORMS[Hello].size + MAX_TEXT
"""No message is longer."""


def encode(message: Control) -> bytes:
    """The bytes of a message.

    >>> decode(encode(Ready(7, 0, buffer=3, offset=4096)))
    Ready(call=7, round=0, buffer=3, offset=4096)
    """
    kind = type(message)
    if kind in _WITH_TEXT:
        *numbers, text = message
        data = _FORMS[kind].pack(_MAGIC, _NUMBERS[kind], *numbers)
        return data + text[:MAX_TEXT]  # type: ignore[index]
    return _FORMS[kind].pack(_MAGIC, _NUMBERS[kind], *message)


def decode(data: bytes) -> Control | None:
    """Read what ``encode`` wrote; None for anything else."""
    kind = _HEADS.get(data[:8])
    if kind is None or len(data) > MAX_MESSAGE:
        return None
    form, text = _FORMS[kind], data[_FORMS[kind].size :]
    if len(data) < form.size or (text and kind not in _WITH_TEXT):
        return None
    numbers = form.unpack_from(data)[2:]
    found: Control = kind(*numbers, text) if kind in _WITH_TEXT else kind(*numbers)
    return found
