"""The long description of the package: README.md, with plain paths for its relative links.

A relative link works in a checkout and nowhere else, and where the project will be published is
not decided, so there is no address to put before it. Hatchling reads this when it builds a wheel.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
NOTE = "\n\nPaths in parentheses are files of the source distribution.\n"


def long_description(text: str) -> str:
    """The text with the path after the words of each relative link, and no picture.

    >>> print(long_description("# a\\n\\n[plans](docs/plans.md), [b](https://b), ![c](c.svg)"))
    # a
    <BLANKLINE>
    Paths in parentheses are files of the source distribution.
    <BLANKLINE>
    plans (docs/plans.md), [b](https://b), *c* (c.svg)
    """
    title, _, rest = text.partition("\n")
    parts = FENCE.split(rest)
    parts[::2] = [LINK.sub(_plain, part) for part in parts[::2]]  # code stays as it is
    return title + NOTE + "".join(parts)


def _plain(found: re.Match[str]) -> str:
    is_picture, words, path = found.groups()
    return f"*{words}* ({path})" if is_picture else f"{words} ({path})"


class LongDescription(MetadataHookInterface):
    """Puts the long description into the metadata of a build."""

    def update(self, metadata: dict[str, object]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": long_description(text)}
