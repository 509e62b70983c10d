"""Shared memory of the processes of one host, which the kernel frees when they end.

A shared buffer is an anonymous memory file (`memfd`): it has no name in a file system, its
descriptor is sent over a unix socket, and the kernel frees it when the last process that maps it
has ended, however it ended.
"""

from __future__ import annotations

import _thread
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import count

from reshard.live.session.store import OwnedLock

__all__ = ["AbortFlags", "BufferPool", "SharedBuffer"]

_numbers = count(1)


class SharedBuffer:
    """A shared buffer that this process has created, or mapped from another process."""

    def __init__(self, num_bytes: int, number: int, fd: int) -> None:
        self.num_bytes = num_bytes
        self.number = number
        self.fd = fd
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
        self, retire: Callable[[SharedBuffer], None], has_read: Callable[[int, int], bool]
    ) -> None:
        """``retire`` frees a buffer; ``has_read`` says whether a peer has read all of a call."""
        self._free: list[SharedBuffer] = []
        self._lock = OwnedLock()
        self.retire = retire
        self._has_read = has_read

    def take(self, num_bytes: int) -> SharedBuffer:
        """Take the smallest buffer of at least this size, or a new one, for one call."""
        with self._lock:
            best = None
            for buffer in self._free:
                if num_bytes <= buffer.num_bytes and (
                    best is None or buffer.num_bytes < best.num_bytes
                ):
                    best = buffer if self._is_idle(buffer) else best
            idle = [one for one in self._free if self._is_idle(one)] if best is None else [best]
            self._free = [buffer for buffer in self._free if buffer not in idle]
        if best is not None:
            return best
        for buffer in idle:
            self.retire(buffer)
        page = mmap.PAGESIZE
        return SharedBuffer.create(max(1, -(-num_bytes // page)) * page)

    def _is_idle(self, buffer: SharedBuffer) -> bool:
        return all(map(self._has_read, buffer.loans, buffer.loans.values()))

    def give_back(self, buffer: SharedBuffer) -> None:
        """Keep a buffer for the next call."""
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Free all buffers that are kept."""
        with self._lock:
            free, self._free = self._free, []
        for buffer in free:
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
        self._failed, self._writing = table

    @classmethod
    def create(cls) -> AbortFlags:
        """Create the flags of this rank."""
        return cls(SharedBuffer.create(FLAG_BYTES))

    def mark_failed(self, call: int) -> None:
        """Mark a call as failed on this rank."""
        self._failed[call % SLOTS] = call + 1
        _fence()

    def has_failed(self, call: int) -> bool:
        """Whether a call has failed on the rank that owns the page."""
        return self._failed[call % SLOTS] == call + 1

    def begin_writing(self, call: int) -> None:
        """Mark that this rank writes into the memory of peers."""
        self._writing[call % SLOTS] = call + 1
        _fence()

    def end_writing(self, call: int) -> None:
        """Mark that this rank has stopped writing."""
        self._writing[call % SLOTS] = 0

    def is_writing(self, call: int) -> bool:
        """Whether the rank that owns the page writes into the memory of peers."""
        return self._writing[call % SLOTS] == call + 1
