"""``reshard diff``: which tensors of two checkpoints differ, and where?"""

from __future__ import annotations

import click

__all__ = ["diff"]


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--memory", default="256MiB", show_default=True, help="The most memory for buffers.")
@click.option("--rules", help="How per-rank files are cut: a family such as llama, or a TOML file.")
@click.option("--mesh", help='The mesh of per-rank files, such as "tp=4".')
@click.option("--b-rules", help="The same for B; as for A if not given.")
@click.option("--b-mesh", help="The same for B; as for A if not given.")
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
            b_rules=b_rules or rules,
            b_mesh=b_mesh or mesh,
            progress=progress,
        )
    print_json(report.to_dict()) if as_json else print(report)
    return 0 if report.equal else 1
