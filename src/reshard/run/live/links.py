"""Connect the ranks of one host, and find out whether they may touch each other's memory.

Every rank listens on an abstract unix socket (no file, gone with the process); the higher rank of a
pair connects to the lower. Both prove that they belong to the team by a secret from its store, the
kernel says which process is at the other end, and each tries to read a number from the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from reshard.errors import LiveError, PeerLostError
from reshard.run.live.arena import Arena
from reshard.run.live.memory import Stretches, allow_others, array_at, pair_up, read_from

__all__ = ["Door", "Link", "closed_by", "who_gave_up"]

BROKEN = (OSError, ValueError, TypeError, IndexError)
"""What it is like to talk to somebody who is gone, or talks nonsense."""

MOST = 4096
"""Bytes of one introduction."""

ACCEPT_SECONDS = 0.25
"""How long to wait for somebody at the door before looking up again."""

SPEAK_SECONDS = 2.0
"""How long somebody at the door may take to say who they are."""

SLOTS = 64
"""Calls that a notice board can name at a time."""

BOARD_BYTES = 2 * SLOTS * 8


class Board:
    """A page where a rank writes which of its calls have failed, for peers to look at.

    A peer that is about to write into our memory looks first: a failed call's tensors may be gone.
    And it writes on its own page that it is about to: whoever gives up a call waits for that to
    end. Both write first and look second, so one of them always sees the other.
    """

    def __init__(self, page: Arena) -> None:
        if page.num_bytes < BOARD_BYTES:
            raise ValueError(f"a board of {page.num_bytes} bytes instead of {BOARD_BYTES}")
        self.page = page
        table = array_at(page.address, (2, SLOTS), np.dtype(np.uint64), (8 * SLOTS, 8))
        self._failed, self._writing = table[0], table[1]

    def close_call(self, call: int) -> None:
        """Say that a call has failed."""
        self._failed[call % SLOTS] = call + 1

    def is_closed(self, call: int) -> bool:
        """Whether a call has failed over there."""
        return int(self._failed[call % SLOTS]) == call + 1

    def begin_writing(self, call: int) -> None:
        """Say that this rank writes into the memory of others, until it says that it does not."""
        self._writing[call % SLOTS] = call + 1

    def end_writing(self, call: int) -> None:
        """Say that it does not any more."""
        self._writing[call % SLOTS] = 0

    def is_writing(self, call: int) -> bool:
        """Whether the rank over there writes into the memory of others, for this call."""
        return int(self._writing[call % SLOTS]) == call + 1


@dataclass(frozen=True, eq=False)
class Link:
    """A rank of the same host."""

    socket: socket.socket
    pid: int
    direct: bool
    """Whether both may read and write each other's memory."""
    board: Board


def who_gave_up(links: Mapping[int, Link], call: int) -> list[int]:
    """The ranks of this host for which a call has failed; found without any message."""
    return [peer for peer, link in links.items() if link.board.is_closed(call)]


