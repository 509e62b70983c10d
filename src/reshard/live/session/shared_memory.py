"""Memory that two processes of one host both map, and that vanishes with them.

A shared buffer is an anonymous memory file (`memfd`): it has no name in any folder, its descriptor
is sent over a unix socket, and the kernel frees it when the last process that maps it is gone,
whether that returned, raised or was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import count

import numpy as np

from reshard.live.program.runs import array_at
from reshard.live.session.worker import OwnedLock

__all__ = ["AbortFlags", "BufferPool", "SharedBuffer"]

_numbers = count(1)


class SharedBuffer:
    """A shared buffer of this process, or another's mapped into this one."""

    def __init__(self, num_bytes: int, number: int, fd: int) -> None:
        self.num_bytes = num_bytes
        self.number = number
        self.fd = fd
        self._map = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.known_to: set[int] = set()
        """The ranks that were sent the descriptor."""
        self.loans: dict[int, int] = {}
        """The last call of each peer whose eager message in it may be unread."""

    @classmethod
    def create(cls, num_bytes: int) -> SharedBuffer:
        """New memory; pages cost nothing until they are written."""
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
        """Map another process's buffer from its descriptor, which is closed.

        Reading pages that the owner has truncated would end this process with SIGBUS, so the file
        must be sealed against that.
        """
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("shared memory that its owner can take away")
            mapped = cls(os.fstat(fd).st_size, number, fd)
        finally:
            os.close(fd)
        mapped.fd = -1
        return mapped

    def fd_for(self, peer: int) -> int | None:
        """The descriptor, for a peer that was not sent it yet."""
        if peer in self.known_to:
            return None
        self.known_to.add(peer)
        return self.fd

    def close_fd(self) -> None:
        """Send it to no other peer; the memory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap it: addresses into it are void."""
        self.close_fd()
        self._map.close()


class BufferPool:
    """The shared buffers that a session keeps for its next calls, so that their pages are warm."""

    def __init__(
        self, retire: Callable[[SharedBuffer], None], has_read: Callable[[int, int], bool]
    ) -> None:
        """``has_read`` says whether a peer reads nothing of a call any more."""
        self._free: list[SharedBuffer] = []
        self.lock = OwnedLock()
        self.retire = retire
        self._has_read = has_read

    def take(self, num_bytes: int) -> SharedBuffer:
        """A buffer of at least this size, for one call."""
        with self.lock:
            idle = [buffer for buffer in self._free if self._is_idle(buffer)]
            fitting = [buffer for buffer in idle if buffer.num_bytes >= num_bytes]
            best = min(fitting, key=lambda buffer: buffer.num_bytes) if fitting else None
            gone = idle if best is None else [best]
            self._free = [buffer for buffer in self._free if buffer not in gone]
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
        with self.lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Free all buffers that are kept."""
        with self.lock:
            free, self._free = self._free, []
        for buffer in free:
            self.retire(buffer)


SLOTS = 64
"""Calls that flags can name at a time."""

FLAG_BYTES = 2 * SLOTS * 8


class AbortFlags:
    """A shared page on which a rank marks its failed calls, and the calls in which it writes.

    A peer looks at our page before it writes into our memory: the tensors of a failed call may be
    gone. And it marks on its own page that it is about to write: a rank that gives up a call waits
    until its peers have stopped writing. Both mark first and look second, so one always sees the
    other.
    """

    def __init__(self, page: SharedBuffer) -> None:
        if page.num_bytes < FLAG_BYTES:
            raise ValueError(f"abort flags of {page.num_bytes} bytes instead of {FLAG_BYTES}")
        self.page = page
        table = array_at(page.address, (2, SLOTS), np.dtype(np.uint64), (8 * SLOTS, 8))
        self._failed, self._writing = table[0], table[1]

    @classmethod
    def create(cls) -> AbortFlags:
        """Flags of this rank."""
        return cls(SharedBuffer.create(FLAG_BYTES))

    def mark_failed(self, call: int) -> None:
        """Mark a call as failed on this rank."""
        self._failed[call % SLOTS] = call + 1

    def has_failed(self, call: int) -> bool:
        """Whether a call has failed on the rank that owns the page."""
        return int(self._failed[call % SLOTS]) == call + 1

    def begin_writing(self, call: int) -> None:
        """Mark that this rank writes into the memory of others."""
        self._writing[call % SLOTS] = call + 1

    def end_writing(self, call: int) -> None:
        """Mark that it does not any more."""
        self._writing[call % SLOTS] = 0

    def is_writing(self, call: int) -> bool:
        """Whether the rank that owns the page writes into the memory of others in this call."""
        return int(self._writing[call % SLOTS]) == call + 1
