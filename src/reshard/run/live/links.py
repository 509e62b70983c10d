"""Connect the ranks of one host, and find out whether they may touch each other's memory.

Every rank listens on an abstract unix socket (no file, gone with the process); the higher rank of a
pair connects to the lower. Both prove that they belong to the team by a secret from its store, the
kernel says which process is at the other end, and each tries to read a number from the other.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard.errors import LiveError
from reshard.run.live.arena import Arena
from reshard.run.live.memory import Stretches, allow_others, array_at, pair_up, read_from

__all__ = ["Door", "Link"]

MOST = 4096
"""Bytes of one introduction."""

SLOTS = 64
"""Calls that a notice board can name as aborted at a time."""


class Board:
    """A page where a rank writes which of its calls have failed, for peers to look at.

    A peer that is about to write into our memory looks first: a failed call's tensors may be gone.
    """

    def __init__(self, page: Arena) -> None:
        self.page = page
        self.calls = array_at(page.address, (SLOTS,), np.dtype(np.uint64), (8,))

    def close_call(self, call: int) -> None:
        """Say that a call has failed."""
        self.calls[call % SLOTS] = call + 1

    def is_closed(self, call: int) -> bool:
        """Whether a call has failed over there."""
        return int(self.calls[call % SLOTS]) == call + 1


@dataclass(frozen=True, eq=False)
class Link:
    """A rank of the same host."""

    socket: socket.socket
    pid: int
    direct: bool
    """Whether both may read and write each other's memory."""
    board: Board


class Door:
    """Where this rank's host mates connect."""

    def __init__(self, rank: int) -> None:
        allow_others()
        self.rank = rank
        self.name = f"reshard-{secrets.token_hex(16)}"
        self.board = Board(Arena.make(SLOTS * 8))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen(1024)
        self._probe = ctypes.c_uint64(secrets.randbits(64))

    def meet(self, doors: Mapping[int, str], direct: bool, seconds: float) -> dict[int, Link]:
        """Connect to every host mate; ``doors`` has the name of each."""
        end = time.monotonic() + seconds
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in sorted(rank for rank in doors if rank < self.rank):
                sockets[peer] = _connect(doors[peer], end)
                sockets[peer].send(json.dumps([self.rank, self.name]).encode())
            for _ in [rank for rank in doors if rank > self.rank]:
                peer, link = self._accept(doors, end)
                sockets[peer] = link
            return self._introduce(sockets, direct, end)
        except OSError as error:
            for link in sockets.values():
                link.close()
            missing = sorted(rank for rank in doors if rank not in sockets and rank != self.rank)
            raise LiveError(
                f"rank {self.rank} could not connect to ranks {missing} of its host: {error}"
            ) from None
        finally:
            self._listener.close()
            self.board.page.close_fd()

    def _accept(self, doors: Mapping[int, str], end: float) -> tuple[int, socket.socket]:
        """The next host mate that shows the name of its own door, which only the store told."""
        while True:
            self._listener.settimeout(_left(end))
            link, _ = self._listener.accept()
            link.settimeout(_left(end))
            try:
                peer, name = json.loads(link.recv(MOST))
                if isinstance(peer, int) and peer > self.rank and doors.get(peer) == name:
                    return peer, link
            except (ValueError, TypeError):
                pass
            link.close()

    def _introduce(
        self, sockets: Mapping[int, socket.socket], direct: bool, end: float
    ) -> dict[int, Link]:
        """Tell everyone where to read a number, try theirs, and tell how it went."""
        ours = json.dumps([ctypes.addressof(self._probe), self._probe.value]).encode()
        for link in sockets.values():
            link.settimeout(_left(end))
            socket.send_fds(link, [ours], [self.board.page.fd])
        pids: dict[int, int] = {}
        can: dict[int, bool] = {}
        boards: dict[int, Board] = {}
        for peer, link in sockets.items():
            theirs, fds, _, _ = socket.recv_fds(link, MOST, 1)
            boards[peer] = Board(Arena.of(fds[0], 0))
            pids[peer] = _pid(link)
            address, value = json.loads(theirs)
            can[peer] = direct and _reads(pids[peer], int(address), int(value))
            link.send(b"1" if can[peer] else b"0")
        return {
            peer: Link(link, pids[peer], link.recv(1) == b"1" and can[peer], boards[peer])
            for peer, link in sockets.items()
        }


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _connect(name: str, end: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_left(end))
    link.connect("\0" + name)
    return link


def _pid(link: socket.socket) -> int:
    """The process at the other end, as the kernel knows it here."""
    form = struct.Struct("3i")
    pid, _, _ = form.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return int(pid)


def _reads(pid: int, address: int, value: int) -> bool:
    """Whether the number at an address of another process can be read."""
    here = ctypes.c_uint64(0)
    own = Stretches(np.array([ctypes.addressof(here)]), np.array([8]))
    theirs = Stretches(np.array([address]), np.array([8]))
    try:
        read_from(pid, pair_up(own, theirs)[0])
    except (OSError, OverflowError):
        return False
    return here.value == value
