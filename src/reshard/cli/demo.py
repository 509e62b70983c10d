"""``reshard demo``: plan, prove and simulate a move of a real size.

A trainer holds Llama-3-8B by FSDP over tensor parallelism on eight ranks; two serving replicas of
two ranks each want it. The plan and its proof are for the whole model at its real size. The
simulation moves numpy arrays: one decoder layer at full size, then all tensors at an eighth of
their size in each dim, and compares every byte, message and peak with what the plan states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np

    from reshard.planning.plan import Plan
    from reshard.spec import TensorSpec

    Array = np.ndarray[Any, Any]

__all__ = ["demo"]

MODEL = "llama-3-8b"
HAVE, FSDP, WANT = "dp=2 tp=4", "dp", "dp=2 tp=2 @ 8-11"
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def demo(as_json: bool) -> int:
    """Plan, prove and simulate a real-sized move of Llama-3-8B.

    From a trainer (FSDP over tensor parallelism, eight ranks) to two serving replicas. Takes less
    than a minute and 4 GiB, and starts no other process.
    """
    from reshard.cli.output import print_json

    move = _real_size()
    if not as_json:
        _introduce(move)
    start = time.perf_counter()
    move.check()
    proof_seconds = time.perf_counter() - start
    if not as_json:
        print(
            f"Proven in {proof_seconds:.1f} s: every element of all {len(move.want)} tensors is "
            "written exactly once on every rank that wants it, by a rank that holds it.\n",
            flush=True,
        )
    results = []
    for what, small in _simulated(move):
        results.append(_compare(what, small))
        if not as_json:
            print("\n".join(_report(results[-1])), flush=True)
    holds = all(result.holds for result in results)
    if as_json:
        figures = {"digest": move.digest, "summary": move.summary().to_dict(), "holds": holds}
        print_json({**figures, "simulated": [asdict(result) for result in results]})
    return 0 if holds else 1


def _introduce(move: Plan) -> None:
    print(
        f"A trainer holds {MODEL} on mesh {HAVE}, tensors cut by tp and each shard by {FSDP}.\n"
        f"Two serving replicas want it on mesh {WANT}. No process is started.\n\n{move}\n",
        flush=True,
    )


def _real_size() -> Plan:
    from reshard.models import preset

    return _plan(preset(MODEL), None)


def _plan(config: Mapping[str, Any], memory: int | None) -> Plan:
    from reshard.cli.inputs import ModelSide, model_specs
    from reshard.planning.plan import plan

    have = model_specs(config, ModelSide("from", HAVE, None, FSDP, None))
    want = model_specs(config, ModelSide("to", WANT, None, None, None))
    return plan(have, want, memory=memory)


def _simulated(move: Plan) -> Iterator[tuple[str, Plan]]:
    """The moves that are run on real data: small enough for a laptop."""
    from reshard.models import preset
    from reshard.planning.plan import plan

    layer = [name for name in move.want if ".layers.0." in name]
    have, want = ({name: side[name] for name in layer} for side in (move.have, move.want))
    yield "decoder layer 0 at full size", plan(have, want)
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    config = {key: n // SMALLER if key in sizes else n for key, n in preset(MODEL).items()}
    yield (
        f"the whole model, every dim divided by {SMALLER}",
        _plan(config, move.memory // SMALLER**2),
    )


def _compare(what: str, move: Plan) -> Comparison:
    """Simulate a move on random arrays and compare what happened with what was stated."""
    from reshard.run.simulate import simulate

    start = time.perf_counter()
    whole = {name: _random(spec, seed) for seed, (name, spec) in enumerate(move.have.items())}
    arrived, report = simulate(move, _local(whole, move.have), report=True)
    expected = _local(whole, move.want)
    equal = all(
        (arrived[rank][name] == array).all()
        for rank, arrays in expected.items()
        for name, array in arrays.items()
    )
    stated = move.summary()
    return Comparison(
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


def _random(spec: TensorSpec, seed: int) -> Array:
    """A whole tensor of random bits; bfloat16 is stored as 16-bit integers."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 1 << 16, spec.shape, dtype=np.uint16)


def _local(
    whole: Mapping[str, Array], specs: Mapping[str, TensorSpec]
) -> dict[int, dict[str, Array]]:
    """Cut whole tensors by their layouts, rank by rank."""
    local: dict[int, dict[str, Array]] = {}
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


def _report(result: Comparison) -> Iterator[str]:
    from reshard.bytesize import format_bytes
    from reshard.planning.text import align

    yield f"Simulated on numpy arrays: {result.what} ({result.num_tensors} tensors)"
    peaks = [format_bytes(n) for n in (result.stated_peak_bytes, result.peak_bytes)]
    rows = [
        ("", "plan states", "happened"),
        ("bytes", f"{result.stated_wire_bytes:,}", f"{result.wire_bytes:,}"),
        ("messages", f"{result.stated_messages:,}", f"{result.messages:,}"),
        ("peak staging", f"<= {peaks[0]}", peaks[1]),
    ]
    yield from (f"  {line}" for line in align(rows, right={1, 2}))
    found = "equal" if result.arrays_equal else "DIFFER FROM"
    yield f"  all arrays {found} the tensors cut by the destination layout"
    yield f"  {'as stated' if result.holds else 'NOT as stated'}, in {result.seconds:.1f} s\n"
