"""Tags: what the user calls a call, so that ranks notice when one of them has left a call out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from reshard.errors import LiveError
from reshard.run.live.cause import Cause

__all__ = ["AheadError", "Tag", "order", "shown"]

MOST_COUNT = 1 << 16
MOST_NUMBER = 1 << 46
MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, and which of the calls with this tag it is."""

    text: str
    """As errors show it."""
    code: int
    """As messages carry it: equal for equal calls; of numbers, larger for later calls."""

    @classmethod
    def of(cls, tag: object, count: int) -> Tag:
        """The tag of the call before which so many calls had the same tag."""
        number = isinstance(tag, int) and not isinstance(tag, bool)
        if not number and not isinstance(tag, str):
            raise LiveError(f"tag= is a {type(tag).__name__}: give a number or a short text")
        if isinstance(tag, int) and not 0 <= tag < MOST_NUMBER:
            raise LiveError(f"tag={tag}: a number is at least 0 and less than {MOST_NUMBER}")
        if isinstance(tag, str) and len(tag) > MOST_TEXT:
            raise LiveError(f"tag= has {len(tag)} characters: {MOST_TEXT} at most")
        if isinstance(tag, int):
            value = tag
        else:
            digest = hashlib.blake2b(str(tag).encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "big") % MOST_NUMBER
        code = (value * MOST_COUNT + min(count, MOST_COUNT - 1)) * 2 + int(number)
        return cls(shown(code) if number else f'tag "{tag}"' + _which(count), code)


class AheadError(Exception):
    """This rank left out the call that failed, and is in a later one: that goes on."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def shown(code: int) -> str:
    """A tag as errors show it, of which only the code is known."""
    if not code:
        return "no tag"
    if not code & 1:
        return "another tag"
    tag, count = divmod(code >> 1, MOST_COUNT)
    return f"tag {tag}" + _which(count)


def _which(count: int) -> str:
    return f", call {count + 1} with it" if count else ""


def order(one: int, other: int) -> int | None:
    """Whether the call with one code is later (1) or earlier (-1) than another; None: unknown.

    Only numbers have an order.
    """
    if not (one & 1 and other & 1):
        return None
    return (one > other) - (one < other)
