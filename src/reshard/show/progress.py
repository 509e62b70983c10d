"""A progress bar for long moves: one line on standard error, removed when the move is over.

The lowest rank of the move shows its own sends, receives and copies. Nothing is shown where
standard error is no terminal, or where a move takes less than half a second; rich is loaded only to
show it.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from reshard.text import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


SHOWN_AFTER = 0.5
"""Seconds before which the bar is not shown."""
MIN_BYTES = 16 << 20
"""A smaller move is over before; no thread is started for it."""


def progress_of(wanted: bool | None, total: int, num_rounds: int) -> Bar | None:
    """A bar where one is wanted: by ``True``, or by ``None`` and a terminal; else None.

    A bar that was asked for is shown at once, and its last state stays.
    """
    if wanted:
        return Bar(total, num_rounds, after=0.0, stays=True)
    seen = wanted is None and sys.stderr is not None and sys.stderr.isatty()
    return Bar(total, num_rounds) if seen and total >= MIN_BYTES else None


class Bar:
    """Bytes, rounds, speed and time left, from ``after`` seconds on."""

    def __init__(
        self, total: int, num_rounds: int, *, after: float = SHOWN_AFTER, stays: bool = False
    ) -> None:
        self._total, self._num_rounds, self._stays = total, num_rounds, stays
        self._began = time.monotonic()
        self._bytes = self._rounds = 0
        self._shown: RichProgress | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(after, self._show)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
            self._rounds += 1
            self._refresh()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._shown is not None:
                self._shown.stop()
                self._shown = None

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        bar = Progress(
            *(SpinnerColumn(), BarColumn(30), TextColumn("{task.description}")),
            console=Console(stderr=True),
            transient=not self._stays,
            redirect_stdout=False,  # what the program prints meanwhile
            redirect_stderr=False,
        )
        with self._lock:
            if not self._closed:
                bar.add_task("", total=self._total)
                self._shown = bar
                self._refresh()
                bar.start()

    def _refresh(self) -> None:
        if self._shown is not None:
            seconds = time.monotonic() - self._began
            text = describe(self._bytes, self._total, self._rounds, self._num_rounds, seconds)
            self._shown.update(self._shown.task_ids[0], completed=self._bytes, description=text)


def describe(done: int, total: int, rounds: int, num_rounds: int, seconds: float) -> str:
    """How far a move has come, in a few words.

    >>> describe(6 << 30, 15 << 30, 24, 60, seconds=2.0)
    '6.0 GiB of 15.0 GiB, 3.2 GB/s, round 25 of 60, 3 s left'
    >>> describe(1 << 30, 15 << 30, 3, 60, seconds=5.4)
    '1.0 GiB of 15.0 GiB, 0.2 GB/s, round 4 of 60, 1 min 16 s left'
    >>> describe(0, 15 << 30, 0, 60, seconds=0.5)
    '0 B of 15.0 GiB, round 1 of 60'
    """
    moved = f"{format_bytes(done)} of {format_bytes(total)}"
    part = f"round {min(rounds + 1, num_rounds)} of {num_rounds}"
    if not done:
        return f"{moved}, {part}"
    minutes, rest = divmod(round(seconds * (total - done) / done), 60)
    left = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{moved}, {done / seconds / 1e9:.1f} GB/s, {part}, {left} left"
