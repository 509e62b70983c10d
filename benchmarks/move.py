"""Live moves against what one would use instead, interleaved on the same ranks of one host.

    python benchmarks/move.py [--ranks 4] [--repeat 9] [--quick] [--json] [--only WORD]

Every case runs all contenders in turn, again and again, so that a busy machine is busy for all of
them; a figure is the median over repetitions of the slowest rank. `reshard` makes new tensors,
`reshard into` writes into given ones. Contenders: `DTensor.redistribute`, tensor by tensor;
`full_tensor()` and a slice; a hand-written pack with one `all_to_all_single` (the raw collective);
and `memcpy`, in which all ranks at the same time copy as many bytes as they end up with, and
`memcpy of what comes`, only those that were on another rank. Values are compared before anything is
timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import arguments, run_ranks, tell

import reshard as rs

Run = Callable[[], object]


@dataclass
class Case:
    """One workload on one rank: what is timed, and what the ratios should be."""

    name: str
    runs: dict[str, Run]
    targets: dict[str, float] = field(default_factory=dict)
    """At least so many times as fast as a contender."""
    at_most: dict[str, float] = field(default_factory=dict)
    """At most so many times as slow as a contender; measured for `reshard into`."""
    plus: float = 0.0
    """Microseconds that `at_most` allows on top."""
    cpu_at_most: dict[str, float] = field(default_factory=dict)
    """The same in CPU seconds of all ranks together, which a busy machine changes less."""
    tensors: int = 1
    per_tensor: float | None = None
    """Microseconds per tensor that `reshard into` may take."""
    burst: int = 1
    """How many calls are timed together: ranks leave a barrier one after the other, and only in a
    row of calls do all of them copy at the same time."""
    turns: int = 1
    """How many times as often it is repeated: what takes long is steadier."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    args = parser.parse_args()
    run_ranks(args.ranks, on_a_rank, args)


def on_a_rank(rank: int, args: argparse.Namespace) -> None:
    cases = (case for make in CASES for case in make(args.ranks, args.quick))
    repeat = 3 if args.quick else args.repeat
    tell((measured(case, repeat) for case in cases if args.only in case.name), rank, args.json)


def measured(case: Case, repeat: int) -> dict[str, Any]:
    """Medians of the slowest rank, contenders in turn; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in case.runs}
    cpu: dict[str, list[float]] = {name: [] for name in case.runs}
    for turn in range(repeat * case.turns + 1):
        for name, run in case.runs.items():
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(case.burst):
                made = run()
                del made
            took = torch.tensor((time.perf_counter() - began) / case.burst)
            used = torch.tensor((time.process_time() - spent) / case.burst)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if turn:
                seconds[name].append(float(took))
                cpu[name].append(float(used))
    medians, cpu_medians = (
        {name: statistics.median(times) for name, times in all_times.items()}
        for all_times in (seconds, cpu)
    )
    found = list(checks(case, medians, cpu_medians))
    return {"name": case.name, "seconds": medians, "cpu_seconds": cpu_medians, "checks": found}


def checks(
    case: Case, medians: dict[str, float], cpu: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Each target: what is asked, what was measured, whether it holds."""
    best = medians.get("reshard", 0.0)
    into = medians.get("reshard into", best)
    for name, factor in case.targets.items():
        ratio = medians[name] / best
        yield {"what": f"{factor:g}x of {name}", "is": ratio, "holds": ratio >= factor}
    for name, factor in case.at_most.items():
        ratio = (into - case.plus * 1e-6) / medians[name]
        plus = f" + {case.plus:g} us" if case.plus else ""
        yield {"what": f"at most {factor:g}x {name}{plus}", "is": ratio, "holds": ratio <= factor}
    for name, factor in case.cpu_at_most.items():
        ratio = cpu["reshard into"] / cpu[name]
        what = f"at most {factor:g}x {name}, in CPU seconds of all ranks"
        yield {"what": what, "is": ratio, "holds": ratio <= factor}
    if case.per_tensor is not None:
        each = into * 1e6 / case.tensors
        yield {
            "what": f"{case.per_tensor:g} us a tensor",
            "is": each,
            "holds": each <= case.per_tensor,
        }


