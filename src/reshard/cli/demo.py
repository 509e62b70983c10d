"""``reshard demo``: plan and prove a move of a real size, simulate it, and run it live.

A trainer holds Llama-3-8B by FSDP over tensor parallelism on eight ranks; two serving replicas of
two ranks each want it. The plan and its proof are for the whole model at its real size. The
simulation moves numpy arrays: one decoder layer at full size, then all tensors at an eighth of
their size in each dim, and compares every byte, message and peak with what the plan states. The
second move then runs live, on twelve processes of this machine, and must give the same bits.
Last, a small checkpoint on disk goes from four files to two, and must hold the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np

    from reshard.cli.demo_live import Live, NotLive
    from reshard.layout.spec import TensorSpec
    from reshard.planning.plan import Plan

    Array = np.ndarray[Any, Any]
    Arrays = dict[int, dict[str, Array]]

__all__ = ["Comparison", "demo"]

MODELS = ("llama-3-8b", "llama-3.2-1b")
HAVE, FSDP, WANT, REPLICAS = "dp=2 tp=4", "dp", "dp=2 tp=2 @ 8-11", "dp"
SMALLER = 8
"""The second simulation divides every dim by this."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the plan of a simulated move states, and what happened."""

    what: str
    num_tensors: int
    stated_wire_bytes: int
    wire_bytes: int
    stated_messages: int
    messages: int
    stated_peak_bytes: int
    peak_bytes: int
    arrays_equal: bool
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything came out as stated."""
        return (
            self.arrays_equal
            and self.wire_bytes == self.stated_wire_bytes
            and self.messages == self.stated_messages
            and self.peak_bytes <= self.stated_peak_bytes
        )


@click.command()
@click.option("--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True)
@click.option("--live/--no-live", default=True, help="Also run the move on processes.")
@click.option("--trace", metavar="FILE", help="Write the live run as a trace for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def demo(model: str, live: bool, trace: str | None, as_json: bool) -> int:
    """Plan, prove, simulate and run a move of a real model; convert a small checkpoint.

    From a trainer (FSDP over tensor parallelism, eight ranks) to two serving replicas. Takes less
    than a minute and 4 GiB. The live part starts twelve processes on this machine, and ends them.
    The checkpoint is made in a temporary folder, and removed.
    """
    from reshard.cli.demo_files import convert_files
    from reshard.cli.demo_text import (
        files_text,
        introduction,
        live_text,
        proof_text,
        simulated_text,
    )
    from reshard.cli.output import print_json

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    move = _real_size(model)
    say(introduction(move, model, (HAVE, FSDP, WANT)))
    start = time.perf_counter()
    move.check()
    say(proof_text(move, time.perf_counter() - start))
    results = []
    for what, small in _simulated(move, model):
        result, given, arrived = _compare(what, small)
        results.append(result)
        say(simulated_text(result))
    ran = _run_live(small, given, arrived, trace) if live else None
    if ran is not None:
        say(live_text(results[-1].what, ran))
    files = convert_files()
    say(files_text(files))
    moved = all(result.holds for result in results) and (ran is None or ran.holds)
    holds = moved and files.holds
    if as_json:
        figures = {"digest": move.digest, "summary": move.summary().to_dict(), "holds": holds}
        simulated = [asdict(result) for result in results]
        ended = {"live": ran and ran.to_dict(), "files": files.to_dict()}
        print_json({**figures, "simulated": simulated, **ended})
    return 0 if holds else 1


def _run_live(plan: Plan, given: Arrays, expected: Arrays, trace: str | None) -> Live | NotLive:
    """The same move between processes, or why it could not be made."""
    from reshard.cli.demo_live import NotLive, has_torch, move_live
    from reshard.errors import LiveError
    from reshard.show.run_report import RunReport

    if not has_torch():
        return NotLive("torch is not installed; try pip install 'reshard[torch]'", holds=True)
    try:
        ran = move_live(plan, given, expected)
    except LiveError as error:
        return NotLive(str(error), holds=False)
    if trace is not None:
        reports = [report for call in ran.reports for report in call]
        Path(trace).write_text(RunReport.merged(reports))
    return ran


def _real_size(model: str) -> Plan:
    from reshard.rules.models import preset

    return _plan(preset(model), None)


def _plan(config: Mapping[str, Any], memory: int | None) -> Plan:
    from reshard.cli.inputs import ModelSide, model_specs
    from reshard.layout.mesh import Mesh
    from reshard.planning.plan import plan

    have, _ = model_specs(config, ModelSide("from", Mesh.parse(HAVE), fsdp=FSDP))
    want, _ = model_specs(config, ModelSide("to", Mesh.parse(WANT), replicate=REPLICAS))
    return plan(have, want, memory=memory)


def _simulated(move: Plan, model: str) -> Iterator[tuple[str, Plan]]:
    """The moves that are run on real data: small enough for a laptop."""
    from reshard.planning.plan import plan
    from reshard.rules.models import preset

    layer = [name for name in move.want if ".layers.0." in name]
    have, want = ({name: side[name] for name in layer} for side in (move.have, move.want))
    yield "decoder layer 0 at full size", plan(have, want)
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    config = {key: n // SMALLER if key in sizes else n for key, n in preset(model).items()}
    yield (
        f"the whole model, every dim divided by {SMALLER}",
        _plan(config, move.memory // SMALLER**2),
    )


def _compare(what: str, move: Plan) -> tuple[Comparison, Arrays, Arrays]:
    """Simulate a move on random arrays and compare what happened with what was stated.

    The arrays come along, as every rank was given them and as they arrived.
    """
    from reshard.simulation import simulate

    start = time.perf_counter()
    whole = {name: _random(spec, seed) for seed, (name, spec) in enumerate(move.have.items())}
    given = _local(whole, move.have)
    arrived, report = simulate(move, given, report=True)
    expected = _local(whole, move.want)
    equal = all(
        (arrived[rank][name] == array).all()
        for rank, arrays in expected.items()
        for name, array in arrays.items()
    )
    stated = move.summary()
    result = Comparison(
        what,
        len(move.want),
        stated.wire_bytes,
        report.wire_bytes,
        stated.num_messages,
        report.num_messages,
        stated.peak_bytes,
        max(report.peak_bytes.values()),
        equal,
        time.perf_counter() - start,
    )
    return result, given, arrived


def _random(spec: TensorSpec, seed: int) -> Array:
    """A whole tensor of random bits; bfloat16 is stored as 16-bit integers."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 1 << 16, spec.shape, dtype=np.uint16)


def _local(whole: Mapping[str, Array], specs: Mapping[str, TensorSpec]) -> Arrays:
    """Cut whole tensors by their layouts, rank by rank."""
    local: Arrays = {}
    for name, spec in specs.items():
        for rank in spec.layout.ranks:
            local.setdefault(rank, {})[name] = _cut(whole[name], spec, rank)
    return local


def _cut(array: Array, spec: TensorSpec, rank: int) -> Array:
    import numpy as np

    local = np.zeros(spec.layout.local_shape(rank, spec.shape), array.dtype)
    for piece in spec.layout.pieces(rank, spec.shape):
        strides = [stride * array.itemsize for stride in piece.strides]
        place = np.lib.stride_tricks.as_strided(
            local.reshape(-1)[piece.offset :], piece.box.shape, strides
        )
        bounds = zip(piece.box.start, piece.box.stop, strict=True)
        place[...] = array[tuple(slice(low, high) for low, high in bounds)]
    return local
