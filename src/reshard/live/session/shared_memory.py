"""Shared memory of the processes of one host, which the kernel frees when they end.

A shared buffer is an anonymous memory file (`memfd`): it has no name in a file system, its
descriptor is sent over a unix socket, and the kernel frees it when the last process that maps it
has ended, however it ended.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count
from operator import attrgetter, ge

import numpy as np

from reshard.live.copy.cuda_driver import WAIT, WRITE, CudaError, Driver
from reshard.live.copy.host import array_at

_numbers = count(1)
_TAKEN = object()


class SharedBuffer:
    """A shared buffer that this process has created, or mapped from another process."""

    def __init__(self, num_bytes: int, number: int, fd: int) -> None:
        self.num_bytes, self.number, self.fd = num_bytes, number, fd
        self._map = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.known_to: set[int] = set()
        """The ranks that were sent the descriptor."""
        self.loans: dict[int, int] = {}
        """By peer, the last call whose eager message in this buffer the peer may not have read."""

    @classmethod
    def create(cls, num_bytes: int) -> SharedBuffer:
        """Create a buffer; its pages are allocated when they are first written."""
        fd = os.memfd_create("reshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(num_bytes, next(_numbers), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int, number: int) -> SharedBuffer:
        """Map another process's buffer from its descriptor, and close the descriptor.

        Reading pages that the owner has truncated would kill this process with SIGBUS, so the file
        must be sealed against shrinking.
        """
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("shared memory that is not sealed against shrinking")
            mapped = cls(os.fstat(fd).st_size, number, fd)
        finally:
            os.close(fd)
        mapped.fd = -1
        return mapped

    def fd_for(self, peer: int) -> int | None:
        """The descriptor, if the peer has not been sent it yet; else None."""
        if peer in self.known_to:
            return None
        self.known_to.add(peer)
        return self.fd

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap the buffer; addresses into it become invalid."""
        self.close_fd()
        self._map.close()


