"""Short messages between the ranks of one host, over unix sockets.

Data never goes this way: a message says that data is there to be taken, or was taken. Each is 88
bytes, carries the number of its call and the digest of its plan, and may carry the descriptor of
shared memory. When a process dies its sockets close, so its peers know at once.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from reshard.errors import LiveError
from reshard.run.live.arena import Arena
from reshard.run.live.cause import MOST_CHARACTERS, MOST_RANKS
from reshard.run.live.gate import Gate

__all__ = ["FAR", "MESSAGE_BYTES", "Inbox", "Kind", "Mailbox", "Message", "packed"]

_FORM = struct.Struct("<4sIQ16sQQQQQQQ")
_MAGIC = b"rsh2"
MESSAGE_BYTES = _FORM.size

MOST_TEXT = 6 * MOST_CHARACTERS + 16 * MOST_RANKS + 256
"""Bytes of text that may follow a message: a cause, of which JSON may spend 6 on a character."""

MOST_BYTES = MESSAGE_BYTES + MOST_TEXT + 1
"""What is asked for at a time: one byte more than any message has."""

_SIZE, _ROOM_FOR_FDS = (MOST_BYTES,), (socket.CMSG_LEN(4 * struct.calcsize("i")),)
"""What is asked of a socket at a time, as `map` takes it."""

FAR = 1024
"""How many calls another rank may be ahead: one that is further is broken."""


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1
    """I have entered this call; ``a``: where my table of addresses is, ``b``: its length.

    A text, if there is one, is the table itself.
    ``c``: 1 if my part of the first round is there too, plus the number of its arena; ``d``: where
    in the arena. ``e``: how many of my first calls are over: I read nothing of them any more.
    """
    READY = 2
    """My part of this round is there; ``a``: arena, ``b``: where in it."""
    TAKEN = 3
    """I have read what you had for me in this round."""
    ABORT = 4
    """This call has failed; a text says why."""
    GONE = 5
    """The arena ``a`` of mine is no longer used."""
    ALIVE = 6
    """I am at work in this call: have patience."""
    WAITS = 7
    """A text says whom I wait for in this call; none if I do not any more."""


class Message(NamedTuple):
    """What one rank tells another; a tuple, because that is the quickest to make."""

    kind: Kind
    call: int
    digest: bytes
    round: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0
    tag: int = 0
    """The code of the call's tag, in a HELLO; 0 if it has none."""

    def pack(self) -> bytes:
        """The 88 bytes on the socket."""
        return _FORM.pack(_MAGIC, *self)

    @property
    def arena(self) -> int:
        """The arena it speaks of; 0 if none."""
        return max(self.c - 1, 0) if self.kind is Kind.HELLO else self.a

    @classmethod
    def unpack(cls, data: bytes) -> Message | None:
        """Read what ``pack`` wrote, before any text; None for anything else."""
        if len(data) < _FORM.size:
            return None
        magic, number, *others = _FORM.unpack_from(data)
        kind = _KINDS.get(number)
        return cls(kind, *others) if kind is not None and magic == _MAGIC else None


def packed(*parts: object) -> bytes:
    """The bytes of a message of these parts, which are those of `Message`, all of them."""
    return _FORM.pack(_MAGIC, *parts)


_KINDS = {int(kind): kind for kind in Kind}


