"""The store of a session: where its ranks compare plans and post why a call failed.

Its lowest rank serves it. The caller's process group only tells its address, so a failure here
cannot break that group.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, TCPStore, Work

from reshard.errors import PeerLostError
from reshard.live.session.listener import addresses, host_identity
from reshard.live.session.worker import Task, Worker

__all__ = [
    "REQUEST_SECONDS",
    "PrefixStore",
    "ProcessGroup",
    "Store",
    "StoreClient",
    "TCPStore",
    "Work",
    "clone_of",
    "connect_store",
    "missing_keys",
    "poll_pauses",
    "serve_store",
]

REQUEST_SECONDS = 1.0
"""How long the store may take to answer while a call fails, or waits."""

MAX_SECONDS = 15.0
END_SECONDS = 1.0
SECOND_LOOK = 0.2

CONNECT_SECONDS = 10.0
"""How long a store may take to accept a connection."""
CONNECT_AGAIN = 0.1

T = TypeVar("T")


def clone_of(store: Store) -> Store:
    """Another connection to the same store."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # torch does not tell its types
    return clone


def poll_pauses() -> Iterable[float]:
    """Seconds between two looks at a store: short at first, then 20 ms.

    The store's own wait writes a warning for every timeout, so we poll instead.
    """
    pause = 0.0002
    while True:
        yield pause
        pause = min(pause * 1.5, 0.02)


def missing_keys(store: Store | StoreClient, keys: Mapping[int, str]) -> list[int]:
    """The ranks whose keys are not in the store."""
    if store.check(list(keys.values())):
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


class StoreClient:
    """One connection to a store, used by a thread of its own.

    A store whose host is cut off does not answer and does not fail: a plain request would wait for
    as long as TCP does. So a worker makes the requests, and callers wait only so long. Several
    calls share the client, so requests are short.
    """

    def __init__(self, store: Store, leader: int, seconds: float) -> None:
        self._store = store
        self._leader = leader
        self.seconds = seconds
        """How long the store may take to answer a call that has time; at most `MAX_SECONDS`."""
        self._stuck: Task[Any] | None = None
        """A request that has waited too long for its answer."""
        self._end: str | None = None
        """Why there are no answers any more."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the rank that serves the store is known to have ended."""
        self._worker = Worker()
        self._own: Store | None = store

    def request(self, action: Callable[[Store], T], seconds: float | None = None) -> T:
        """The store's answer; a `PeerLostError` that names the serving rank when none comes.

        With a limit in seconds it fails at once while another request is stuck.
        """
        return self.finish(self.begin(action, seconds), seconds)

    def begin(self, action: Callable[[Store], T], seconds: float | None = None) -> Task[T]:
        """Begin a request; `finish` gives its answer."""
        if self._end is None and self.has_ended():
            # A request would make torch write a warning, also where all is well: the rank may have
            # done its part and left.
            self._end = "has left (its process ended)"
        if self._end is not None:
            raise self._lost(self._end)
        if seconds is not None and self.is_stuck:
            raise self._lost("does not answer")
        return self._worker.submit(lambda: action(self._connected()))

    def finish(self, task: Task[T], seconds: float | None = None) -> T:
        """Wait for the answer to a request."""
        limit = min(self.seconds, MAX_SECONDS) if seconds is None else seconds
        # A process that was stopped itself finds its time over and the answer on its way.
        if not task.wait(limit) and not task.wait(SECOND_LOOK):
            if not self.is_stuck:
                self._stuck = task
            raise self._lost(f"has not answered for {limit:g} s")
        error = task.error
        if isinstance(error, RuntimeError):
            reason = f"is gone ({str(error).splitlines()[0]})"
            if isinstance(error, dist.DistNetworkError):
                self._end = reason
            raise self._lost(reason) from None
        return task.result()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.request(lambda store: store.check(keys)))

    def get(self, key: str) -> bytes | None:
        """The value of a key, None if there is none; for keys that are never deleted."""

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        return self.request(look, REQUEST_SECONDS)

    @property
    def is_stuck(self) -> bool:
        """Whether a request has waited too long for its answer, and still does."""
        return self._stuck is not None and not self._stuck.done

    def renew(self) -> None:
        """If the store does not answer, try another connection: the old one may notice late."""
        if self.is_stuck:
            self._worker.end()
            self._stuck, self._own, self._worker = None, None, Worker()

    def _connected(self) -> Store:
        if self._own is None:
            self._own = clone_of(self._store)
        return self._own

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"the store of this session, which rank {self._leader} serves, {reason}: without it no "
            "cause can be told; end the job or make a new process group without that rank"
        )

    def close(self) -> None:
        """Let the worker end, and wait: when a process ends it must not hold the store."""
        self._worker.end(END_SECONDS)


def serve_store() -> tuple[TCPStore, dict[str, Any]]:
    """Serve a session's store on its lowest rank; gives it and where others find it."""
    # torch looks up the name of every peer that connects, and serves nobody until it has it. To an
    # IPv4 socket the ranks of this host come as 127.0.0.1, which needs no name server.
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
    ranks: tuple[int, int],
    seconds: float,
    what: str,
    check: Callable[[], object],
) -> TCPStore:
    """Connect to a session's store; ``ranks`` are this one and the one that serves it."""
    rank, leader = ranks
    end = time.monotonic() + seconds
    hosts = ["127.0.0.1"] if host == host_identity() else list(place["addresses"])
    while True:
        store, errors = _try_addresses(hosts, int(place["port"]), max(end - time.monotonic(), 1.0))
        if store is not None:
            return store
        check()
        if time.monotonic() > end:
            raise PeerLostError(
                f"rank {rank} cannot reach the store that rank {leader} serves for {what} "
                f"({'; '.join(errors)}): if rank {leader} lives, name the network interface that "
                f"the hosts share in GLOO_SOCKET_IFNAME (on rank {rank}: no round begun)"
            )
        time.sleep(CONNECT_AGAIN)


def _try_addresses(
    hosts: Sequence[str], port: int, seconds: float
) -> tuple[TCPStore | None, list[str]]:
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