def one_tensor(num: int, quick: bool) -> Iterator[Case]:
    """64 MiB from rows to columns: the move that DTensor makes through a full gather."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    side = 1024 if quick else 4096
    mesh = init_device_mesh("cpu", (num,))
    local = torch.randn(side // num, side)
    have, want = rs.Layout(rs.Mesh(x=num), "x -"), rs.Layout(rs.Mesh(x=num), "- x")
    plan = rs.plan(have, want, shape=(side, side), dtype="float32")
    given = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    mine = torch.empty(side, side // num)
    copy = torch.empty_like(local)
    kept = len(local) // num
    sent, got = (
        torch.empty(num, side // num, side // num),
        torch.empty(num, side // num, side // num),
    )

    def raw() -> torch.Tensor:
        sent.copy_(local.view(side // num, num, side // num).transpose(0, 1))
        dist.all_to_all_single(got, sent)
        return got.view(side, side // num)

    wanted = given.redistribute(mesh, [Shard(1)]).to_local()
    assert torch.equal(plan.run({"tensor": local})["tensor"], wanted)
    assert torch.equal(raw(), wanted)
    yield Case(
        f"{side * side * 4 >> 20} MiB Shard(0) -> Shard(1)",
        {
            "reshard": lambda: rs.move(local, have, want, shape=(side, side)),
            "reshard into": lambda: rs.move(local, have, want, shape=(side, side), into=mine),
            "DTensor": lambda: given.redistribute(mesh, [Shard(1)]),
            "pack + all_to_all_single": raw,
            "memcpy": lambda: copy.copy_(local),
            "memcpy of what comes": lambda: copy[kept:].copy_(local[kept:]),
        },
        {"DTensor": 10},
        {"memcpy": 2, "memcpy of what comes": 2},
        cpu_at_most={"memcpy of what comes": 2},
        burst=8,
    )


def two_axes(num: int, quick: bool) -> Iterator[Case]:
    """(Shard(0), Shard(1)) to (Shard(1), Shard(0)) on 2 x 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if num != 4:
        return
    side = 1024 if quick else 4096
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.randn(side // 2, side // 2)
    given = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False)
    target = [Shard(1), Shard(0)]
    into = rs.move(given, to=(mesh, target))
    copy = torch.empty_like(local)
    assert torch.equal(into.to_local(), given.redistribute(mesh, target).to_local())
    yield Case(
        f"{side * side * 4 >> 20} MiB (S0, S1) -> (S1, S0) on 2x2",
        {
            "reshard": lambda: rs.move(given, to=(mesh, target)),
            "reshard into": lambda: rs.move(given, to=(mesh, target), into=into),
            "DTensor": lambda: given.redistribute(mesh, target),
            "memcpy": lambda: copy.copy_(local),
        },
        {"DTensor": 10},
        {"memcpy": 2},
        burst=8,
    )


