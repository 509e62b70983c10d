"""Many tensor names as few patterns: ``model.layers.{0-31}.mlp.{gate,up}_proj.weight``.

A pattern stands for exactly the names it was made of: braces list what a part of the dotted name
may be, and every combination of them is a name.

>>> name_patterns([f"h.{i}.{part}_proj.weight" for i in range(32) for part in ("gate", "up")])
['h.{0-31}.{gate,up}_proj.weight']
>>> name_patterns(["norm.weight", "h.0.w", "h.1.w", "h.3.w"])
['norm.weight', 'h.{0-1,3}.w']
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from reshard.layout.mesh import format_ranks
from reshard.text import count, shorten

MAX_NAMES = 50_000
"""Names that are looked at; the rest are only counted."""
MAX_WORDS = 8
"""Words in braces that are listed."""
MAX_LENGTH = 200
MAX_PARTS = 32
"""Dotted parts of a name that is joined with others; files may hold names of any length."""

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})\Z", re.ASCII)
_SPECIAL = re.compile(r"[{},]")

Parts = tuple[frozenset[str], ...]


def name_patterns(names: Iterable[str]) -> list[str]:
    """Patterns that together stand for exactly these names, in the order of their first names."""
    order = {name: at for at, name in enumerate(names)}
    # A name with braces would itself read as a pattern.
    odd = {name for name in order if name.count(".") >= MAX_PARTS or _SPECIAL.search(name)}
    items = {
        tuple(frozenset((part,)) for part in name.split(".")): at
        for name, at in order.items()
        if name not in odd
    }
    patterns = [(at, ".".join(map(_braces, parts))) for parts, at in _merge(items).items()]
    return [text for _, text in sorted([*patterns, *((order[name], name) for name in odd)])]


def named(names: Sequence[str], most: int = 4, width: int | None = None) -> str:
    """The names of a group as text: its patterns, and how many patterns are left out of it.

    With a width, patterns after the first are listed only as far as they fit into it.

    >>> named(["a.0.w", "a.1.w", "b"])
    'a.{0-1}.w, b'
    >>> named(["a.0.w", "a.1.w", "b"], width=10)
    'a.{0-1}.w and 1 more pattern'
    """
    patterns = name_patterns(names[:MAX_NAMES])
    if width is None:
        shown = [one if len(one) <= MAX_LENGTH else f"{one[:MAX_LENGTH]}..." for one in patterns]
    else:
        ends = accumulate(len(one) + len(", ") for one in patterns)
        most = max(min(most, sum(end <= width + len(", ") for end in ends)), 1)
        shown = [shorten(one, width) for one in patterns[:most]]
    parts = [", ".join(shown[:most])]
    for number, what in ((len(patterns) - most, "pattern"), (len(names) - MAX_NAMES, "name")):
        if number > 0:
            parts.append(count(number, f"more {what}"))
    return " and ".join(parts)


def named_pairs(pairs: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """The destination's names of a group as text, and the source's where these differ.

    >>> named_pairs([("q.0", "h.0.q"), ("q.1", "h.1.q")])
    'h.{0-1}.q <- q.{0-1}'
    """
    have, want = ([pair[side] for pair in pairs] for side in (0, 1))
    if have == want:
        return named(want, width=width)
    each = None if width is None else width * 5 // 8
    return " <- ".join(named(side, width=each) for side in (want, have))


def _merge(items: dict[Parts, int]) -> dict[Parts, int]:
    """Join names that differ in one part, part by part, until none do."""
    width = max(map(len, items), default=0)
    words = [len({parts[at] for parts in items if at < len(parts)}) for at in range(width)]
    # The part with the most words first: thousands of experts become one name at once.
    order = sorted(range(width), key=lambda at: -words[at])
    num_before = -1
    while len(items) != num_before:
        num_before = len(items)
        for part in order:
            items = _merge_at(items, part)
    return items


def _merge_at(items: dict[Parts, int], part: int) -> dict[Parts, int]:
    merged = {parts: at for parts, at in items.items() if part >= len(parts)}
    groups = defaultdict[tuple[Parts, Parts, bool], list[tuple[frozenset[str], int]]](list)
    for parts, at in items.items():
        if part < len(parts):  # numbers and words do not share braces
            key = parts[:part], parts[part + 1 :], _are_numbers(parts[part])
            groups[key].append((parts[part], at))
    for (head, tail, _), members in groups.items():
        words, places = zip(*members, strict=True)
        merged[(*head, frozenset().union(*words), *tail)] = min(places)
    return merged


def _are_numbers(words: frozenset[str]) -> bool:
    return all(map(_NUMBER.match, words))


def _braces(words: frozenset[str]) -> str:
    if len(words) == 1:
        return next(iter(words))
    if _are_numbers(words):
        return f"{{{format_ranks(sorted(map(int, words)))}}}"
    listed = sorted(words)
    head, tail = _common(listed), _common([word[::-1] for word in listed])[::-1]
    if any(len(word) <= len(head) + len(tail) for word in listed):
        tail = ""
    inside = [word[len(head) : len(word) - len(tail)] for word in listed]
    if len(inside) > MAX_WORDS:
        inside = [*inside[: MAX_WORDS - 1], f"...{len(inside)} words"]
    return f"{head}{{{','.join(inside)}}}{tail}"


def _common(words: Sequence[str]) -> str:
    """What all words begin with, up to an underscore."""
    low, high = min(words), max(words)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[: low.rfind("_", 0, length) + 1]
