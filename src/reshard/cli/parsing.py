"""What people write on the command line, read into values: shapes, sides, models, ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import FormatError, LayoutError, NotationError, PlanError

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.layout.spec import TensorSpec

__all__ = [
    "ModelSide",
    "model_config",
    "model_specs",
    "parse_lost",
    "parse_model_mesh",
    "parse_shape",
    "parse_side",
    "replicated",
]

MAX_ELEMENTS = 1 << 56
MAX_CONFIG = 1 << 24

_TIMES = re.compile(r"\d+(x\d+)+\Z", re.ASCII)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read ``8192,4096`` or ``8192x4096``; an empty text is the shape of a 0-d tensor.

    >>> parse_shape("8192,4096"), parse_shape("")
    ((8192, 4096), ())
    """
    inside = text.strip().strip("()[]").removesuffix(",")
    between = "x" if _TIMES.match(inside) else ","
    words = inside.split(between) if inside.strip() else []
    sizes = [_size(word.strip(), text) for word in words]
    if prod(size or 1 for size in sizes) > MAX_ELEMENTS:
        raise LayoutError(f'shape "{text}" has more than {MAX_ELEMENTS} elements: check the sizes')
    return tuple(sizes)


def _size(word: str, text: str) -> int:
    digits = word.removeprefix("-")
    if not digits.isascii() or not digits.isdigit():
        raise NotationError(
            f'"{word}" in shape "{text}" is not a size: expected numbers such as 8192,4096'
        )
    if word.startswith("-"):
        raise LayoutError(f'size {word} in shape "{text}" is negative: sizes are >= 0')
    if len(digits) > 18:
        raise LayoutError(f'size {word[:20]}... in shape "{text[:60]}" is too large')
    return int(digits)


def parse_side(text: str, option: str) -> Layout:
    """Read ``dp=2 tp=4: (dp tp) -``, a mesh and a layout.

    >>> parse_side("tp=2 @ 8-9: - tp", "--to")
    Layout(Mesh(tp=2, ranks=range(8, 10)), '- tp')
    """
    from reshard.layout.layout import Layout
    from reshard.layout.notation import from_placements

    if ":" not in text:
        answer = from_placements((), text)
        if answer is not None:
            raise NotationError(f'{option}: {answer}, after a mesh and a colon, as in "tp=2: - tp"')
        raise NotationError(
            f'{option} "{text}" has no layout: expected "MESH: LAYOUT", such as "tp=2: - tp"'
        )
    return Layout.parse(text)


def parse_lost(text: str) -> tuple[int, ...]:
    """Read the ranks of ``--without``."""
    from reshard.layout.mesh import parse_ranks

    return tuple(parse_ranks(text, f"--without {text}"))


@dataclass(frozen=True, slots=True)
class ModelSide:
    """How one side of a model's move is cut: a mesh, rules, axes of FSDP and of replicas."""

    option: str
    mesh: Mesh
    rules: str | None = None
    fsdp: str | None = None
    replicate: str | None = None
    dtype: str | None = None


def model_config(name: str) -> Mapping[str, Any]:
    """The config of a known model, of a ``config.json`` file, or of a folder that has one."""
    import json

    from reshard.rules.models import preset

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        return preset(name)
    if path.stat().st_size > MAX_CONFIG:
        raise FormatError(f'"{name}" is larger than {MAX_CONFIG} bytes: is it a config.json?')
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f'"{name}" is not JSON ({error}): expected a config.json') from None
    if not isinstance(config, dict):
        raise FormatError(f'"{name}" holds a {type(config).__name__}: expected a config.json')
    return config


def model_specs(
    config: Mapping[str, Any], side: ModelSide
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The specs of all tensors of a model on one side of a move, and notes about its layouts."""
    from reshard.layout.spec import TensorSpec
    from reshard.rules import Rules
    from reshard.rules.models import tensors

    model = tensors(config)
    shapes = {name: shape for name, (shape, _) in model.items()}
    rules = Rules.load(side.rules, config=config, fsdp=side.fsdp, replicate=side.replicate)
    layouts = rules.layouts(shapes, side.mesh)
    specs = {
        name: TensorSpec(shape, side.dtype or dtype, layouts[name])
        for name, (shape, dtype) in model.items()
    }
    return specs, [f"{side.option}: {note}" for note in rules.notes(layouts, shapes, side.mesh)]


def parse_model_mesh(text: str, option: str) -> Mesh:
    """Read the mesh of one side of a model's move."""
    from reshard.layout.mesh import Mesh

    mesh, colon, layout = text.partition(":")
    if colon:
        raise PlanError(
            f'{option} has the layout "{layout.strip()}": with --model the layouts come from '
            f'rules; give the mesh alone, "{mesh.strip()}"'
        )
    return Mesh.parse(mesh)


def replicated(
    axes: Sequence[str], sides: Sequence[tuple[Mesh | None, str | None]]
) -> list[str | None]:
    """The axes of ``--replicate`` for each side of a request, given as a mesh and its FSDP axes.

    >>> from reshard.layout.mesh import Mesh
    >>> replicated(["dp"], [(Mesh(dp=2, tp=4), "dp"), (Mesh(dp=2), None), (None, None)])
    [None, 'dp', None]
    """
    free = [
        [axis for axis in (mesh.axes if mesh else ()) if axis not in (fsdp or "").split()]
        for mesh, fsdp in sides
    ]
    for axis in axes:
        if not any(axis in one for one in free):
            known = ", ".join(dict.fromkeys(name for one in free for name in one)) or "no axis"
            raise PlanError(f'--replicate "{axis}": the meshes have {known} to replicate along')
    return [" ".join(axis for axis in axes if axis in one) or None for one in free]
