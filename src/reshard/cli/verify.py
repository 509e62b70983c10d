"""``reshard verify``: is a checkpoint sound, or are two of them equal, bit by bit?"""

from __future__ import annotations

import click

__all__ = ["verify"]


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option("--memory", default="256MiB", show_default=True, help="The most memory for buffers.")
@click.option("--rules", help="How files of ranks of A are cut: a family, or a TOML file.")
@click.option("--mesh", help='The mesh of files of ranks of A, such as "tp=4".')
@click.option("--b-rules", help="How files of ranks of B are cut.")
@click.option("--b-mesh", help="The mesh of files of ranks of B.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(
    a: str,
    b: str | None,
    memory: str,
    rules: str | None,
    mesh: str | None,
    b_rules: str | None,
    b_mesh: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Read a checkpoint in full and say what is damaged, or compare two, however they are cut.

    \b
    reshard verify ckpt             every byte against its checksum, nothing missing
    reshard verify ckpt converted   the same tensors, bit by bit; exit code 1 if not
    """
    from reshard.checkpoint.verify import verify as check
    from reshard.cli.meter import byte_meter
    from reshard.cli.output import print_json

    with byte_meter("verify", quiet=quiet) as progress:
        report = check(
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
    return 0 if report.ok else 1
