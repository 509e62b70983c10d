"""Requests to the stores of a session, the worker threads that make them, and locks.

A signal handler may raise between any two bytecodes of the main thread, error handling included.
So everything that threads share changes in single calls of C: a dict entry, a queue item.
`threading.Lock` in a `with` statement, `Future` and `Event` are not safe in this sense.

In the store of the caller's group, which torch serves in one process of the job or in the launcher,
the ranks of a session find each other. In the session's own store, which the lowest rank serves,
they compare plans and post why a call failed, so its failure cannot break that group.

A store whose host is unreachable, or whose process is stopped (SIGSTOP), neither answers nor fails,
so worker threads make all requests, and callers wait for them with a time limit. What becomes of a
request that was not answered is open, because the process may go on later: an `UndecidedError`.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import Work as Work

from reshard.errors import MoveTimeoutError, PeerLostError
from reshard.text import first_line

REQUEST_SECONDS = 1.0
"""How long the store may take to answer while a call fails, or waits."""

END_SECONDS = 1.0
SECOND_LOOK = 0.2
LOOK_AFTER = 0.5
"""Seconds after which a rank that cannot connect looks whether the store is still served."""

MAX_LEFT = 4
"""Connections that a client replaces while none of them answers."""

FIRST_PAUSE, LAST_PAUSE = 0.00005, 0.005
"""Seconds between two attempts to take a lock that another thread holds."""

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]

holders: dict[OwnedLock, int] = {}
"""The thread that holds each lock; a lock that is free has no entry."""


class OwnedLock:
    """A lock that knows which thread holds it; the holder may enter again.

    When an exception has taken a thread out of its call, the cleanup thread releases the locks that
    it still holds. Blocks are short, and those of one lock are not nested.
    """

    def __enter__(self) -> None:
        me, pause = _thread.get_ident(), FIRST_PAUSE
        # One call of C: there is no moment at which the lock is taken and its holder unknown.
        while holders.setdefault(self, me) != me:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def __exit__(self, *_: object) -> None:
        holders.pop(self, None)

    def try_acquire(self) -> bool:
        """Acquire the lock unless another thread holds it; whether this thread holds it."""
        me = _thread.get_ident()
        return holders.setdefault(self, me) == me

    release = __exit__


def release_locks_of(thread: int | None) -> None:
    """Release all locks of a thread that an exception has taken out of its call."""
    for lock, holder in list(holders.items()):
        if holder == thread:
            holders.pop(lock, None)


class Task(Generic[T]):
    """Work for a `Worker`, and its outcome."""

    __slots__ = ("_action", "_outcome", "_running")

    def __init__(self, action: Callable[[], T]) -> None:
        self._action: Callable[[], T] | None = action
        self._outcome: Outcome | None = None
        self._running = _thread.allocate_lock()
        self._running.acquire()

    def run(self) -> None:
        """Do the work; `result` raises what it raises."""
        assert self._action is not None
        try:
            outcome: Outcome = self._action(), None
        except BaseException as error:
            outcome = None, error
        self._action = None  # it may refer to tensors
        self._outcome = outcome
        self._running.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the work is done, up to a limit; whether it is done."""
        # An exception in between leaves it locked; `done` is true by then, so no thread waits.
        if not self.done and self._running.acquire(timeout=seconds):
            self._running.release()
        return self.done

    @property
    def done(self) -> bool:
        return self._outcome is not None

    @property
    def error(self) -> BaseException | None:
        assert self._outcome is not None
        return self._outcome[1]

    def result(self) -> T:
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return cast(T, result)


class Worker:
    """A daemon thread that runs tasks in the order in which they were submitted."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._ident = _thread.start_new_thread(self._serve, (self._tasks, self._ended))

    @staticmethod
    def _serve(tasks: queue.SimpleQueue[Task[Any] | None], ended: _thread.LockType) -> None:
        try:
            while (task := tasks.get()) is not None:
                task.run()
                del task  # an idle thread must keep nothing alive
        finally:
            ended.release()

    def submit(self, action: Callable[[], T]) -> Task[T]:
        """Run an action after everything that was submitted before."""
        task = Task(action)
        self._tasks.put(task)
        return task

    @property
    def is_alive(self) -> bool:
        return self._ended.locked()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread itself: garbage collection may run there."""
        return self._ident == _thread.get_ident()

    def end(self, seconds: float = 0.0) -> None:
        """End the thread after its tasks, and wait for that, up to a limit."""
        self._tasks.put(None)
        if seconds and not self.is_current and self._ended.acquire(timeout=seconds):
            self._ended.release()


