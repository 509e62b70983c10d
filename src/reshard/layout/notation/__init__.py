"""The layout notation: text such as ``(tp dp) - | on pp=2`` to words, and back.

``words`` are the values, ``parser`` reads them from text. A layout text is one word per tensor dim,
then suffixes. Neither knows meshes or shapes; ``layout.layout`` gives the words their meaning.

    layout   = dims { "|" suffix }               suffixes in this order, each at most once:
    suffix   = "on" at { at }                      at = axis "=" ints
             | op axis { axis }                    op = "sum" | "avg" | "max" | "min" | "prod"
             | "flat" cuts
             | "without" ranks                     ranks = range { "," range }
    dims     = word { word }
    word     = "-" | "..." | cuts
    cuts     = cut | "(" cut { cut } ")"
    cut      = axis [ "*" int | ":" int | "[" ints "]" | "~" ]
             | cuts "{" ints "}"
             | "{" segment { "," segment } "}"
    segment  = int [ "-" | cuts ]
    ints     = int { "," int }
    axis     = letter { letter | digit | "_" }

    >>> words = parse("(tp*128 dp) - | on pp=2")
    >>> words.dims[0]
    (Units('tp', 128), Chunk('dp'))
    >>> str(words)
    '(tp*128 dp) - | on pp=2'
"""

from reshard.layout.notation.parser import parse
from reshard.layout.notation.words import (
    OPS,
    Chunk,
    Cut,
    Cuts,
    Cyclic,
    Packed,
    Ragged,
    Segment,
    Units,
    Words,
    ZigZag,
    axes_of,
    format_cuts,
)

__all__ = [
    "OPS",
    "Chunk",
    "Cut",
    "Cuts",
    "Cyclic",
    "Packed",
    "Ragged",
    "Segment",
    "Units",
    "Words",
    "ZigZag",
    "axes_of",
    "format_cuts",
    "parse",
]
