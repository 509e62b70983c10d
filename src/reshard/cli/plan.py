"""``reshard plan`` and ``explore``: what moves, what it costs, and why; also in a browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import (
    command_of,
    json_option,
    model_config,
    model_option,
    model_specs,
    parse_model_mesh,
    parse_shape,
    parse_side,
    replicate_option,
    replicated,
    rules_option,
)
from reshard.cli.output import (
    fitted,
    print_json,
    print_lines,
    say_written,
    terminal_width,
    this_command,
    write_page,
)
from reshard.errors import ArgumentError, PlanError, ProofError
from reshard.text import align, format_bytes, shorten

if TYPE_CHECKING:
    from reshard.layout.spec import TensorSpec
    from reshard.planning.plans import Plan
    from reshard.planning.rank import RankPlan


MAX_STEPS = 40
STEPS = ("sends", "receives", "copies")


MODEL_OPTIONS = ("from_rules", "to_rules", "from_fsdp", "to_fsdp", "replicate")


@click.command()
@click.option("--from", "have", required=True, help='Where it is: "dp=2 tp=4: (dp tp) -".')
@click.option("--to", "want", required=True, help='Where it goes: "tp=2 @ 8-9: - tp".')
@click.option("--shape", help="The shape of one tensor, such as 8192,4096.")
@model_option("A model: llama-3-8b, ..., a config.json or its folder.")
@click.option("--dtype", help="The dtype; if not given float32, or the model's.")
@click.option("--to-dtype", help="The dtype at the destination, if it is another one.")
@click.option("--memory", help="Maximum staging memory per rank; 256MiB if not given.")
@click.option("--topology", metavar="FILE", help="Hosts and links, as TOML: predicts seconds.")
@click.option("--without", metavar="RANKS", help="Source ranks that are lost, such as 3,7.")
@rules_option("--rules", "With --model: a family such as llama, or a TOML file.")
@rules_option("--from-rules", "Rules for the source alone.")
@rules_option("--to-rules", "Rules for the destination alone.")
@click.option("--from-fsdp", metavar="AXES", help="Axes that shard dim 0 of the source further.")
@click.option("--to-fsdp", metavar="AXES", help="Axes that shard dim 0 of the destination further.")
@replicate_option
@click.option("--rank", type=int, help="Print what one rank does, step by step.")
@click.option("--check", is_flag=True, help="Prove the plan; exit code 1 if it does not hold.")
@click.option("--html", metavar="FILE", help="Write the plan as a page.")
@click.option("--report", "reports", multiple=True, metavar="FILE", help=(
    "With --html: what a run of this plan measured, as RunReport.save wrote it; may be repeated."
))  # fmt: skip
@click.option("--save", metavar="FILE", help="Write the plan as .html, .json or .trace.")
@json_option
def plan(
    rules: str | None,
    rank: int | None,
    check: bool,
    html: str | None,
    reports: tuple[str, ...],
    save: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Plan a move: of one tensor, or of a whole model by rules.

    \b
    reshard plan --shape 8192,4096 --from "dp=8: dp -" --to "tp=2 @ 8-9: - tp"
    reshard plan --model llama-3-8b --from dp=8 --from-fsdp dp --to "tp=4 @ 8-11"

    With --model, every axis of a mesh must shard something, by the rules or by --from-fsdp and
    --to-fsdp; replicas along an axis are asked for with --replicate.
    """
    from reshard.layout.mesh import format_ranks

    for side in ("from_rules", "to_rules"):
        options[side] = options[side] or rules
    notes: list[str] = []
    move = _make_plan(options, notes)
    if rank is not None and rank not in move.ranks:
        raise PlanError(
            f"rank {rank} has no part in this plan: its ranks are {format_ranks(move.ranks)}"
        )
    failure = None
    try:
        if check:
            move.check()
    except ProofError as error:
        failure = f"does not hold: {error}"
    if reports and html is None:
        raise PlanError("--report is for --html: a page shows what a run measured")
    if html is not None:
        _write_page(move, html, options, notes, reports)
    if save is not None:
        move.save(save)
        say_written(save)
    if as_json:
        proof = {"proof": {"holds": failure is None, "error": failure}} if check else {}
        _print_json(move, rank, notes, proof)
    else:
        _print(move, rank, notes)
        if check:
            print(fitted(f"\n{failure or 'proven: every wanted element is written exactly once'}"))
    return 1 if failure else 0


