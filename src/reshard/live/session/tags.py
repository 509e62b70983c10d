"""Tags: user-given names of calls, which reveal that a rank has left out a call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from reshard.errors import LiveError
from reshard.live.session.cause import Cause

__all__ = ["CallAheadError", "Tag", "compare_codes", "describe_code"]

MAX_COUNT = 1 << 16
MAX_NUMBER = 1 << 46
MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, and how many earlier calls had the same one."""

    text: str
    """As errors show it."""
    code: int
    """As messages carry it: equal for equal calls; for numbers, larger for later calls."""

    @classmethod
    def of(cls, tag: object, count: int) -> Tag:
        """The tag of a call; ``count`` calls before it had the same tag."""
        number = isinstance(tag, int) and not isinstance(tag, bool)
        if not number and not isinstance(tag, str):
            raise LiveError(f"tag= is a {type(tag).__name__}: give a number or a short text")
        if isinstance(tag, int) and not 0 <= tag < MAX_NUMBER:
            raise LiveError(f"tag={tag}: a number is at least 0 and less than {MAX_NUMBER}")
        if isinstance(tag, str) and len(tag) > MAX_TEXT:
            raise LiveError(f"tag= has {len(tag)} characters: {MAX_TEXT} at most")
        if isinstance(tag, int):
            value = tag
        else:
            digest = hashlib.blake2b(str(tag).encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "big") % MAX_NUMBER
        code = (value * MAX_COUNT + min(count, MAX_COUNT - 1)) * 2 + int(number)
        return cls(describe_code(code) if number else f'tag "{tag}"' + _nth(count), code)


class CallAheadError(Exception):
    """This rank left out the call that failed and is already in a later one, which goes on."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def describe_code(code: int) -> str:
    """A tag as errors show it, where only its code is known."""
    if not code:
        return "no tag"
    if not code & 1:
        return "another tag"
    tag, count = divmod(code >> 1, MAX_COUNT)
    return f"tag {tag}" + _nth(count)


def _nth(count: int) -> str:
    return f", call {count + 1} with it" if count else ""


def compare_codes(one: int, other: int) -> int | None:
    """1 if the call with the first code is the later one, -1 if it is the earlier one.

    None where that is unknown: only tags that are numbers have an order.
    """
    if not (one & 1 and other & 1):
        return None
    return (one > other) - (one < other)
