"""``reshard inspect``, ``convert``, ``verify`` and ``diff``: the commands for checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.cli.options import (
    json_option,
    memory_option,
    replicate_option,
    replicated,
    rules_option,
)
from reshard.cli.output import (
    code_of,
    print_report,
    this_command,
    working,
    write_page,
)
from reshard.errors import UnfinishedError
from reshard.text import Report

if TYPE_CHECKING:
    from reshard.planning.names import Names
    from reshard.rules import Rules


UNFINISHED = 3

F = TypeVar("F", bound=Callable[..., int])
R = TypeVar("R", bound=Report)


@click.command()
@click.argument("path")
@click.option("--tree", is_flag=True, help="The tensors as a tree of their names.")
@rules_option("--rules", "Rules of per-rank files: a family such as llama, or a TOML file.")
@click.option("--mesh", help='The mesh of per-rank files, such as "tp=4".')
@replicate_option
@click.option("--html", metavar="FILE", help="Write the report as a page that lists every tensor.")
@json_option
def inspect(path: str, tree: bool, html: str | None, as_json: bool, **source: Any) -> int:
    """Report what a checkpoint holds, from its headers alone.

    Exit code 1 if it is damaged, 4 if it is of a kind that is not supported.

    \b
    reshard inspect ckpt                    tensors, layouts, files, damage
    reshard inspect ckpt --tree             as a tree of names
    reshard inspect ckpt --html ckpt.html   as a page with search and drawings
    reshard inspect shards --rules llama --mesh "tp=4"
    """
    from reshard.checkpoint.inspection import inspect as look

    [rules] = loaded_rules(source["replicate"], (source["rules"], source["mesh"]))
    report = look(path, rules, source["mesh"])
    if html is not None:
        from reshard.cli.checkpoint_page import render_stored
        from reshard.show.page.document import Footer

        write_page(html, render_stored(report, Footer(this_command())))
    print_report("inspect", report, as_json, report.tree() if tree else None)
    return code_of(report.ok, is_unsupported=not report.damage)


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--mesh", help='The mesh of the destination, such as "tp=2" or "dp=2 tp=4".')
@rules_option("--rules", "A family such as llama, or a TOML file; else by config.json.")
@click.option("--layout", "layouts", multiple=True, metavar="NAME=LAYOUT", help=(
    "The layout of tensors by name or pattern, such as '*=tp ...'; may be repeated, the first that "
    "matches counts; patterns leave 0-d tensors whole."
))  # fmt: skip
@click.option("--fsdp", metavar="AXES", help="Axes of the mesh that shard dim 0 further (FSDP).")
@replicate_option
@click.option(
    "--format", type=click.Choice(["full", "sharded", "distcp", "ranks"]),
    help="What to write; sharded if there is a mesh, else full.",
)  # fmt: skip
@click.option("--dtype", help="The dtype of all floating-point parameters.")
@click.option("--names", metavar="FILE", help="Tensors to rename, join or stack, as TOML.")
@click.option(
    "--drop", multiple=True, metavar="NAME",
    help="Tensors, by name or pattern, to leave out as far as no name takes them.",
)  # fmt: skip
@rules_option("--from-rules", "Rules of the source's per-rank files: a family, or a TOML file.")
@click.option("--from-mesh", help="The mesh of the source, where its files do not say.")
@click.option("--max-shard-size", default="5GB", show_default=True, help=(
    "The maximum size of one file with --format full."
))  # fmt: skip
@memory_option
@click.option("--workers", type=click.IntRange(1, 64), help="Threads; 4 if not given.")
@click.option(
    "--checksums/--no-checksums", default=True, help="Write checksums, check the source's."
)
@click.option("--compare/--no-compare", default=True, help="Compare what is stored several times.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace DST, once the new one is complete.")
@click.option(
    "--dry-run", is_flag=True, help="Report what would be read, written and needed; write nothing."
)
@click.option(
    "--ranks/--no-ranks", default=True, help="Share the work with torchrun's or Slurm's ranks."
)
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds to wait for other ranks."
)
@json_option
def convert(src: str, dst: str, ranks: bool, timeout: float, as_json: bool, **options: Any) -> int:
    """Write a checkpoint for another mesh, or in another format.

    \b
    reshard convert ckpt out --mesh "tp=2" --rules llama      for two ranks
    reshard convert ckpt out --format full --dtype bfloat16   whole tensors
    reshard convert ckpt out --dry-run                        what it takes
    torchrun --nproc-per-node 8 -m reshard convert ckpt out   the same, faster

    DST appears when it is complete. --resume continues an interrupted conversion.
    """
    from reshard.checkpoint.conversion.stages import convert as run
    from reshard.checkpoint.publish.journal import Team, team_of

    team = team_of(timeout=timeout) if ranks else Team()
    again = f"to continue: {this_command('--resume')}"
    rules, mesh = options.pop("from_rules"), options.pop("from_mesh")
    sides = (mesh if rules else None, None), (options["mesh"], options["fsdp"])
    for_source, options["replicate"] = replicated(options["replicate"], sides)
    options["layouts"] = dict(map(_layout, options["layouts"]))
    options["names"] = names_in(options["names"])
    options["source_rules"], options["source_mesh"] = _loaded(rules, for_source), mesh
    options["compare_replicas"] = options.pop("compare")
    try:
        with working("convert", quiet=not team.leads) as progress:
            report = run(src, dst, progress=progress, team=team, **options)
    except UnfinishedError as error:
        # Of ranks only the launcher knows the command that goes on.
        command = f"; {again}" if team.size == 1 else ""
        print(f"reshard: {' '.join(str(error).split())}{command}", file=sys.stderr)
        return UNFINISHED
    except KeyboardInterrupt:
        print(f"reshard: interrupted; {again}", file=sys.stderr)
        raise
    if team.leads:
        print_report("convert", report, as_json)
    return 0


def _layout(text: str) -> tuple[str, str]:
    name, equals, layout = text.partition("=")
    if not equals or not name.strip():
        raise click.BadParameter(f'--layout "{text}": expected NAME=LAYOUT, such as "*=tp ..."')
    return name.strip(), layout.strip()


_OPTIONS = (
    memory_option,
    rules_option("--rules", "Rules of the per-rank files of A: a family, or a TOML file."),
    click.option("--mesh", help='The mesh of the per-rank files of A, such as "tp=4".'),
    rules_option("--b-rules", "Rules of the per-rank files of B."),
    click.option("--b-mesh", help="The mesh of the per-rank files of B."),
    replicate_option,
    json_option,
)


def with_options(command: F) -> F:
    """The options of a command that reads one or two checkpoints in full."""
    for option in reversed(_OPTIONS):  # the last one that is added is shown first
        command = option(command)
    return command


def loaded_rules(
    axes: Sequence[str], *sides: tuple[str | None, str | None]
) -> list[Rules | str | None]:
    """The rules of each side, given with its mesh, with the axes of ``--replicate``."""
    copies = replicated(axes, [(mesh if rules else None, None) for rules, mesh in sides])
    return [_loaded(rules, mine) for (rules, _), mine in zip(sides, copies, strict=True)]


def _loaded(rules: str | None, replicate: str | None) -> Rules | str | None:
    """Rules as they are given, or loaded with axes to replicate along."""
    if rules is None or replicate is None:
        return rules
    from reshard.rules import Rules

    return Rules.load(rules, replicate=replicate)


def names_in(path: str | None) -> Names | None:
    """The names in the file of ``--names``."""
    from reshard.planning.names import read_names

    return None if path is None else read_names(path)


def compared(verb: str, compare: Callable[..., R], as_json: bool, **options: Any) -> R:
    """Compare two checkpoints as the command line asks, and print the report."""
    sides = [(options[f"{side}rules"], options[f"{side}mesh"]) for side in ("", "b_")]
    options["rules"], options["b_rules"] = loaded_rules(options.pop("replicate"), *sides)
    with working(verb) as progress:
        report = compare(options.pop("a"), options.pop("b"), progress=progress, **options)
    print_report(verb, report, as_json)
    return report


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option("--names", metavar="FILE", help="The names with which B was converted from A.")
@click.option("--drop", multiple=True, metavar="NAME", help="Tensors that were dropped from A.")
@with_options
def verify(names: str | None, **options: Any) -> int:
    """Read a checkpoint in full and say what is damaged, or compare two, however they are cut.

    \b
    reshard verify ckpt             every byte by its checksum, nothing missing
    reshard verify ckpt converted   the same, bit by bit; exit code 1 if not
    reshard verify ckpt renamed --names names.toml

    Exit code 4 if nothing is known to be wrong and a part is of a kind that is not supported.
    """
    from reshard.checkpoint.soundness import verify as check

    report = compared("verify", check, names=names_in(names), **options)
    return code_of(report.ok, report.is_unsupported)


@click.command()
@click.argument("a")
@click.argument("b")
@with_options
def diff(**options: Any) -> int:
    """Report how two checkpoints differ, or that they hold the same values in other layouts.

    \b
    reshard diff ckpt-1000 ckpt-2000    exit code 0 if equal, 1 if not
    """
    from reshard.checkpoint.differences import diff as compare

    return 0 if compared("diff", compare, **options).equal else 1
