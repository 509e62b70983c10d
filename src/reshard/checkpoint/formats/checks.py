"""Numbers out of files, checked once: a shape or an offset may be anything until it was here."""

from __future__ import annotations

from math import prod

from reshard.errors import DamageError, quoted

__all__ = ["checked_shape", "whole_numbers"]

MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48
"""As layouts have it, which take longer to load than most headers to read."""


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """The values as numbers from 0 on, or None if they are anything else.

    >>> whole_numbers([2, 3]), whole_numbers([2, -3]), whole_numbers("23")
    ((2, 3), None, None)
    """
    if not isinstance(values, list | tuple):
        return None
    if all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def checked_shape(values: object, where: str) -> tuple[int, ...]:
    """A shape that some tensor may have.

    >>> checked_shape([4, 2], "a.safetensors")
    (4, 2)
    """
    shape = whole_numbers(values)
    if shape is None:
        raise DamageError(f"{where} has the shape {quoted(values)}: sizes are numbers from 0 on")
    if len(shape) > MAX_DIMS or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise DamageError(
            f"{where} has the shape {quoted(shape)}: no tensor has that many dims or elements"
        )
    return shape
