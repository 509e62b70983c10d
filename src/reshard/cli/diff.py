"""``reshard diff``: which tensors of two checkpoints differ, and where?"""

from __future__ import annotations

import click

__all__ = ["diff"]


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--memory", default="256MiB", show_default=True, help="The most memory for buffers.")
@click.option("--rules", help="How files of ranks of A are cut: a family, or a TOML file.")
@click.option("--mesh", help='The mesh of files of ranks of A, such as "tp=4".')
@click.option("--b-rules", help="How files of ranks of B are cut.")
@click.option("--b-mesh", help="The mesh of files of ranks of B.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(
    a: str,
    b: str,
    memory: str,
    rules: str | None,
    mesh: str | None,
    b_rules: str | None,
    b_mesh: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Say how two checkpoints differ, or that they hold the same values cut differently.

    \b
    reshard diff ckpt-1000 ckpt-2000    exit code 0 if equal, 1 if not
    """
    from reshard.checkpoint.diff import diff as compare
    from reshard.cli.meter import byte_meter
    from reshard.cli.output import print_json

    with byte_meter("diff", quiet=quiet) as progress:
        report = compare(
            a,
            b,
            memory=memory,
            rules=rules,
            mesh=mesh,
            b_rules=b_rules,
            b_mesh=b_mesh,
            progress=progress,
        )
    print_json(report.to_dict()) if as_json else print(report)
    return 0 if report.equal else 1