class BufferPool:
    """Keeps a session's shared buffers for later calls, because new pages cost time."""

    def __init__(
        self,
        retire: Callable[[SharedBuffer], None],
        have_read: Callable[[Mapping[int, int]], bool],
    ) -> None:
        """``retire`` frees a buffer; ``have_read`` says whether peers have read their calls."""
        self._free: dict[SharedBuffer, None] = {}
        """Several threads take buffers from it: the one that pops a buffer has it."""
        self.retire, self._have_read = retire, have_read

    def take(self, num_bytes: int) -> SharedBuffer:
        """Take the smallest buffer of at least this size, or a new one, for one call.

        A new one replaces all that are idle.
        """
        for buffer in sorted(self._free, key=attrgetter("num_bytes")):
            if buffer.num_bytes >= num_bytes and self._claim(buffer):
                return buffer
        for buffer in tuple(self._free):
            if self._claim(buffer):
                self.retire(buffer)
        page = mmap.PAGESIZE
        return SharedBuffer.create(max(1, -(-num_bytes // page)) * page)

    def _claim(self, buffer: SharedBuffer) -> bool:
        """Take a free buffer out of the pool, unless another thread has, or peers still read it."""
        if self._free.pop(buffer, _TAKEN) is _TAKEN:
            return False
        # Only now: another thread may have lent it to its peers since this one saw it in the pool.
        if self._have_read(buffer.loans):
            return True
        self._free[buffer] = None
        return False

    def end_call(
        self, used: list[SharedBuffer], call: int, unread_by: Collection[int], ok: bool
    ) -> None:
        """Keep the buffers of a call for later ones; after a failure peers may still read them.

        Some peers read their messages after the call, until their next Hello. May be repeated, and
        by two threads at a time: after an exception a buffer must not be kept and retired.
        """
        while used:
            try:
                buffer = used.pop()
            except IndexError:
                return  # the other thread has taken it
            if ok and unread_by:
                buffer.loans |= dict.fromkeys(unread_by, call)
            (self.give_back if ok else self.retire)(buffer)

    def give_back(self, buffer: SharedBuffer) -> None:
        self._free[buffer] = None

    def release(self) -> None:
        for buffer in tuple(self._free):
            if self._free.pop(buffer, _TAKEN) is None:
                self.retire(buffer)


SLOTS = 64
"""Calls whose flags a page holds at a time."""
FLAG_BYTES = 2 * SLOTS * 8


def _fence() -> None:
    """Make earlier writes to shared memory visible before later reads: processors reorder them.

    Acquiring a lock that is free is an atomic instruction, which is a full fence.
    """
    _thread.allocate_lock().acquire(False)


class AbortFlags:
    """A shared page on which a rank marks its failed calls, and the calls in which it writes.

    A rank that is about to write into a peer's memory marks that on its own page, then checks the
    peer's page: the tensors of a failed call may be freed. A rank whose call fails marks that on
    its own page, then waits until no peer is writing. Both mark first and check second, so at least
    one of them sees the other.
    """

    def __init__(self, page: SharedBuffer) -> None:
        if page.num_bytes < FLAG_BYTES:
            raise ValueError(f"abort flags of {page.num_bytes} bytes instead of {FLAG_BYTES}")
        self.page = page
        table = (ctypes.c_uint64 * SLOTS * 2).from_address(page.address)
        self.failed, self._writing = table
        """By slot, a failed call plus 1, and a call in which the rank writes plus 1."""

    @classmethod
    def create(cls) -> AbortFlags:
        return cls(SharedBuffer.create(FLAG_BYTES))

    def mark_failed(self, call: int) -> None:
        self.failed[call % SLOTS] = call + 1
        _fence()

    def has_failed(self, call: int) -> bool:
        """Whether a call has failed on the rank that owns the page."""
        return self.failed[call % SLOTS] == call + 1

    def begin_writing(self, call: int) -> None:
        self._writing[call % SLOTS] = call + 1
        _fence()

    def end_writing(self, call: int) -> None:
        self._writing[call % SLOTS] = 0

    def is_writing(self, call: int) -> bool:
        """Whether the rank that owns the page writes into the memory of peers."""
        return self._writing[call % SLOTS] == call + 1


REACHED, DONE, OVER = range(3)
"""The signals of a rank in a call: how far its tensors are ready, how far its own reads are done,
and that its stream has nothing left to do in the call. The host writes the first two as well, to
release streams; it never writes the last."""
SIGNAL_SLOTS = 1024
"""Calls whose signals a page holds at a time."""
SIGNAL_BYTES = (OVER + 1) * SIGNAL_SLOTS * 8
LAST_STEP = (1 << 32) - 1


class Signals:
    """How far a rank has come in its calls, on a page of the host that all its peers map.

    A signal is a number that grows: the call in its upper half, a step of the call in its lower.
    Every call has words of its own, so that a failed call can be released without regard to others.
    """

    def __init__(self, page: SharedBuffer, driver: Driver) -> None:
        if page.num_bytes < SIGNAL_BYTES:
            raise ValueError(f"signals of {page.num_bytes} bytes instead of {SIGNAL_BYTES}")
        self.page, self.driver = page, driver
        shape, strides = (OVER + 1, SIGNAL_SLOTS), (8 * SIGNAL_SLOTS, 8)
        self._words = array_at(page.address, shape, np.dtype(np.uint64), strides)
        self._address = driver.register(page.address, page.num_bytes)
        self.enqueued = np.zeros(shape, np.uint64)
        """What the stream of this rank writes last, as far as it is enqueued."""

    @classmethod
    def create(cls, driver: Driver) -> Signals:
        return cls(SharedBuffer.create(SIGNAL_BYTES), driver)

    def address_of(self, kind: int, call: int) -> int:
        return self._address + 8 * (kind * SIGNAL_SLOTS + call % SIGNAL_SLOTS)

    def is_free(self, call: int) -> bool:
        """Whether the GPU is done with the earlier call that had the words of this one."""
        slot = call % SIGNAL_SLOTS
        return all(map(ge, self._words[:, slot].tolist(), self.enqueued[:, slot].tolist()))

    def has_come(self, kind: int, call: int, step: int) -> bool:
        return int(self._words[kind, call % SIGNAL_SLOTS]) >= call << 32 | step

    def is_over(self, call: int) -> bool:
        """Whether the stream of the rank has nothing left to do in a call."""
        return self.has_come(OVER, call, LAST_STEP)

    def release(self, call: int) -> None:
        """Release all streams that wait for signals of a call that has failed."""
        self._words[:OVER, call % SIGNAL_SLOTS] = call << 32 | LAST_STEP

    def close(self) -> None:
        """Take the page back from the GPU."""
        with contextlib.suppress(CudaError):
            self.driver.unregister(self.page.address)


class CallSignals:
    """The signals of one call: those of this rank and of its peers."""

    def __init__(self, call: int, own: Signals) -> None:
        self.call, self.own = call, own
        self.peers: dict[int, Signals] = {}
        self.aborted = False

    def enqueue(
        self,
        stream: int,
        waits: Iterable[tuple[int, int, int]] = (),
        writes: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Let the stream of this rank wait for signals of peers (peer, kind, step), then write its
        own (kind, step)."""
        call, own = self.call, self.own
        operations = [
            (WAIT, self.peers[peer].address_of(kind, call), call << 32 | step)
            for peer, kind, step in waits
        ]
        written = [(kind, call << 32 | step) for kind, step in writes]
        operations += [(WRITE, own.address_of(kind, call), value) for kind, value in written]
        if operations:
            own.driver.enqueue(stream, operations)
        for kind, value in written:
            own.enqueued[kind, call % SIGNAL_SLOTS] = value

    def abort(self) -> None:
        """Release all streams that wait in this call; what they then copy is undefined."""
        self.aborted = True
        for signals in (self.own, *self.peers.values()):
            signals.release(self.call)
