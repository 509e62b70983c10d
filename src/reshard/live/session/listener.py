"""Connect the ranks of one host to each other, and serve the session's store.

Two ranks are on one host when they run under one kernel (its boot id) and in one network and IPC
namespace. Host names prove nothing: containers share them, and clones of a machine have equal ones.

Every rank listens on an abstract unix socket (no file, gone with the process); the higher rank of a
pair connects to the lower, and proves who it is by the random name of its own socket. The kernel
tells the process id of the peer, and each tries to read a number from the other's memory, to find
out whether they may access it. Names and numbers are known only through the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.errors import LiveError, PeerLostError
from reshard.live.copy.host import allow_access, read_memory
from reshard.live.program.messages import IovecCall
from reshard.live.session.shared_memory import AbortFlags, SharedBuffer
from reshard.live.session.store import TCPStore

BROKEN_PEER = (OSError, ValueError, TypeError, LookupError)
"""Exceptions raised when a peer has exited or sends malformed data."""
MAX_INTRODUCTION = 4096
"""Bytes of one introduction."""
ACCEPT_SECONDS = 0.25
"""How long to wait for a connection before checking whether the rendezvous has failed."""
INTRODUCE_SECONDS = 2.0
"""How long a process that connected may take to say which rank it is."""
CONNECT_SECONDS = 10.0
"""How long a store may take to accept a connection."""
SIOCGIFADDR = 0x8915
UNIX = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
DATAGRAM = (socket.AF_INET, socket.SOCK_DGRAM)

Stalled = Callable[[Sequence[int]], Exception]


@dataclass(frozen=True, eq=False)
class HostPeer:
    socket: socket.socket
    pid: int
    direct: bool
    """Whether both ranks may read and write each other's memory."""
    flags: AbortFlags


