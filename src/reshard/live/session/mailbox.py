"""Control messages between the ranks of one host, over unix sockets.

The kernel closes the sockets of a process that ends, so its peers know at once. Sockets carry no
data, but a message may carry the descriptor of a shared buffer.
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
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import LiveError, MoveTimeoutError
from reshard.live.session.control import (
    MAX_MESSAGE,
    Abort,
    Alive,
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
from reshard.live.session.store import OwnedLock

_SIZE, _FD_BYTES = (MAX_MESSAGE + 1,), (socket.CMSG_LEN(4 * struct.calcsize("i")),)
"""Arguments of recvmsg, as `map` takes them: one byte more than the longest message."""

MAX_AHEAD = 1024
"""How many calls a peer may be ahead of this rank; a peer that is further ahead is broken."""

MAX_SKIPPED = 64
"""Calls without an exchange that are counted together: each by itself costs as much as the call."""

YIELD_SECONDS = 0.0002
"""How long a thread that polls without a pause lets another one poll: that one needs the
interpreter to file what it has received."""

DISPENSABLE = {Abort, Alive, Retired, Waiting}
"""Messages that a peer can do without: it sees an abort in flags and in the store too, and a
buffer that it does not unmap costs only memory."""


class Inbox:
    """The messages received for one call. Other threads add to it: copy a dict to iterate."""

    __slots__ = ("abort", "buffers", "heard", "hellos", "ready", "released", "waiting")

    def __init__(self) -> None:
        self.hellos: dict[int, Hello] = {}
        self.ready: dict[tuple[int, int], Ready | Hello] = {}
        """Messages that peers have made ready, by peer and round: a Hello, if eager."""
        self.released: set[tuple[int, int]] = set()
        """Messages of this rank that peers have read, by peer and round."""
        self.abort: Abort | None = None
        self.waiting: dict[int, bytes] = {}
        """The last `Waiting` text of each peer."""
        self.heard: dict[int, float] = {}
        """When each peer last sent a message that shows that it works."""
        self.buffers: dict[tuple[int, int], SharedBuffer] = {}
        """Shared buffers with messages of the call, by peer and number."""

    def put(self, peer: int, message: Any, now: float | None = None) -> None:
        """Add a message; it has arrived now."""
        kind = type(message)
        if kind is Hello:
            self.hellos[peer] = message
            if message.eager:
                self.ready[peer, 0] = message
        elif kind is Ready:
            self.ready[peer, message.round] = message
        elif kind is Released:
            self.released.add((peer, message.round))
        elif kind is Abort:
            self.abort = message
        elif kind is Waiting:
            self.waiting[peer] = message.text
            if message.text:
                return  # a rank that waits does not work
        self.heard[peer] = now or time.monotonic()

    def address_of(self, peer: int, number: int, size: int) -> int:
        """The address of the staged part of a peer's message, which has this size."""
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
    """The sockets of one rank to the other ranks of its host, and the messages received.

    Several calls may be in flight, each in a thread: one thread polls for all of them.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], first_call: int = 0) -> None:
        self.sockets = dict(sockets)
        self.lost: set[int] = set()
        """Peers whose process has ended, or that sent a malformed message."""
        self.seconds = 60.0
        """How long a peer may leave its socket full, in the last call that has begun."""
        self.buffers: dict[tuple[int, int], SharedBuffer] = {}
        """Shared buffers of peers, by peer and number."""
        self._inboxes: dict[int, Inbox] = {}
        self._next_call = first_call
        self._over: set[int] = set()
        self._skipped: set[int] = set()
        """Calls that ended without an exchange and are not counted yet."""
        self.num_finished = first_call
        """How many of the first calls are over."""
        self.finished_by: dict[int, int] = {}
        """The same of each peer, from its last Hello."""
        self.waiting: dict[int, bytes] = {}
        """The last `Waiting` text of each peer in a call that is over here."""
        self._polling = OwnedLock()
        self._sleepers: dict[_thread.LockType, None] = {}
        """Threads that wait while another thread polls."""
        self._received: deque[tuple[int, tuple[bytes, list[tuple[int, int, bytes]], int, object]]]
        self._received = deque()
        """Peers, and messages of theirs that are not in an inbox yet."""
        self._lock = OwnedLock()
        self._peers = {link.fileno(): peer for peer, link in self.sockets.items()}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for link in self.sockets.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def open(self, call: int) -> Inbox:
        if call >= self._next_call:
            self._next_call = call + 1
        if self._skipped:
            self._count_skipped()
        return self._inboxes.get(call) or self._inboxes.setdefault(call, Inbox())

    def close(self, *calls: int) -> None:
        """Close the inboxes of calls that are over; late messages are dropped.

        Their buffers stay mapped: the cleanup thread closes calls whose threads may still read
        them.
        """
        with self._lock:
            for call in calls:
                closed = self._inboxes.pop(call, None)
                if closed is not None and closed.waiting:
                    self.waiting |= closed.waiting
                if call == self.num_finished:
                    self.num_finished = call + 1
                elif call > self.num_finished:  # else closed before, or before the connections
                    self._over.add(call)
            while self.num_finished in self._over:
                self.num_finished += 1
                self._over.discard(self.num_finished - 1)

    def skip(self, call: int) -> None:
        """A call has ended without an exchange; it is counted with the next message or call."""
        self._skipped.add(call)
        if len(self._skipped) > MAX_SKIPPED:
            self._count_skipped()

    def _count_skipped(self) -> None:
        calls = sorted(self._skipped)
        if calls:  # else another thread has counted them
            self._next_call = max(self._next_call, calls[-1] + 1)
            self.close(*calls)
            self._skipped.difference_update(calls)

    def have_read(self, calls: Mapping[int, int]) -> bool:
        """Whether each of these peers has finished its call, and reads no message of it again."""
        finished = self.finished_by
        for peer, call in calls.items():
            if finished.get(peer, 0) <= call and peer not in self.lost:
                return False
        return True

    def send(self, peer: int, message: Control | bytes, fd: int | None = None) -> None:
        """Send a message, or an encoded Hello.

        It receives while the socket is full, so that two ranks never deadlock. A peer that is
        stopped, or makes no calls, reads nothing. Messages that it can do without are dropped then;
        for the others it has as long as for everything else in a call.
        """
        data, end = message if type(message) is bytes else encode(message), 0.0
        while peer not in self.lost:
            try:
                if fd is None:
                    self.sockets[peer].send(data)
                else:
                    socket.send_fds(self.sockets[peer], [data], [fd])
                return
            except BlockingIOError:
                if type(message) in DISPENSABLE:
                    return
                end = end or time.monotonic() + self.seconds
                if time.monotonic() > end:
                    raise MoveTimeoutError(
                        f"rank {peer} has not read its messages for {self.seconds:g} s: it is "
                        "stopped, or makes no calls; if it is only late, give a longer timeout="
                    ) from None
                self.step(0.01)
            except ConnectionError:
                return  # the peer has exited: `step` reads a buffered Abort first, then the loss
            except OSError:
                self._lose(peer)

    def step(self, seconds: float) -> None:
        """Wait for messages, up to a limit, and receive all that have arrived.

        All, because the last message of a peer may be an Abort. A signal handler may raise between
        any two bytecodes here, so `recvmsg` and the append to `_received` are one call of C.
        """
        if not self._polling.try_acquire():
            self._sleep(seconds or YIELD_SECONDS)
            return
        try:
            self._file_received()  # what an exception has left there
            events = self._poll.poll(seconds * 1000)
            while events:
                for fd, event in events:
                    self._receive(fd, event)
                self._file_received()
                events = self._poll.poll(0)
        finally:
            self._polling.release()
        if self._sleepers:
            self._wake_sleepers()

    def _sleep(self, seconds: float) -> None:
        """Wait until the thread that polls has received a message."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self._sleepers[lock] = None
        try:
            lock.acquire(timeout=seconds)
        finally:
            self._sleepers.pop(lock, None)

    def _wake_sleepers(self) -> None:
        for lock in tuple(self._sleepers):
            with contextlib.suppress(RuntimeError):
                lock.release()

    def wake(self) -> None:
        """Make a waiting ``step`` return, because another event has happened."""
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
        if peer in self.lost:
            return
        # One message each time: a receive without a message costs as much as one with, and the
        # next poll asks for all peers together.
        receive = map(self.sockets[peer].recvmsg, _SIZE, _FD_BYTES)
        try:
            self._received.extend(zip((peer,), receive, strict=True))
        except (BlockingIOError, ConnectionResetError):
            return  # after a reset, messages sent before it can still be read
        except OSError:
            self._lose(peer)

    def _file_received(self) -> None:
        now = time.monotonic() if self._received else 0.0
        while self._received:
            peer, (data, extra, _, _) = self._received[0]
            fds = _fds(extra) if extra else ()
            if data:
                self._file(peer, data, fds, now)
            else:
                self._lose(peer)
            self._received.popleft()
            for fd in fds:
                os.close(fd)

    def _file(self, peer: int, data: bytes, fds: Sequence[int], now: float) -> None:
        message: Any = decode(data)
        if self._skipped:
            self._count_skipped()
        if message is None or message.call > self._next_call + MAX_AHEAD:
            self._lose(peer)
            return
        kind, number = type(message), getattr(message, "buffer", 0)
        # A message that is filed twice, because of an exception, maps its buffer once: a thread may
        # read the buffer by then. So numbers are not used twice, and descriptors stay open so long.
        if fds and (peer, number) not in self.buffers:
            try:
                self.buffers[peer, number] = SharedBuffer.map(os.dup(fds[0]), number)
            except (OSError, ValueError):
                self._lose(peer)
                return
        if kind is Retired:
            self.buffers.pop((peer, number), None)
            return
        if kind is Hello and message.finished > self.finished_by.get(peer, 0):
            self.finished_by[peer] = message.finished
        inbox, call = self._inboxes.get(message.call), message.call
        if inbox is None:
            with self._lock:
                if call >= self.num_finished and call not in self._over:  # it has not begun here
                    inbox = self._inboxes.setdefault(call, Inbox())
        if inbox is not None:
            buffer = self.buffers.get((peer, number)) if number else None
            if buffer is not None:
                inbox.buffers[peer, number] = buffer
            inbox.put(peer, message, now)
        elif kind is Waiting:
            self.waiting[peer] = message.text

    def _lose(self, peer: int) -> None:
        if peer in self.lost:
            return
        self.lost.add(peer)
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._poll.unregister(self.sockets[peer])
        self.sockets[peer].close()

    def shut(self) -> None:
        for peer in list(self.sockets):
            self._lose(peer)
        self.buffers.clear()
        os.close(self._wake)


def _fds(extra: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
