"""Where the elements of a destination tensor come from, when names or shapes differ.

    names = {
        "layers.{i}.qkv.weight": join("layers.{i}.q.weight", "layers.{i}.k.weight", dim=0),
        "layers.{i}.qkv.bias":   join(dim=0, source="layers.{i}.{part}.bias", q=512, k=128, v=128),
        "layers.{i}.experts":    stack("layers.{i}.expert.{e}", dim=0),
        "embed.weight":          take("tok_embeddings.weight", pad={0: 128512}),
        "head.weight":           "lm_head.weight",
    }

A key names destination tensors; ``{i}`` stands for digits and means the same in the source. Names
without an entry come from the source tensor of the same name. One source may feed several names.
The same mapping is a table in TOML (``--names``, or ``[names]`` of a rules file) and in JSON:

"layers.{i}.qkv.bias" = { join = "layers.{i}.{part}.bias", rows = { q = 512, k = 128 } }
"embed.weight"        = { take = "tok_embeddings.weight", pad = { 0 = 128512 } }

>>> template_regex("layers.{i}.w{i}").fullmatch("layers.12.w12").groupdict()
{'i': '12'}
>>> fill_in("h.{i}.{j}", {"i": "12"}), placeholders("h.{i}.{j}")
('h.12.{j}', ('i', 'j'))
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias, TypeGuard

from reshard.errors import FormatError, PlanError, ReshardError, require_type
from reshard.text import quoted

MAX_FILE = 1 << 24
MAX_NUMBER = (1 << 63) - 1
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class Take:
    """One source tensor, or a part of it, perhaps padded."""

    name: str
    crop: tuple[tuple[int, tuple[int, int]], ...] = ()  # dims of which only start to stop is taken
    index: tuple[tuple[int, int], ...] = ()  # dims of which one index is taken; they are gone
    pad: tuple[tuple[int, int], ...] = ()  # dims that are filled with zeros at the end


@dataclass(frozen=True, slots=True)
class Join:
    """Several sources one after the other along a dim, or interleaved in groups of rows."""

    names: tuple[str, ...]
    dim: int
    rows: tuple[int, ...] | None = None  # of each source in one group, if they are interleaved


@dataclass(frozen=True, slots=True)
class Stacked:
    """Equal sources stacked along a new dim."""

    names: tuple[str, ...]
    dim: int


Source: TypeAlias = str | Take | Join | Stacked
"""What take, join and stack return: a dict of several of them is then one that `plan` takes."""
Names: TypeAlias = Mapping[str, Source]


def take(
    name: str,
    *,
    crop: Mapping[int, tuple[int, int]] | None = None,
    index: Mapping[int, int] | None = None,
    pad: Mapping[int, int] | None = None,
) -> Source:
    """A source tensor, cropped, indexed or padded on its way.

    >>> take("embed", pad={0: 128512})
    Take(name='embed', crop=(), index=(), pad=((0, 128512),))
    """
    advice = "give a dict by dim, as crop={0: (0, 4)}, index={0: 3} or pad={0: 16}"
    options: dict[str, Any] = {"crop=": crop, "index=": index, "pad=": pad}
    for what, by_dim in options.items():
        require_type({} if by_dim is None else by_dim, Mapping, what, advice)
        for dim, numbers in (by_dim or {}).items():
            numbers = numbers if what == "crop=" else [numbers]
            require_type(numbers, Sequence, what, advice)
            for number in (dim, *numbers):
                require_type(number, SupportsIndex, what, advice)
    for limits in (crop or {}).values():
        if len(limits) != 2:
            raise PlanError(f"crop= got {limits}: give a start and a stop, as crop={{0: (0, 4)}}")
    ranges = sorted((dim, (low, high)) for dim, (low, high) in (crop or {}).items())
    sizes = (tuple(sorted((by_dim or {}).items())) for by_dim in (index, pad))
    return Take(name, tuple(ranges), *sizes)


def join(*names: str, dim: int = 0, source: str = "{part}", **rows: int) -> Source:
    """Sources joined along a dim, or interleaved in groups of so many rows of each.

    >>> join("q", "k", dim=0)
    Join(names=('q', 'k'), dim=0, rows=None)
    >>> join(dim=0, source="layers.0.{part}", q=512, k=128)
    Join(names=('layers.0.q', 'layers.0.k'), dim=0, rows=(512, 128))
    """
    if bool(names) == bool(rows):
        raise PlanError("join takes names, or parts with rows such as q=512, k=128: give one kind")
    require_type(dim, SupportsIndex, "dim=", "give the number of a dim, as dim=0")
    if names:
        return Join(names, dim)
    if any(not isinstance(count, int) or count < 1 for count in rows.values()):
        raise PlanError(f"join got rows {rows}: each part of a group has at least 1 row")
    return Join(tuple(source.replace("{part}", part) for part in rows), dim, tuple(rows.values()))


def stack(*names: str, dim: int = 0) -> Source:
    """Equal sources stacked along a new dim; one name with a free ``{e}`` counts from 0."""
    require_type(dim, SupportsIndex, "dim=", "give the number of a dim, as dim=0")
    return Stacked(names, dim)


Segments: TypeAlias = tuple[tuple[int, int, int], ...]
"""Runs of one dim: the start of each in the source, its start in the destination, its length."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One source tensor that provides a part of a destination tensor.

    Both are seen with the same dims: where one side lacks a dim, a dim of size 1 is inserted.
    """

    name: str
    moves: tuple[Segments, ...] = ()  # the runs of each dim; none where the tensor moves as it is
    have_insert: tuple[int, ...] = ()
    want_insert: tuple[int, ...] = ()


def placeholders(template: str) -> tuple[str, ...]:
    """The names in braces, in order, with repetitions."""
    return tuple(_PLACEHOLDER.findall(template))


def fill_in(template: str, values: Mapping[str, str]) -> str:
    """The template with values for some placeholders."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


