"""The pictures of README and docs, drawn by the library: `python docs/pictures.py` writes them.

tests/docs/test_site.py fails if a file is not what this makes.
"""

from html import escape
from pathlib import Path

import reshard as rs
from reshard.show.holdings import picture_of
from reshard.show.page.drawings import Colours, Drawing, drawing_of, palette

FOLDER = Path(__file__).parent / "pictures"
FILLS = palette(dark=False)
STYLE = """<style>
text { font: 12px ui-monospace, monospace; fill: #333 }
.title { font: 600 13px sans-serif }
.edge { font-size: 10px; fill: #777 }
rect { stroke: #fff }
.paper { fill: #fff; stroke: none }
</style>"""

WORDS = (
    ("tp=4: tp -", (8, 8), "rows over tp"),
    ("tp=4: - tp", (8, 8), "columns over tp"),
    ("dp=2 tp=2: dp tp", (8, 8), "rows over dp, columns over tp"),
    ("dp=2 tp=2: (dp tp) -", (8, 8), "rows over dp, then over tp"),
    ("dp=2 tp=2: tp -", (8, 8), "replicas along dp"),
    ("tp=4: tp -", (10, 8), "uneven: the last is shorter"),
    ("tp=3: tp[1,4,3] -", (8, 8), "given sizes"),
    ("tp=2: tp*3 -", (9, 8), "in whole units of 3"),
    ("tp=2: tp:2 -", (8, 8), "round-robin in blocks of 2"),
    ("tp=2: tp{4,2,2} -", (8, 8), "packed segments (fused qkv)"),
    ("cp=2: cp~ -", (8, 8), "zig-zag"),
    ("pp=2 tp=2: tp - | on pp=1", (8, 8), "only ranks of stage 1"),
)
"""Layout, shape and caption of each drawing of the notation."""


def drawing(text: str, shape: tuple[int, ...], colours: Colours) -> Drawing:
    return drawing_of(picture_of(rs.Layout.parse(text), shape, (32, 32)), colours)


def svg_of(one: Drawing, scale: float, at: tuple[float, float], labels: str = "") -> list[str]:
    """The rectangles of a drawing at a place, with the index at each edge."""
    x, y = at
    parts = []
    for rect in one.rects:
        left, top = x + rect.x * scale, y + rect.y * scale
        width, height = rect.width * scale, rect.height * scale
        fill = "#ddd" if rect.look is None else FILLS[rect.look % len(FILLS)]
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"><title>{escape(rect.title)}</title></rect>'
        )
        if rect.label and height >= 12:
            middle = f'x="{left + width / 2:.1f}" y="{top + height / 2 + 4:.1f}"'
            label = escape(f"{labels}{rect.label}")
            parts.append(f'<text {middle} text-anchor="middle">{label}</text>')
    for tick in one.left:
        place = f'x="{x - 5:.1f}" y="{y + tick.at * scale + 4:.1f}"'
        parts.append(f'<text class="edge" {place} text-anchor="end">{tick.text}</text>')
    for tick in one.top:
        place = f'x="{x + tick.at * scale:.1f}" y="{y - 5:.1f}"'
        parts.append(f'<text class="edge" {place} text-anchor="middle">{tick.text}</text>')
    return parts


def file(width: int, height: int, label: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{escape(label)}">'
    )
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return "\n".join([head, STYLE, paper, *parts, "</svg>", ""])


def move() -> str:
    """The move of the README: eight trainers hold rows, two servers want columns."""
    shape = (8192, 4096)
    have, want = "dp=2 tp=4: (dp tp) -", "tp=2 @ 8-9: - tp"
    figures = rs.plan(have, want, shape=shape, dtype="bfloat16").summary()
    said = (
        f"{figures.wire_bytes >> 20} MiB travel, the least possible, in "
        f"{figures.num_messages} messages and {figures.num_rounds} round"
    )
    colours = Colours()
    parts = [
        '<text class="title" x="60" y="24">Eight trainers hold rows</text>',
        f'<text x="60" y="42">{escape(have)}</text>',
        '<text class="title" x="430" y="24">Two servers want columns</text>',
        f'<text x="430" y="42">{escape(want)}</text>',
        *svg_of(drawing(have, shape, colours), 0.6, (60, 74), "rank "),
        *svg_of(drawing(want, shape, colours), 0.6, (430, 74), "rank "),
        '<path d="M318 152h72m-9 -7l9 7l-9 7" fill="none" stroke="#555" stroke-width="2"/>',
        f'<text x="350" y="258" text-anchor="middle">{said}</text>',
    ]
    return file(700, 276, "Eight trainers hold rows, two servers want columns", parts)


def notation() -> str:
    """The words of the notation, each on a small tensor."""
    parts = []
    for number, (text, shape, caption) in enumerate(WORDS):
        x, y = 30 + number % 4 * 200, 62 + number // 4 * 190
        parts += [
            f'<text x="{x}" y="{y - 34}">{escape(text)}</text>',
            f'<text class="edge" x="{x}" y="{y - 19}">{escape(caption)}</text>',
            *svg_of(drawing(text, shape, Colours()), 0.35, (x, y)),
        ]
    return file(820, 590, "Twelve layouts of the notation, each drawn on a small tensor", parts)


PICTURES = {"move.svg": move, "notation.svg": notation}

if __name__ == "__main__":
    for name, make in PICTURES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        print(f"wrote docs/pictures/{name}")
