"""``reshard bench``: run the benchmarks of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import click

__all__ = ["bench"]

HELPERS = frozenset({"before_after.py", "side_by_side.py", "walk.py"})
"""Files beside the benchmarks that only help them."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Run the benchmarks, with the given arguments for each."""
    import subprocess

    folder = _folder()
    if folder is None:
        raise click.UsageError(
            "the benchmarks are not installed with the package: run this in a checkout of the "
            "repository, where they are in benchmarks/ (or run make bench)"
        )
    for script in _scripts(folder):
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


def _scripts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name not in HELPERS)


bench.hidden = _folder() is None  # outside a checkout there is nothing to run