class Listener:
    """The socket to which the other ranks of this host connect."""

    def __init__(self, rank: int) -> None:
        allow_access()
        self.rank = rank
        self.name = f"reshard-{secrets.token_hex(16)}"
        self.flags = AbortFlags.create()
        self._listener = socket.socket(*UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(1024)
        self._probe = probe = ctypes.c_uint64(secrets.randbits(64))
        where = [ctypes.addressof(probe), probe.value]
        self.announced: dict[str, Any] = {"socket": self.name, "probe": where}
        """What other ranks of the host need to know to connect."""
        self._watched: dict[int, socket.socket] = {}
        self._sockets: dict[int, socket.socket] = {}
        """Connections that are being made; `close` closes those that failed."""

    def connect_all(
        self,
        members: Mapping[int, Mapping[str, Any]],
        seconds: float,
        check: Callable[[], object],
        reach: Callable[[int], object],
        stalled: Stalled,
    ) -> dict[int, HostPeer]:
        """Connect to the other ranks of the host, of which ``members`` has the announcements.

        ``check`` raises if another rank failed; ``reach`` is called with the number of each step
        that this rank has reached; ``stalled`` makes the error when ranks do not answer in time.
        """
        end, sockets = time.monotonic() + seconds, self._sockets
        names = {peer: str(one["socket"]) for peer, one in members.items() if peer != self.rank}
        self._introduce(names, end, check, reach, stalled)
        probed: dict[int, tuple[int, bool]] = {}
        # All ranks send before they receive, so that no two wait for each other.
        for peer, link in sockets.items():
            with self._blaming(peer, stalled):
                link.settimeout(_left(end))
                pid, _ = _credentials(link)
                readable = _can_read(pid, *map(int, members[peer]["probe"]))
                socket.send_fds(link, [b"1" if readable else b"0"], [self.flags.page.fd])
                probed[peer] = pid, readable
        reach(3)
        peers = {}
        for peer, link in sockets.items():
            with self._blaming(peer, stalled):
                link.settimeout(_left(end))
                answer, fds, _, _ = socket.recv_fds(link, 1, 1)
                flags, (pid, readable) = AbortFlags(SharedBuffer.map(fds[0], 0)), probed[peer]
                peers[peer] = HostPeer(link, pid, answer == b"1" and readable, flags)
        self._sockets = {}
        return peers

    def _introduce(
        self,
        names: Mapping[int, str],
        end: float,
        check: Callable[[], object],
        reach: Callable[[int], object],
        stalled: Stalled,
    ) -> None:
        """Connect to the lower ranks, and accept the connections of the higher ones."""
        sockets = self._sockets
        for peer in sorted(rank for rank in names if rank < self.rank):
            with self._blaming(peer, stalled):
                sockets[peer] = link = socket.socket(*UNIX)
                link.settimeout(_left(end))
                link.connect("\0" + names[peer])
                link.send(json.dumps([self.rank, self.name]).encode())
        reach(1)
        while absent := [peer for peer in names if peer > self.rank and peer not in sockets]:
            check()
            if not self._accept(names):
                self.check_alive({peer: names[peer] for peer in absent})
            if time.monotonic() > end:
                raise stalled(absent)
        reach(2)

    def close(self) -> None:
        """Accept no further connections."""
        self._listener.close()
        for sockets in (self._watched, self._sockets):
            while sockets:
                sockets.popitem()[1].close()
        self.flags.page.close_fd()

    def check_alive(self, names: Mapping[int, str]) -> None:
        """Raise if the process that listens at one of these sockets has ended.

        A connection to each is kept: the kernel closes it when the process ends. A process that
        rejects the connection closes it as well, so a closed one is made again.
        """
        for peer, name in names.items():
            link = self._watched.get(peer)
            if link is None or is_closed(link):
                if link is not None:
                    link.close()
                try:
                    self._watched[peer] = link = socket.socket(*UNIX)
                    link.setblocking(False)
                except OSError as error:
                    raise LiveError(f"rank {self.rank} cannot open a socket: {error}") from None
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

    def _accept(self, names: Mapping[int, str]) -> bool:
        """Accept one connection, of a rank that sends the name of its own socket, if one comes.

        Other processes are rejected: those of another user at once, silent ones after a while.
        """
        try:
            self._listener.settimeout(ACCEPT_SECONDS)
            link, _ = self._listener.accept()
        except TimeoutError:
            return False
        except OSError as error:
            raise LiveError(f"rank {self.rank} cannot accept connections: {error}") from None
        with contextlib.suppress(*BROKEN_PEER):
            link.settimeout(INTRODUCE_SECONDS)
            if _credentials(link)[1] == os.getuid():
                peer, name = json.loads(link.recv(MAX_INTRODUCTION))
                if isinstance(peer, int) and peer > self.rank and names.get(peer) == name:
                    self._sockets[peer] = link
                    return True
        link.close()
        return False

    @contextlib.contextmanager
    def _blaming(self, peer: int, stalled: Stalled) -> Iterator[None]:
        """Report errors inside the block as errors of this peer; silence may have other causes."""
        try:
            yield
        except TimeoutError:
            raise stalled([peer]) from None
        except BROKEN_PEER as error:
            raise PeerLostError(
                f"rank {peer} is gone or broken ({error}) and rank {self.rank} waits to connect "
                "to it"
            ) from None


def is_closed(link: socket.socket) -> bool:
    """Whether the peer of a socket has closed it; consumes no data."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _credentials(link: socket.socket) -> tuple[int, int]:
    """The process id and the user id of a socket's peer, from the kernel."""
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", peer)
    return pid, user


def _can_read(pid: int, address: int, value: int) -> bool:
    """Whether this process can read a number, which it knows, from the memory of another."""
    here = ctypes.c_uint64(0)
    try:
        read_memory(pid, IovecCall.single(ctypes.addressof(here), address, 8))
    except (OSError, OverflowError):
        return False
    return here.value == value


@lru_cache(maxsize=1)
def host_identity() -> str:
    """A text that is equal for ranks that can connect by unix sockets and share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "ipc")]
    return "/".join([boot, *map(str, namespaces)])


def serve_store() -> tuple[TCPStore, dict[str, Any]]:
    """Serve a session's store on its lowest rank; returns the store, and its port and addresses."""
    # torch resolves the name of every peer that connects, and accepts no other peer meanwhile. On
    # an IPv4 socket the ranks of this host come from 127.0.0.1, which needs no name server.
    listener = socket.create_server(("", 0), backlog=1024)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, {"port": port, "addresses": _addresses()}


def connected_store(host: str, port: int, seconds: float) -> TCPStore:
    # torch takes up to three times its timeout, and logs pages about it, so a probe comes first.
    # socket.create_connection would import the codec of host names, which takes longer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(seconds)
        probe.connect((host, port))
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds / 3))
    store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
    return store


def _addresses() -> list[str]:
    """Addresses of this host: of the interfaces that the user named, of the route, of its name."""
    addresses: list[str] = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for interface in os.environ.get(name, "").split(","):
            with contextlib.suppress(OSError), socket.socket(*DATAGRAM) as probe:
                request = struct.pack("256s", interface.strip("=^").encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                addresses.append(socket.inet_ntoa(answer[20:24]))
    master = os.environ.get("MASTER_ADDR")
    if master:
        with contextlib.suppress(OSError), socket.socket(*DATAGRAM) as probe:
            probe.connect((master, 9))  # sends nothing
            addresses.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(address for address in addresses if address)] or ["127.0.0.1"]
