"""A lock that an exception between two bytecodes cannot leave locked for good.

`with lock` of the standard library is not enough where a signal handler may raise, or a debugger:
between the end of the block and the release of the lock there are bytecodes. A `Gate` knows which
thread is inside. That thread may enter again, and for a thread that has left its call by an
exception the cleanup thread opens the gate. Blocks are short, and those of one gate not nested.
"""

from __future__ import annotations

import _thread
import time

__all__ = ["Gate"]

INSIDE = "inside"
FIRST_PAUSE, LAST_PAUSE = 0.00005, 0.005


class Gate:
    """One thread at a time is inside."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread: dict[str, int] = {}

    def __enter__(self) -> None:
        me, inside = _thread.get_ident(), self._thread
        # One call of C: there is no moment at which the gate is taken and nobody knows by whom.
        pause = FIRST_PAUSE
        while inside.setdefault(INSIDE, me) != me:
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def __exit__(self, *_: object) -> None:
        self._thread.pop(INSIDE, None)

    def try_enter(self) -> bool:
        """Enter unless another thread is inside; whether this thread is."""
        me = _thread.get_ident()
        return self._thread.setdefault(INSIDE, me) == me

    def leave(self) -> None:
        """Let another thread in."""
        self._thread.pop(INSIDE, None)

    def open_for(self, thread: int | None) -> None:
        """A thread that may have been inside has left its call: let others in."""
        if thread is not None and self._thread.get(INSIDE) == thread:
            self._thread.pop(INSIDE, None)
