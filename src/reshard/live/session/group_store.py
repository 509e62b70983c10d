"""The store of the caller's process group, in which the ranks of a session find each other.

Torch serves it in one process of the job, or in the launcher. A request to a process that is
stopped (SIGSTOP) is neither answered nor refused, so all requests have a time limit. What becomes
of a request that was not answered is open: the process may go on later. That is an
`UndecidedError`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from reshard.errors import MoveTimeoutError, PeerLostError
from reshard.live.session.store import Store, StoreClient, clone_of

__all__ = ["GroupStore", "StoreGoneError", "UndecidedError", "own_connection", "undecided"]

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The environment variable by which torchrun says that it serves the store itself."""


class UndecidedError(Exception):
    """The store does not answer, so it is open whether the session is connected."""

    def __init__(self, error: MoveTimeoutError) -> None:
        super().__init__(str(error))
        self.error = error
        """What the user's call raises."""


class StoreGoneError(Exception):
    """The process that serves the store has ended."""


def undecided(rank: int, seconds: float, what: str) -> UndecidedError:
    """The error of a call that has waited this long for the store."""
    by = "the launcher" if os.environ.get(AGENT_STORE) == "True" else "usually rank 0 of the job"
    return UndecidedError(MoveTimeoutError(
        f"the process that serves the store of the process group, {by}, has not answered for "
        f"{seconds:g} s: ranks find each other there before {what}; if stopped, let it go on; "
        f"if it is only slow, give a longer timeout= (on rank {rank}: no round begun)"
    ))  # fmt: skip


def own_connection(store: Store) -> Store:
    """A connection of our own: a thread of the user that waits for a key blocks the group's."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return clone_of(store)
    return store  # a kind of store that cannot be cloned


class GroupStore(StoreClient):
    """Makes requests to the store for a rank that waits up to ``seconds`` for the others."""

    max_seconds = float("inf")

    def __init__(self, store: Store, rank: int, seconds: float, what: str) -> None:
        super().__init__(store, rank, seconds)
        self._own, self._rank, self._what = None, rank, what

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.request(lambda store: store.set(key, value))

    def values(self, keys: Mapping[int, str]) -> dict[int, bytes]:
        """The values of those keys that are in the store."""
        names = list(keys.values())

        def read(store: Store) -> dict[int, bytes]:
            whole = store.check(names)
            return {at: store.get(key) for at, key in keys.items() if whole or store.check([key])}

        return self.request(read)

    def close(self) -> None:
        """End the worker; a thread that still waits in this rendezvous fails at once."""
        self._end = self._end or "this rank has given up"
        super().close()

    def _connected(self) -> Store:
        if self._own is None:
            self._own = own_connection(self._store)
        return self._own

    def _silent(self, seconds: float) -> Exception:
        if seconds < self.seconds:
            return PeerLostError("the store of the process group is slow")  # the caller goes on
        return undecided(self._rank, seconds, self._what)

    def _lost(self, reason: str) -> Exception:
        return StoreGoneError(reason)
