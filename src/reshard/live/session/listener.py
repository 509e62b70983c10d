"""Connect to the session's store, and the ranks of one host to each other.

Two ranks are on one host when they run under one kernel (its boot id) and in one network and IPC
namespace. Host names prove nothing: containers share them, and clones of a machine have equal ones.

Every rank listens on an abstract unix socket (no file, gone with the process); the higher rank of a
pair connects to the lower. Each proves that it belongs to the session by the random name of its own
socket, which is known only through the store; the kernel tells the process id of the peer; and each
tries to read a number from the other's memory, to find out whether they may access it.
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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from reshard.errors import LiveError, PeerLostError
from reshard.live.copy.host import allow_access, read_memory
from reshard.live.program.messages import IovecCall
from reshard.live.session.shared_memory import AbortFlags, SharedBuffer
from reshard.live.session.store import TCPStore, Worker

__all__ = [
    "HostPeer", "Listener", "SilentPeersError", "closed_by", "connect_store", "host_identity",
    "serve_store",
]  # fmt: skip

BROKEN_PEER = (OSError, ValueError, TypeError, IndexError)
"""Exceptions raised when a peer has exited or sends malformed data."""
MAX_INTRODUCTION = 4096
"""Bytes of one introduction."""
ACCEPT_SECONDS = 0.25
"""How long to wait for a connection before checking whether the rendezvous has failed."""
INTRODUCE_SECONDS = 2.0
"""How long a process that connected may take to say which rank it is."""
CONNECT_SECONDS, CONNECT_AGAIN = 10.0, 0.1
"""How long a store may take to accept a connection, and seconds between two looks at it."""
SIOCGIFADDR = 0x8915
UNIX = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
DATAGRAM = (socket.AF_INET, socket.SOCK_DGRAM)


@dataclass(frozen=True, eq=False)
class HostPeer:
    """Another rank of this host."""

    socket: socket.socket
    pid: int
    direct: bool
    """Whether both ranks may read and write each other's memory."""
    flags: AbortFlags


