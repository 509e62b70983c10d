"""The pattern language of tensor names: does ``*.layers.{i}.mlp.*`` match, and what is ``i``?

``*`` matches any text, dots and nothing included. ``{i}`` matches one whole part of a dotted name
that is an integer, and captures it. Everything else stands for itself.

    >>> Pattern.parse("*layers.{i}.mlp.*").match("model.layers.7.mlp.up_proj.weight")
    {'i': 13}

The value is where in the name the integer starts.

Of several patterns that match a name the most specific one wins: the one with the longest literal
text, then the one with the fewest ``*``, then with the fewest ``{i}``. So whatever is put in the
place of a ``*`` makes a pattern more specific, never less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from reshard.errors import RulesError
from reshard.text import quoted

__all__ = ["INDEX", "Pattern", "matches", "matching"]

MAX_TEXT = 512
INDEX = re.compile(r"\.([0-9]{1,9})(?![^.])", re.ASCII)
"""A part of a dotted name that is an integer; search in ``"." + name``."""

_WILD = re.compile(r"(\*|\{[^{}]*\})")
_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}\Z", re.ASCII)
_DIGITS = re.compile(r"(?<![^.*])[0-9]+(?![^.*])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One name pattern of a rules file."""

    text: str
    captures: tuple[str, ...]
    """The names of the captured integers, in order."""
    regex: re.Pattern[str] = field(compare=False, repr=False)
    rank: tuple[int, int, int] = field(compare=False, repr=False)
    """How specific the pattern is; larger wins."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern, or say what is wrong with it."""
        if not text or len(text) > MAX_TEXT:
            raise RulesError(f"a pattern has {len(text)} characters: 1 to {MAX_TEXT} work")
        pieces = re.sub(r"\*+", "*", text)
        words = [piece for piece in _WILD.split(pieces) if piece]
        captures = tuple(_captures(text, words))
        literal = sum(len(word) for word in words if not _WILD.match(word))
        rank = (literal, -words.count("*"), -len(captures))
        return cls(text, captures, re.compile(_regex(words), re.ASCII | re.DOTALL), rank)

    def match(self, name: str) -> dict[str, int] | None:
        """Where in the name each captured integer starts, or None if the pattern does not match.

        >>> Pattern.parse("h.{i}.w").match("h.x.w") is None
        True
        """
        found = self.regex.match(name)
        return {key: found.start(key) for key in self.captures} if found else None

    def digits(self) -> set[str]:
        """The integers that the pattern spells out, as in ``layers.0.*``.

        >>> Pattern.parse("layers.0.w1.*").digits()
        {'0'}
        """
        return set(_DIGITS.findall(_CAPTURE_ANYWHERE.sub("x", self.text)))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is a pattern's text, or matches it; for ``--layout``, ``dtype=``, ``drop=``.

    >>> matches("layers.{i}.*", "layers.0.mlp.weight"), matches("a[0]", "a[0]")
    (True, True)
    """
    return name == pattern or _parsed(pattern).regex.match(name) is not None


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches; wildcards of the shell raise an error with our spelling."""
    names = list(names)
    found = [name for name in names if matches(pattern, name)]
    if not found and any(fnmatchcase(name, pattern) for name in names):
        raise RulesError(
            f"pattern {quoted(pattern)}: ? and [...] stand for themselves; write * for any text "
            "and {i} for an integer between dots"
        )
    return found


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Pattern:
    return Pattern.parse(text)


_CAPTURE_ANYWHERE = re.compile(r"\{[^{}]*\}")


def _captures(text: str, words: list[str]) -> list[str]:
    """The names in braces; each stands for a whole part of the name."""
    captures: list[str] = []
    for at, word in enumerate(words):
        if word[0] != "{":
            if "{" in word or "}" in word:
                raise RulesError(f'pattern "{text}" has a brace alone: write {{i}} for an integer')
            continue
        name = _CAPTURE.match(word)
        before = words[at - 1][-1] if at else "."
        after = words[at + 1][0] if at + 1 < len(words) else "."
        if not name or (before, after) != (".", "."):
            raise RulesError(f'{word} in pattern "{text}" must be a whole part: write .{{i}}.')
        if name[1] in captures:
            raise RulesError(f'{word} appears twice in pattern "{text}": give each its own name')
        captures.append(name[1])
    return captures


def _regex(words: list[str]) -> str:
    """A regular expression that never looks back, so that no pattern can be slow.

    Between two ``*`` the leftmost match is as good as any other (a capture cannot stretch), so it
    is never given up; only the text after the last ``*`` is tied to the end.
    """
    chunks = [""]
    for word in words:
        if word == "*":
            chunks.append("")
        else:
            capture = _CAPTURE.match(word)
            chunks[-1] += f"(?P<{capture[1]}>[0-9]{{1,9}})" if capture else re.escape(word)
    if len(chunks) == 1:
        return rf"{chunks[0]}\Z"
    middle = "".join(f"(?>.*?{chunk})" for chunk in chunks[1:-1])
    return rf"(?>{chunks[0]}){middle}.*{chunks[-1]}\Z"
