"""What ``verify`` and ``diff`` have in common: how two checkpoints are named, read and told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import click

__all__ = ["told", "with_options"]


class _Report(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Report)
C = TypeVar("C", bound=Callable[..., int])

_OPTIONS = (
    click.option(
        "--memory", default="256MiB", show_default=True, help="The most memory for buffers."
    ),
    click.option("--rules", help="How files of ranks of A are cut: a family, or a TOML file."),
    click.option("--mesh", help='The mesh of files of ranks of A, such as "tp=4".'),
    click.option("--b-rules", help="How files of ranks of B are cut."),
    click.option("--b-mesh", help="The mesh of files of ranks of B."),
    click.option("--quiet", is_flag=True, help="No progress bar."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def with_options(command: C) -> C:
    """The options of a command that reads one or two checkpoints in full."""
    for option in reversed(_OPTIONS):  # the last one that is added is shown first
        command = option(command)
    return command


def told(verb: str, compare: Callable[..., R], words: Mapping[str, Any]) -> R:
    """Call what compares with the words of the command line, and print what it reports."""
    from reshard.cli.meter import byte_meter
    from reshard.cli.output import print_json

    given = dict(words)
    quiet, as_json = given.pop("quiet"), given.pop("as_json")
    with byte_meter(verb, quiet=quiet) as progress:
        report = compare(given.pop("a"), given.pop("b"), progress=progress, **given)
    print_json(report.to_dict()) if as_json else print(report)
    return report
