"""Checks of values that come from files, which may be anything: numbers, shapes, text."""

from __future__ import annotations

from reshard.errors import DamageError
from reshard.text import quoted

__all__ = ["checked_shape", "shown", "whole_numbers"]

_PLAIN = (int, float, str, bool, type(None))
MAX_SHOWN = 8
MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48
"""The limit of layouts, which are not imported here: that takes longer than reading a header."""


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """The values as a tuple of integers from 0 on; None if they are anything else.

    >>> whole_numbers([2, 3]), whole_numbers([2, -3]), whole_numbers("23")
    ((2, 3), None, None)
    """
    if not isinstance(values, list | tuple):
        return None
    for value in values:
        if type(value) is not int or value < 0:  # True is an int too, but no size
            return None
    return tuple(values)


def checked_shape(values: object, where: str, name: str | None = None) -> tuple[int, ...]:
    """A valid shape of a tensor; ``where`` and ``name`` are for the error.

    >>> checked_shape([4, 2], "a.safetensors", "w")
    (4, 2)
    """
    # Thousands of tensors may share one list of millions: a list that is too long is not visited.
    too_long = isinstance(values, list | tuple) and len(values) > MAX_DIMS
    if isinstance(values, list | tuple) and not too_long:
        count = 1
        for size in values:
            if type(size) is not int or size < 0:
                break
            count *= size or 1
        else:
            if count <= MAX_ELEMENTS:
                return tuple(values)
    about = where if name is None else f"{where}: tensor {quoted(name)}"
    if not too_long and whole_numbers(values) is None:
        raise DamageError(f"{about} has the shape {shown(values)}: sizes are numbers from 0 on")
    raise DamageError(
        f"{about} has the shape {shown(values)}: no tensor has that many dims or elements"
    )


def shown(value: object) -> str:
    """A value as part of a message; of values that may nest without end only the type.

    >>> shown([2, "x"]), shown([[2]]), shown(2.5)
    ('[2, "x"]', 'a list', '2.5')
    """
    if isinstance(value, list | tuple):
        first = value[:MAX_SHOWN]
        if all(isinstance(part, _PLAIN) for part in first):
            inner = ", ".join(map(shown, first))
            more = ", ..." if len(value) > MAX_SHOWN else ""
            return f"[{inner}{more}]" if isinstance(value, list) else f"({inner}{more})"
        return f"a {type(value).__name__}"
    if isinstance(value, str):
        return quoted(value)
    return str(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
