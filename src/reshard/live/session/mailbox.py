"""Control messages between the ranks of one host, over unix sockets.

When a process dies its sockets close, so its peers know at once. Data does not go this way, except
that a message may carry the descriptor of a shared buffer.
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
from typing import Any

from reshard.errors import LiveError
from reshard.live.session.control import (
    MAX_MESSAGE,
    Abort,
    Control,
    Hello,
    Ready,
    Released,
    Retired,
    Waiting,
    decode,
    encode,
)
from reshard.live.session.shared_memory import SharedBuffer
from reshard.live.session.worker import OwnedLock

__all__ = ["MAX_AHEAD", "Inbox", "Mailbox"]

_SIZE, _FD_BYTES = (MAX_MESSAGE + 1,), (socket.CMSG_LEN(4 * struct.calcsize("i")),)
"""What is asked of a socket at a time, as `map` takes it: one byte more than any message has."""

MAX_AHEAD = 1024
"""How many calls a peer may be ahead of this rank: one that is further is broken."""


class Inbox:
    """What has arrived for one call. Other threads add to it: copy a dict before you iterate."""

    __slots__ = ("abort", "buffers", "heard", "hellos", "ready", "released", "waiting")

    def __init__(self) -> None:
        self.hellos: dict[int, Hello] = {}
        """By peer."""
        self.ready: dict[tuple[int, int], Ready] = {}
        """Messages of peers that are there, by peer and round."""
        self.released: set[tuple[int, int]] = set()
        """Messages of this rank that were read, by peer and round."""
        self.abort: Abort | None = None
        self.waiting: dict[int, bytes] = {}
        """Whom each peer waits for, as it said last."""
        self.heard: dict[int, float] = {}
        """When each peer last sent something."""
        self.buffers: dict[tuple[int, int], SharedBuffer] = {}
        """Shared buffers that messages are in, by peer and number, until the call is over."""

    def put(self, peer: int, message: Any) -> None:
        """File a message."""
        self.heard[peer] = time.monotonic()
        kind = type(message)
        if kind is Hello:
            self.hellos[peer] = message
            if message.eager:
                self.ready[peer, 0] = Ready(message.call, 0, message.buffer, message.offset)
        elif kind is Ready:
            self.ready[peer, message.round] = message
        elif kind is Released:
            self.released.add((peer, message.round))
        elif kind is Abort:
            self.abort = message
        elif kind is Waiting:
            self.waiting[peer] = message.text

    def address_of(self, peer: int, number: int, size: int) -> int:
        """Where the staged part of a peer's message is, all of these bytes of it."""
        ready = self.ready[peer, number]
        buffer = self.buffers.get((peer, ready.buffer))
        if buffer is None or ready.offset + size > buffer.num_bytes:
            there = "none" if buffer is None else f"{buffer.num_bytes}"
            raise LiveError(
                f"rank {peer} says that {size} bytes begin at {ready.offset} of shared memory that "
                f"has {there}: it is broken, or runs another version of reshard"
            )
        return buffer.address + ready.offset


