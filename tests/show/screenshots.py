"""Pictures of the page for README and docs, made in a headless Chromium: ``make screenshots``."""

from __future__ import annotations

import struct
import sys
import tempfile
import zlib
from pathlib import Path

from reshard.show.page import render
from reshard.show.page.document import Footer
from tests.moves import model_plan
from tests.show.browser import Browser, Tab, find_chromium

MAX_BYTES = 150_000
SITE = Path(__file__).parents[2] / "docs/_build/html/index.html"


def packed(png: bytes) -> bytes:
    """The same picture, compressed as far as it goes; browsers are in a hurry."""
    at, parts, pixels = 8, [], b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            pixels += png[at + 8 : at + 8 + size]
        else:
            parts.append((kind, png[at + 8 : at + 8 + size]))
        at += 12 + size
    parts.insert(-1, (b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
    chunks = [kind + data for kind, data in parts]
    return png[:8] + b"".join(
        struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks
    )


def shoot(tab: Tab, path: Path) -> None:
    """Write what the tab shows; a picture of the repository is small."""
    data = packed(tab.screenshot())
    if len(data) > MAX_BYTES:
        raise SystemExit(f"{path} has {len(data)} bytes, and at most {MAX_BYTES} are kept")
    path.write_bytes(data)
    print(f"wrote {path}, {len(data):,} bytes")


def main(folder: Path) -> None:
    """Take all pictures."""
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium on PATH: install it, or set RESHARD_CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    plan = model_plan("llama-3-8b", "fsdp=16", "dp=2 tp=8", fsdp="fsdp")
    command = 'reshard plan --model llama-3-8b --from fsdp=16 --to "dp=2 tp=8" ...'
    text = render(plan, footer=Footer(command, "llama-3-8b"))
    browser = Browser(program)
    with tempfile.TemporaryDirectory() as place:
        tab = browser.tab(1120, 670)
        tab.show(Path(place, "page.html"), text)
        for name, dark in (("page.png", False), ("page-dark.png", True)):
            tab.resize(1120, 670, dark=dark)
            tab.run("scrollTo(0, 0)")
            x, y = tab.run(
                "(() => { const b = document.querySelector("
                "\".piece[data-side='0'][data-number='3'] .face\").getBoundingClientRect();"
                "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
            )
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            tab.until("getComputedStyle(document.querySelector('.piece:not(.lit)')).opacity < 0.5")
            shoot(tab, folder / name)
        tab.resize(390, 800, touch=True, scale=1.5)
        tab.open(Path(place, "page.html").as_uri())
        tab.tap(".piece[data-side='1'][data-number='2']")
        tab.until("getComputedStyle(document.querySelector('.piece:not(.lit)')).opacity < 0.5")
        top = "document.querySelector('.move').getBoundingClientRect().top + scrollY"
        tab.run(f"scrollTo(0, {top} - 60)")
        shoot(tab, folder / "page-phone.png")
    if SITE.is_file():
        tab = browser.tab(1000, 780)
        tab.open(SITE.as_uri())
        shoot(tab, folder / "docs.png")
    else:
        print(f"no docs.png: {SITE} is not there, run make docs first")
    browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