class Door:
    """Where this rank's host mates connect."""

    def __init__(self, rank: int) -> None:
        allow_others()
        self.rank = rank
        self.name = f"reshard-{secrets.token_hex(16)}"
        self.board = Board(Arena.make(BOARD_BYTES))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen(1024)
        self._probe = ctypes.c_uint64(secrets.randbits(64))
        self._watched: dict[int, socket.socket] = {}
        self._sockets: dict[int, socket.socket] = {}
        """Connections that are being made; `close` closes those that came to nothing."""

    def meet(
        self, doors: Mapping[int, str], seconds: float, look_up: Callable[[], None]
    ) -> dict[int, Link]:
        """Connect to every host mate; ``doors`` has the name of each.

        Raises what ``look_up`` raises, which is called now and then.
        """
        sockets = self._sockets
        try:
            links = self._meet(doors, seconds, look_up, sockets)
            self._sockets = {}
            return links
        except BROKEN as error:
            if isinstance(error, LiveError):
                raise
            missing = sorted(rank for rank in doors if rank not in sockets and rank != self.rank)
            whom = " and ".join(f"rank {rank}" for rank in missing) or "one of its host"
            raise PeerLostError(
                f"{whom} is gone or broken ({error}) and rank {self.rank} waits to connect to it"
            ) from None

    def _meet(
        self,
        doors: Mapping[int, str],
        seconds: float,
        look_up: Callable[[], None],
        sockets: dict[int, socket.socket],
    ) -> dict[int, Link]:
        end = time.monotonic() + seconds
        for peer in sorted(rank for rank in doors if rank < self.rank):
            with self._blaming(peer):
                sockets[peer] = _connect(doors[peer], end)
                sockets[peer].send(json.dumps([self.rank, self.name]).encode())
        while len(sockets) < len(doors) - 1:
            look_up()
            came = self._accept(doors)
            sockets |= came
            if not came:
                absent = (peer for peer in doors if peer > self.rank and peer not in sockets)
                self.check_alive({peer: doors[peer] for peer in absent})
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came within {seconds:g} s")
        return self._introduce(sockets, end)

    def close(self) -> None:
        """Accept no further connections."""
        self._listener.close()
        for sockets in (self._watched, self._sockets):
            while sockets:
                sockets.popitem()[1].close()
        self.board.page.close_fd()

    def check_alive(self, doors: Mapping[int, str]) -> None:
        """Raise if the process behind one of these sockets has ended.

        A connection to each is kept: the kernel closes it when the process ends. A process that
        only does not want it closes it, too, so a closed one is tried again.
        """
        for peer, name in doors.items():
            link = self._watched.get(peer)
            if link is None or _is_closed(link):
                if link is not None:
                    link.close()
                self._watched[peer] = link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.setblocking(False)
                try:
                    link.connect("\0" + name)
                    link.send(b"?")
                except BlockingIOError:
                    pass
                except OSError:
                    raise PeerLostError(
                        f"rank {peer} is gone (its process ended) and rank {self.rank} waits for "
                        "it to connect"
                    ) from None

    def _accept(self, doors: Mapping[int, str]) -> dict[int, socket.socket]:
        """A host mate that shows the name of its own door, which only the store told; or nobody.

        A stranger is sent away: one of another user at once, one who says nothing after a while.
        """
        self._listener.settimeout(ACCEPT_SECONDS)
        try:
            link, _ = self._listener.accept()
        except TimeoutError:
            return {}
        try:
            link.settimeout(SPEAK_SECONDS)
            if _peer(link)[1] == os.getuid():
                peer, name = json.loads(link.recv(MOST))
                if isinstance(peer, int) and peer > self.rank and doors.get(peer) == name:
                    return {peer: link}
        except (OSError, ValueError, TypeError):
            pass
        link.close()
        return {}

    def _introduce(self, sockets: Mapping[int, socket.socket], end: float) -> dict[int, Link]:
        """Tell everyone where to read a number, try theirs, and tell how it went."""
        ours = json.dumps([ctypes.addressof(self._probe), self._probe.value]).encode()
        for peer, link in sockets.items():
            with self._blaming(peer):
                link.settimeout(_left(end))
                socket.send_fds(link, [ours], [self.board.page.fd])
        pids: dict[int, int] = {}
        can: dict[int, bool] = {}
        boards: dict[int, Board] = {}
        for peer, link in sockets.items():
            with self._blaming(peer):
                theirs, fds, _, _ = socket.recv_fds(link, MOST, 1)
                boards[peer] = Board(Arena.of(fds[0], 0))
                pids[peer] = _peer(link)[0]
                address, value = json.loads(theirs)
                can[peer] = _reads(pids[peer], int(address), int(value))
                link.send(b"1" if can[peer] else b"0")
        links = {}
        for peer, link in sockets.items():
            with self._blaming(peer):
                direct = link.recv(1) == b"1" and can[peer]
                links[peer] = Link(link, pids[peer], direct, boards[peer])
        return links

    @contextlib.contextmanager
    def _blaming(self, peer: int) -> Iterator[None]:
        """Whatever goes wrong inside is a peer's fault."""
        try:
            yield
        except BROKEN as error:
            raise PeerLostError(
                f"rank {peer} is gone or broken ({error}) and rank {self.rank} waits to connect to "
                "it"
            ) from None


def _is_closed(link: socket.socket) -> bool:
    """Whether the other end of a socket has closed it; reads nothing."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def closed_by(links: Mapping[int, Link]) -> list[int]:
    """The ranks of this host whose process has ended, as their sockets tell."""
    return [peer for peer, link in links.items() if _is_closed(link.socket)]


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _connect(name: str, end: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(_left(end))
        link.connect("\0" + name)
    except BaseException:
        link.close()
        raise
    return link


def _peer(link: socket.socket) -> tuple[int, int]:
    """The process at the other end and its user, as the kernel knows them here."""
    form = struct.Struct("3i")
    pid, user, _ = form.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return int(pid), int(user)


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
