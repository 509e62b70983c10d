"""A team's own store: where its ranks meet, compare, and leave word of failures.

The caller's group only tells the address. Nothing else of the caller's is touched, so whatever goes
wrong here cannot break it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from reshard.errors import MoveTimeoutError, PeerLostError
from reshard.run.live.c10d import Store, TCPStore
from reshard.run.live.host import addresses, host_identity

__all__ = ["await_keys", "own_store"]

CONNECT_SECONDS = 10.0


def own_store(caller: Store, rank: int, leader: int, seconds: float) -> TCPStore:
    """Make the team's store on its first rank, or connect to it."""
    if rank == leader:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"host": host_identity(), "port": store.port, "addresses": addresses()}
        caller.set("address", json.dumps(place))
        return store
    missing = await_keys(caller, ["address"], seconds)
    if missing:
        raise MoveTimeoutError(
            f"rank {leader} has not called within {seconds:g} s and rank {rank} waits for it: "
            "every rank of the two layouts calls a move; if it is only late, give a longer timeout="
        )
    place = json.loads(caller.get("address"))
    local = place["host"] == host_identity()
    return _connect(["127.0.0.1"] if local else place["addresses"], place["port"], leader)


def _connect(hosts: Sequence[str], port: int, leader: int) -> TCPStore:
    errors = []
    for host in hosts:
        try:
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        except RuntimeError as error:
            errors.append(f"{host}: {str(error).splitlines()[0]}")
    tried = "; ".join(errors)
    raise PeerLostError(
        f"the store that rank {leader} serves on port {port} cannot be reached ({tried}): "
        "name the network interface that the hosts share in GLOO_SOCKET_IFNAME"
    )


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
