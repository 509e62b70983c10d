"""Specs as text that travels between ranks: JSON with few layouts and many names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reshard.errors import FormatError, ReshardError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.text import quoted

__all__ = ["SCHEMA", "specs_from_text", "specs_to_text"]

SCHEMA = "reshard.specs/1"
MAX_TEXT = 1 << 28
MAX_DIMS = 32


def specs_to_text(specs: Mapping[str, TensorSpec]) -> str:
    """Write specs; layouts, and specs that tensors share, are listed once."""
    layouts: dict[Layout, int] = {}
    kinds: dict[tuple[tuple[int, ...], str, int], int] = {}
    tensors: dict[str, int] = {}
    for name, spec in specs.items():
        layout = layouts.setdefault(spec.layout, len(layouts))
        tensors[name] = kinds.setdefault((spec.shape, spec.dtype, layout), len(kinds))
    data = {
        "schema": SCHEMA,
        "layouts": [layout.to_dict() for layout in layouts],
        "kinds": [*kinds],
        "names": [*tensors],
        "kind_of": [*tensors.values()],
    }
    return json.dumps(data, separators=(",", ":"))


def specs_from_text(text: str) -> dict[str, TensorSpec]:
    """Read what ``specs_to_text`` wrote; a text that is anything else is a FormatError."""
    if len(text) > MAX_TEXT:
        raise FormatError(f"specs of {len(text)} characters: at most {MAX_TEXT} work")
    try:
        return _read(json.loads(text))
    except FormatError:
        raise
    except (ReshardError, ValueError, RecursionError) as error:
        raise FormatError(f"the text of specs cannot be read: {error}") from None


def _read(data: object) -> dict[str, TensorSpec]:
    match data:
        case {
            "schema": str(schema),
            "layouts": list(layouts),
            "kinds": list(kinds),
            "names": list(names),
            "kind_of": list(kind_of),
        } if schema == SCHEMA:
            known = [_read_layout(json.dumps(layout)) for layout in layouts]
            specs = [_read_kind(kind, known) for kind in kinds]
            return _read_names(names, kind_of, specs)
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    raise FormatError(f'this is {quoted(found)} and not whole "{SCHEMA}"')


@lru_cache(maxsize=1024)
def _read_layout(text: str) -> Layout:
    """One object per layout, whichever rank sent it."""
    return Layout.from_json(text)


def _read_kind(data: Any, layouts: list[Layout]) -> TensorSpec:
    match data:
        case [list(shape), str(dtype), int(layout)] if len(shape) <= MAX_DIMS:
            if all(map(_is_size, (*shape, layout))) and layout < len(layouts):
                return _spec(tuple(shape), dtype, layouts[layout])
    raise FormatError(f"a kind is [shape, dtype, layout], and found {quoted(data)}")


@lru_cache(maxsize=1 << 16)
def _spec(shape: tuple[int, ...], dtype: str, layout: Layout) -> TensorSpec:
    """One object per spec, so that comparing what ranks said is quick."""
    layout.dims(shape)
    return TensorSpec(shape, dtype, layout)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_names(
    names: list[Any], kind_of: list[Any], specs: list[TensorSpec]
) -> dict[str, TensorSpec]:
    if len(names) != len(kind_of):
        raise FormatError(f"{len(names)} names and {len(kind_of)} kinds of them: give one each")
    for name, kind in zip(names, kind_of, strict=True):
        if not isinstance(name, str) or not _is_size(kind) or kind >= len(specs):
            raise FormatError(
                f"{quoted(name)} is of kind {quoted(kind)}: expected a name and a number below "
                f"{len(specs)}"
            )
    read = dict(zip(names, map(specs.__getitem__, kind_of), strict=True))
    if len(read) != len(names):
        raise FormatError(f"{len(names)} names, of which {len(read)} are distinct: name each once")
    return read
