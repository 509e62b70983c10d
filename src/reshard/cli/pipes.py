"""Standard output whose reader may leave, as in ``reshard inspect ckpt | head -1``.

The command goes on and its exit code is its answer, whether the reader saw all of it or not.
"""

from __future__ import annotations

import io
from typing import TextIO

__all__ = ["forgiving"]


class _Pipe(io.FileIO):
    """A file descriptor that drops what is written after its reader has left."""

    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return super().write(view)
        except BrokenPipeError:
            return view.nbytes


def forgiving(stream: TextIO) -> TextIO:
    """The same stream without errors about a reader that left."""
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
