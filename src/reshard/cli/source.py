"""``reshard index`` and ``reshard bench``: pages of a source tree, benchmarks of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reshard.cli.options import json_option
from reshard.cli.output import fitted, print_json
from reshard.errors import ArgumentError

HELPERS = frozenset({"before_after.py", "side_by_side.py", "walk.py"})
"""Files beside the benchmarks that only help them."""


@click.command()
@click.argument("path", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write.")
@json_option
def index(path: str, out: str, as_json: bool) -> None:
    """Write an index of the Python and Markdown files below PATH, as Markdown and JSON.

    \b
    reshard index src -o index      then read index/index.md

    For every file: a documentation page, a page of its keywords and a JSON record, linked to each
    other. For the tree: a page for each folder, an A to Z of all keywords, and a search page. Files
    that do not parse are named and skipped. Nothing is imported or run.
    """
    from reshard.index import build

    report = build(path, out)
    print_json("index", report.to_dict()) if as_json else print(fitted(str(report)))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks, with the given arguments for each."""
    import subprocess

    folder = _folder()
    if folder is None:
        raise ArgumentError(
            "the benchmarks are not installed with the package: run this in a checkout of the "
            "repository, where they are in benchmarks/ (or run make bench)"
        )
    for script in sorted(path for path in folder.glob("*.py") if path.name not in HELPERS):
        print(f"==> {script.name}", flush=True)
        code = subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
        if code:
            return code
    return 0


def _folder() -> Path | None:
    """The benchmarks below the working directory, or next to the package in a checkout."""
    for root in (Path.cwd(), Path(__file__).parents[3]):
        if (root / "benchmarks").is_dir() and (root / "pyproject.toml").is_file():
            return root / "benchmarks"
    return None


bench.hidden = _folder() is None  # outside a checkout there is nothing to run