def _fds(extra: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    found = array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


@dataclass(eq=False, slots=True)
class Inbox:
    """What has arrived for one call."""

    hellos: dict[int, Message] = field(default_factory=dict)
    """By peer. Other threads add to it: whoever goes through it takes a copy, in one step of C."""
    ready: dict[tuple[int, int], Message] = field(default_factory=dict)
    """By peer and round."""
    taken: set[tuple[int, int]] = field(default_factory=set)
    aborted_by: int | None = None
    texts: dict[tuple[int, Kind], bytes] = field(default_factory=dict)
    """What came last after a message, by peer and kind."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each peer last said something."""
    arenas: dict[tuple[int, int], Arena] = field(default_factory=dict)
    """Memory that messages lie in, by peer and number: mapped until the call is over."""

    def address_of(self, peer: int, number: int, size: int) -> int:
        """Where a message of a round lies that a peer has packed, all of these bytes of it."""
        ready = self.ready[peer, number]
        arena = self.arenas.get((peer, ready.a))
        if arena is None or ready.b + size > arena.num_bytes:
            room = "none" if arena is None else f"{arena.num_bytes}"
            raise LiveError(
                f"rank {peer} says that {size} bytes begin at {ready.b} of shared memory that has "
                f"{room}: it is broken, or runs another version of reshard"
            )
        return arena.address + ready.b

    def put(self, peer: int, message: Message) -> None:
        """File a message."""
        self.heard[peer] = time.monotonic()
        match message.kind:
            case Kind.HELLO:
                self.hellos[peer] = message
                if message.c:
                    self.ready[peer, 0] = Message(
                        Kind.READY, message.call, b"", 0, message.arena, message.d
                    )
            case Kind.READY:
                self.ready[peer, message.round] = message
            case Kind.TAKEN:
                self.taken.add((peer, message.round))
            case Kind.ABORT:
                self.aborted_by = peer


class Mailbox:
    """All sockets of one rank to the ranks of its host, and what came over them.

    Several calls may be in flight, each in a thread: whoever needs a message polls for all.
    """

    def __init__(self, links: Mapping[int, socket.socket], first_call: int = 0) -> None:
        self.links = dict(links)
        self.lost: set[int] = set()
        self.arenas: dict[tuple[int, int], Arena] = {}
        """Memory that peers share with us, by peer and number; the latest of each."""
        self._lent: dict[tuple[int, int, int], Arena] = {}
        """Arenas with messages that may not be read yet, by peer, call and number."""
        self._open: dict[int, Inbox] = {}
        self._next_call = first_call
        self._over: set[int] = set()
        self.num_over = first_call
        """How many of the first calls are over."""
        self.passed: dict[int, int] = {}
        """How many of its first calls each peer is through with, as its last HELLO says."""
        self._polling = Gate()
        self._waiting: list[_thread.LockType] = []
        """Threads that wait for what another one receives."""
        self._raw: dict[int, deque[tuple[bytes, list[tuple[int, int, bytes]], int, object]]]
        self._raw = {peer: deque() for peer in self.links}
        """Messages that were received and not filed yet, by peer."""
        self._unfiled = False
        self._lock = Gate()
        self._peers = {link.fileno(): peer for peer, link in self.links.items()}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for link in self.links.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def open(self, call: int) -> Inbox:
        """The messages of a call, which begins."""
        with self._lock:
            self._next_call = max(self._next_call, call + 1)
            return self._open.setdefault(call, Inbox())

    def close(self, call: int) -> None:
        """Forget a call; late messages to it are dropped."""
        with self._lock:
            closed = self._open.pop(call, None)
            if closed is not None:
                closed.arenas.clear()
            self._over.add(call)
            while self.num_over in self._over:
                self._over.remove(self.num_over)
                self.num_over += 1

    def lend(self, arena: Arena, peer: int, call: int) -> None:
        """Keep an arena from being used again until a peer says that a call is over for it."""
        with self._lock:
            if (peer, call, arena.number) not in self._lent:
                self._lent[peer, call, arena.number] = arena
                arena.lent += 1

    def send(self, peer: int, message: Message, fd: int | None = None, text: bytes = b"") -> None:
        """Send a message; what arrives meanwhile is filed, so that two full sockets never wait."""
        self.send_bytes(peer, message.pack() + text[:MOST_TEXT], fd)

    def send_bytes(self, peer: int, data: bytes, fd: int | None = None) -> None:
        """Send a message that is packed already."""
        while peer not in self.lost:
            try:
                if fd is None:
                    self.links[peer].send(data)
                else:
                    socket.send_fds(self.links[peer], [data], [fd])
                return
            except BlockingIOError:
                self.step(0.01)
            except ConnectionError:
                return  # it has left; whoever reads its last words will notice
            except OSError:
                self._lose(peer)

    def step(self, seconds: float) -> None:
        """Wait for messages, at most so long, and file all that have come.

        All, because what a peer said last may be that the call has failed.

        A signal handler may raise between any two bytecodes here, so a message is in `_raw` as soon
        as its socket has given it away.
        """
        if not self._polling.try_enter():
            self._wait_for_poller(seconds)
            return
        try:
            if self._unfiled:
                self._file_all()
                self._unfiled = False
            found = self._poll.poll(seconds * 1000)
            while found:
                for fd, event in found:
                    self._receive(fd, event)
                found = self._poll.poll(0)
        finally:
            self._polling.leave()
        if self._waiting:
            self._wake_waiting()

    def release(self, thread: int | None) -> None:
        """A thread has left its call by an exception: others may do what it was at."""
        self._polling.open_for(thread)
        self._lock.open_for(thread)

    def _wait_for_poller(self, seconds: float) -> None:
        gate = _thread.allocate_lock()
        gate.acquire()
        self._waiting.append(gate)
        try:
            gate.acquire(timeout=seconds)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(gate)

    def _wake_waiting(self) -> None:
        for gate in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):
                gate.release()

    def wake(self) -> None:
        """Make a waiting ``step`` return: something else has happened."""
        os.eventfd_write(self._wake, 1)
        self._wake_waiting()

    def _receive(self, fd: int, event: int) -> None:
        if fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            return
        peer = self._peers[fd]
        if event & select.POLLNVAL:
            self._lose(peer)
            return
        if peer in self.lost:
            return
        # One message each time: asking for one that is not there costs as much as taking one that
        # is, and the next poll says it of all peers together.
        self._unfiled = True
        try:
            self._raw[peer].extend(map(self.links[peer].recvmsg, _SIZE, _ROOM_FOR_FDS))
        except (BlockingIOError, ConnectionResetError):
            return  # what a peer said before it left without hearing us is read after this
        except OSError:
            self._lose(peer)
            return
        self._file_all(peer)
        self._unfiled = False

    def _file_all(self, peer: int | None = None) -> None:
        """File what was received, also what an exception has kept from being filed before."""
        for one in self._raw if peer is None else (peer,):
            raw = self._raw[one]
            while raw:
                data, extra, _, _ = raw[0]
                fds = _fds(extra) if extra else []
                if data:
                    self._file(one, data, fds)
                else:
                    self._lose(one)
                raw.popleft()
                for fd in fds:
                    os.close(fd)

    def _file(self, peer: int, data: bytes, fds: list[int]) -> None:
        message, text = Message.unpack(data), data[_FORM.size :]
        if message is None or len(text) > MOST_TEXT:
            self._lose(peer)
            return
        number = message.arena
        if not self._map(peer, number, fds) or message.call > self._next_call + FAR:
            self._lose(peer)
            return
        if message.kind is Kind.GONE:
            self._forget(peer, message.a)
            return
        if message.kind is Kind.HELLO:
            self.passed[peer] = max(self.passed.get(peer, 0), message.e)
        with self._lock:
            if self._lent and message.kind is Kind.HELLO:
                for key in [key for key in self._lent if key[0] == peer and key[1] < message.e]:
                    self._give_back(key)
            # Calls in flight open their inboxes in any order: what is not over may still do so.
            if message.call >= self.num_over and message.call not in self._over:
                self._open.setdefault(message.call, Inbox())
            inbox = self._open.get(message.call)
        if inbox is not None:
            if (peer, number) in self.arenas:
                inbox.arenas[peer, number] = self.arenas[peer, number]
            if text or message.kind is Kind.WAITS:
                inbox.texts[peer, message.kind] = text
            inbox.put(peer, message)

    def _map(self, peer: int, number: int, fds: list[int]) -> bool:
        """Keep the memory that came with a message; whether it is any.

        The descriptors stay open until the message is filed: an exception out of a signal handler
        may have it filed again.
        """
        try:
            for fd in fds:
                self.arenas[peer, number] = Arena.of(os.dup(fd), number)
        except (OSError, ValueError):
            return False
        return True

    def _give_back(self, key: tuple[int, int, int]) -> None:
        arena = self._lent.pop(key, None)
        if arena is not None:
            arena.lent -= 1

    def _forget(self, peer: int, number: int) -> None:
        """Unmap an arena that its owner no longer uses, when no call reads it any more."""
        self.arenas.pop((peer, number), None)

    def _lose(self, peer: int) -> None:
        if peer in self.lost:
            return
        self.lost.add(peer)
        with self._lock:
            for key in [key for key in self._lent if key[0] == peer]:
                self._give_back(key)
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._poll.unregister(self.links[peer])
        self.links[peer].close()

    def abandon(self) -> None:
        """Close the sockets of a process that was forked; a lock may be held for ever there."""
        for link in self.links.values():
            link.close()

    def shut(self) -> None:
        """Close every socket and unmap every arena."""
        for peer in list(self.links):
            self._lose(peer)
        for key in list(self.arenas):
            self._forget(*key)
        os.close(self._wake)
