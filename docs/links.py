"""Checks that every link inside the built site leads to a file and an anchor that exist.

python docs/links.py docs/_build/html
"""

import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

HREF = re.compile(r'(?:href|src)="([^"]+)"')
ELSEWHERE = re.compile(r"[a-z]+:|//")


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))


def is_broken(link: str, page: Path) -> bool:
    name, _, anchor = link.partition("#")
    name = unquote(name.partition("?")[0])
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".html" and unquote(anchor) not in anchors(target)


def main(folder: Path) -> int:
    anchors.cache_clear()
    pages = sorted(path.resolve() for path in folder.rglob("*.html"))
    num_links, broken = 0, []
    for page in pages:
        links = set(HREF.findall(page.read_text(encoding="utf-8")))
        inside = sorted(link for link in links if not ELSEWHERE.match(link))
        num_links += len(inside)
        broken += [f"{page}: {link}" for link in inside if is_broken(link, page)]
    for line in broken[:40]:
        print(f"broken link in {line}", file=sys.stderr)
    print(f"{num_links:,} links inside {len(pages):,} pages, {len(broken)} broken")
    return 1 if broken or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
