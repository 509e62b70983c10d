"""What each special case of the live engine gains on its own: the same move with it on and off.

    python benchmarks/special_cases.py [--ranks 4] [--repeat 9] [--quick] [--json] [--only WORD]

Every case runs both variants in turn, again and again, on the same ranks of one host; a figure is
the median over repetitions of the slowest rank, and of the CPU seconds of all ranks. A special case
that gains less than a tenth in either should go.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from side_by_side import arguments, run_ranks, tell

import reshard as rs
from reshard.live.copy import host as host_copy
from reshard.live.copy import reduce
from reshard.live.inputs import huge_pages
from reshard.live.program import rounds
from reshard.live.program.runs import IovecPlan
from reshard.live.transport import host

GAIN = 1.1

Run = Callable[[], object]


@dataclass
class Case:
    """A move with a special case switched on and off."""

    name: str
    on: Run
    off: Run
    burst: int


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
    runs = {"on": case.on, "off": case.off}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 2):
        for name in sorted(runs, reverse=turn % 2 == 0):
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(case.burst):
                runs[name]()
            took = torch.tensor((time.perf_counter() - began) / case.burst)
            used = torch.tensor((time.process_time() - spent) / case.burst)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if turn > 1:
                seconds[name].append(float(took))
                cpu[name].append(float(used))
    medians, spent_by = (
        {name: statistics.median(times) for name, times in all_times.items()}
        for all_times in (seconds, cpu)
    )
    gains = {"time": medians["off"] / medians["on"], "CPU time": spent_by["off"] / spent_by["on"]}
    best = max(gains.values())
    checks = [{"what": f"{what}, off / on", "is": gain, "holds": best >= GAIN}
              for what, gain in gains.items()]  # fmt: skip
    return {"name": case.name, "seconds": medians, "cpu_seconds": spent_by, "checks": checks}


def layouts(num: int) -> tuple[rs.Layout, rs.Layout, rs.Layout]:
    mesh = rs.Mesh(x=num)
    return tuple(rs.Layout(mesh, words) for words in ("x -", "- x", "- -"))  # type: ignore[return-value]


def runs_of(plan: rs.Plan, tensors: Any, into: Any, **patches: tuple[Any, Any]) -> Run:
    """Run a plan, with attributes of modules or classes patched."""

    def run() -> object:
        with mock.patch.multiple(next(iter(patches.values()))[0], **{
            name: value for name, (_, value) in patches.items()
        }):  # fmt: skip
            return plan.run(tensors, into=into)

    return run if patches else lambda: plan.run(tensors, into=into)


def two_plans(*args: Any, **options: Any) -> tuple[rs.Plan, rs.Plan]:
    """Two equal plans, each with what is compiled for it."""
    return rs.plan(*args, **options), rs.plan(*args, **options)


def large_pages(num: int, quick: bool) -> Iterator[Case]:
    side = 1024 if quick else 4096
    rows, columns, _ = layouts(num)
    on, off = two_plans(rows, columns, shape=(side, side), dtype="float32")
    sides = [
        ({"tensor": torch.randn(side // num, side)}, {"tensor": torch.empty(side, side // num)})
        for _ in range(2)
    ]
    patched = runs_of(off, *sides[1], _are_on_request=(huge_pages, lambda: False))
    yield Case("huge pages: 64 MiB into=", runs_of(on, *sides[0]), patched, 4)


def eager_buffers(num: int, quick: bool) -> Iterator[Case]:
    rows, columns, _ = layouts(num)
    on, off = two_plans(rows, columns, shape=(64, 64), dtype="float32")
    tensors = {"tensor": torch.randn(64 // num, 64)}
    with mock.patch.object(rounds, "MAX_LENT", 0):
        off.run(tensors)
    yield Case("eager messages that are not waited for: 16 KiB", runs_of(on, tensors, None),
               runs_of(off, tensors, None), 50)  # fmt: skip


def staged_once(num: int, quick: bool) -> Iterator[Case]:
    rows, _, whole = layouts(num)
    on, off = two_plans(rows, whole, shape=(1024, 1024), dtype="float32")
    tensors = {"tensor": torch.randn(1024 // num, 1024)}

    def unique(transfer: object) -> tuple[object, ...]:
        return (transfer,)

    patched = runs_of(off, tensors, None, _content=(host, unique))
    yield Case("equal messages staged once: 4 MiB rows to whole", runs_of(on, tensors, None),
               patched, 10)  # fmt: skip


def kept_arrays(num: int, quick: bool) -> Iterator[Case]:
    rows, columns, _ = layouts(num)
    sides = [
        {f"t{n}": rs.TensorSpec((64, 64), "float32", layout) for n in range(400)}
        for layout in (rows, columns)
    ]
    on, off = two_plans(*sides)
    tensors = {name: torch.randn(64 // num, 64) for name in sides[0]}
    into = {name: torch.empty(64, 64 // num) for name in sides[0]}
    patched = runs_of(off, tensors, into, MAX_ARRAYS=(host_copy, -1), MAX_KEPT=(host_copy, 0))
    yield Case("arrays of many strided blocks kept: 400 x 16 KiB", runs_of(on, tensors, into),
               patched, 5)  # fmt: skip


def kept_calls(num: int, quick: bool) -> Iterator[Case]:
    side = 1024 if quick else 4096
    rows, columns, _ = layouts(num)
    on, off = two_plans(rows, columns, shape=(side, side), dtype="float32")
    tensors = {"tensor": torch.randn(side // num, side)}
    into = {"tensor": torch.empty(side, side // num)}
    patched = runs_of(off, tensors, into, calls=(IovecPlan, IovecPlan.calls_at))
    yield Case("system calls kept for the same addresses: 64 MiB", runs_of(on, tensors, into),
               patched, 4)  # fmt: skip


def sums_in_place(num: int, quick: bool) -> Iterator[Case]:
    side = 512 if quick else 2048
    mesh = rs.Mesh(x=num)
    have, want = rs.Layout(mesh, "- - | sum x"), rs.Layout(mesh, "x -")
    on, off = two_plans(have, want, shape=(side, side), dtype="float32")
    tensors = {"tensor": torch.randn(side, side)}
    into = {"tensor": torch.empty(side // num, side)}
    with mock.patch.multiple(reduce, MIN_BLOCK=1 << 60, FEW_BLOCKS=0):
        off.run(tensors, into=into)
    yield Case("sums block by block into the destination: 16 MiB", runs_of(on, tensors, into),
               runs_of(off, tensors, into), 4)  # fmt: skip


CASES = (large_pages, eager_buffers, staged_once, kept_arrays, kept_calls, sums_in_place)


if __name__ == "__main__":
    main()
