"""A session's own store: where its ranks compare plans and post causes of failures.

The caller's group only tells its address, so a failure here cannot break the caller's group.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from reshard.errors import PeerLostError
from reshard.mesh import format_ranks
from reshard.run.live.c10d import TCPStore
from reshard.run.live.host import addresses, host_identity

__all__ = ["await_keys", "connect_store", "missing_keys", "not_called", "serve_store"]

CONNECT_SECONDS = 10.0
"""How long a store may take to answer."""

CONNECT_AGAIN = 0.1


def serve_store() -> tuple[TCPStore, dict[str, Any]]:
    """Make the session's store on its lowest rank; gives it and where others find it."""
    # torch looks up the name of everyone who connects, and nobody is served until it has it. To a
    # socket of IPv4 the ranks of this host come as 127.0.0.1, of which no name server is asked.
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
    return store, {"port": port, "addresses": addresses()}


def connect_store(
    place: Mapping[str, Any],
    host: str,
    rank: int,
    leader: int,
    seconds: float,
    what: str,
    look_up: Callable[[], None],
) -> TCPStore:
    """Connect to the session's store, which its lowest rank serves on a host."""
    end = time.monotonic() + seconds
    hosts = ["127.0.0.1"] if host == host_identity() else list(place["addresses"])
    while True:
        store, errors = _connect(hosts, int(place["port"]), max(end - time.monotonic(), 1.0))
        if store is not None:
            return store
        look_up()
        if time.monotonic() > end:
            raise PeerLostError(
                f"rank {rank} cannot reach the store that rank {leader} serves for {what} "
                f"({'; '.join(errors)}): if rank {leader} lives, name the network interface that "
                f"the hosts share in GLOO_SOCKET_IFNAME (on rank {rank}: no round begun)"
            )
        time.sleep(CONNECT_AGAIN)


def missing_keys(store: Checks, keys: Mapping[int, str]) -> list[int]:
    """The ranks whose keys are not in the store."""
    if store.check(list(keys.values())):
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


def not_called(absent: Sequence[int], seconds: float, rank: int, what: str) -> str:
    """What is said when ranks do not come at all."""
    one = len(absent) == 1
    who = f"rank {absent[0]} has" if one else f"ranks {format_ranks(absent)} have"
    return (
        f"{who} not called within {seconds:g} s and rank {rank} waits for {'it' if one else 'them'}"
        f" to begin {what}: every rank of the two layouts calls a move; if only late, give a longer"
        f" timeout= (on rank {rank}: no round begun)"
    )


def _connect(hosts: Sequence[str], port: int, seconds: float) -> tuple[TCPStore | None, list[str]]:
    """The store, or why each of its addresses failed."""
    limit = min(seconds, CONNECT_SECONDS) / len(hosts)
    errors = []
    for host in hosts:
        try:
            # torch tries up to three times as long as it was told, and writes pages about it.
            socket.create_connection((host, port), limit).close()
            patience = timedelta(seconds=limit / 3)
            store = TCPStore(host, port, is_master=False, timeout=patience)
            store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
            return store, []
        except (OSError, RuntimeError) as error:
            errors.append(f"{host} port {port}: {str(error).splitlines()[0]}")
    return None, errors


class Checks(Protocol):
    """A store, or a line to one."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


def await_keys(
    store: Checks,
    keys: Iterable[str],
    seconds: float,
    look_up: Callable[[], None] = lambda: None,
) -> list[str]:
    """Wait until all keys are there, calling ``look_up`` meanwhile; gives those still missing.

    The store's own wait writes a warning for every time-out, so this asks instead: often at first,
    then every 20 ms.
    """
    left = list(keys)
    end, pause = time.monotonic() + seconds, 0.0002
    while not store.check(left):
        look_up()
        if time.monotonic() >= end:
            return [key for key in left if not store.check([key])]
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return []
