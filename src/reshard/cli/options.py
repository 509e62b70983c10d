"""Options that several commands take, and how ``verify`` and ``diff`` report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from reshard.rules import Rules

__all__ = [
    "MODELS", "REPLICATE", "RULES", "add_manners", "compare_and_report", "with_options",
    "with_replicas",
]  # fmt: skip

REPLICATE = "An axis of the mesh along which the rules replicate everything, on purpose."


def MODELS(_: Any, __: Any, typed: str) -> list[str]:  # noqa: N802
    """What a shell completes after --model."""
    from reshard.rules.models import PRESETS

    return [name for name in PRESETS if name.startswith(typed)]


def RULES(_: Any, __: Any, typed: str) -> list[str]:  # noqa: N802
    """What a shell completes after --rules."""
    from reshard.rules import Rules

    return [name for name in Rules.families() if name.startswith(typed)]


def add_manners(command: click.Command) -> None:
    """Add -q and -v to a command; both may also stand before its name."""
    texts = (
        ("quiet", "No progress bar, no line about written files."),
        ("verbose", "Show log messages, and the code behind an error."),
    )
    for name, text in texts:
        words = [f"-{name[0]}", f"--{name}"]
        option = click.Option(
            words, is_flag=True, expose_value=False, callback=_remember, help=text
        )
        command.params.append(option)


def _remember(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Keep a flag for all of the command, whichever side of its name it stands on."""
    said = context.ensure_object(dict)
    if value and option.name == "verbose" and not said.get("verbose"):
        import logging

        from reshard.text import log

        handler = logging.StreamHandler()
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        context.call_on_close(lambda: log.setLevel(logging.NOTSET))
        context.call_on_close(lambda: log.removeHandler(handler))
    said[option.name] = value or said.get(option.name, False)


class _Report(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Report)
C = TypeVar("C", bound=Callable[..., int])

_OPTIONS = (
    click.option(
        "--memory", default="256MiB", show_default=True, help="Maximum memory for buffers."
    ),
    click.option(
        "--rules",
        help="Rules of the per-rank files of A: a family, or a TOML file.",
        shell_complete=RULES,
    ),
    click.option("--mesh", help='The mesh of the per-rank files of A, such as "tp=4".'),
    click.option("--b-rules", help="Rules of the per-rank files of B.", shell_complete=RULES),
    click.option("--b-mesh", help="The mesh of the per-rank files of B."),
    click.option("--replicate", multiple=True, metavar="AXIS", help=REPLICATE),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def with_options(command: C) -> C:
    """The options of a command that reads one or two checkpoints in full."""
    for option in reversed(_OPTIONS):  # the last one that is added is shown first
        command = option(command)
    return command


def with_replicas(
    axes: Sequence[str], sides: Sequence[tuple[str | None, str | None]]
) -> list[Rules | str | None]:
    """The rules of each side, given with its mesh, with the axes of ``--replicate``."""
    if not axes:
        return [rules for rules, _ in sides]
    from reshard.cli.parsing import replicated
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

    meshes = [Mesh.parse(mesh) if mesh and rules else None for rules, mesh in sides]
    copies = replicated(axes, [(mesh, None) for mesh in meshes])
    return [
        rules if axes is None or rules is None else Rules.load(rules, replicate=axes)
        for (rules, _), axes in zip(sides, copies, strict=True)
    ]


def compare_and_report(verb: str, compare: Callable[..., R], words: Mapping[str, Any]) -> R:
    """Compare two checkpoints as the command line asks, and print the report."""
    from reshard.cli.output import byte_meter, fitted, print_json

    given = dict(words)
    as_json = given.pop("as_json")
    sides = [(given["rules"], given["mesh"]), (given["b_rules"], given["b_mesh"])]
    given["rules"], given["b_rules"] = with_replicas(given.pop("replicate"), sides)
    with byte_meter(verb) as progress:
        report = compare(given.pop("a"), given.pop("b"), progress=progress, **given)
    print_json(verb, report.to_dict()) if as_json else print(fitted(str(report)))
    return report
