"""Standard output and standard error: JSON, coloured lines, progress bars, readers that leave."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from reshard.show.ink import Line

__all__ = [
    "UNSUPPORTED",
    "byte_meter",
    "code_of",
    "print_json",
    "print_lines",
    "terminal_width",
    "tolerant",
    "wants_boxes",
]


UNSUPPORTED = 4
"""The exit code for a checkpoint of a kind that is not supported."""


def code_of(ok: bool, is_unsupported: bool) -> int:
    """The exit code of a command that answers a question about checkpoints."""
    return 0 if ok else UNSUPPORTED if is_unsupported else 1


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    print(json.dumps(data, indent=2))


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines with colours if the reader has them."""
    from reshard.show.ink import coloured, plain, wants_colour

    if wants_colour(sys.stdout, os.environ):
        print(coloured(lines, sys.stdout, terminal_width()))
    else:
        print(plain(lines))


def terminal_width() -> int:
    """How many characters a line has."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def wants_boxes() -> bool:
    """Whether lines can be drawn with more than ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return sys.stdout.isatty() and encoding == "utf8"


@contextmanager
def byte_meter(words: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar of bytes, as a function of bytes done and in all; None without a terminal.

    The bar goes to standard error, so that reports can be piped.
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


class _Pipe(io.FileIO):
    """A file descriptor that drops what is written after its reader has left."""

    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return super().write(view)
        except BrokenPipeError:
            return view.nbytes


def tolerant(stream: TextIO) -> TextIO:
    """The same stream, without errors when its reader leaves (``reshard inspect x | head -1``).

    The command goes on, so its exit code does not depend on its reader.
    """
    try:
        pipe = _Pipe(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=bool(getattr(stream, "write_through", False)),
    )