def clone_of(store: Store) -> Store:
    """Another connection to the same store."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


def poll_until(seconds: float) -> Iterator[bool]:
    """Pause between polls of a store, shortly at first, then 20 ms; yields whether time is left.

    The store's own wait writes a warning for every timeout, so reshard polls instead.
    """
    pause, end = 0.0002, time.monotonic() + seconds
    while True:
        yield time.monotonic() <= end
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


class StoreClient:
    """One connection to a store, used by a worker; several calls share it: requests are short."""

    max_seconds = 15.0
    was_stuck = False
    """Whether a request has timed out since `renew` found everything in order."""
    _clone = staticmethod(clone_of)

    def __init__(self, store: Store, leader: int, seconds: float) -> None:
        """``seconds`` is how long the store may take to answer; at most `max_seconds`."""
        self._store, self._leader, self.seconds = store, leader, seconds
        self._stuck: Task[Any] | None = None
        """A request that has timed out."""
        self._end: str | None = None
        """Why the store will answer no more requests."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the process of the rank that serves the store is known to have ended."""
        self._worker = Worker()
        self._left: list[Worker] = []
        """Workers that wait for ever, perhaps, in a connection that was replaced."""
        self._own: Store | None = store

    def request(self, action: Callable[[Store], T], seconds: float | None = None) -> T:
        """The store's answer; a `PeerLostError` that names the serving rank when none comes.

        With a limit in seconds it fails at once while another request is stuck.
        """
        return self.finish(self.begin(action, seconds), seconds)

    def begin(self, action: Callable[[Store], T], seconds: float | None = None) -> Task[T]:
        """Begin a request; `finish` returns its answer."""
        if self._end is None and self.has_ended():
            # A request would make torch write a warning, although nothing may be wrong: the rank
            # may have finished its part and exited.
            self._end = "has left (its process ended)"
        if self._end is not None:
            raise self._lost(self._end)
        if seconds is not None and self.is_stuck:
            raise self._silent(seconds)
        return self._worker.submit(lambda: action(self._connected()))

    def finish(self, task: Task[T], seconds: float | None = None) -> T:
        """Wait for the answer to a request."""
        limit = min(self.seconds, self.max_seconds) if seconds is None else seconds
        # If this process was stopped (SIGSTOP), its time is over although the answer is on its way.
        if not task.wait(limit) and not task.wait(SECOND_LOOK):
            if not self.is_stuck:
                self._stuck, self.was_stuck = task, True
            raise self._silent(limit)
        error = task.error  # not raised here: its traceback would keep this frame alive
        if isinstance(error, RuntimeError):
            reason = f"is gone ({first_line(error)})"
            if isinstance(error, dist.DistNetworkError):
                self._end = reason
            raise self._lost(reason) from None
        return task.result()

    def check(self, keys: list[str]) -> bool:
        return self.request(lambda store: store.check(keys))

    def set(self, key: str, value: str) -> None:
        self.request(lambda store: store.set(key, value))

    def post(self, key: str, value: str) -> None:
        """Write a value that other ranks can do without: does not wait for the answer."""
        self.begin(lambda store: store.set(key, value), REQUEST_SECONDS)

    def values(self, keys: Mapping[int, str], seconds: float | None = None) -> dict[int, bytes]:
        """The values of those keys that are in the store."""

        def read(store: Store) -> dict[int, bytes]:
            all_there = store.check(list(keys.values()))
            some = keys.items() if all_there or len(keys) > 1 else ()
            return {at: store.get(key) for at, key in some if all_there or store.check([key])}

        return self.request(read, seconds)

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None; only for keys that no rank deletes."""
        return self.values({0: key}, REQUEST_SECONDS).get(0)

    @property
    def is_stuck(self) -> bool:
        """Whether a request has timed out and is still unanswered."""
        stuck = self._stuck
        return stuck is not None and not stuck.done and self._worker.is_alive

    def renew(self) -> None:
        """Replace a connection whose store does not answer: TCP may notice the loss much later."""
        if self._left:
            self._left = [worker for worker in self._left if worker.is_alive]
        if self.is_stuck and len(self._left) < MAX_LEFT:
            self._worker.end()
            self._left.append(self._worker)
            self._stuck, self._own, self._worker = None, None, Worker()
        self.was_stuck = self.is_stuck or bool(self._left)

    def _connected(self) -> Store:
        if self._own is None:
            self._own = self._clone(self._store)
        return self._own

    def _silent(self, seconds: float) -> Exception:
        return self._lost(f"has not answered for {seconds:g} s")

    def _lost(self, reason: str) -> Exception:
        return PeerLostError(
            f"the store of this session, which rank {self._leader} serves, {reason}: without it no "
            "cause can be told; end the job or make a new process group without that rank"
        )

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the worker, and wait for it: it must not use the store when the process ends."""
        self._worker.end(seconds)


