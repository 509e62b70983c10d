"""The command and its options."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import MODELS

if TYPE_CHECKING:
    from reshard.cli.explore.server import Server

__all__ = ["explore"]


@click.command()
@click.option("--from", "have", help='Where it is: "dp=2 tp=4: (dp tp) -".')
@click.option("--to", "want", help='Where it goes: "tp=2 @ 8-9: - tp".')
@click.option("--shape", help="The shape of the tensor, such as 8192,4096.")
@click.option("--model", help="A whole model instead, such as llama-3-8b.", shell_complete=MODELS)
@click.option("--from-fsdp", metavar="AXES", help="With --model: axes that shard dim 0 further.")
@click.option("--to-fsdp", metavar="AXES", help="The same for the destination.")
@click.option("--replicate", multiple=True, metavar="AXIS", help=(
    "With --model: an axis of replicas; may be repeated."
))  # fmt: skip
@click.option("--dtype", help="The dtype; if not given bfloat16, or the model's.")
@click.option("--memory", help="Maximum staging memory per rank; 256MiB if not given.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The port to listen on; a free one if not given."
)
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def explore(port: int | None, no_browser: bool, as_json: bool, **words: Any) -> int:
    """Explore plans in a browser: edit meshes, layouts, shape and memory cap.

    The page is served to browsers of this machine alone, until Ctrl-C ends it (exit code 130).

    \b
    reshard explore
    reshard explore --shape 8192,4096 --from "dp=8: dp -" --to "tp=2 @ 8-9: - tp"
    reshard explore --model llama-3-8b --from tp=8 --to "tp=2 @ 8-9"
    """
    from reshard.cli.explore.answers import answer_of
    from reshard.cli.explore.server import Server
    from reshard.errors import PlanError

    values = _tensor_values(**words) if words["model"] is None else _model_values(**words)
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
        _say_where(server, as_json)
        if not no_browser and _has_screen():
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)
    return 0


def _say_where(server: Server, as_json: bool) -> None:
    if as_json:
        from reshard.cli.output import print_json

        print_json("explore", {"url": server.url, "port": server.server_port})
    else:
        print(f"exploring at {server.url} until Ctrl-C")
    sys.stdout.flush()  # a pipe would keep it until the end


def _tensor_values(have: str | None, want: str | None, **given: Any) -> dict[str, str]:
    """The fields of one tensor, as far as options name them."""
    from reshard.cli.explore.answers import DEFAULTS
    from reshard.cli.parsing import parse_side

    for option in ("from_fsdp", "to_fsdp", "replicate"):
        if given[option]:
            name = option.replace("_", "-")
            raise click.UsageError(f"--{name} is for --model: a layout names all its axes")
    for side, option, text in (("have", "--from", have), ("want", "--to", want)):
        if text is not None:
            parse_side(text, option)
            given[f"{side}_mesh"], _, given[f"{side}_layout"] = map(str.strip, text.partition(":"))
    return {name: given.get(name) or value for name, value in DEFAULTS.items()}


def _model_values(have: str | None, want: str | None, **given: Any) -> dict[str, str]:
    """The fields of a model, as far as options name them."""
    from reshard.cli.explore.answers import MODEL_DEFAULTS
    from reshard.cli.parsing import parse_model_mesh

    if given["shape"]:
        raise click.UsageError("give --shape (one tensor) or --model (a whole model), not both")
    for side, option, text in (("have", "--from", have), ("want", "--to", want)):
        if text is not None:
            given[f"{side}_mesh"] = str(parse_model_mesh(text, option))
    given |= {"have_fsdp": given["from_fsdp"], "want_fsdp": given["to_fsdp"]}
    given["replicate"] = " ".join(given["replicate"])
    return {name: given.get(name) or value for name, value in MODEL_DEFAULTS.items()}


def _has_screen() -> bool:
    """Whether a browser would open a window, and not take over this terminal."""
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