@lru_cache(maxsize=4096)
def template_regex(template: str) -> re.Pattern[str]:
    """A regular expression that captures the digits; a repeated placeholder repeats its digits."""
    pieces = _PLACEHOLDER.split(template)
    parts = [re.escape(text) for text in pieces]
    for at, name in enumerate(pieces):
        if at % 2:
            parts[at] = rf"(?P={name})" if name in pieces[1:at:2] else rf"(?P<{name}>\d+)"
    return re.compile("".join(parts))


def read_names(path: str) -> dict[str, Source]:
    """Read a file of names, or the names of a rules file."""
    file = Path(path)
    if file.stat().st_size > MAX_FILE:
        raise FormatError(f"{path} is larger than {MAX_FILE} bytes: is it a file of names?")
    try:
        return parse_names(file.read_text(encoding="utf-8"))
    except ReshardError:
        raise
    except (ValueError, RecursionError) as error:  # tomllib also lets errors of int() through
        raise FormatError(f"{path} is not TOML: {' '.join(str(error).split())}") from None


def parse_names(text: str) -> dict[str, Source]:
    """Read TOML text.

    >>> parse_names('"a" = { stack = "b.{e}", dim = 1 }')
    {'a': Stacked(names=('b.{e}',), dim=1)}
    """
    table = tomllib.loads(text)
    match table:
        case {"tensors": dict(), "names": dict(names)}:  # a rules file
            return names_of(names)
    return names_of(table)


def names_of(table: Mapping[str, Any]) -> dict[str, Source]:
    """Read a table."""
    return {name: _read_source(name, value) for name, value in table.items()}


def check_names(names: object) -> None:
    """Refuse ``names=`` that is no dict by names."""
    advice = 'give a dict, as {"new": "old", "qkv": rs.join("q", "k", "v")}'
    require_type(names, Mapping, "names=", advice)
    assert isinstance(names, Mapping)
    for name in names:
        require_type(name, str, "a name in names=", advice)


def table_of(names: Names) -> dict[str, Any]:
    """Write a table that `names_of` reads back.

    >>> table_of({"a": Stacked(("b", "c"), 1), "d": take("e", crop={0: (0, 4)})})
    {'a': {'stack': ['b', 'c'], 'dim': 1}, 'd': {'take': 'e', 'crop': {'0': [0, 4]}}}
    """
    return {name: _table_of_source(source) for name, source in names.items()}


def _table_of_source(source: Source) -> Any:
    match source:
        case Take(name, crop, index, pad):
            parts = {
                "crop": {str(dim): list(limits) for dim, limits in crop},
                "index": {str(dim): at for dim, at in index},
                "pad": {str(dim): size for dim, size in pad},
            }
            return {"take": name, **{what: part for what, part in parts.items() if part}}
        case Join(parts, dim, rows):
            more = {} if rows is None else {"rows": list(rows)}
            return {"join": list(parts), "dim": dim, **more}
        case Stacked(parts, dim):
            return {"stack": list(parts), "dim": dim}
    return source


def _read_source(name: str, value: object) -> Source:
    match value:
        case str():
            return value
        case {"take": str(part), **rest} if set(rest) <= {"crop", "index", "pad"}:
            return take(
                part,
                crop=_by_dim(name, rest.get("crop", {}), _range),
                index=_by_dim(name, rest.get("index", {}), _number),
                pad=_by_dim(name, rest.get("pad", {}), _number),
            )
        case {"join": parts, **rest}:
            rows = rest.pop("rows", None)
            if isinstance(parts, str) and isinstance(rows, dict):
                parts, rows = [parts.replace("{part}", part) for part in rows], [*rows.values()]
            if _are_texts(parts) and rows is None:
                return Join(tuple(parts), _dim(name, rest))
            if _are_texts(parts) and _are_counts(rows) and len(parts) == len(rows):
                return Join(tuple(parts), _dim(name, rest), tuple(rows))
        case {"stack": parts, **rest}:
            parts = [parts] if isinstance(parts, str) else parts
            if _are_texts(parts):
                return Stacked(tuple(parts), _dim(name, rest))
    raise FormatError(
        f"{quoted(name)} in the names: give a name, or a table with join (and rows above 0), stack "
        "or take"
    )


def _dim(name: str, rest: Mapping[Any, object]) -> int:
    dim = _number(rest.get("dim", 0))
    if set(rest) - {"dim"} or dim is None:
        raise FormatError(f"{quoted(name)} in the names: beside join or stack only dim is known")
    return dim


def _by_dim(name: str, table: object, read: Callable[[object], Any]) -> dict[int, Any]:
    """A table from dims to numbers or ranges; its keys are text, in TOML as in JSON."""
    if isinstance(table, dict) and all(key.isascii() and key.isdigit() for key in table):
        by_dim = {int(key): read(value) for key, value in table.items()}
        if None not in by_dim.values():
            return by_dim
    raise FormatError(f"{quoted(name)} in the names: expected dims with numbers, as {{ 0 = 128 }}")


def _number(value: object) -> int | None:
    """A whole number that 64 bits hold; TOML has larger ones."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER:
        return value
    return None


def _range(value: object) -> tuple[int, int] | None:
    match value:
        case [int(low), int(high)] if None not in (_number(low), _number(high)):
            return low, high
    return None


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all((_number(value) or 0) > 0 for value in values)


def _are_texts(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and values != [] and all(isinstance(v, str) for v in values)