class UndecidedError(Exception):
    """The store does not answer, so it is open whether the session is connected.

    The user's call raises ``error``: it has waited so long for the store, before ``what``.
    """

    def __init__(self, rank: int, seconds: float, what: str) -> None:
        # So torchrun says that it serves the store itself.
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        by = "the launcher" if launched else "usually rank 0 of the job"
        self.error = MoveTimeoutError(
            f"the process that serves the store of the process group, {by}, has not answered for "
            f"{seconds:g} s: ranks find each other there before {what}; if stopped, let it go on; "
            f"if it is only slow, give a longer timeout= (on rank {rank}: no round begun)"
        )
        super().__init__(str(self.error))


class StoreGoneError(Exception):
    """The process that serves the store has ended."""


def own_connection(store: Store) -> Store:
    """A connection of our own: a thread of the user that waits for a key blocks the group's."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return clone_of(store)
    return store  # a kind of store that cannot be cloned


def is_refused(store: Store) -> bool:
    """Whether connections to the process that served a store are refused."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    try:
        if isinstance(store, TCPStore):
            socket.create_connection((store.host, store.port), REQUEST_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class GroupStore(StoreClient):
    """Makes requests to the store for a rank that waits up to ``seconds`` for the others."""

    max_seconds = float("inf")
    _clone = staticmethod(own_connection)

    def __init__(self, store: Store, rank: int, seconds: float, what: str) -> None:
        super().__init__(store, rank, seconds)
        self._own, self._rank, self._what = None, rank, what

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the worker; a thread that still waits in this rendezvous fails at once."""
        self._end = self._end or "this rank has given up"
        super().close(seconds)

    def finish(self, task: Task[T], seconds: float | None = None) -> T:
        # torch tries to connect for as long as it may, also to a process that has ended.
        if self._own is None and not task.wait(LOOK_AFTER) and is_refused(self._store):
            self._end = "is gone (it refuses connections)"
            raise self._lost(self._end)
        return super().finish(task, seconds)

    def _silent(self, seconds: float) -> Exception:
        if seconds < self.seconds:
            return PeerLostError("the store of the process group is slow")  # the caller goes on
        return UndecidedError(self._rank, seconds, self._what)

    def _lost(self, reason: str) -> Exception:
        return StoreGoneError(reason)


class Member:
    """A rank of a session, as it is known before the ranks are connected."""

    def __init__(self, group_store: Store, rank: int, ranks: tuple[int, ...]) -> None:
        self.group_store, self.rank, self.ranks = group_store, rank, ranks
        """The store of the caller's group, and the ranks of the session."""
        self._prefix = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()

    def key(self, call: int, what: str) -> str:
        """A key of this session in the store of the caller's group."""
        return f"reshard/{self._prefix}/{call}/{what}"
