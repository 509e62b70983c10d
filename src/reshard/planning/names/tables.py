"""Renamed and joined tensors as a table, the same in TOML and in JSON.

In TOML it is a file of its own (``--names``) or the table ``[names]`` of a rules file:

"layers.{i}.qkv.weight" = { join = ["layers.{i}.q.weight", "layers.{i}.k.weight"], dim = 0 }
"layers.{i}.qkv.bias"   = { join = "layers.{i}.{part}.bias", rows = { q = 512, k = 128 } }
"layers.{i}.experts"    = { stack = "layers.{i}.expert.{e}", dim = 0 }
"embed.weight"          = { take = "tok_embeddings.weight", pad = { 0 = 128512 } }
"head.weight"           = "lm_head.weight"

In JSON it is the ``"names"`` of a saved plan.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import FormatError, ReshardError
from reshard.planning.names.sources import Join, Names, Source, Stacked, Take, stack, take
from reshard.text import quoted

__all__ = ["names_of", "parse_names", "read_names", "table_of"]

MAX_FILE = 1 << 24
MAX_NUMBER = (1 << 63) - 1


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


def table_of(names: Names) -> dict[str, Any]:
    """Write a table that `names_of` reads back.

    >>> table_of({"a": Stacked(("b", "c"), 1), "d": take("e", crop={0: (0, 4)})})
    {'a': {'stack': ['b', 'c'], 'dim': 1}, 'd': {'take': 'e', 'crop': {'0': [0, 4]}}}
    """
    return {name: _write_source(source) for name, source in names.items()}


def _write_source(source: Source) -> Any:
    match source:
        case Take(name, crop, index, pad):
            parts = {
                "crop": {str(dim): list(limits) for dim, limits in crop},
                "index": {str(dim): at for dim, at in index},
                "pad": {str(dim): size for dim, size in pad},
            }
            return {"take": name} | {key: part for key, part in parts.items() if part}
        case Join(names, dim, rows):
            table = {"join": list(names), "dim": dim}
            return table if rows is None else table | {"rows": list(rows)}
        case Stacked(names, dim):
            return {"stack": list(names), "dim": dim}
    return source


def _read_source(name: str, value: object) -> Source:
    match value:
        case str():
            return value
        case {"join": str(source), "rows": dict(rows), **rest} if _counts([*rows.values()]):
            parts = tuple(source.replace("{part}", part) for part in rows)
            return Join(parts, _dim(name, rest), tuple(rows.values()))
        case {"join": list(parts), "rows": list(rows), **rest} if _texts(parts) and _counts(rows):
            if len(parts) == len(rows):
                return Join(tuple(parts), _dim(name, rest), tuple(rows))
        case {"join": list(parts), **rest} if _texts(parts) and rest.get("rows") is None:
            return Join(tuple(parts), _dim(name, rest))
        case {"stack": str(part), **rest}:
            return stack(part, dim=_dim(name, rest))
        case {"stack": list(parts), **rest} if _texts(parts):
            return stack(*parts, dim=_dim(name, rest))
        case {"take": str(part), **rest} if set(rest) <= {"crop", "index", "pad"}:
            return take(
                part,
                crop=_by_dim(name, rest.get("crop", {}), _range),
                index=_by_dim(name, rest.get("index", {}), _number),
                pad=_by_dim(name, rest.get("pad", {}), _number),
            )
    raise FormatError(
        f"{quoted(name)} in the names: give a name, or a table with join (and rows above 0), stack "
        "or take"
    )


def _dim(name: str, rest: Mapping[Any, object]) -> int:
    dim = _number(rest.get("dim", 0))
    if set(rest) - {"dim", "rows"} or dim is None:
        raise FormatError(f"{quoted(name)} in the names: beside join or stack only dim is known")
    return dim


def _by_dim(name: str, table: object, read: Callable[[object], Any]) -> dict[int, Any]:
    """A table from dims to numbers or ranges; its keys are text, in TOML as in JSON.

    Plans saved by version 0.1 have lists instead: ``[[dim, start, stop]]`` or ``[[dim, number]]``.
    """
    if isinstance(table, list) and all(isinstance(row, list) and len(row) > 1 for row in table):
        table = {str(dim): rest if len(rest) > 1 else rest[0] for dim, *rest in table}
    if isinstance(table, dict) and all(key.isascii() and key.isdigit() for key in table):
        found = {int(key): read(value) for key, value in table.items()}
        if None not in found.values():
            return found
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


def _counts(values: list[object]) -> bool:
    numbers = [_number(value) for value in values]
    return bool(numbers) and all(number is not None and number > 0 for number in numbers)


def _texts(values: list[object]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)
