"""``reshard inspect``: what a checkpoint holds, its layouts, and its damage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from reshard.cli.options import REPLICATE, RULES, with_replicas

if TYPE_CHECKING:
    from reshard.checkpoint.inspection import Inspection

__all__ = ["inspect"]


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
    from reshard.cli.output import code_of, fitted, print_json

    [given] = with_replicas(replicate, [(rules, mesh)])
    report = look(path, given, mesh)
    if html is not None:
        _write_page(report, html)
    if as_json:
        print_json("inspect", report.to_dict())
    else:
        print(fitted(report.tree() if tree else str(report)))
    return code_of(report.ok, is_unsupported=not report.damage)


def _write_page(report: Inspection, path: str) -> None:
    from reshard.cli.output import say_written
    from reshard.show.page.document import Footer
    from reshard.show.page.stored import render_stored

    arguments = click.get_current_context().meta.get("reshard.arguments", ["inspect"])
    text = render_stored(report, Footer.of_command(arguments))
    Path(path).write_text(text, encoding="utf-8")
    say_written(path)
