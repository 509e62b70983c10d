"""Layout texts with numbers of the model in braces: what is ``tp*{head_dim} -`` for heads of 128?

Braces around a formula with a name stand for its value. Packed segments, which start with a number
and hold no formula, are left as they are, so both may be used together.

    >>> Template.parse("tp*{3*head_dim} -").fill({"head_dim": 128})
    'tp*384 -'
    >>> Template.parse("{4096 kv, {size} kv} -").fill({"size": 1024})
    '{4096 kv, 1024 kv} -'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import RulesError
from reshard.rules.expression import Formula, evaluate, names_of, parse_formula

__all__ = ["Template"]

MAX_TEXT = 4096

_BRACES = re.compile(r"\{([^{}]*)\}")
_SEGMENTS = re.compile(r"[^,]*,|\s*[0-9]+\s*(?:-?\s*\Z|[A-Za-z_(])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Template:
    """A layout text in which some numbers are formulas."""

    text: str
    parts: tuple[str | Formula, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Find the formulas of a layout text."""
        if len(text) > MAX_TEXT:
            raise RulesError(f"a layout of {len(text)} characters: at most {MAX_TEXT} work")
        parts: list[str | Formula] = []
        at = 0
        for found in _BRACES.finditer(text):
            if not _SEGMENTS.match(found[1]):
                parts += [text[at : found.start()], parse_formula(found[1])]
                at = found.end()
        return cls(text, (*parts, text[at:]))

    def names(self) -> set[str]:
        """The names its formulas use."""
        return {name for part in self.parts if not isinstance(part, str) for name in names_of(part)}

    def sample(self) -> str:
        """A layout text with the same axes, for any numbers."""
        return "".join(part if isinstance(part, str) else "1" for part in self.parts)

    def fill(self, numbers: Mapping[str, int]) -> str:
        """The layout text for these numbers."""
        return "".join(
            part if isinstance(part, str) else str(evaluate(part, numbers)) for part in self.parts
        )
