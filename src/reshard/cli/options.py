"""Options that several commands take, and what people write in them, read into values.

Shapes, sides of a move, models, rules, ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.errors import FormatError, LayoutError, NotationError, PlanError, ReshardError
from reshard.text import log

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.layout.spec import TensorSpec


MAX_ELEMENTS = 1 << 56
MAX_CONFIG = 1 << 24

F = TypeVar("F", bound=Callable[..., Any])

_TIMES = re.compile(r"\d+(x\d+)+\Z", re.ASCII)


def model_option(text: str) -> Callable[[F], F]:
    """The option --model; a shell completes the names of known models."""

    def models(_: Any, __: Any, typed: str) -> list[str]:
        from reshard.rules.models import PRESETS

        return [name for name in PRESETS if name.startswith(typed)]

    return click.option("--model", help=text, shell_complete=models)


def rules_option(name: str, text: str) -> Callable[[F], F]:
    """An option for rules; a shell completes the names of families."""

    def families(_: Any, __: Any, typed: str) -> list[str]:
        from reshard.rules import Rules

        return [family for family in Rules.families() if family.startswith(typed)]

    return click.option(name, help=text, shell_complete=families)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
memory_option = click.option(
    "--memory", default="256MiB", show_default=True, help="Maximum memory for buffers."
)
replicate_option = click.option("--replicate", multiple=True, metavar="AXIS", help=(
    "An axis of a mesh along which the rules replicate everything, on purpose; may be repeated."
))  # fmt: skip


def add_common_options(command: click.Command) -> None:
    """Add -q and -v to a command; both may also stand before its name."""
    texts = {
        "quiet": "No progress bar, no line about written files.",
        "verbose": "Show log messages, and the code behind an error.",
    }
    for name, text in texts.items():
        names, how = [f"-{name[0]}", f"--{name}"], {"is_flag": True, "expose_value": False}
        command.params.append(click.Option(names, **how, callback=_remember, help=text))


def _remember(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Keep a flag for all of the command, whichever side of its name it stands on."""
    flags = context.ensure_object(dict)
    if value and option.name == "verbose" and not flags.get("verbose"):
        import logging

        handler = logging.StreamHandler()
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        context.call_on_close(lambda: log.setLevel(logging.NOTSET))
        context.call_on_close(lambda: log.removeHandler(handler))
    flags[option.name] = value or flags.get(option.name, False)


def command_of(verb: str, options: Mapping[str, str | Sequence[str] | None]) -> str:
    """A command with its options; a sequence is an option that is repeated.

    >>> command_of("plan", {"from_fsdp": "dp", "shape": None, "replicate": ["ep", "cp"]})
    'reshard plan --from-fsdp dp --replicate ep --replicate cp'
    """
    words = ["reshard", verb]
    for name, value in options.items():
        for one in [value] if isinstance(value, str) else value or ():
            words += [f"--{name.replace('_', '-')}", one] if one else []
    return shlex.join(words)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read ``8192,4096`` or ``8192x4096``; an empty text is the shape of a 0-d tensor.

    >>> parse_shape("8192,4096"), parse_shape("")
    ((8192, 4096), ())
    """
    inside = text.strip().strip("()[]").removesuffix(",")
    sizes: list[int] = []
    for word in inside.split("x" if _TIMES.match(inside) else ",") if inside.strip() else ():
        size, digits = word.strip(), word.strip().removeprefix("-")
        if not digits.isascii() or not digits.isdigit():
            raise NotationError(
                f'"{size}" in shape "{text}" is not a size: expected numbers such as 8192,4096'
            )
        if size.startswith("-"):
            raise LayoutError(f'size {size} in shape "{text}" is negative: sizes are >= 0')
        if len(digits) > 18:
            raise LayoutError(f'size {size[:20]}... in shape "{text[:60]}" is too large')
        sizes.append(int(digits))
    if prod(size or 1 for size in sizes) > MAX_ELEMENTS:
        raise LayoutError(f'shape "{text}" has more than {MAX_ELEMENTS} elements: check the sizes')
    return tuple(sizes)


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


def model_config(name: str) -> Mapping[str, Any]:
    """The config of a known model, of a ``config.json`` file, or of a folder that has one."""
    import json

    from reshard.rules.models import preset

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise FormatError(f'"{name}" has no config.json: name the folder of a model that has')
    if path.suffix != ".json":
        try:
            return preset(name)
        except ReshardError as error:
            raise type(error)(f"{error}; or name a config.json, or its folder") from None
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise FormatError(f'"{path}" is larger than {MAX_CONFIG} bytes: is it a config.json?')
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f'"{path}" is not JSON ({error}): expected a config.json') from None
    if not isinstance(config, dict):
        raise FormatError(f'"{path}" holds a {type(config).__name__}: expected a config.json')
    return config


def model_specs(
    config: Mapping[str, Any],
    mesh: Mesh,
    rules: str | None = None,
    fsdp: str | None = None,
    replicate: str | None = None,
    dtype: str | None = None,
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The specs of all tensors of a model on one side of a move, and notes about its layouts."""
    from reshard.layout.spec import TensorSpec
    from reshard.rules import Rules
    from reshard.rules.models import tensors

    model = tensors(config)
    shapes = {name: shape for name, (shape, _) in model.items()}
    loaded = Rules.load(rules, config=config, fsdp=fsdp, replicate=replicate)
    layouts = loaded.layouts(shapes, mesh)
    specs = {
        name: TensorSpec(shape, dtype or usual, layouts[name])
        for name, (shape, usual) in model.items()
    }
    return specs, loaded.notes(layouts, shapes, mesh)


def parse_model_mesh(text: str, option: str) -> Mesh:
    from reshard.layout.mesh import Mesh

    mesh, colon, layout = text.partition(":")
    if colon:
        raise PlanError(
            f'{option} has the layout "{layout.strip()}": with --model the layouts come from '
            f'rules; give the mesh alone, "{mesh.strip()}"'
        )
    return Mesh.parse(mesh)


def replicated(
    axes: Sequence[str], sides: Sequence[tuple[Mesh | str | None, str | None]]
) -> list[str | None]:
    """The axes of ``--replicate`` for each side of a request, given as a mesh and its FSDP axes.

    >>> replicated(["dp"], [("dp=2 tp=4", "dp"), ("dp=2", None), (None, None)])
    [None, 'dp', None]
    """
    if not axes:
        return [None for _ in sides]
    from reshard.layout.mesh import Mesh

    meshes = [Mesh.parse(mesh) if isinstance(mesh, str) else mesh for mesh, _ in sides]
    free = [
        [axis for axis in (mesh.axes if mesh else ()) if axis not in (fsdp or "").split()]
        for mesh, (_, fsdp) in zip(meshes, sides, strict=True)
    ]
    for axis in axes:
        if not any(axis in one for one in free):
            known = ", ".join(dict.fromkeys(name for one in free for name in one)) or "no axis"
            raise PlanError(
                f'--replicate "{axis}": the meshes have {known} to replicate along: give a mesh '
                "that has it (with rules, for per-rank files), and leave it out of the FSDP axes"
            )
    return [" ".join(axis for axis in axes if axis in one) or None for one in free]
