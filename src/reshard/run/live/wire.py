"""A team's own gloo group, and the threads that wait for what comes over it.

gloo can only be waited for, not asked; so a thread waits, and calls back. Nor can it be told to
give up one message: where something may still come into tensors of a call that has failed, all
connections are cut. Every call in flight has
a thread of its own: one that waited for several calls in turn would keep the news of one from it
for as long as another gets nothing, and two ranks that do so in different orders wait for ever.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from reshard.run.live.c10d import Store, Work
from reshard.run.live.cause import Cause
from reshard.run.live.gate import Gate

__all__ = ["Awaitable", "Waiter", "Wire", "in_short"]

END_SECONDS = 1.0
"""How long an idle thread may take to end: none should be about when the process ends."""

NO_TAG = 1 << 24
"""A tag that no call has."""


class Wire:
    """A gloo group of one team, and the threads that wait for what comes over it."""

    def __init__(self, store: Store, index: int, size: int, timeout: float) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout))
        self._index, self._size = index, size
        self._idle: list[Waiter] = []
        self._waiters: set[Waiter] = set()
        """All threads that have not ended, idle or not."""
        self._closed = False
        self.num_calls = 0
        """Calls that use it."""
        self.cut_because: Cause | None = None
        """Why all connections were cut, if they were."""
        self.lock = Gate()

    def send(self, index: int, tensor: torch.Tensor, tag: int) -> Awaitable:
        """Begin to send bytes."""
        return _begun(lambda: self.group.send([tensor], index, tag))

    def receive(self, index: int, tensor: torch.Tensor, tag: int) -> Awaitable:
        """Begin to receive bytes."""
        return _begun(lambda: self.group.recv([tensor], index, tag))

    def cut(self, cause: Cause) -> None:
        """Close all connections: what waits fails, and nothing is written into any tensor."""
        with self.lock:
            if self.cut_because is not None:
                return
            self.cut_because = cause
        # What gloo does when a wait takes too long. Nobody sends with this tag.
        nothing = torch.empty(1, dtype=torch.uint8)
        work = self.receive((self._index + 1) % self._size, nothing, NO_TAG)
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))

    def waiter(self) -> Waiter:
        """A thread for one call."""
        with self.lock:
            self.num_calls += 1
            found = self._idle.pop() if self._idle else Waiter()
            self._waiters.add(found)
            return found

    def give_back(self, waiter: Waiter) -> None:
        """The call is over, and nothing is waited for."""
        with self.lock:
            self.num_calls -= 1
            if not self._closed:
                self._idle.append(waiter)
                return
            self._waiters.discard(waiter)
        waiter.end()

    def let_go(self, waiter: Waiter, seconds: float) -> None:
        """The call has failed; wait at most so long until it has come to nothing."""
        waiter.end(seconds)
        with self.lock:
            self.num_calls -= 1
            self._waiters = {one for one in self._waiters if one.is_alive}

    def close(self) -> None:
        """End all threads; connections that a thread still waits on are cut.

        A thread that waits in gloo while the interpreter shuts down would abort the process.
        """
        with self.lock:
            self._closed = True
            idle, self._idle = set(self._idle), []
            waiters, self._waiters = self._waiters, set()
        if any(waiter.is_alive for waiter in waiters - idle):
            self.cut(Cause("error", "the connections of this process group were closed"))
        for waiter in waiters:
            waiter.end(END_SECONDS)


class Waiter:
    """A thread that waits for the works of one call, one after the other, and calls back."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reshard-wire")
        self._thread.start()

    def when_done(
        self,
        works: Sequence[Awaitable],
        seconds: float,
        then: Callable[[str | None], None],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Call back when all are done, with an error if there was one or it took too long."""
        self._works.put(_Awaited(works, timedelta(seconds=seconds), then, progress))

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def end(self, seconds: float = 0.0) -> None:
        """Let the thread end, after what it waits for; wait at most so long for that."""
        self._works.put(None)
        if self._thread is not threading.current_thread():  # which may free the group
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (awaited := self._works.get()) is not None:
            error = None
            try:
                for work in awaited.works:
                    work.wait(awaited.limit)
                    awaited.progress()
            except RuntimeError as failure:
                error = in_short(failure)
            awaited.then(error)
            # An idle thread must not keep a call's tensors alive.
            awaited = work = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False, slots=True)
class _Awaited:
    works: Sequence[Awaitable]
    limit: timedelta
    then: Callable[[str | None], None]
    progress: Callable[[], None]


class Awaitable(Protocol):
    """A message under way."""

    def wait(self, limit: timedelta, /) -> object:
        """Wait for its end."""


@dataclass(frozen=True, eq=False, slots=True)
class _Refused:
    """A message that could not even begin."""

    error: RuntimeError

    def wait(self, limit: timedelta, /) -> object:
        raise self.error


def _begun(begin: Callable[[], Work]) -> Awaitable:
    try:
        work: Any = begin()
        return cast(Awaitable, work)
    except RuntimeError as error:
        return _Refused(error)


def in_short(error: RuntimeError) -> str:
    """What gloo says, without its file names and guesses."""
    text = str(error).splitlines()[0]
    return re.sub(r"^\[[^]]*\] *", "", text).partition(". ")[0]
