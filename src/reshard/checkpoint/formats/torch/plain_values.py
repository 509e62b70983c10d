"""Plain values (numbers, texts, bytes, and lists, tuples and dicts of them) out of pickles.

What nests without end, or refers to one list in thousands of places, is not plain: each visit of a
value is counted, so that its text and its pickle are of a size that the file can have.

>>> is_plain([0.9, (1, None)], Visits(100)), is_plain([object()], Visits(100))
(True, False)
>>> as_json((0.9, 0.999)), as_json(b"raw")
('[0.9, 0.999]', None)
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_DEPTH", "Visits", "as_json", "is_plain"]

MAX_DEPTH = 32
MAX_TEXT = 1 << 20
"""Characters and bytes of one value, all texts in it together."""

_PLAIN = (str, bytes, int, float, type(None))  # bool is an int


class Visits:
    """How many more values may be looked at."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


def is_plain(value: Any, visits: Visits) -> bool:
    """Whether a value is plain, and not larger than one value may be."""
    pending, text = [(value, 0)], 0
    while pending:
        found, depth = pending.pop()
        visits.left -= 1
        if isinstance(found, str | bytes):
            text += len(found)
        elif isinstance(found, list | tuple | dict):
            inside = [*found, *found.values()] if isinstance(found, dict) else found
            if depth >= MAX_DEPTH or len(inside) > visits.left:
                return False
            pending += [(one, depth + 1) for one in inside]
        elif not isinstance(found, _PLAIN):
            return False
        if text > MAX_TEXT or visits.left < 0:
            return False
    return True


def as_json(value: Any) -> str | None:
    """A plain value as JSON text; None if JSON has nothing for it, such as bytes or infinity."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
