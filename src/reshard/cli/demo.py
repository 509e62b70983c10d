"""``reshard demo``: plan and prove a move of a real size, simulate it, run it live, convert files.

A trainer holds Llama-3-8B by FSDP over tensor parallelism on eight ranks; two serving replicas of
two ranks each want it. The plan and its proof are for the whole model at its real size. The
simulation moves numpy arrays: one decoder layer at half of its size in each dim, then all tensors
at an eighth, and compares every byte, message and peak with what the plan states. The second move
then runs live, on twelve processes of this machine, and must give the same bits. Then a small
checkpoint on disk is converted from four shards to two, and must hold the same values. Last, a
picture of what was moved, and commands to try next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import json_option, model_specs
from reshard.cli.output import fitted, print_json, terminal_width, wants_boxes, working
from reshard.errors import ArgumentError, LiveError
from reshard.text import align, format_bytes

if TYPE_CHECKING:
    import numpy as np

    from reshard.layout.spec import TensorSpec
    from reshard.planning.plans import Plan

    Array = np.ndarray[Any, Any]
    Arrays = dict[int, dict[str, Array]]


NO_TORCH = "torch is not installed; try pip install torch"
MODELS = ("llama-3-8b", "llama-3.2-1b")
HAVE, FSDP, WANT, REPLICAS = "dp=2 tp=4", "dp", "dp=2 tp=2 @ 8-11", "dp"
LAYER = "decoder layer 0"
SMALLER = {2: LAYER, 8: "the whole model"}
"""By what the simulations divide every dim, and of which part of the model."""
SHOWN = "model.layers.0.mlp.gate_proj.weight"
NEXT = (
    (
        f'reshard plan --model {{model}} --from "{HAVE}" --from-fsdp {FSDP} \\\n'
        f'      --to "{WANT}" --replicate {REPLICAS} --html plan.html'
    ),
    f'reshard show --model {{model}} --mesh "tp=4" \\\n      {SHOWN}',
    "reshard convert CHECKPOINT OUT --mesh tp=2 --dry-run",
)
"""Commands that a reader can try next: a page of this plan, a layout, a checkpoint of their own."""
FILES_MODEL, FILES_HAVE, FILES_WANT = "llama-3.2-1b", "tp=4", "tp=2"
FILES_SMALLER = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 4}
"""By how much the model that is written to files is smaller than the real one."""


EQUAL = {True: "equal", False: "DIFFER FROM"}
AS_STATED = {True: "as stated", False: "NOT as stated"}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the demo: what it prints and its figures, and whether it came out as stated."""

    text: str
    figures: dict[str, Any] | None
    holds: bool


