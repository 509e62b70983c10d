"""Printing: coloured where somebody watches a terminal, plain everywhere else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.show.ink import Line

__all__ = ["UNSUPPORTED", "code_of", "print_json", "print_lines", "terminal_width", "wants_boxes"]


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
