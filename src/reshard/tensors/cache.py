"""A cache that is bounded in bytes, for plans and long lists of boxes that calls repeat."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["SizedCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Values by key; the oldest are dropped once all of them together are too large.

    Dropping the oldest, and not the least recently used, leaves a look-up as quick as that of a
    dict, and safe in threads: a training step repeats the same few moves.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._values: dict[K, tuple[V, int]] = {}
        self._total = 0

    def clear(self) -> None:
        """Drop everything."""
        self._values.clear()
        self._total = 0

    def get(self, key: K) -> V | None:
        """The value that is kept under a key, or None."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: K, value: V, num_bytes: int) -> V:
        """Keep a value of about this size, unless another thread has kept one; gives that kept."""
        kept, size = self._values.setdefault(key, (value, num_bytes))
        if kept is value:
            self._total += size
            while self._total > self.max_bytes and self._values:
                _, dropped = self._values.pop(next(iter(self._values)))
                self._total -= dropped
        return kept
