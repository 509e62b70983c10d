"""Python's garbage collector, paused while a catalog or a plan of many tensors is made.

A checkpoint of 100,000 tensors is a million small objects, none of them garbage. The collector
would look through all of them again and again as they become more: 40 % of a conversion's time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

_lock = threading.Lock()
_paused: list[bool] = []
"""One entry for each thread inside; the first says whether the collector was on before."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside; then as it was before.

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