def many_tensors(num: int, quick: bool) -> Iterator[Case]:
    """200 tensors of 256 KiB, rows to columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    count = 50 if quick else 200
    mesh = init_device_mesh("cpu", (num,))
    have, want = rs.Layout(rs.Mesh(x=num), "x -"), rs.Layout(rs.Mesh(x=num), "- x")
    names = [f"layer.{n}" for n in range(count)]
    plan = rs.plan(
        {name: rs.TensorSpec((256, 256), "float32", have) for name in names},
        {name: rs.TensorSpec((256, 256), "float32", want) for name in names},
    )
    given = {name: torch.randn(256 // num, 256) for name in names}
    tensors = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in given.values()]
    into = plan.run(given)
    copies = [torch.empty_like(tensor) for tensor in given.values()]
    assert torch.equal(into[names[1]], tensors[1].redistribute(mesh, [Shard(1)]).to_local())
    yield Case(
        f"{count} x 256 KiB Shard(0) -> Shard(1)",
        {
            "reshard": lambda: plan.run(given),
            "reshard into": lambda: plan.run(given, into=into),
            "DTensor": lambda: [t.redistribute(mesh, [Shard(1)]) for t in tensors],
            "memcpy": lambda: [c.copy_(t) for c, t in zip(copies, given.values(), strict=True)],
        },
        {"DTensor": 30},
        tensors=count,
    )


def llama(num: int, quick: bool) -> Iterator[Case]:
    """Llama-3-8B with every dim divided by 8, from FSDP to tensor parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from reshard.rules.models import tensors

    mesh = init_device_mesh("cpu", (num,))
    layers = 4 if quick else 32
    shapes = {
        name: tuple(max(size // 8, 1) for size in shape)
        for name, (shape, _) in tensors("llama-3-8b").items()
        if ".layers." not in name or int(name.split(".")[2]) < layers
    }
    have = rs.Layout(rs.Mesh(x=num), "x ...")
    placed = {name: _placed(name, len(shape)) for name, shape in shapes.items()}
    words = {None: "...", 0: "x ...", 1: "- x"}
    wants = {name: rs.Layout(rs.Mesh(x=num), words[dim]) for name, dim in placed.items()}
    plan = rs.plan(
        {name: rs.TensorSpec(shape, "bfloat16", have) for name, shape in shapes.items()},
        {name: rs.TensorSpec(shape, "bfloat16", wants[name]) for name, shape in shapes.items()},
    )
    rank = dist.get_rank()
    given = {
        name: torch.randn(have.local_shape(rank, shape)).bfloat16()
        for name, shape in shapes.items()
    }
    dtensors = {
        name: DTensor.from_local(
            given[name], mesh, [Shard(0)], run_check=False, shape=torch.Size(shape),
            stride=(shape[1], 1) if len(shape) == 2 else (1,),
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    targets = {n: [Replicate() if dim is None else Shard(dim)] for n, dim in placed.items()}

    def gathered() -> list[torch.Tensor]:
        full = ((name, tensor.full_tensor()) for name, tensor in dtensors.items())
        return [
            t if placed[n] is None else t.chunk(num, placed[n])[rank].contiguous() for n, t in full
        ]

    into = plan.run(given)
    for name in list(shapes)[:5]:
        assert torch.equal(into[name], dtensors[name].redistribute(mesh, targets[name]).to_local())
    total = sum(torch.Size(shape).numel() * 2 for shape in shapes.values()) >> 20
    yield Case(
        f"Llama-3-8B / 8 ({len(shapes)} tensors, {total} MiB) FSDP -> TP",
        {
            "reshard": lambda: plan.run(given),
            "reshard into": lambda: plan.run(given, into=into),
            "DTensor": lambda: [dtensors[n].redistribute(mesh, targets[n]) for n in shapes],
            "full_tensor + slice": gathered,
        },
        {"DTensor": 5, "full_tensor + slice": 5},
        tensors=len(shapes),
    )


def _placed(name: str, num_dims: int) -> int | None:
    """The dim that tensor parallelism cuts: rows of what goes in, columns of what comes out."""
    if num_dims == 1:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def experts(num: int, quick: bool) -> Iterator[Case]:
    """18,000 expert matrices (a 30B mixture with dims / 16), from expert to tensor parallel."""
    count = 1800 if quick else 18_000
    rank, each = dist.get_rank(), count // 3
    owners = [rs.Layout(rs.Mesh(ep=num), f"... | on ep={at}") for at in range(num)]
    rows, columns = (rs.Layout(rs.Mesh(tp=num), words) for words in ("tp -", "- tp"))
    kinds = {"gate": ((48, 128), rows), "up": ((48, 128), rows), "down": ((128, 48), columns)}
    have, want = {}, {}
    for expert in range(each):
        for kind, (shape, layout) in kinds.items():
            name = f"experts.{expert}.{kind}"
            have[name] = rs.TensorSpec(shape, "bfloat16", owners[expert * num // each])
            want[name] = rs.TensorSpec(shape, "bfloat16", layout)
    plan = rs.plan(have, want)
    given = {
        name: torch.randn(spec.shape).bfloat16()
        for name, spec in have.items()
        if spec.layout.holds(rank) is not None
    }
    into = plan.run(given)
    yield Case(
        f"{count} experts, EP{num} -> TP{num}, warm",
        {
            "reshard": lambda: plan.run(given),
            "reshard into": lambda: plan.run(given, into=into),
        },
        tensors=count,
        per_tensor=20,
    )


def transitions(num: int, quick: bool) -> Iterator[Case]:
    """Every transition of one axis, and some of two, from 4 KiB on: never slower than DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (num,))
    rows, columns, whole, addend = Shard(0), Shard(1), Replicate(), Partial()
    sources = [rows, columns, whole, addend]
    pairs = [(mesh, [source], [target]) for source in sources for target in sources[:3]]
    if num == 4:
        square = init_device_mesh("cpu", (2, 2))
        pairs += [
            (square, [rows, columns], [columns, rows]),
            (square, [rows, rows], [whole, rows]),
            (square, [whole, rows], [rows, whole]),
            (square, [rows, whole], [whole, whole]),
            (square, [addend, rows], [whole, rows]),
            (square, [addend, addend], [rows, whole]),
        ]
    for side in (32, 128, 512) if quick else (32, 128, 512, 1024, 2048):
        for on, have, want in pairs:
            yield transition(side, on, have, want)


def transition(side: int, mesh: Any, have: list[Any], want: list[Any]) -> Case:
    """One transition: what communicates against DTensor, what does not with 50 us to spare."""
    from torch.distributed.tensor import DTensor

    shape = [side, side]
    for axis, placement in enumerate(have):
        if placement.is_shard():
            shape[placement.dim] //= mesh.size(axis)
    given = DTensor.from_local(torch.randn(shape), mesh, have, run_check=False)
    silent = all(a == b or a.is_replicate() for a, b in zip(have, want, strict=True))
    names = [", ".join(map(str, placements)) for placements in (have, want)]
    return Case(
        f"{side}x{side} {names[0]} -> {names[1]}",
        {
            "reshard": lambda: rs.move(given, to=(mesh, want)),
            "DTensor": lambda: given.redistribute(mesh, want),
        },
        {} if silent else {"DTensor": 1},
        {"DTensor": 1} if silent else {},
        plus=50.0 if silent else 0.0,
        turns=4 if side < 1024 else 1,
    )


CASES = [one_tensor, two_axes, many_tensors, llama, experts, transitions]

if __name__ == "__main__":
    main()
