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
from reshard.run.live.c10d import Store

__all__ = ["Line"]

T = TypeVar("T")


class Line:
    """One connection to the store, used by one thread."""

    def __init__(self, store: Store, leader: int, seconds: float = 5.0) -> None:
        self._store = store
        self._leader = leader
        self._seconds = seconds
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None]
        self._asked = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: str | None = None
        """Why nobody answers any more."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether the rank that serves the store is known to have ended."""

    def ask(self, question: Callable[[Store], T]) -> T:
        """The store's answer; an error that names who serves it when none comes."""
        if self._end is None and self.has_ended():
            # Asking it would make torch write a warning, also where all is well: the rank may have
            # done its part and left.
            self._end = "has left (its process ended)"
        if self._end is not None:
            raise self._lost(self._end)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="reshard-store")
            self._thread.start()
        answer: Future[T] = Future()
        self._asked.put((answer, question))
        try:
            return answer.result(self._seconds)
        except NoAnswer:
            raise self._lost(f"has not answered for {self._seconds:g} s") from None
        except RuntimeError as error:
            reason = f"is gone ({str(error).splitlines()[0]})"
            if isinstance(error, dist.DistNetworkError):
                self._end = reason
            raise self._lost(reason) from None

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"the store of this team, which rank {self._leader} serves, {reason}: without it no "
            "cause can be told; end the job or make a new process group without that rank"
        )

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.ask(lambda store: store.check(keys)))

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            answer, question = asked
            try:
                answer.set_result(question(self._store))
            except BaseException as error:
                answer.set_exception(error)
            del asked, answer, question  # An idle thread must keep nothing alive.

    def close(self) -> None:
        """Let the thread end."""
        self._asked.put(None)
