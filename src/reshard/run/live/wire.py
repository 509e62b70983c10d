"""A team's own gloo group, and the threads that wait for what comes over it.

gloo can only be waited for, not asked; so a thread waits, and calls back. Every call in flight has
a thread of its own: one that waited for several calls in turn would keep the news of one from it
for as long as another gets nothing, and two ranks that do so in different orders wait for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.run.live.c10d import Store, Work

__all__ = ["Waiter", "Wire"]


class Wire:
    """A gloo group of one team, and the threads that wait for what comes over it."""

    def __init__(self, store: Store, index: int, size: int, timeout: float) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout))
        self._idle: list[Waiter] = []
        self._closed = False
        self._lock = threading.Lock()

    def send(self, index: int, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to send bytes."""
        work: Work = self.group.send([tensor], index, tag)
        return work

    def receive(self, index: int, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to receive bytes."""
        work: Work = self.group.recv([tensor], index, tag)
        return work

    def waiter(self) -> Waiter:
        """A thread for one call."""
        with self._lock:
            return self._idle.pop() if self._idle else Waiter()

    def give_back(self, waiter: Waiter) -> None:
        """The call is over, and nothing is waited for."""
        with self._lock:
            if self._closed:
                waiter.end()
            else:
                self._idle.append(waiter)

    def close(self) -> None:
        """Let the idle threads end, and the group with the last call that uses it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for waiter in idle:
            waiter.end()


class Waiter:
    """A thread that waits for the works of one call, one after the other, and calls back."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="reshard-wire").start()

    def when_done(
        self, works: list[Work], seconds: float, then: Callable[[str | None], None]
    ) -> None:
        """Call back when all are done, with an error if there was one or it took too long."""
        self._works.put(_Awaited(works, timedelta(seconds=seconds), then))

    def end(self) -> None:
        """Let the thread end, after what it waits for."""
        self._works.put(None)

    def _serve(self) -> None:
        while (awaited := self._works.get()) is not None:
            error = None
            try:
                for work in awaited.works:
                    work.wait(awaited.limit)
            except RuntimeError as failure:
                error = str(failure).splitlines()[0]
            awaited.then(error)
            del awaited  # An idle thread must not keep a call's tensors alive.


@dataclass(frozen=True, eq=False, slots=True)
class _Awaited:
    works: list[Work]
    limit: timedelta
    then: Callable[[str | None], None]
