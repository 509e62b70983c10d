"""Talk to the store without ever hanging on it.

A store whose host is cut off does not answer and does not fail: a plain call would wait for as long
as TCP does. So a thread of its own does the talking, and whoever asks waits only so long. Several
calls may share the line, so a question is short: to wait for something, ask again and again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.errors import PeerLostError
from reshard.run.live.c10d import Store, clone_of

__all__ = ["Line"]

MOST_SECONDS = 15.0
END_SECONDS = 1.0

T = TypeVar("T")


class Line:
    """One connection to the store, used by one thread."""

    def __init__(self, store: Store, leader: int, seconds: float) -> None:
        self._store = store
        self._leader = leader
        self.be_patient(seconds)
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None]
        self._asked = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: Future[Any] | None = None
        """A question that has waited too long for its answer."""
        self._end: str | None = None
        """Why nobody answers any more."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the rank that serves the store is known to have ended."""

    def be_patient(self, seconds: float) -> None:
        """How long the store may take to answer whoever has time."""
        self._seconds = min(seconds, MOST_SECONDS)

    def ask(self, question: Callable[[Store], T], seconds: float | None = None) -> T:
        """The store's answer; an error that names who serves it when none comes.

        Who gives only so many seconds gets no answer at all while another question is stuck.
        """
        if self._end is None and self.has_ended():
            # Asking it would make torch write a warning, also where all is well: the rank may have
            # done its part and left.
            self._end = "has left (its process ended)"
        if self._end is not None:
            raise self._lost(self._end)
        if seconds is not None and self.is_stuck:
            raise self._lost("does not answer")
        if self._thread is None:
            self._begin()
        answer: Future[T] = Future()
        self._asked.put((answer, question))
        return self._answer(answer, self._seconds if seconds is None else seconds)

    def _answer(self, answer: Future[T], seconds: float) -> T:
        try:
            return answer.result(seconds)
        except NoAnswer:
            if not self.is_stuck:
                self._stuck = answer
            raise self._lost(f"has not answered for {seconds:g} s") from None
        except RuntimeError as error:
            reason = f"is gone ({str(error).splitlines()[0]})"
            if isinstance(error, dist.DistNetworkError):
                self._end = reason
            raise self._lost(reason) from None

    @property
    def is_stuck(self) -> bool:
        """Whether a question has waited too long for its answer, and still does."""
        return self._stuck is not None and not self._stuck.done()

    def renew(self) -> None:
        """If nobody answers, try another connection: the old one may be slow to notice."""
        if self.is_stuck:
            self._asked.put(None)
            self._asked, self._stuck = queue.SimpleQueue(), None
            self._begin(anew=True)

    def _begin(self, anew: bool = False) -> None:
        args = (self._asked, anew)
        self._thread = threading.Thread(
            target=self._serve, args=args, daemon=True, name="reshard-store"
        )
        self._thread.start()

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"the store of this team, which rank {self._leader} serves, {reason}: without it no "
            "cause can be told; end the job or make a new process group without that rank"
        )

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.ask(lambda store: store.check(keys)))

    def _serve(
        self,
        asked: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None],
        anew: bool,
    ) -> None:
        store = self._store
        while (one := asked.get()) is not None:
            answer, question = one
            try:
                if anew:
                    store, anew = clone_of(store), False
                answer.set_result(question(store))
            except BaseException as error:
                answer.set_exception(error)
            del one, answer, question  # An idle thread must keep nothing alive.

    def close(self) -> None:
        """Let the thread end, and wait: when a process ends it must not hold the store."""
        self._asked.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