def _make_plan(options: Mapping[str, Any], notes: list[str]) -> Plan:
    """The plan that the options ask for; adds notes about the layouts of a model."""
    from reshard.layout.mesh import parse_ranks
    from reshard.planning.cost.topology import Topology
    from reshard.planning.plans import plan as make

    if (options["shape"] is None) == (options["model"] is None):
        which = "both" if options["shape"] is not None else "neither"
        raise PlanError(
            f"give --shape (one tensor) or --model (a whole model): {which} of them were given"
        )
    have, want = _model(options, notes) if options["shape"] is None else _tensor(options)
    if (lost := options["without"]) is not None:
        ranks = tuple(parse_ranks(lost, f"--without {lost}"))
        layouts = {spec.layout: spec.layout.without(ranks) for spec in have.values()}
        have = {name: replace(spec, layout=layouts[spec.layout]) for name, spec in have.items()}
    topology = None if options["topology"] is None else Topology.load(options["topology"])
    return make(have, want, memory=options["memory"], topology=topology)


def _tensor(options: Mapping[str, Any]) -> list[dict[str, TensorSpec]]:
    """The specs at the source and at the destination."""
    from reshard.layout.spec import TensorSpec

    _refuse_model_options(options)
    shape, dtype = parse_shape(options["shape"]), options["dtype"] or "float32"
    layouts = parse_side(options["have"], "--from"), parse_side(options["want"], "--to")
    dtypes = dtype, options["to_dtype"] or dtype
    specs = [TensorSpec(shape, *side) for side in zip(dtypes, layouts, strict=True)]
    for layout in layouts:
        layout.dims(shape)
    return [{"tensor": spec} for spec in specs]


def _refuse_model_options(options: Mapping[str, Any]) -> None:
    for option in MODEL_OPTIONS:
        if options.get(option):
            name = option.replace("_", "-")
            raise PlanError(f"--{name} is for --model: with --shape the layouts are given in full")


def _model(options: Mapping[str, Any], notes: list[str]) -> Iterator[dict[str, TensorSpec]]:
    """The same for a model; adds notes about its layouts."""
    config, names = model_config(options["model"]), ("--from", "--to")
    meshes = [*map(parse_model_mesh, (options["have"], options["want"]), names)]
    fsdp = options["from_fsdp"], options["to_fsdp"]
    copies = replicated(options["replicate"], [*zip(meshes, fsdp, strict=True)])
    rules = options["from_rules"], options["to_rules"]
    dtypes = options["dtype"], options["to_dtype"] or options["dtype"]
    for name, *side in zip(names, meshes, rules, fsdp, copies, dtypes, strict=True):
        specs, about = model_specs(config, *side)
        notes += [f"{name}: {note}" for note in about]
        yield specs


def _write_page(
    move: Plan, path: str, options: Mapping[str, Any], notes: Sequence[str], reports: Sequence[str]
) -> None:
    from reshard.show.page import render
    from reshard.show.page.document import Footer
    from reshard.show.run_report import RunReport

    model, explore = options["model"], None
    # The explorer has the models and rules that are shipped, and no files.
    is_file = model is not None and Path(model).exists()
    if not (options["from_rules"] or options["to_rules"] or is_file):
        same = ("shape", "model", "from_fsdp", "to_fsdp", "replicate")
        sides = {"from": options["have"], "to": options["want"]}
        explore = command_of("explore", sides | {name: options[name] for name in same})
    runs = [RunReport.load(report) for report in reports]
    footer = Footer(this_command(), model, explore)
    write_page(path, render(move, reports=runs, notes=notes, footer=footer))


