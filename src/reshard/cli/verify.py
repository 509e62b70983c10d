"""``reshard verify``: is a checkpoint sound, or are two of them equal, bit by bit?"""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.output import code_of
from reshard.cli.two_checkpoints import told, with_options

__all__ = ["verify"]


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@with_options
def verify(**words: Any) -> int:
    """Read a checkpoint in full and say what is damaged, or compare two, however they are cut.

    \b
    reshard verify ckpt             every byte against its checksum, nothing missing
    reshard verify ckpt converted   the same tensors, bit by bit; exit code 1 if not

    Exit code 4 if nothing is known to be wrong and a part is of a kind that is not supported.
    """
    from reshard.checkpoint.verify import verify as check

    report = told("verify", check, words)
    return code_of(report.ok, report.is_unsupported)
