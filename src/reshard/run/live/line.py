"""Talk to the store without ever hanging on it.

A store whose host is cut off does not answer and does not fail: a plain call would wait for as long
as TCP does. So a thread of its own does the talking, and whoever asks waits only so long. Several
calls may share the line, so a question is short: to wait for something, ask again and again.
"""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.errors import PeerLostError
from reshard.run.live.c10d import Store, clone_of

__all__ = ["Line"]

MOST_SECONDS = 15.0
END_SECONDS = 1.0
SECOND_LOOK = 0.2

T = TypeVar("T")


Reply = queue.SimpleQueue[tuple[Any, BaseException | None]]
Asked = queue.SimpleQueue[tuple[Reply, Callable[[Store], Any]] | None]


class Line:
    """One connection to the store, used by one thread.

    Questions and replies go through queues written in C: an exception out of a signal handler
    leaves them as they were, which it does not do with a `Future`.
    """

    def __init__(self, store: Store, leader: int, seconds: float) -> None:
        self._store = store
        self._leader = leader
        self.be_patient(seconds)
        self._stuck: Reply | None = None
        """Where the reply to a question should have come that has waited too long for it."""
        self._end: str | None = None
        """Why there are no answers any more."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the rank that serves the store is known to have ended."""
        self._begin(store)

    def be_patient(self, seconds: float) -> None:
        """How long the store may take to answer a call that has time."""
        self._seconds = min(seconds, MOST_SECONDS)

    def ask(self, question: Callable[[Store], T], seconds: float | None = None) -> T:
        """The store's answer; an error that names the rank that serves it when none comes.

        With a limit in seconds there is no answer at all while another question is stuck.
        """
        if self._end is None and self.has_ended():
            # Asking it would make torch write a warning, also where all is well: the rank may have
            # done its part and left.
            self._end = "has left (its process ended)"
        if self._end is not None:
            raise self._lost(self._end)
        if seconds is not None and self.is_stuck:
            raise self._lost("does not answer")
        reply: Reply = queue.SimpleQueue()
        self._asked.put((reply, question))
        answer: T = self._answer(reply, self._seconds if seconds is None else seconds)
        return answer

    def _answer(self, reply: Reply, seconds: float) -> Any:
        try:
            try:
                value, error = reply.get(timeout=seconds)
            except queue.Empty:
                # A process that was stopped itself finds its time over and the answer on its way.
                value, error = reply.get(timeout=SECOND_LOOK)
        except queue.Empty:
            if not self.is_stuck:
                self._stuck = reply
            raise self._lost(f"has not answered for {seconds:g} s") from None
        if isinstance(error, RuntimeError):
            reason = f"is gone ({str(error).splitlines()[0]})"
            if isinstance(error, dist.DistNetworkError):
                self._end = reason
            raise self._lost(reason) from None
        if error is not None:
            raise error
        return value

    @property
    def is_stuck(self) -> bool:
        """Whether a question has waited too long for its answer, and still does."""
        return self._stuck is not None and self._stuck.empty()

    def renew(self) -> None:
        """If the store does not answer, try another connection: the old one may notice late."""
        if self.is_stuck:
            self._asked.put(None)
            self._stuck = None
            self._begin(None)

    def _begin(self, store: Store | None) -> None:
        asked: Asked = queue.SimpleQueue()
        ended = _thread.allocate_lock()
        ended.acquire()
        _thread.start_new_thread(self._serve, (asked, ended, store))
        self._asked, self._ended = asked, ended

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"the store of this team, which rank {self._leader} serves, {reason}: without it no "
            "cause can be told; end the job or make a new process group without that rank"
        )

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.ask(lambda store: store.check(keys)))

    def _serve(self, asked: Asked, ended: _thread.LockType, store: Store | None) -> None:
        try:
            while (one := asked.get()) is not None:
                reply, question = one
                try:
                    if store is None:
                        store = clone_of(self._store)
                    reply.put((question(store), None))
                except BaseException as error:
                    reply.put((None, error))
                del one, reply, question  # An idle thread must keep nothing alive.
        finally:
            ended.release()

    def close(self) -> None:
        """Let the thread end, and wait: when a process ends it must not hold the store."""
        self._asked.put(None)
        if self._ended.acquire(timeout=END_SECONDS):
            self._ended.release()