def _print(move: Plan, rank: int | None, notes: Sequence[str]) -> None:
    from reshard.show.plan_text import describe
    from reshard.show.terminal import Span
    from reshard.show.traffic import draw, traffic_matrix

    if rank is not None:
        lines = [line for verb in STEPS for line in _rank_lines(move.for_rank(rank), verb)]
        print(fitted("\n".join(lines)))
        return
    noted = ["", "notes", *(f"  {note}" for note in notes)] if notes else []
    texts = fitted("\n".join([describe(move), *noted])).splitlines()
    label = max(2 * len(str(move.ranks[-1])) + 1 if len(move.ranks) > 16 else 2, 5)
    most = max(min((terminal_width() - label - 9) // (label + 2), 16), 2)
    spans = [[Span(line, bold=line in (texts[0], "why", "notes"))] for line in texts]
    print_lines([*spans, [], *draw(traffic_matrix(move, most))])


def _rank_lines(mine: RankPlan, verb: str) -> Iterator[str]:
    """What a rank sends, receives or copies, step by step."""
    steps = getattr(mine, verb)
    yield f"rank {mine.rank} {verb} {format_bytes(steps.num_bytes)}"
    rows = [("round", "tensor", "box", "with", "bytes")]
    shown = list(islice(iter(steps), MAX_STEPS + 1))
    for step in shown[:MAX_STEPS]:
        peers = {"sends": f"to {step.destination}", "receives": f"from {step.source}"}
        what = str(step.round), shorten(step.name, 60), str(step.box)
        rows.append((*what, peers.get(verb, ""), format_bytes(step.num_bytes)))
    yield from (f"  {line}" for line in align(rows, right={0, 4}) if shown)
    if len(shown) > MAX_STEPS:
        yield "  and more; --json lists all"


def _print_json(
    move: Plan, rank: int | None, notes: Sequence[str], proof: Mapping[str, Any]
) -> None:
    from reshard.show.plan_text import reasons
    from reshard.show.traffic import traffic_matrix

    matrix = traffic_matrix(move)
    ends = {"sources": matrix.sources, "destinations": matrix.destinations}
    data: dict[str, Any] = {
        **move.to_dict(),
        "summary": move.summary().to_dict(),
        "why": reasons(move),
        "notes": notes,
        "traffic": {"between": matrix.kind, **ends, "bytes": matrix.num_bytes.tolist()},
        **proof,
    }
    if rank is not None:
        data["rank"] = {"rank": rank}
        for kind in STEPS:
            data["rank"][kind] = [
                {
                    "round": step.round,
                    "name": step.name,
                    "start": step.box.start,
                    "stop": step.box.stop,
                    "source": step.source,
                    "destination": step.destination,
                    "bytes": step.num_bytes,
                    "hop": step.hop,
                }
                for step in getattr(move.for_rank(rank), kind)
            ]
    print_json("plan", data)


@click.command()
@click.option("--from", "have", help='Where it is: "dp=2 tp=4: (dp tp) -".')
@click.option("--to", "want", help='Where it goes: "tp=2 @ 8-9: - tp".')
@click.option("--shape", help="The shape of the tensor, such as 8192,4096.")
@model_option("A whole model instead, such as llama-3-8b.")
@click.option("--from-fsdp", metavar="AXES", help="With --model: axes that shard dim 0 further.")
@click.option("--to-fsdp", metavar="AXES", help="The same for the destination.")
@replicate_option
@click.option("--dtype", help="The dtype; if not given bfloat16, or the model's.")
@click.option("--memory", help="Maximum staging memory per rank; 256MiB if not given.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The port to listen on; a free one if not given."
)
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def explore(port: int | None, no_browser: bool, as_json: bool, **options: Any) -> int:
    """Explore plans in a browser: edit meshes, layouts, shape and memory cap.

    The page is served to browsers of this machine alone, until Ctrl-C ends it (exit code 130).

    \b
    reshard explore
    reshard explore --shape 8192,4096 --from "dp=8: dp -" --to "tp=2 @ 8-9: - tp"
    reshard explore --model llama-3-8b --from tp=8 --to "tp=2 @ 8-9"
    """
    from reshard.cli.explore_server import Server, answer_of

    values = _values(**options)
    errors = answer_of(values).errors  # the first page must be one; and this loads all it needs
    for side, option in (("have", "--from"), ("want", "--to")):
        if options[side] is None and (text := errors.get(f"{side}_layout")) is not None:
            errors[f"{side}_layout"] = f"{option} is not given and its default does not fit: {text}"
    if errors:
        raise PlanError("; ".join(errors.values()))
    try:
        server = Server(port or 0, values)
    except OSError as error:
        raise ArgumentError(
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


def _values(have: str | None, want: str | None, **options: Any) -> dict[str, str]:
    """The fields of the explorer, as far as options name them."""
    from reshard.cli.explore_server import DEFAULTS, MODEL_DEFAULTS

    is_model = options["model"] is not None
    if is_model and options["shape"]:
        raise ArgumentError("give --shape (one tensor) or --model (a whole model), not both")
    if not is_model:
        _refuse_model_options(options)
    for side, option, text in (("have", "--from", have), ("want", "--to", want)):
        if text is not None and is_model:
            options[f"{side}_mesh"] = str(parse_model_mesh(text, option))
        elif text is not None:
            parse_side(text, option)
            mesh, _, layout = map(str.strip, text.partition(":"))
            options |= {f"{side}_mesh": mesh, f"{side}_layout": layout}
    options["replicate"] = " ".join(options["replicate"])
    defaults = MODEL_DEFAULTS if is_model else DEFAULTS
    return {name: options.get(name) or value for name, value in defaults.items()}
