"""`rs.exchange`: all ranks learn what all ranks hold and want.

The ranks of a trainer know the layout of the weights there, the ranks of an inference engine the
layout that they need; a plan needs both. Each rank describes its own side, and gets both.

    specs = rs.describe(model.state_dict())
    have, want = rs.exchange(have=specs)              # on a trainer's rank
    have, want = rs.exchange(want=specs)              # on an inference rank
    plan = rs.plan(have, want)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from reshard.errors import FormatError, LiveError, ReshardError, TensorError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.tensors.agreement import Agreement
from reshard.tensors.merging import merge_specs
from reshard.text import quoted

__all__ = ["SCHEMA", "exchange", "specs_from_text", "specs_to_text"]

Specs = Mapping[str, TensorSpec]

GIVE = "give rs.describe(state_dict), or a dict of rs.TensorSpec"
SCHEMA = "reshard.specs/1"
MAX_TEXT = 1 << 28
MAX_DIMS = 32


def exchange(
    have: Specs | None = None,
    want: Specs | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 60.0,
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Both sides of a move, as all ranks of the group described them together.

    Every rank of the group calls it, with what it holds, what it wants, both or neither. One name
    is one tensor: ranks that describe it on different sub-meshes hold replicas of it. Where shapes,
    dtypes or what a rank holds differ, all ranks get the same error.
    """
    if not dist.is_initialized():
        raise LiveError("exchange needs torch.distributed: call init_process_group first")
    ranks = Agreement(group, "an exchange of layouts", timeout, TensorError)
    texts = ranks.run(lambda: [_write("have", have or {}), _write("want", want or {})])
    # Many ranks send the same text: each is read once.
    reader = _Reader()
    read = {text: reader.read(text) for text in {one for both in texts.values() for one in both}}
    sides = ({rank: read[both[side]] for rank, both in texts.items()} for side in (0, 1))
    have_specs, want_specs = map(merge_specs, sides)
    return have_specs, want_specs


def _write(side: str, specs: Specs) -> str:
    if not isinstance(specs, Mapping):
        raise TensorError(f"{side}= is a {type(specs).__name__}: {GIVE}")
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            raise TensorError(f"{side}[{quoted(name)}] is a {type(spec).__name__}: {GIVE}")
    return specs_to_text(specs)


def specs_to_text(specs: Specs) -> str:
    """Write specs as JSON; layouts, and specs that tensors share, are listed once."""
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
    """Read what `specs_to_text` wrote; any other text raises a FormatError."""
    return _Reader().read(text)


class _Reader:
    """Reads the texts of several ranks; equal layouts and specs become one object.

    Merging compares what ranks describe, and is quick where that is the same object.
    """

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}
        self._specs: dict[tuple[tuple[int, ...], str, Layout], TensorSpec] = {}

    def read(self, text: str) -> dict[str, TensorSpec]:
        """The specs in a text, by name."""
        if len(text) > MAX_TEXT:
            raise FormatError(f"specs of {len(text)} characters: at most {MAX_TEXT} work")
        try:
            return self._read(json.loads(text))
        except FormatError:
            raise
        except (ReshardError, ValueError, RecursionError) as error:
            raise FormatError(f"the text of specs cannot be read: {error}") from None

    def _read(self, data: object) -> dict[str, TensorSpec]:
        match data:
            case {
                "schema": str(schema),
                "layouts": list(layouts),
                "kinds": list(kinds),
                "names": list(names),
                "kind_of": list(kind_of),
            } if schema == SCHEMA:
                known = [self._layout(json.dumps(layout)) for layout in layouts]
                specs = [self._spec(kind, known) for kind in kinds]
                return _read_names(names, kind_of, specs)
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise FormatError(f'this is {quoted(found)} and not whole "{SCHEMA}"')

    def _layout(self, text: str) -> Layout:
        if text not in self._layouts:
            self._layouts[text] = Layout.from_json(text)
        return self._layouts[text]

    def _spec(self, data: Any, layouts: list[Layout]) -> TensorSpec:
        match data:
            case [list(shape), str(dtype), int(layout)] if len(shape) <= MAX_DIMS:
                if all(map(_is_size, (*shape, layout))) and layout < len(layouts):
                    key = (tuple(shape), dtype, layouts[layout])
                    if key not in self._specs:
                        layouts[layout].dims(key[0])
                        self._specs[key] = TensorSpec(*key)
                    return self._specs[key]
        raise FormatError(f"a kind is [shape, dtype, layout], and found {quoted(data)}")


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
