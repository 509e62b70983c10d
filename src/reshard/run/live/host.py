"""Which host is this, and under which addresses do others reach it?

Two ranks are on one host when they run under one kernel (its boot id) and in one network namespace,
in which the unix sockets live that they talk over. Names of hosts say nothing: containers share
them, and clones of a machine have equal ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from functools import lru_cache
from pathlib import Path

__all__ = ["addresses", "host_identity"]

SIOCGIFADDR = 0x8915


@lru_cache(maxsize=1)
def host_identity() -> str:
    """A text that is equal for ranks that can talk over unix sockets and share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "ipc")]
    return "/".join([boot, *map(str, namespaces)])


def addresses() -> list[str]:
    """Addresses of this host, the likeliest first: what the user set, what routes, its name."""
    found: list[str] = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for interface in os.environ.get(name, "").split(","):
            with contextlib.suppress(OSError):
                found.append(_address_of(interface.strip("=^")))
    with contextlib.suppress(OSError):
        found.append(_address_towards(os.environ.get("MASTER_ADDR", "")))
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(address for address in found if address)] or ["127.0.0.1"]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def _address_towards(other: str) -> str:
    """The address this host sends from to another; connecting a datagram socket sends nothing."""
    if not other:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
