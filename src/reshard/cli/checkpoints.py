"""``reshard inspect``, ``verify`` and ``diff``: what checkpoints hold, and whether it is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.cli.options import (
    REPLICATE,
    RULES,
    compare_and_report,
    with_options,
    with_replicas,
)
from reshard.cli.output import code_of, fitted, print_json, say_written

__all__ = ["diff", "inspect", "verify"]


@click.command()
@click.argument("path")
@click.option("--tree", is_flag=True, help="The tensors as a tree of their names.")
@click.option(
    "--rules",
    help="Rules of per-rank files: a family such as llama, or a TOML file.",
    shell_complete=RULES,
)
@click.option("--mesh", help='The mesh of per-rank files, such as "tp=4".')
@click.option("--replicate", multiple=True, metavar="AXIS", help=REPLICATE)
@click.option("--html", metavar="FILE", help="Write the report as a page that lists every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(
    path: str,
    tree: bool,
    rules: str | None,
    mesh: str | None,
    replicate: tuple[str, ...],
    html: str | None,
    as_json: bool,
) -> int:
    """Report what a checkpoint holds, from its headers alone.

    Exit code 1 if it is damaged, 4 if it is of a kind that is not supported.

    \b
    reshard inspect ckpt                    tensors, layouts, files, damage
    reshard inspect ckpt --tree             as a tree of names
    reshard inspect ckpt --html ckpt.html   as a page with search and drawings
    reshard inspect shards --rules llama --mesh "tp=4"
    """
    from reshard.checkpoint.inspection import inspect as look

    [given] = with_replicas(replicate, [(rules, mesh)])
    report = look(path, given, mesh)
    if html is not None:
        from reshard.cli.checkpoint_page import render_stored
        from reshard.show.page.document import Footer

        words = click.get_current_context().meta.get("reshard.arguments", ["inspect"])
        Path(html).write_text(render_stored(report, Footer.of_command(words)), encoding="utf-8")
        say_written(html)
    if as_json:
        print_json("inspect", report.to_dict())
    else:
        print(fitted(report.tree() if tree else str(report)))
    return code_of(report.ok, is_unsupported=not report.damage)


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option("--names", metavar="FILE", help="The names with which B was converted from A.")
@click.option("--drop", multiple=True, metavar="NAME", help="Tensors that were dropped from A.")
@with_options
def verify(names: str | None, **words: Any) -> int:
    """Read a checkpoint in full and say what is damaged, or compare two, however they are cut.

    \b
    reshard verify ckpt             every byte by its checksum, nothing missing
    reshard verify ckpt converted   the same, bit by bit; exit code 1 if not
    reshard verify ckpt renamed --names names.toml

    Exit code 4 if nothing is known to be wrong and a part is of a kind that is not supported.
    """
    from reshard.checkpoint.soundness import verify as check
    from reshard.planning.names import read_names

    words["names"] = None if names is None else read_names(names)
    report = compare_and_report("verify", check, words)
    return code_of(report.ok, report.is_unsupported)


@click.command()
@click.argument("a")
@click.argument("b")
@with_options
def diff(**words: Any) -> int:
    """Report how two checkpoints differ, or that they hold the same values in other layouts.

    \b
    reshard diff ckpt-1000 ckpt-2000    exit code 0 if equal, 1 if not
    """
    from reshard.checkpoint.differences import diff as compare

    return 0 if compare_and_report("diff", compare, words).equal else 1
