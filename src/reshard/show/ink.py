"""Text with coloured backgrounds, and the same text plain.

>>> line = [Span("rank 0", "#ffcc00"), Span(" | ")]
>>> plain([line])
'rank 0 |'
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeAlias

__all__ = ["Line", "Span", "coloured", "heat", "hues", "plain", "wants_colour"]


@dataclass(frozen=True, slots=True)
class Span:
    """Some characters and the colour behind them."""

    text: str
    background: str | None = None
    """A colour such as ``#ffcc00``, or None."""
    bold: bool = False


Line: TypeAlias = Sequence[Span]


def plain(lines: Iterable[Line]) -> str:
    """The characters alone."""
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def coloured(lines: Iterable[Line], file: TextIO, width: int) -> str:
    """The characters with the colours that a terminal can show."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    console = Console(file=file, width=width, highlight=False, soft_wrap=True)
    with console.capture() as captured:
        for line in lines:
            text = Text()
            for span in line:
                front = "black" if span.background else None
                text.append(span.text, Style(color=front, bgcolor=span.background, bold=span.bold))
            console.print(text)
    return captured.get().rstrip("\n")


def wants_colour(file: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the output is a terminal with colours, and the user has not disabled them.

    >>> import io
    >>> wants_colour(io.StringIO(), {})
    False
    """
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return file.isatty()


def hues(holders: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], str]:
    """A light background for each set of ranks; neighbours look different.

    >>> hues([(0,), (1,)])
    {(0,): '#94bfeb', (1,): '#ebbf94'}
    """
    degrees = [(210 + at * 360 // len(holders)) % 360 for at in range(len(holders))]
    tones = [_hex(*colorsys.hls_to_rgb(one / 360, 0.75, 0.68)) for one in degrees]
    return dict(zip(holders, tones, strict=True))


def heat(part: float) -> str:
    """A background for an amount between 0 and 1: the more, the stronger.

    >>> heat(0.0), heat(1.0)
    ('#e7eff9', '#6ea9e7')
    """
    return _hex(*colorsys.hls_to_rgb(211 / 360, 0.94 - 0.27 * part, 0.6 + 0.12 * part))


def _hex(*channels: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