class Mailbox:
    """The sockets of one rank to the other ranks of its host, and what came over them.

    Several calls may be in flight, each in a thread: whichever needs a message polls for all.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], first_call: int = 0) -> None:
        self.sockets = dict(sockets)
        self.lost: set[int] = set()
        """Peers whose process has ended, or that sent something malformed."""
        self.buffers: dict[tuple[int, int], SharedBuffer] = {}
        """Buffers of peers, by peer and number; the latest of each."""
        self._inboxes: dict[int, Inbox] = {}
        self._next_call = first_call
        self._over: set[int] = set()
        self.num_finished = first_call
        """How many of the first calls are over."""
        self.finished_by: dict[int, int] = {}
        """The same of each peer, as its last Hello says."""
        self._polling = OwnedLock()
        self._sleepers: list[_thread.LockType] = []
        """Threads that wait for what another thread receives."""
        self._raw: dict[int, deque[tuple[bytes, list[tuple[int, int, bytes]], int, object]]]
        self._raw = {peer: deque() for peer in self.sockets}
        """Messages that were received and not filed yet, by peer."""
        self._unfiled = False
        self._lock = OwnedLock()
        self._peers = {link.fileno(): peer for peer, link in self.sockets.items()}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for link in self.sockets.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def open(self, call: int) -> Inbox:
        """The inbox of a call, which begins."""
        self._next_call = max(self._next_call, call + 1)
        return self._inboxes.get(call) or self._inboxes.setdefault(call, Inbox())

    def close(self, call: int) -> None:
        """A call is over; late messages to it are dropped."""
        with self._lock:
            closed = self._inboxes.pop(call, None)
            if closed is not None:
                closed.buffers.clear()
            self._over.add(call)
            while self.num_finished in self._over:
                self._over.remove(self.num_finished)
                self.num_finished += 1

    def has_read(self, peer: int, call: int) -> bool:
        """Whether a peer reads nothing of a call any more."""
        return self.finished_by.get(peer, 0) > call or peer in self.lost

    def send(self, peer: int, message: Control, fd: int | None = None) -> None:
        """Send a message; what arrives meanwhile is filed, so that two full sockets never wait."""
        data = encode(message)
        while peer not in self.lost:
            try:
                if fd is None:
                    self.sockets[peer].send(data)
                else:
                    socket.send_fds(self.sockets[peer], [data], [fd])
                return
            except BlockingIOError:
                self.step(0.01)
            except ConnectionError:
                return  # the peer has left: the receiving side reads a buffered Abort, then notices
            except OSError:
                self._lose(peer)

    def step(self, seconds: float) -> None:
        """Wait for messages, at most so long, and file all that have come.

        All, because the last thing that a peer sent may be an Abort. A signal handler may raise
        between any two bytecodes here, so a message is in `_raw` as soon as its socket has given it
        away.
        """
        if not self._polling.try_acquire():
            self._sleep(seconds)
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
            self._polling.release()
        if self._sleepers:
            self._wake_sleepers()

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""
        self._polling.release_for(thread)
        self._lock.release_for(thread)

    def _sleep(self, seconds: float) -> None:
        """Wait until the thread that polls has received something."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self._sleepers.append(lock)
        try:
            lock.acquire(timeout=seconds)
        finally:
            with contextlib.suppress(ValueError):
                self._sleepers.remove(lock)

    def _wake_sleepers(self) -> None:
        for lock in tuple(self._sleepers):
            with contextlib.suppress(RuntimeError):
                lock.release()

    def wake(self) -> None:
        """Make a ``step`` that waits return: something else has happened."""
        os.eventfd_write(self._wake, 1)
        self._wake_sleepers()

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
        # is, and the next poll asks for all peers together.
        self._unfiled = True
        try:
            self._raw[peer].extend(map(self.sockets[peer].recvmsg, _SIZE, _FD_BYTES))
        except (BlockingIOError, ConnectionResetError):
            return  # after a reset, what the peer had sent before is still read
        except OSError:
            self._lose(peer)
            return
        self._file_all(peer)
        self._unfiled = False

    def _file_all(self, peer: int | None = None) -> None:
        """File what was received, also what an exception kept from being filed before."""
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
        message: Any = decode(data)
        if message is None or message.call > self._next_call + MAX_AHEAD:
            self._lose(peer)
            return
        kind, number = type(message), getattr(message, "buffer", 0)
        if fds and not self._map(peer, number, fds):
            self._lose(peer)
            return
        if kind is Retired:
            self.buffers.pop((peer, number), None)
            return
        if kind is Hello and message.finished > self.finished_by.get(peer, 0):
            self.finished_by[peer] = message.finished
        inbox = self._inboxes.get(message.call) or self._open_early(message.call)
        if inbox is not None:
            if number and (peer, number) in self.buffers:
                inbox.buffers[peer, number] = self.buffers[peer, number]
            inbox.put(peer, message)

    def _open_early(self, call: int) -> Inbox | None:
        """The inbox of a call that has not begun here; None if it is over.

        Calls in flight open their inboxes in any order.
        """
        with self._lock:
            if call < self.num_finished or call in self._over:
                return None
            return self._inboxes.setdefault(call, Inbox())

    def _map(self, peer: int, number: int, fds: list[int]) -> bool:
        """Map the buffer that came with a message; whether it is one.

        The descriptors stay open until the message is filed: an exception out of a signal handler
        may have it filed again.
        """
        try:
            for fd in fds:
                self.buffers[peer, number] = SharedBuffer.map(os.dup(fd), number)
        except (OSError, ValueError):
            return False
        return True

    def _lose(self, peer: int) -> None:
        if peer in self.lost:
            return
        self.lost.add(peer)
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._poll.unregister(self.sockets[peer])
        self.sockets[peer].close()

    def close_in_child(self) -> None:
        """Close the sockets in a forked process; a lock may be held for ever there."""
        for link in self.sockets.values():
            link.close()

    def shut(self) -> None:
        """Close every socket and unmap every buffer."""
        for peer in list(self.sockets):
            self._lose(peer)
        self.buffers.clear()
        os.close(self._wake)


def _fds(extra: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    found = array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()
