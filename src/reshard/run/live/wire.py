"""A team's own gloo group, and the thread that waits for what comes over it.

gloo can only be waited for, not asked; so a thread waits, and calls back.
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

__all__ = ["Wire"]


class Wire:
    """A gloo group of one team, and the thread that waits for what comes over it."""

    def __init__(self, store: Store, index: int, size: int, timeout: float) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout))
        self._works: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, index: int, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to send bytes."""
        work: Work = self.group.send([tensor], index, tag)
        return work

    def receive(self, index: int, tensor: torch.Tensor, tag: int) -> Work:
        """Begin to receive bytes."""
        work: Work = self.group.recv([tensor], index, tag)
        return work

    def when_done(self, works: list[Work], then: Callable[[str | None], None]) -> None:
        """Call back, from the waiting thread, when all are done; with an error if there was one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="reshard-wire")
            self._thread.start()
        self._works.put(_Awaited(works, then))

    def _serve(self) -> None:
        while (awaited := self._works.get()) is not None:
            error = None
            try:
                for work in awaited.works:
                    work.wait()
            except RuntimeError as failure:
                error = str(failure).splitlines()[0]
            awaited.then(error)

    def close(self) -> None:
        """Let the thread end, and the group with it."""
        self._works.put(None)


@dataclass(frozen=True, eq=False, slots=True)
class _Awaited:
    works: list[Work]
    then: Callable[[str | None], None]
