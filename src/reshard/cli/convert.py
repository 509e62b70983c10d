"""``reshard convert``: write a checkpoint in another layout or format."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import RULES
from reshard.cli.output import byte_meter, fitted, print_json
from reshard.errors import UnfinishedError

if TYPE_CHECKING:
    from reshard.checkpoint.publish.journal import Team

__all__ = ["convert"]

UNFINISHED = 3


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--mesh", help='The mesh of the destination, such as "tp=2" or "dp=2 tp=4".')
@click.option(
    "--rules",
    help="A family such as llama, or a TOML file; else by config.json.",
    shell_complete=RULES,
)
@click.option("--layout", "layouts", multiple=True, metavar="NAME=LAYOUT", help=(
    "The layout of tensors by name or pattern, such as '*=tp ...'; may be repeated, the first that "
    "matches counts; patterns leave 0-d tensors whole."
))  # fmt: skip
@click.option("--fsdp", metavar="AXES", help="Axes of the mesh that shard dim 0 further (FSDP).")
@click.option("--replicate", multiple=True, metavar="AXIS", help=(
    "An axis of the mesh along which the rules replicate everything, on purpose; may be repeated."
))  # fmt: skip
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
@click.option(
    "--from-rules",
    help="Rules of the source's per-rank files: a family, or a TOML file.",
    shell_complete=RULES,
)
@click.option("--from-mesh", help="The mesh of the source, where its files do not say.")
@click.option("--max-shard-size", default="5GB", show_default=True, help=(
    "The maximum size of one file with --format full."
))  # fmt: skip
@click.option("--memory", default="256MiB", show_default=True, help="Maximum memory for buffers.")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def convert(src: str, dst: str, ranks: bool, timeout: float, as_json: bool, **words: Any) -> int:
    """Write a checkpoint for another mesh, or in another format.

    \b
    reshard convert ckpt out --mesh "tp=2" --rules llama      for two ranks
    reshard convert ckpt out --format full --dtype bfloat16   whole tensors
    reshard convert ckpt out --dry-run                        what it takes
    torchrun --nproc-per-node 8 -m reshard convert ckpt out   the same, faster

    DST appears when it is complete. --resume continues an interrupted conversion.
    """
    from reshard.checkpoint.publish.journal import Team, team_of

    team = team_of(timeout=timeout) if ranks else Team()
    try:
        return _convert(src, dst, team, as_json, words)
    except UnfinishedError as error:
        # Of ranks only the launcher knows the command that goes on.
        command = f"; to continue: {_again()}" if team.size == 1 else ""
        print(f"reshard: {' '.join(str(error).split())}{command}", file=sys.stderr)
        return UNFINISHED
    except KeyboardInterrupt:
        print(f"reshard: interrupted; to continue: {_again()}", file=sys.stderr)
        raise


def _convert(src: str, dst: str, team: Team, as_json: bool, words: dict[str, Any]) -> int:
    from reshard.checkpoint.conversion.stages import convert as run
    from reshard.planning.names import read_names

    names = words.pop("names")
    with byte_meter("convert", quiet=not team.leads) as progress:
        report = run(
            src,
            dst,
            layouts=dict(map(_layout, words.pop("layouts"))),
            replicate=" ".join(words.pop("replicate")) or None,
            names=None if names is None else read_names(names),
            source_rules=words.pop("from_rules"),
            source_mesh=words.pop("from_mesh"),
            compare_replicas=words.pop("compare"),
            progress=progress,
            team=team,
            **words,
        )
    if team.leads:
        print_json("convert", report.to_dict()) if as_json else print(fitted(str(report)))
    return 0


def _layout(text: str) -> tuple[str, str]:
    name, equals, layout = text.partition("=")
    if not equals or not name.strip():
        raise click.BadParameter(f'--layout "{text}": expected NAME=LAYOUT, such as "*=tp ..."')
    return name.strip(), layout.strip()


def _again() -> str:
    """The command that was given, with --resume."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["reshard", *words, "--resume"])