@click.command()
@click.option("--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True)
@click.option("--live/--no-live", default=True, help="Also run the move on processes.")
@click.option("--trace", metavar="FILE", help="Write the live run as a trace for Perfetto.")
@json_option
def demo(model: str, live: bool, trace: str | None, as_json: bool) -> int:
    """Plan, prove, simulate and run a move of a real model; convert a small checkpoint.

    From a trainer (FSDP over tensor parallelism, eight ranks) to two serving replicas. Takes less
    than 40 seconds and 2 GiB. The live part starts twelve processes on this machine, and ends them.
    The checkpoint is made in a temporary folder, and removed.
    """
    from reshard.rules.models import preset

    if trace is not None and not live:
        raise ArgumentError("--trace writes the live run: leave out --no-live, or --trace")

    def say(text: str) -> None:
        if not as_json:
            print(fitted(text), flush=True)

    with working("planning"):
        move = _plan(preset(model), None)
    say(
        f"A trainer holds {model} on mesh {HAVE}, tensors sharded by tp and each shard by {FSDP}.\n"
        f"Two serving replicas want it on mesh {WANT}.\n\n{move}\n"
    )
    start = time.perf_counter()
    with working("proving"):
        move.check()
    say(
        f"Proven in {time.perf_counter() - start:.1f} s: every element of all {len(move.want)} "
        "tensors is written exactly once on every rank that wants it, by a rank that holds it.\n"
    )
    simulated = []
    for what, small in _simulated_moves(move, model):
        with working(f"simulating {what}"):
            part, sources, arrived = _simulate(what, small)
        simulated.append(part)
        say(part.text)
    ran = Part("", None, True)
    if live:
        with working("starting twelve processes, and moving between them"):
            ran = _run_live(what, small, sources, arrived, trace)
        say(ran.text)
    with working("converting a checkpoint"):
        files = _convert_files()
    say(files.text)
    say(_picture(move))
    say("\n  ".join(["Try next:", *(line.format(model=model) for line in NEXT)]))
    holds = all(part.holds for part in (*simulated, ran, files))
    if as_json:
        figures = {"digest": move.digest, "summary": move.summary().to_dict(), "holds": holds}
        figures["simulated"] = [part.figures for part in simulated]
        print_json("demo", {**figures, "live": ran.figures, "files": files.figures})
    return 0 if holds else 1


def _plan(config: Mapping[str, Any], memory: int | None) -> Plan:
    from reshard.layout.mesh import Mesh
    from reshard.planning.plans import plan

    have, _ = model_specs(config, Mesh.parse(HAVE), fsdp=FSDP)
    want, _ = model_specs(config, Mesh.parse(WANT), replicate=REPLICAS)
    return plan(have, want, memory=memory)


def _simulated_moves(move: Plan, model: str) -> Iterator[tuple[str, Plan]]:
    from reshard.planning.plans import plan
    from reshard.rules.models import preset

    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    for smaller, part in SMALLER.items():
        config = {key: n // smaller if key in sizes else n for key, n in preset(model).items()}
        small = _plan(config, move.memory // smaller**2)
        if part == LAYER:
            names = [name for name in small.want if ".layers.0." in name]
            have, want = ({name: side[name] for name in names} for side in (small.have, small.want))
            small = plan(have, want, memory=small.memory)
        yield f"{part}, every dim divided by {smaller}", small


def _picture(move: Plan) -> str:
    from reshard.show.terminal import draw, plain

    parts = []
    for when, side in (("before", move.have), ("after", move.want)):
        spec = side[SHOWN]
        lines = draw(spec.layout, spec.shape, width=terminal_width(), unicode=wants_boxes())
        picture = plain(lines).partition("\nranks ")[0]
        parts.append(f"{SHOWN} {when}:\n{picture}")
    return "\n".join(parts)


def _simulate(what: str, move: Plan) -> tuple[Part, Arrays, Arrays]:
    """Simulate a move on random arrays and compare what happened with what was stated.

    Also returns the arrays of every rank, before and after.
    """
    import numpy as np

    from reshard.simulation import simulate

    start = time.perf_counter()
    whole = {  # random bits: numpy stores bfloat16 as 16-bit integers
        name: np.random.default_rng(seed).integers(0, 1 << 16, spec.shape, dtype=np.uint16)
        for seed, (name, spec) in enumerate(move.have.items())
    }
    sources, expected = _local(whole, move.have), _local(whole, move.want)
    arrived, report = simulate(move, sources, report=True)
    equal = all(
        (arrived[rank][name] == array).all()
        for rank, arrays in expected.items()
        for name, array in arrays.items()
    )
    stated, peak = move.summary(), max(report.peak_bytes.values())
    seconds = time.perf_counter() - start
    figures = {
        "what": what,
        "num_tensors": len(move.want),
        "stated_wire_bytes": stated.wire_bytes,
        "wire_bytes": report.wire_bytes,
        "stated_messages": stated.num_messages,
        "messages": report.num_messages,
        "stated_peak_bytes": stated.peak_bytes,
        "peak_bytes": peak,
        "arrays_equal": bool(equal),
        "seconds": seconds,
    }
    counts = report.wire_bytes, report.num_messages
    is_stated = counts == (stated.wire_bytes, stated.num_messages) and peak <= stated.peak_bytes
    staging = "peak staging", f"<= {format_bytes(stated.peak_bytes)}", format_bytes(peak)
    text = _section(
        f"Simulated on numpy arrays: {what} ({len(move.want)} tensors)",
        *_stated(figures, staging),
        f"all arrays {EQUAL[bool(equal)]} the tensors sharded by the destination layout",
        f"{AS_STATED[equal and is_stated]}, in {seconds:.1f} s",
    )
    return Part(text, figures, equal and is_stated), sources, arrived


def _local(whole: Mapping[str, Array], specs: Mapping[str, TensorSpec]) -> Arrays:
    """The arrays of every rank; of the layouts of the demo a rank holds one box."""
    local: Arrays = {}
    for name, spec in specs.items():
        for rank in spec.layout.ranks:
            [piece] = spec.layout.pieces(rank, spec.shape)
            inside = tuple(map(slice, piece.box.start, piece.box.stop))
            local.setdefault(rank, {})[name] = whole[name][inside].copy()
    return local


def _run_live(what: str, plan: Plan, sources: Arrays, expected: Arrays, trace: str | None) -> Part:
    """The same move between processes, or why it could not be made."""
    from reshard.cli.demo_live import move_live
    from reshard.show.run_report import RunReport, format_seconds

    if find_spec("torch") is None:  # it is optional: without it nothing is run, and that is fine
        return Part(_section(f"Not run live: {NO_TORCH}"), {"not_run": NO_TORCH}, holds=True)
    try:
        ran = move_live(plan, sources, expected)
    except LiveError as error:
        return Part(_section(f"NOT run live: {error}"), {"not_run": str(error)}, holds=False)
    if trace is not None:
        Path(trace).write_text(RunReport.merged(chain(*ran.reports)))
    first, second = map(format_seconds, ran.seconds)
    # The rank that the others waited for.
    busiest = max(ran.reports[-1], key=lambda report: report.packing + report.unpacking)
    figures = {
        "stated_wire_bytes": ran.stated[0],
        "wire_bytes": ran.happened[0],
        "stated_messages": ran.stated[1],
        "messages": ran.happened[1],
        "values_equal": ran.equal,
        "seconds": ran.seconds,
        "start_seconds": ran.start_seconds,
        "reports": [report.to_dict() for report in ran.reports[-1]],
    }
    text = _section(
        f"Run live on {len(plan.ranks)} processes of this machine: {what}",
        *_stated(figures),
        f"all values on every rank {EQUAL[ran.equal]} the simulated ones",
        f"{AS_STATED[ran.holds]}, in {second}: {ran.wire_bytes / ran.seconds[1] / 1e9:.2f} GB/s "
        "over all ranks",
        f"before that {ran.start_seconds:.1f} s to import torch and start the ranks, and a first "
        f"call of {first} to connect and compare",
        "",
        "The busiest rank:",
        *str(busiest).splitlines(),
    )
    return Part(text, figures, ran.holds)


def _convert_files() -> Part:
    """Reshard a small checkpoint on disk; all values must be the same, and each read once."""
    from tempfile import TemporaryDirectory

    from reshard.checkpoint.conversion.stages import convert
    from reshard.checkpoint.inspection import inspect
    from reshard.checkpoint.soundness import verify

    with TemporaryDirectory(prefix="reshard-demo-") as folder:
        whole, four, two = (Path(folder) / name for name in ("ckpt", "ckpt-tp4", "ckpt-tp2"))
        _write_model(whole)
        convert(whole, four, mesh=FILES_HAVE, rules="llama")
        start = time.perf_counter()
        report = convert(four, two, mesh=FILES_WANT, rules="llama")
        converted = time.perf_counter()
        equal = verify(four, two).ok
        verified = time.perf_counter()
        before, after = (
            str(inspect(path)).splitlines()[0].replace(f"{folder}/", "") for path in (four, two)
        )
    figures = {
        "found": before,
        "made": after,
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
        "amplification": report.amplification,
        "seconds": converted - start,
        "verify_seconds": verified - converted,
        "equal": equal,
    }
    read, written = format_bytes(report.bytes_read), format_bytes(report.bytes_written)
    text = _section(
        "Converted on disk, without torch: a small Llama from 4-way to 2-way tensor parallelism",
        f"before  {before}",
        f"after   {after}",
        f"read {read}, {report.amplification:.2f} x the tensors, and wrote {written}, "
        f"in {converted - start:.2f} s",
        f"{'verified: same values' if equal else 'VALUES DIFFER'}, bit by bit, "
        f"in {verified - converted:.2f} s",
    )
    return Part(text, figures, equal and report.amplification <= 1.02)


def _write_model(folder: Path) -> None:
    """Write a model of random values as Hugging Face stores it: one file and a config."""
    import numpy as np

    from reshard.checkpoint.formats.safetensors.header import build_header
    from reshard.rules.models import preset, tensors

    config = dict(preset(FILES_MODEL))
    for key, smaller in FILES_SMALLER.items():
        config[key] //= smaller
    listed = {name: (dtype, shape) for name, (shape, dtype) in tensors(config).items()}
    header = build_header(listed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header.data)
        file.write(np.random.default_rng(0).bytes(header.file_size - len(header.data)))


def _stated(figures: Mapping[str, Any], *more: tuple[str, str, str]) -> list[str]:
    """A table of what a plan states and what happened."""
    rows = [
        ("", "plan states", "happened"),
        ("bytes", f"{figures['stated_wire_bytes']:,}", f"{figures['wire_bytes']:,}"),
        ("messages", f"{figures['stated_messages']:,}", f"{figures['messages']:,}"),
        *more,
    ]
    return align(rows, right={1, 2})


def _section(title: str, *lines: str) -> str:
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines), ""])
