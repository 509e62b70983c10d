"""A bounded set of open files: the least recently used are closed when there are many."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["OpenFile", "OpenFiles"]

MAX_OPEN = 128
"""Files that stay open while no thread uses them."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class OpenFile:
    """An open file, and the number of threads that use it."""

    descriptor: int
    size: int
    direct: int | None = None
    """A second descriptor for direct writes, where the file system supports them."""
    users: int = 0

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)


class OpenFiles(Generic[Key]):
    """Open files by key, opened when first used; safe to use from several threads."""

    def __init__(self, open_file: Callable[[Key], OpenFile]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._files: OrderedDict[Key, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def using(self, key: Key) -> Iterator[OpenFile]:
        """A file that stays open inside the ``with`` block."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                self._close_idle()
                file = self._files[key] = self._open_file(key)
            self._files.move_to_end(key)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _close_idle(self) -> None:
        """Make room for one more file; files in use stay open."""
        idle = [key for key, file in self._files.items() if not file.users]
        for key in idle[: max(len(self._files) + 1 - MAX_OPEN, 0)]:
            self._files.pop(key).close()
