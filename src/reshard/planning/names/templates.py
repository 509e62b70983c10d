"""Names with placeholders: ``layers.{i}.weight`` stands for all names with digits at ``{i}``.

>>> template_regex("layers.{i}.w{i}").fullmatch("layers.12.w12").groupdict()
{'i': '12'}
>>> fill_in("h.{i}.{j}", {"i": "12"}), placeholders("h.{i}.{j}")
('h.12.{j}', ('i', 'j'))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

__all__ = ["fill_in", "placeholders", "template_regex"]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def placeholders(template: str) -> tuple[str, ...]:
    """The names in braces, in order; one that appears twice is listed twice."""
    return tuple(_PLACEHOLDER.findall(template))


def fill_in(template: str, values: Mapping[str, str]) -> str:
    """The template with values for some placeholders."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)


@lru_cache(maxsize=4096)
def template_regex(template: str) -> re.Pattern[str]:
    """A regular expression that captures the digits; a repeated placeholder repeats its digits."""
    seen: set[str] = set()
    parts = []
    for at, text in enumerate(_PLACEHOLDER.split(template)):
        if at % 2 == 0:
            parts.append(re.escape(text))
        else:
            parts.append(rf"(?P={text})" if text in seen else rf"(?P<{text}>\d+)")
            seen.add(text)
    return re.compile("".join(parts))
