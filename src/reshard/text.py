"""Text for people: sizes, quoted names, counts, lists cut short, columns, reports, the log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from reshard.errors import SizeError

MAX_QUOTED = 160

log = logging.getLogger("reshard")
"""What effects did: files that were written, ranks that connected. Silent without a handler."""
log.addHandler(logging.NullHandler())

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*\Z", re.ASCII)


def parse_bytes(amount: int | str) -> int:
    """Read a size: a number of bytes, or a text with a unit.

    >>> parse_bytes("256MiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (268435456, 1500000000, 4096)
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount < 0:
            raise SizeError(f"{amount} bytes: an amount of bytes is not negative")
        return amount
    match = _AMOUNT.match(amount) if isinstance(amount, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise SizeError(f'"{amount}" is not an amount of bytes: write 4096, "256MiB" or "1GB"')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(amount: int | float) -> str:
    """Write a size with a binary unit.

    >>> format_bytes(268435456), format_bytes(1500), format_bytes(12)
    ('256.0 MiB', '1.5 KiB', '12 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(amount) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def format_shape(shape: Iterable[int]) -> str:
    """Write the sizes of a tensor.

    >>> format_shape((8192, 4096)), format_shape(())
    ('8192x4096', '0-d')
    """
    return "x".join(map(str, shape)) or "0-d"


def quoted(text: object) -> str:
    """Text from a user or a file in quotes: one printable line of bounded length, for a message.

    >>> print(quoted("tp -"), quoted("tp" + chr(10)))
    "tp -" "tp\\n"
    """
    shown = str(text)
    if len(shown) > MAX_QUOTED:
        shown = f"{shown[:MAX_QUOTED]}... ({len(shown)} characters)"
    return f'"{printable(shown)}"'


def printable(text: str) -> str:
    """Text as one printable line: what turns text around or hides in it becomes visible.

    >>> print(printable("a" + chr(0x202E) + "b"))
    a\\u202eb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def count(number: int, what: str, several: str = "") -> str:
    """A number and a noun in the singular or plural.

    >>> count(1, "rank"), count(1200, "rank"), count(2, "box", "boxes")
    ('1 rank', '1,200 ranks', '2 boxes')
    """
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def and_more(items: Sequence[object], most: int = 1, what: str = "") -> str:
    """The first items of a list, and how many follow.

    >>> and_more(["a"]), and_more("abcd", 2), and_more("abcd", 3, "files")
    ('a', 'a, b and 2 more', 'a, b, c and 1 more files')
    """
    shown = ", ".join(map(str, items[:most]))
    if len(items) <= most:
        return shown
    return f"{shown} and {len(items) - most:,} more{f' {what}' if what else ''}"


def name_list(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, printable and on one line, and how many follow.

    >>> name_list(["a", "b" + chr(10), "c"], 2)
    'a, b\\\\n and 1 more'
    """
    return and_more([quoted(name)[1:-1] for name in names], most)


def listed(lines: Sequence[str], most: int = 20) -> list[str]:
    """The first of some lines, indented, and how many follow.

    >>> listed(["a", "b", "c"], 2)
    ['  a', '  b', '  and 1 more; --json lists all']
    """
    more = [f"  and {len(lines) - most} more; --json lists all"] if len(lines) > most else []
    return [*(f"  {line}" for line in lines[:most]), *more]


def shorten(text: str, most: int) -> str:
    """Replace the middle of a long text by dots.

    >>> shorten("model.layers.0.weight and 31 more", 24)
    'model.layers.0...31 more'
    """
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"


def first_line(error: object) -> str:
    """The beginning of the text of an error; its type if it has no text.

    >>> first_line(ValueError("two lines\\nof text")), first_line(KeyError())
    ('two lines', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line per row, columns padded to equal width; those in ``right`` are right-aligned.

    >>> align([("a", "10"), ("bcd", "9")], right={1})
    ['a    10', 'bcd   9']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Report:
    """What all reports on checkpoints have in common: plain data, JSON, a cell of a notebook."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dict(json.loads(json.dumps(asdict(self))))  # type: ignore[call-overload]

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def _repr_html_(self) -> str:
        """The report as a cell of a notebook."""
        return str(import_module("reshard.show.page.notebook").text_cell(str(self)))
