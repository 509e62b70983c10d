"""``reshard verify`` and ``reshard diff``: is a checkpoint sound, are two equal, where not?"""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.options import compare_and_report, with_options
from reshard.cli.output import code_of

__all__ = ["diff", "verify"]


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
