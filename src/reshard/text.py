"""Amounts of bytes as people write them: ``256MiB`` to 268435456 and back."""

from __future__ import annotations

import re

from reshard.errors import SizeError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*\Z", re.ASCII)


def parse_bytes(amount: int | str) -> int:
    """Read an amount: a number of bytes, or a text with a unit.

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
    """Write an amount the short way.

    >>> format_bytes(268435456), format_bytes(1500), format_bytes(12)
    ('256.0 MiB', '1.5 KiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")
