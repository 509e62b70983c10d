"""The command and its options."""

from __future__ import annotations

import os
import sys

import click

__all__ = ["explore"]


@click.command()
@click.option("--from", "have", help='Where it is: "dp=2 tp=4: (dp tp) -".')
@click.option("--to", "want", help='Where it goes: "tp=2 @ 8-9: - tp".')
@click.option("--shape", help="The shape of the tensor, such as 8192,4096.")
@click.option("--dtype", help="The dtype; bfloat16 if not given.")
@click.option("--memory", help="Maximum staging memory per rank; 256MiB if not given.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The port to listen on; a free one if not given."
)
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
def explore(
    have: str | None,
    want: str | None,
    shape: str | None,
    dtype: str | None,
    memory: str | None,
    port: int | None,
    no_browser: bool,
) -> int:
    """Explore plans of one tensor in a browser: edit meshes, layouts, shape and memory cap.

    The page is served to browsers of this machine alone, until Ctrl-C ends it (exit code 130).

    \b
    reshard explore
    reshard explore --shape 8192,4096 --from "dp=8: dp -" --to "tp=2 @ 8-9: - tp"
    """
    from reshard.cli.explore.answers import DEFAULTS, answer_of
    from reshard.cli.explore.server import Server
    from reshard.cli.parsing import parse_side
    from reshard.errors import PlanError

    given = {"shape": shape, "dtype": dtype, "memory": memory}
    for side, option, text in (("have", "--from", have), ("want", "--to", want)):
        if text is not None:
            parse_side(text, option)
            given[f"{side}_mesh"], _, given[f"{side}_layout"] = map(str.strip, text.partition(":"))
    values = {**DEFAULTS, **{name: text for name, text in given.items() if text is not None}}
    errors = answer_of(values).errors  # the first page must be one; and this loads all it needs
    if errors:
        raise PlanError("; ".join(errors.values()))
    try:
        server = Server(port or 0, values)
    except OSError as error:
        raise click.UsageError(
            f"cannot listen on port {port}: {error.strerror}; leave out --port for a free one"
        ) from None
    with server:
        print(f"exploring at {server.url} until Ctrl-C", flush=True)
        if not no_browser and _has_screen():
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)
    return 0


def _has_screen() -> bool:
    """Whether a browser would open a window, and not take over this terminal."""
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
