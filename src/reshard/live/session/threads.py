"""Worker threads and locks that survive exceptions.

A signal handler may raise between any two bytecodes of the main thread, error handling included.
So everything that threads share changes in single calls of C: a dict entry, a queue item.
`threading.Lock` in a `with` statement, `Future` and `Event` are not safe in this sense.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["OwnedLock", "Task", "Worker", "release_locks_of"]

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]

FIRST_PAUSE, LAST_PAUSE = 0.00005, 0.005

_holders: dict[OwnedLock, int] = {}
"""The thread that holds each lock; a lock that is free has no entry."""


class OwnedLock:
    """A lock that knows which thread holds it; the holder may enter again.

    When an exception has taken a thread out of its call, the cleanup thread releases the locks that
    it still holds. Blocks are short, and those of one lock are not nested.
    """

    def __enter__(self) -> None:
        me, pause = _thread.get_ident(), FIRST_PAUSE
        # One call of C: there is no moment at which the lock is taken and its holder unknown.
        while _holders.setdefault(self, me) != me:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def __exit__(self, *_: object) -> None:
        _holders.pop(self, None)

    def try_acquire(self) -> bool:
        """Acquire the lock unless another thread holds it; whether this thread holds it."""
        me = _thread.get_ident()
        return _holders.setdefault(self, me) == me

    release = __exit__


def release_locks_of(thread: int | None) -> None:
    """Release all locks of a thread that an exception has taken out of its call."""
    for lock, holder in list(_holders.items()):
        if holder == thread:
            _holders.pop(lock, None)


class Task(Generic[T]):
    """Work for a `Worker`, and its outcome."""

    __slots__ = ("_action", "_outcome", "_reply")

    def __init__(self, action: Callable[[], T]) -> None:
        self._action: Callable[[], T] | None = action
        self._reply: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._outcome: Outcome | None = None

    def run(self) -> None:
        """Do the work; `result` raises what it raises."""
        assert self._action is not None
        try:
            outcome: Outcome = (self._action(), None)
        except BaseException as error:
            outcome = (None, error)
        self._action = None  # it may refer to tensors
        self._reply.put(outcome)

    def wait(self, seconds: float) -> bool:
        """Wait until the work is done, up to a limit; whether it is done."""
        if self._outcome is None:
            try:
                self._outcome = self._reply.get(timeout=seconds)
            except queue.Empty:
                return False
        return True

    @property
    def done(self) -> bool:
        """Whether the work is done."""
        return self._outcome is not None or not self._reply.empty()

    @property
    def error(self) -> BaseException | None:
        """The exception of work that is done."""
        self.wait(0.0)
        assert self._outcome is not None
        return self._outcome[1]

    def result(self) -> T:
        """The result of work that is done, or its exception."""
        error = self.error
        if error is not None:
            raise error
        assert self._outcome is not None
        result: T = self._outcome[0]
        return result


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
        """Whether the thread has not ended."""
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
