"""A bar that shows bytes done, GB/s and the time left; only where somebody watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_meter"]


@contextmanager
def byte_meter(words: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Something to tell how many bytes are done and of how many, or None if nobody watches.

    The bar goes to standard error, so that reports can be piped on.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(words),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words)
        yield lambda done, total: bar.update(task, completed=done, total=total)