class SilentPeersError(Exception):
    """These ranks have not answered in time; they may themselves wait for another rank."""

    def __init__(self, peers: Sequence[int]) -> None:
        super().__init__(f"ranks {list(peers)} are silent")
        self.peers = peers


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
        self._probe = ctypes.c_uint64(secrets.randbits(64))
        self._watched: dict[int, socket.socket] = {}
        self._sockets: dict[int, socket.socket] = {}
        """Connections that are being made; `close` closes those that failed."""

    def connect_all(
        self,
        names: Mapping[int, str],
        seconds: float,
        check: Callable[[], object],
        reach: Callable[[int], object],
    ) -> dict[int, HostPeer]:
        """Connect to the ranks with these socket names.

        ``check`` raises if another rank failed; ``reach`` is called with the number of each step
        that this rank has reached.
        """
        end, sockets = time.monotonic() + seconds, self._sockets
        try:
            for peer in sorted(rank for rank in names if rank < self.rank):
                with self._blaming(peer):
                    sockets[peer] = link = socket.socket(*UNIX)
                    link.settimeout(_left(end))
                    link.connect("\0" + names[peer])
                    link.send(json.dumps([self.rank, self.name]).encode())
            reach(1)
            while absent := [peer for peer in names if peer > self.rank and peer not in sockets]:
                check()
                accepted = self._accept(names)
                sockets |= accepted
                if not accepted:
                    self.check_alive({peer: names[peer] for peer in absent})
                if time.monotonic() > end:
                    raise SilentPeersError(absent)
            reach(2)
            peers = self._introduce(sockets, end, reach)
        except BROKEN_PEER as error:
            if isinstance(error, LiveError):
                raise
            missing = sorted(names.keys() - sockets.keys() - {self.rank})
            whom = " and ".join(f"rank {rank}" for rank in missing) or "one of its host"
            raise self._lost(whom, error) from None
        self._sockets = {}
        return peers

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
            if link is None or _is_closed(link):
                if link is not None:
                    link.close()
                self._watched[peer] = link = socket.socket(*UNIX)
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

    def _accept(self, names: Mapping[int, str]) -> dict[int, socket.socket]:
        """Accept one connection, of a rank that sends the name of its own socket; {} if none comes.

        Other processes are rejected: those of another user at once, silent ones after a while.
        """
        self._listener.settimeout(ACCEPT_SECONDS)
        try:
            link, _ = self._listener.accept()
        except TimeoutError:
            return {}
        try:
            link.settimeout(INTRODUCE_SECONDS)
            if _credentials(link)[1] == os.getuid():
                peer, name = json.loads(link.recv(MAX_INTRODUCTION))
                if isinstance(peer, int) and peer > self.rank and names.get(peer) == name:
                    return {peer: link}
        except (OSError, ValueError, TypeError):
            pass
        link.close()
        return {}

    def _introduce(
        self, sockets: Mapping[int, socket.socket], end: float, reach: Callable[[int], object]
    ) -> dict[int, HostPeer]:
        """Exchange abort flags and the addresses of a number, and try to read the peers' numbers.

        All ranks send before they receive, so that no two wait for each other.
        """
        ours = json.dumps([ctypes.addressof(self._probe), self._probe.value]).encode()
        for peer, link in sockets.items():
            with self._blaming(peer):
                link.settimeout(_left(end))
                socket.send_fds(link, [ours], [self.flags.page.fd])
        probed: dict[int, tuple[int, bool, AbortFlags]] = {}
        for peer, link in sockets.items():
            with self._blaming(peer):
                link.settimeout(_left(end))
                theirs, fds, _, _ = socket.recv_fds(link, MAX_INTRODUCTION, 1)
                flags, pid = AbortFlags(SharedBuffer.map(fds[0], 0)), _credentials(link)[0]
                address, value = json.loads(theirs)
                readable = _can_read(pid, int(address), int(value))
                link.send(b"1" if readable else b"0")
                probed[peer] = pid, readable, flags
        reach(3)
        peers = {}
        for peer, link in sockets.items():
            with self._blaming(peer):
                link.settimeout(_left(end))
                pid, readable, flags = probed[peer]
                peers[peer] = HostPeer(link, pid, link.recv(1) == b"1" and readable, flags)
        return peers

    @contextlib.contextmanager
    def _blaming(self, peer: int) -> Iterator[None]:
        """Report errors inside the block as errors of this peer; silence may have other causes."""
        try:
            yield
        except TimeoutError:
            raise SilentPeersError([peer]) from None
        except BROKEN_PEER as error:
            raise self._lost(f"rank {peer}", error) from None

    def _lost(self, whom: str, error: Exception) -> PeerLostError:
        waits = f"rank {self.rank} waits to connect to it"
        return PeerLostError(f"{whom} is gone or broken ({error}) and {waits}")


def closed_by(peers: Mapping[int, HostPeer]) -> list[int]:
    """The ranks of this host that have closed their sockets, because their process ended."""
    return [rank for rank, peer in peers.items() if _is_closed(peer.socket)]


def _is_closed(link: socket.socket) -> bool:
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
    form = struct.Struct("3i")
    pid, user, _ = form.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return int(pid), int(user)


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


def connect_store(
    hosts: Sequence[str],
    port: int,
    seconds: float,
    check: Callable[[], object],
    describe: Callable[[str], str],
) -> TCPStore:
    """Connect to a session's store at the first address that answers.

    ``check`` raises if another rank has failed; ``describe`` makes the text of the error.
    """
    end, worker = time.monotonic() + seconds, Worker()
    try:
        while True:
            limit = min(max(end - time.monotonic(), 1.0), CONNECT_SECONDS) / len(hosts)
            errors: list[str] = []
            for host in hosts:
                # torch waits without a limit for the first answer of a process that is stopped.
                task = worker.submit(partial(_connected_store, host, port, limit))
                while not task.wait(CONNECT_AGAIN) and time.monotonic() < end:
                    check()
                if not task.done:
                    errors.append(f"{host} port {port}: no answer within {seconds:g} s")
                elif isinstance(task.error, OSError | RuntimeError):
                    errors.append(f"{host} port {port}: {str(task.error).splitlines()[0]}")
                else:
                    return task.result()
            check()
            if time.monotonic() > end:
                raise PeerLostError(describe("; ".join(errors)))
            time.sleep(CONNECT_AGAIN)
    finally:
        worker.end()


def _connected_store(host: str, port: int, seconds: float) -> TCPStore:
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
