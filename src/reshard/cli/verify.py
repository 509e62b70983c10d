"""``reshard verify``: is a checkpoint sound, or are two of them equal, bit by bit?"""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.options import compare_and_report, with_options
from reshard.cli.output import code_of

__all__ = ["verify"]


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option("--names", metavar="FILE", help="The names with which B was converted from A.")
@click.option("--drop", multiple=True, metavar="NAME", help="Tensors that were dropped from A.")
@with_options
def verify(names: str | None, **words: Any) -> int:
    """Read a checkpoint in full and say what is damaged, or compare two, however they are cut.

    \b
    reshard verify ckpt             every byte against its checksum, nothing missing
    reshard verify ckpt converted   the same tensors, bit by bit; exit code 1 if not
    reshard verify ckpt renamed --names names.toml

    Exit code 4 if nothing is known to be wrong and a part is of a kind that is not supported.
    """
    from reshard.checkpoint.verification.soundness import verify as check
    from reshard.planning.names.tables import read_names

    words["names"] = None if names is None else read_names(names)
    report = compare_and_report("verify", check, words)
    return code_of(report.ok, report.is_unsupported)
