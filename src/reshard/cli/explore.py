"""``reshard explore``: the page of a plan with fields, served to browsers of this machine."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from reshard.cli.options import MODELS, parse_model_mesh, parse_side
from reshard.cli.output import print_json
from reshard.errors import PlanError

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
    from reshard.cli.explore_server import Server, answer_of

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
        if as_json:
            print_json("explore", {"url": server.url, "port": server.server_port})
        else:
            print(f"exploring at {server.url} until Ctrl-C")
        sys.stdout.flush()  # a pipe would keep it until the end
        # Where there is no screen, a browser would take over this terminal.
        displays = map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
        if not no_browser and (sys.platform == "darwin" or any(displays)):
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)
    return 0


def _tensor_values(have: str | None, want: str | None, **given: Any) -> dict[str, str]:
    """The fields of one tensor, as far as options name them."""
    from reshard.cli.explore_server import DEFAULTS

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
    from reshard.cli.explore_server import MODEL_DEFAULTS

    if given["shape"]:
        raise click.UsageError("give --shape (one tensor) or --model (a whole model), not both")
    for side, option, text in (("have", "--from", have), ("want", "--to", want)):
        if text is not None:
            given[f"{side}_mesh"] = str(parse_model_mesh(text, option))
    given |= {"have_fsdp": given["from_fsdp"], "want_fsdp": given["to_fsdp"]}
    given["replicate"] = " ".join(given["replicate"])
    return {name: given.get(name) or value for name, value in MODEL_DEFAULTS.items()}
