"""``reshard index``: documentation and keyword pages of a source tree."""

from __future__ import annotations

import click

__all__ = ["index"]


@click.command()
@click.argument("path", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def index(path: str, out: str, as_json: bool) -> None:
    """Write an index of the Python and Markdown files below PATH, as Markdown and JSON.

    \b
    reshard index src -o index      then read index/index.md

    For every file: a documentation page, a page of its keywords and a JSON record, linked to each
    other. For the tree: a page for each folder, an A to Z of all keywords, and a search page. Files
    that do not parse are named and skipped. Nothing is imported or run.
    """
    from reshard.cli.output import fitted, print_json
    from reshard.index import build

    report = build(path, out)
    print_json("index", report.to_dict()) if as_json else print(fitted(str(report)))
