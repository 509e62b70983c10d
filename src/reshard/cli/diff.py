"""``reshard diff``: which tensors of two checkpoints differ, and where?"""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.options import compare_and_report, with_options

__all__ = ["diff"]


@click.command()
@click.argument("a")
@click.argument("b")
@with_options
def diff(**words: Any) -> int:
    """Report how two checkpoints differ, or that they hold the same values in other layouts.

    \b
    reshard diff ckpt-1000 ckpt-2000    exit code 0 if equal, 1 if not
    """
    from reshard.checkpoint.verification.differences import diff as compare

    return 0 if compare_and_report("diff", compare, words).equal else 1
