"""Memory that two processes of one host both see, and that vanishes with them.

An arena is an anonymous memory file (`memfd`): it has no name in any folder, its descriptor is
handed over a socket, and the kernel frees it when the last process that maps it is gone, whether it
returned, raised or was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import count

from reshard.run.live.gate import Gate

__all__ = ["Arena", "Arenas"]

_numbers = count(1)


class Arena:
    """A stretch of shared memory of this process, or another's mapped into this one."""

    def __init__(self, num_bytes: int, number: int, fd: int) -> None:
        self.num_bytes = num_bytes
        self.number = number
        self.fd = fd
        self._map = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.known_to: set[int] = set()
        """The ranks that were handed the descriptor."""
        self.lent = 0
        """Messages in it that peers have not read yet, and nobody waits for."""

    @classmethod
    def make(cls, num_bytes: int) -> Arena:
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
    def of(cls, fd: int, number: int) -> Arena:
        """Another process's memory, from its descriptor, which is closed.

        Reading memory that its owner has cut off would end this process, so it must be unable to.
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
        """The descriptor, for a peer that was not handed it yet."""
        if peer in self.known_to:
            return None
        self.known_to.add(peer)
        return self.fd

    def close_fd(self) -> None:
        """Hand it to nobody else; the memory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Give the memory back; addresses into it are void."""
        self.close_fd()
        self._map.close()


class Arenas:
    """The arenas that a process keeps for its next calls, so that pages are warm."""

    def __init__(self, retire: Callable[[Arena], None]) -> None:
        self._free: list[Arena] = []
        self._lock = Gate()
        self.retire = retire

    def release_for(self, thread: int | None) -> None:
        """A thread has left its call by an exception."""
        self._lock.open_for(thread)

    def take(self, num_bytes: int) -> Arena:
        """An arena of at least this size, for one call."""
        with self._lock:
            idle = [arena for arena in self._free if not arena.lent]
            fitting = [arena for arena in idle if arena.num_bytes >= num_bytes]
            best = min(fitting, key=lambda arena: arena.num_bytes) if fitting else None
            gone = idle if best is None else [best]
            self._free = [arena for arena in self._free if arena not in gone]
        if best is not None:
            return best
        for arena in idle:
            self.retire(arena)
        page = mmap.PAGESIZE
        return Arena.make(max(1, -(-num_bytes // page)) * page)

    def give_back(self, arena: Arena) -> None:
        """Keep an arena for the next call."""
        with self._lock:
            self._free.append(arena)

    def release(self) -> None:
        """Free all that is kept."""
        with self._lock:
            free, self._free = self._free, []
        for arena in free:
            self.retire(arena)
