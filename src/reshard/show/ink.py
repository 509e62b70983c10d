"""Text with coloured backgrounds, and the same text plain.

>>> line = [Span("rank 0", "#ffcc00"), Span(" | ")]
>>> plain([line])
'rank 0 |'
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "Line",
    "Lines",
    "Span",
    "coloured",
    "heat",
    "hue",
    "hues",
    "plain",
    "tone",
    "wants_colour",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Some characters and the colour behind them."""

    text: str
    background: str | None = None
    """A colour such as ``#ffcc00``, or None."""
    bold: bool = False


Line: TypeAlias = Sequence[Span]
Lines: TypeAlias = Sequence[Line]


def plain(lines: Iterable[Line]) -> str:
    """The characters alone."""
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def coloured(lines: Iterable[Line], file: TextIO, width: int) -> str:
    """The characters with the colours that a terminal can show."""
    from rich.console import Console

    console = Console(file=file, width=width, highlight=False, soft_wrap=True)
    with console.capture() as captured:
        for line in lines:
            console.print(_rich(line))
    return captured.get().rstrip("\n")


def _rich(line: Line) -> Text:
    from rich.style import Style
    from rich.text import Text

    text = Text()
    for span in line:
        front = "black" if span.background else None
        text.append(span.text, Style(color=front, bgcolor=span.background, bold=span.bold))
    return text


def wants_colour(file: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the output is a terminal with colours, and the user has not disabled them.

    >>> import io
    >>> wants_colour(io.StringIO(), {})
    False
    """
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return file.isatty()


def hue(number: int, count: int) -> int:
    """The colour of one of so many things, in degrees; neighbours look different.

    >>> [hue(i, 4) for i in range(4)]
    [210, 300, 30, 120]
    """
    return (210 + number * 360 // max(count, 1)) % 360


def hues(holders: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """A colour for each set of ranks."""
    order = sorted(set(holders))
    return {ranks: hue(number, len(order)) for number, ranks in enumerate(order)}


def tone(degrees: int) -> str:
    """A light background of a hue.

    >>> tone(210)
    '#94bfeb'
    """
    return _hex(*colorsys.hls_to_rgb(degrees / 360, 0.75, 0.68))


def heat(part: float) -> str:
    """A background for an amount between 0 and 1: the more, the stronger.

    >>> heat(0.0), heat(1.0)
    ('#e7eff9', '#6ea9e7')
    """
    return _hex(*colorsys.hls_to_rgb(211 / 360, 0.94 - 0.27 * part, 0.6 + 0.12 * part))


def _hex(*channels: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
