"""Worker threads under a cap of memory, progress, and the garbage collector."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from reshard.checkpoint.storage.base import Storage
from reshard.errors import MemoryCapError
from reshard.text import format_bytes, parse_bytes

__all__ = ["Budget", "Meter", "collector_paused", "in_order"]

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_WORKERS = 4
REMOTE_WORKERS = 16
LARGEST_WINDOW = 8 << 20
SMALLEST_MEMORY = 1 << 20
SHARES = 8
"""A worker's share of the memory, in windows: two sides with a scratch buffer each, and what numpy
allocates for temporary results."""

_lock = threading.Lock()
_paused: list[bool] = []
"""One entry per thread inside `collector_paused`; the first says whether the collector was on."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of workers and the size of their windows that fit into a given memory.

    >>> Budget.of("256MiB", workers=4).window, Budget.of("4MiB", workers=4)
    (8388608, Budget(workers=1, window=524288))
    """

    workers: int
    window: int
    """Bytes of one window."""

    @classmethod
    def of(cls, memory: int | str, workers: int | None = None) -> Budget:
        """Divide the memory between this many workers, by default one for each core."""
        total = parse_bytes(memory)
        if total < SMALLEST_MEMORY:
            raise MemoryCapError(
                f"{format_bytes(total)} of memory is too little to read a checkpoint: "
                f"give at least {format_bytes(SMALLEST_MEMORY)}"
            )
        wanted = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        workers = max(min(wanted, total // (4 * SMALLEST_MEMORY)), 1)
        return cls(workers, min(total // workers // SHARES, LARGEST_WINDOW))

    @classmethod
    def for_reading(cls, memory: int | str, *storages: Storage) -> Budget:
        """The budget for reading these; remote storage gets more workers, which mostly wait."""
        is_local = all(storage.is_local for storage in storages)
        return cls.of(memory, None if is_local else REMOTE_WORKERS)


class Meter:
    """Counts bytes and reports how many are done, of how many."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def in_order(
    work: Callable[[Task, Any], Result],
    tasks: Iterable[Task],
    workers: int,
    make: Callable[[], Any],
) -> Iterator[tuple[Task, Result]]:
    """Run tasks in worker threads and yield the results in the order of the tasks.

    Every worker has its own object from ``make``, such as its buffers. Tasks are taken from the
    iterable as they are needed, so there may be more of them than fit in memory. An error is raised
    in its turn; tasks that have not started by then are cancelled.
    """
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(workers):
        idle.put(make())

    def run(task: Task) -> Result:
        mine = idle.get()
        try:
            return work(task, mine)
        finally:
            idle.put(mine)

    pool = ThreadPoolExecutor(workers, "reshard-checkpoint")
    pending: deque[tuple[Task, Future[Result]]] = deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(run, task)))
            if len(pending) >= 4 * workers:
                first, result = pending.popleft()
                yield first, result.result()
        while pending:
            first, result = pending.popleft()
            yield first, result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the block, in all threads.

    A checkpoint of 100,000 tensors is a million small objects, none of them garbage. The collector
    would scan them again and again as their number grows: 40 % of a conversion's time.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    with _lock:
        _paused.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_enabled = _paused[0]
            _paused.pop()
            if not _paused and was_enabled:
                gc.enable()
