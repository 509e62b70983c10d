"""Worker threads, and a lock that an exception cannot leave locked.

A signal handler may raise between any two bytecodes of the main thread, our own error handling
included. Everything that threads share is therefore changed in single steps of C: a dict entry, a
queue item. `threading.Lock` with a `with` statement, `Future` and `Event` are not safe in this
sense.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["OwnedLock", "Task", "Worker"]

T = TypeVar("T")

HOLDER = "holder"
FIRST_PAUSE, LAST_PAUSE = 0.00005, 0.005


class OwnedLock:
    """A lock that knows which thread holds it.

    The holder may enter again. When an exception has taken a thread out of its call, the cleanup
    thread releases the locks that it may have held. Blocks are short, and those of one lock are not
    nested.
    """

    __slots__ = ("_holder",)

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        me, holder = _thread.get_ident(), self._holder
        pause = FIRST_PAUSE
        # One call of C: there is no moment at which the lock is taken and its holder unknown.
        while holder.setdefault(HOLDER, me) != me:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def __exit__(self, *_: object) -> None:
        self._holder.pop(HOLDER, None)

    def try_acquire(self) -> bool:
        """Acquire the lock unless another thread holds it; whether this thread holds it."""
        me = _thread.get_ident()
        return self._holder.setdefault(HOLDER, me) == me

    def release(self) -> None:
        """Release the lock."""
        self._holder.pop(HOLDER, None)

    def release_for(self, thread: int | None) -> None:
        """Release the lock if this thread, which has left its call, still holds it."""
        if thread is not None and self._holder.get(HOLDER) == thread:
            self._holder.pop(HOLDER, None)


class Task(Generic[T]):
    """Work for a `Worker`, and its outcome."""

    __slots__ = ("_action", "_outcome", "_reply")

    def __init__(self, action: Callable[[], T]) -> None:
        self._action: Callable[[], T] | None = action
        self._reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def run(self) -> None:
        """Do the work; an exception is kept for whoever asks for the result."""
        assert self._action is not None
        try:
            outcome: tuple[Any, BaseException | None] = (self._action(), None)
        except BaseException as error:
            outcome = (None, error)
        self._action = None  # it may refer to tensors
        self._reply.put(outcome)

    def wait(self, seconds: float) -> bool:
        """Wait until the work is done, at most so long; whether it is done."""
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
        """What the work raised; asked for only when it is done."""
        self.wait(0.0)
        assert self._outcome is not None
        return self._outcome[1]

    def result(self) -> T:
        """What the work returned; raises what it raised. Asked for only when it is done."""
        error = self.error
        if error is not None:
            raise error
        assert self._outcome is not None
        found: T = self._outcome[0]
        return found


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
        """Run this after everything that was submitted before."""
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
        """Let the thread end after its tasks, and wait for that, at most so long."""
        self._tasks.put(None)
        if seconds and not self.is_current and self._ended.acquire(timeout=seconds):
            self._ended.release()
