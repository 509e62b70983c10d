"""Colours of sets of ranks: on one page the same colour means exactly the same set.

There are 16 fills, each plain or with one of five textures: 96 looks. A page that draws more
sets leaves the rest without a colour, and their cells are told apart by their labels.

>>> colours = Colours()
>>> [str(colours.of(ranks)) for ranks in ((0,), (1,), (0,))]
['c0', 'c1', 'c0']
>>> Look(17).fill, Look(17).texture
(1, 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["FILLS", "LOOKS", "TEXTURES", "Colours", "Look", "palette"]

HUES = 8
LIGHT = ((0.88, 0.075), (0.74, 0.125))
DARK = ((0.36, 0.075), (0.50, 0.100))
"""Lightness and chroma (OKLCH) of the two rows of fills, for a light and a dark page."""

FILLS = HUES * 2
TEXTURES = ("", "M-2,10 L10,-2 M-2,2 L2,-2 M6,10 L10,6", "M-2,-2 L10,10 M6,-2 L10,2 M-2,6 L2,10",
            "M0,4 H8", "M4,0 V8", "M0,4 H8 M4,0 V8")  # fmt: skip
"""Lines of a tile of 8 by 8: none, rising, falling, across, down, a grid."""
LOOKS = FILLS * len(TEXTURES)


@dataclass(frozen=True, slots=True)
class Look:
    """One of the looks of a cell: a fill and a texture."""

    number: int

    @property
    def fill(self) -> int:
        """The fill, as a number."""
        return self.number % FILLS

    @property
    def texture(self) -> int:
        """The texture over it; 0 is none."""
        return self.number // FILLS

    def __str__(self) -> str:
        return f"c{self.number}"


@dataclass(slots=True)
class Colours:
    """The looks that a page has given to sets of ranks so far."""

    known: dict[tuple[int, ...], Look] = field(default_factory=dict)
    num_left_out: int = 0
    """Sets for which there was no look left."""
    _left_out: set[tuple[int, ...]] = field(default_factory=set)

    def of(self, ranks: tuple[int, ...]) -> Look | None:
        """The look of a set of ranks, always the same on a page; None where all are taken."""
        if ranks not in self.known and len(self.known) < LOOKS:
            self.known[ranks] = Look(len(self.known))
        if ranks not in self.known:
            self._left_out.add(ranks)
            self.num_left_out = len(self._left_out)
        return self.known.get(ranks)

    @property
    def textures(self) -> list[int]:
        """The textures in use."""
        return sorted({look.texture for look in self.known.values()} - {0})


def palette(dark: bool) -> list[str]:
    """The fills in the order in which they are given away, so that neighbours look different.

    >>> palette(False)[:2]
    ['#abdfff', '#ffc4c8']
    """
    rows = DARK if dark else LIGHT
    return [
        _hex(*rows[number // HUES], 240 + 3 * number * 360 / HUES + 22.5 * (number // HUES))
        for number in range(FILLS)
    ]


def _hex(lightness: float, chroma: float, degrees: float) -> str:
    """A colour of OKLCH in sRGB; what sRGB cannot show is cut off."""
    angle = math.radians(degrees)
    a, b = chroma * math.cos(angle), chroma * math.sin(angle)
    long, medium, short = (
        (lightness + x * a + y * b) ** 3
        for x, y in ((0.3963378, 0.2158038), (-0.1055613, -0.0638542), (-0.0894842, -1.2914855))
    )
    channels = (
        4.0767417 * long - 3.3077116 * medium + 0.2309699 * short,
        -1.2684380 * long + 2.6097574 * medium - 0.3413194 * short,
        -0.0041961 * long - 0.7034186 * medium + 1.7076147 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in channels)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
