"""Standard output and standard error: JSON, coloured lines, tables that fit, progress bars."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from reshard.text import Report, format_bytes, shorten

if TYPE_CHECKING:
    from reshard.checkpoint.transfer.windows import Progress
    from reshard.show.terminal import Line


MIN_NAME = 36
"""Names of tensors are not made shorter than this, but get lines of their own."""
_HEADER = re.compile(r"\s*(?:round +)?(?P<column>tensor +)(?=shape|box|from)")
"""The first row of a table of tensors, and the column with their names."""
_LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}")
"""A label, and the gap before the text that it is for."""

UNSUPPORTED = 4
"""The exit code for a checkpoint of a kind that is not supported."""
ARGUMENTS = "reshard.arguments"
"""The words of the command line, in the meta data of its context."""


def code_of(ok: bool, is_unsupported: bool) -> int:
    """The exit code of a command that answers a question about checkpoints."""
    return 0 if ok else UNSUPPORTED if is_unsupported else 1


def this_command(*added: str) -> str:
    """The command that runs, as it can be typed again; with these words at its end."""
    arguments = [one for one in click.get_current_context().meta[ARGUMENTS] if one not in added]
    return shlex.join(["reshard", *arguments, *added])


def is_quiet() -> bool:
    """Whether -q was given, before or after the name of the command."""
    context = click.get_current_context(silent=True)
    return context is not None and bool((context.obj or {}).get("quiet"))


def write_page(path: str, text: str) -> None:
    """Write a page, and say so."""
    # The page names the command, whose words need not be valid UTF-8.
    Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    say_written(path)


def say_written(path: str) -> None:
    """Say which file was written, on standard error."""
    if not is_quiet():
        print(f"wrote {path}", file=sys.stderr)


def print_json(kind: str, data: dict[str, Any]) -> None:
    """Print a report as JSON; its schema comes first, ``reshard.KIND/1`` unless it has another."""
    print(json.dumps({"schema": f"reshard.{kind}/1", **data}, indent=2))


def print_report(kind: str, report: Report, as_json: bool, text: str | None = None) -> None:
    """Print a report on checkpoints as JSON or as text, perhaps another than its usual one."""
    print_json(kind, report.to_dict()) if as_json else print(fitted(text or str(report)))


def fitted(text: str) -> str:
    """A text that fits the terminal: tables of tensors are narrowed, other long lines wrapped.

    What goes to a file or a pipe stays as it is, unless COLUMNS asks for a width.
    """
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return text
    lines, width = text.split("\n"), terminal_width()
    starts = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    for start in starts:
        stop = next((n for n in range(start, len(lines)) if not lines[n].strip()), len(lines))
        lines[start:stop] = _narrowed(lines[start:stop], width)
    return "\n".join(part for line in lines for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> list[str]:
    """A line as several that fit; names and paths stay whole, so that they can be copied.

    >>> _wrapped("wire  64.0 MiB, the least possible", 20)
    ['wire  64.0 MiB, the', '      least possible']
    """
    from textwrap import wrap

    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 4
    space = " " * min(indent, width // 2)
    return wrap(
        line, width, subsequent_indent=space, break_long_words=False, break_on_hyphens=False
    )


def _narrowed(rows: list[str], width: int) -> list[str]:
    """The rows of a table that is too wide: shorter names, or names on lines of their own."""
    excess = max(map(len, rows)) - width
    header = _HEADER.match(rows[0])
    if excess <= 0 or header is None:
        return rows
    low, high = header.span("column")
    names, most = [row[low:high].rstrip() for row in rows], high - low - excess
    short = [shorten(name, max(most - 2, 6)) for name in names]
    if most - 2 >= MIN_NAME and len(set(short)) == len(set(names)):
        cells = zip(rows, short, strict=True)
        return [f"{row[:low]}{name.ljust(most)}{row[high:]}" for row, name in cells]
    lines = []
    for row, name in zip(rows, names, strict=True):
        lines += [f"{row[:low]}{shorten(name, width - low)}", f"{' ' * low}    {row[high:]}"]
    return [line for line in lines if line.strip()]


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines with colours if the reader has them."""
    from reshard.show.terminal import coloured, plain, wants_colour

    if wants_colour(sys.stdout, os.environ):
        print(coloured(lines, sys.stdout, terminal_width()))
    else:
        print(plain(lines))


def terminal_width() -> int:
    import shutil  # with all that it imports, two per cent of a short command

    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def wants_boxes() -> bool:
    """Whether lines can be drawn with more than ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return sys.stdout.isatty() and encoding == "utf8"


@contextmanager
def working(step: str, *, quiet: bool = False) -> Iterator[Progress | None]:
    """Show on a terminal that a step is under way; None without a terminal.

    What it yields is a function of bytes done and in all, for steps that know them. The bar goes to
    standard error, so that reports can be piped. Its units are those of reports.
    """
    if quiet or is_quiet() or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bytes_text = TextColumn("{task.fields[bytes]}")
    columns = (TextColumn(step), BarColumn(), bytes_text, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task, began = bar.add_task(step, total=None, bytes=""), time.monotonic()

        def show(done: int, total: int) -> None:
            text = progress_text(done, total, time.monotonic() - began)
            bar.update(task, completed=done, total=total, bytes=text)

        yield show


def progress_text(done: int, total: int, seconds: float) -> str:
    """How far a command is, in the units of its report.

    >>> progress_text(3 << 20, 256 << 20, 2.0)
    '3.0 MiB of 256.0 MiB, 1.5 MiB/s'
    """
    speed = f", {format_bytes(done / seconds)}/s" if done and seconds > 0 else ""
    return f"{format_bytes(done)} of {format_bytes(total)}{speed}"


class _Pipe(io.FileIO):
    """A file descriptor that drops what is written after its reader has left, or its disk is full.

    The latter is an error, once: Python would raise it again when it exits, and change the exit
    code.
    """

    label = "standard output"
    failed = False

    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return view.nbytes if self.failed else super().write(view)
        except BrokenPipeError:
            return view.nbytes
        except OSError as error:
            self.failed = True
            raise OSError(error.errno, error.strerror, self.label) from None


def tolerant(stream: TextIO) -> TextIO:
    """The same stream, without errors when its reader leaves (``reshard inspect x | head -1``).

    The command goes on, so its exit code does not depend on its reader.
    """
    try:
        pipe = _Pipe(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return stream
    if stream is sys.stderr:
        pipe.label = "standard error"
    return io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=bool(getattr(stream, "write_through", False)),
    )
